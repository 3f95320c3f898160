"""MpiTransport at the number of ranks the run has."""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

from okrt.errors import StallError
from okrt.transport import mpi
from okrt.transport.mpi import _IN_FLIGHT, _TAG_EXCHANGE, _TAG_TREE, MpiTransport

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
SHORT_S = 0.3
ROUNDS = math.ceil(math.log2(SIZE))
TEXTS = ["", "grün", "Σ gradients = P·Σ results", "x" * 5000, "a\nb"]


@pytest.fixture(scope="module")
def shared() -> Iterator[MpiTransport]:
    yield MpiTransport(COMM, 60)


@pytest.fixture
def transport(shared: MpiTransport) -> MpiTransport:
    shared.ledger.begin()
    return shared


def numbers(rank: int, length: int, dtype: str) -> np.ndarray:
    """Small whole numbers, so that sums are exact in every type."""
    return np.random.default_rng([rank, length]).integers(-100, 100, length).astype(dtype)


def test_knows_its_place(transport: MpiTransport) -> None:
    assert (transport.rank, transport.size) == (RANK, SIZE)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("length", [1, 3, 100_000])
@pytest.mark.parametrize(("op", "oracle"), [("sum", np.sum), ("max", np.max)])
def test_allreduce(transport: MpiTransport, op: str, oracle: Callable, length: int, dtype: str) -> None:
    array = numbers(RANK, length, dtype)
    transport.allreduce(array, op)
    np.testing.assert_array_equal(array, oracle([numbers(rank, length, dtype) for rank in range(SIZE)], axis=0))
    assert transport.ledger.bytes_received == transport.ledger.bytes_sent == array.nbytes * ROUNDS
    assert transport.ledger.messages == ROUNDS


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("length", [0, 1, 1000])
def test_allgather(transport: MpiTransport, length: int, dtype: str) -> None:
    rows = transport.allgather(numbers(RANK, length, dtype))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, [numbers(rank, length, dtype) for rank in range(SIZE)])
    assert transport.ledger.bytes_received == transport.ledger.bytes_sent == (SIZE - 1) * length * rows.itemsize


def test_alltoall(transport: MpiTransport) -> None:
    words = np.arange(SIZE, dtype=np.int32) + 100 * RANK
    np.testing.assert_array_equal(transport.alltoall(words), 100 * np.arange(SIZE) + RANK)
    np.testing.assert_array_equal(words, np.arange(SIZE) + 100 * RANK)
    assert transport.ledger.bytes_received == transport.ledger.bytes_sent == 4 * (SIZE - 1)
    assert transport.ledger.messages == SIZE - 1


def mail(source: int, dest: int, most: int) -> np.ndarray | None:
    """What source sends dest: nothing at all, an empty message, or up to `most` words."""
    length = (7 * source + 5 * dest) % 4 * most // 3
    return None if (source + 2 * dest) % 5 == 4 else numbers(100 * source + dest, length, "int32")


@pytest.mark.parametrize("most", [3, 90_000])
def test_exchange(transport: MpiTransport, most: int) -> None:
    peers = [(RANK - distance) % SIZE for distance in range(1, SIZE)]
    outgoing = {peer: message for peer in peers if (message := mail(RANK, peer, most)) is not None}
    expected = {peer: message for peer in peers if (message := mail(peer, RANK, most)) is not None}
    # Where a message comes there may be room for more than that.
    rooms = {peer: message.size + (peer % 3) * (message.size > 0) for peer, message in expected.items()}
    incoming = {peer: np.full(room, -1000, np.int32) for peer, room in sorted(rooms.items())}
    came = []
    for peer, message in transport.exchange(outgoing, incoming):
        assert message.size == 0 or np.shares_memory(message, incoming[peer])
        np.testing.assert_array_equal(message, expected[peer])
        assert (incoming[peer][message.size :] == -1000).all()
        came.append(peer)
    assert came == [peer for peer in peers if peer in expected]

    ledger = transport.ledger
    assert ledger.bytes_sent == sum(message.nbytes for message in outgoing.values())
    assert ledger.bytes_received == sum(message.nbytes for message in expected.values())
    assert ledger.messages == sum(message.size > 0 for message in expected.values())
    assert COMM.allreduce(ledger.bytes_sent) == COMM.allreduce(ledger.bytes_received)


@pytest.mark.mpi(min_size=3)
def test_exchange_with_more_peers_than_are_served_at_once(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "_IN_FLIGHT", 1)
    outgoing = {peer: np.full(50_000, 1000 * RANK + peer, np.int32) for peer in range(SIZE) if peer != RANK}
    incoming = {peer: np.zeros(50_000, np.int32) for peer in outgoing}
    for peer, message in transport.exchange(outgoing, incoming):
        assert (message == 1000 * peer + RANK).all()


@pytest.mark.parametrize("sizes_dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    "lengths", [[0], [3], [0, 5, 1], [40_000, 0, 0, 1]], ids=["none", "equal", "uneven", "one has nearly all"]
)
def test_allgatherv(transport: MpiTransport, lengths: list[int], sizes_dtype: str) -> None:
    sizes = np.resize(lengths, SIZE).astype(sizes_dtype)
    out = np.full(int(sizes.sum()) + 2, -1000, np.int32)
    transport.allgatherv(numbers(RANK, int(sizes[RANK]), "int32"), sizes, out)
    expected = np.concatenate([numbers(rank, int(size), "int32") for rank, size in enumerate(sizes)])
    np.testing.assert_array_equal(out[:-2], expected)
    np.testing.assert_array_equal(out[-2:], -1000)
    assert transport.ledger.bytes_received == 4 * (int(sizes.sum()) - sizes[RANK])
    assert COMM.allreduce(transport.ledger.bytes_sent) == COMM.allreduce(transport.ledger.bytes_received)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [0, 1, 100])
def test_send_and_receive_around_a_ring(transport: MpiTransport, length: int) -> None:
    out = np.full(length + 5, -1000, np.int32)
    transport.send(NEXT, numbers(RANK, length, "int32"))
    assert transport.receive(PREVIOUS, out) == length
    np.testing.assert_array_equal(out[:length], numbers(PREVIOUS, length, "int32"))
    np.testing.assert_array_equal(out[length:], -1000)
    assert transport.ledger.bytes_received == transport.ledger.bytes_sent == 4 * length
    assert transport.ledger.messages == 1


@pytest.mark.parametrize("shift", range(len(TEXTS)))
def test_gather_texts(transport: MpiTransport, shift: int) -> None:
    texts = [TEXTS[(rank + shift) % len(TEXTS)] for rank in range(SIZE)]
    assert transport.gather_texts(texts[RANK]) == texts


def test_gather_texts_of_nobody(transport: MpiTransport) -> None:
    assert transport.gather_texts("") == [""] * SIZE


@pytest.mark.mpi(min_size=2)
def test_a_message_that_never_comes() -> None:
    transport = MpiTransport(COMM, SHORT_S)
    out = np.empty(3, np.int32)
    start = time.monotonic()
    with pytest.raises(
        StallError, match=f"rank {RANK} of {SIZE} waited .*for a message from rank {PREVIOUS};"
    ) as stall:
        transport.receive(PREVIOUS, out)
    assert SHORT_S <= time.monotonic() - start < 20
    assert "OKRT_TIMEOUT_S" in str(stall.value)
    assert transport.ledger.messages == 0
    # Late, for the receive that still stands.
    COMM.barrier()
    transport.send(NEXT, out)
    COMM.barrier()


def exchange_with_all(transport: MpiTransport) -> None:
    peers = [peer for peer in range(SIZE) if peer != RANK]
    list(transport.exchange(dict.fromkeys(peers, ONES), {peer: np.empty_like(ONES) for peer in peers}))


ONES = np.ones(5, np.int32)
CALLS = {
    "an all-reduction of 5 words": lambda transport: transport.allreduce(ONES.copy(), "sum"),
    "a gather of 5 words from every rank": lambda transport: transport.allgather(ONES),
    f"a gather of {20 * SIZE} bytes from all ranks": lambda transport: transport.allgatherv(
        ONES, np.full(SIZE, 5), np.empty(5 * SIZE, np.int32)
    ),
    # Past the peers that are served at once, a rank may wait for one that itself waits for the late one.
    f"a message of up to 20 bytes from rank {SIZE - 1 if SIZE <= _IN_FLIGHT + 1 else '[0-9]+'}": exchange_with_all,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", CALLS)
def test_a_rank_that_comes_late(what: str) -> None:
    late = RANK == SIZE - 1
    transport = MpiTransport(COMM, 60 if late else SHORT_S)
    if late:
        COMM.barrier()
        CALLS[what](transport)
        COMM.barrier()
        return
    # The exception holds the buffers that the call has left to MPI.
    with pytest.raises(StallError, match=f"rank {RANK} of {SIZE} waited .*for {what};"):
        CALLS[what](transport)
        pytest.fail("did not wait for the late rank")
    COMM.barrier()
    COMM.barrier()


def test_naps_prolong_no_wait_by_much_and_leave_the_core_in_long_ones() -> None:
    for waited_s in np.geomspace(50e-6, 100, 200):
        nap_s = mpi.nap_s(waited_s)
        assert 20e-6 <= nap_s <= max(20e-6, waited_s / 16)
        assert nap_s <= 5e-3, "MPI is to move data now and then"
        assert nap_s >= min(waited_s / 500, 5e-3)


@pytest.mark.mpi(min_size=2)
def test_idle_work_is_done_while_waiting(transport: MpiTransport) -> None:
    turns = 0

    def work() -> Iterator[None]:
        nonlocal turns
        for _ in range(10):
            turns += 1
            yield
        # Only now does the rank before this one send what this one waits for.
        COMM.send("go on", PREVIOUS, tag=7)

    out = np.empty(1, np.int32)
    if RANK == 0:
        transport.idle = work()
        transport.receive(PREVIOUS, out)
        assert turns == 10
        assert next(transport.idle, "done") == "done"
        transport.idle = iter(())
    elif RANK == SIZE - 1:
        assert COMM.recv(source=0, tag=7) == "go on"
        transport.send(0, out)
    COMM.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("tag", [_TAG_EXCHANGE, _TAG_TREE])
def test_messages_of_the_user_are_not_mistaken_for_ours(transport: MpiTransport, tag: int) -> None:
    ours, users, theirs = (np.full(4, 10 * RANK + kind, np.int32) for kind in range(3))
    early, late = np.empty(4, np.int32), np.empty(4, np.int32)
    requests = [COMM.Irecv(early, PREVIOUS, tag), COMM.Isend(users, NEXT, tag)]
    got = np.empty(4, np.int32)
    if tag == _TAG_TREE:
        transport.send(NEXT, ours)
        transport.receive(PREVIOUS, got)
    else:
        list(transport.exchange({NEXT: ours}, {PREVIOUS: got}))
    requests += [COMM.Isend(theirs, NEXT, tag), COMM.Irecv(late, PREVIOUS, tag)]
    MPI.Request.Waitall(requests)
    assert [int(array[0]) - 10 * PREVIOUS for array in (got, early, late)] == [0, 1, 2]
