"""Packed messages in every exchange: the results of coordinates in fewer bytes, and nothing lost to rounding."""

import numpy as np
import pytest

import okrt
from okrt.errors import MessageError, UsageError
from tests.laws import (
    DTYPES,
    LAWS,
    SPARSE,
    check_bound,
    check_conservation,
    check_identical,
    gradient,
    run,
    take_step,
    wide,
)
from tests.ranks import LocalTransport, run_ranks

each_reducer = pytest.mark.parametrize("name", SPARSE)
SHORT = ("fp16", "bf16")
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@each_reducer
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_float32_values_give_the_bits_of_coordinates(name, size, complete):
    cases = [("correlated", 6000, 0.1), ("one_winner", 5000, 0.05), ("normal", 300, 1.0)]
    # Where the words of oktopk are cut to its bound, the word more that a message may take shifts the cut.
    for law, n, density in cases[:1] if name == "oktopk" and complete else cases:
        options = {"n": n, "size": size, "steps": 4, "density": density, "complete": complete}
        of_codecs = (run(name, law, codec=codec, **options) for codec in ("coo", "packed"))
        for coo, packed in zip(*of_codecs, strict=True):
            for a, b in zip(coo, packed, strict=True):
                assert a.result.tobytes() == b.result.tobytes()
                assert a.after.tobytes() == b.after.tobytes()
                assert (a.stats.selected_local, a.stats.selected_global) == (
                    *(b.stats.selected_local, b.stats.selected_global),
                )
                assert b.stats.bytes_received < a.stats.bytes_received


@each_reducer
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(("size", "values"), [(1, "fp16"), (2, "bf16"), (3, "fp16"), (4, "bf16"), (7, "fp16")])
def test_nothing_is_lost_to_rounding(name, size, values, complete):
    for law, n, density, dtype in (
        ("correlated", 4000, 0.1, "float32"),
        ("one_winner", 5000, 0.05, "float32"),
        ("heavy", 3000, 0.2, "float16"),
        ("layers", 3000, 0.2, "torch.bfloat16"),
        ("single", 9, 0.5, "float32"),
        ("normal", 300, 1.0, "float32"),
    ):
        options = {"codec": "packed", "values": values, "complete": complete, "density": density}
        for ranks in run(name, law, n=n, size=size, steps=4, dtype=dtype, **options):
            check_conservation(ranks)
            check_identical(ranks)


@pytest.mark.parametrize(("values", "complete"), [("fp32", True), ("fp16", False), ("bf16", True)])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("k", "size"), [(20, 8), (400, 4)])
def test_bound_of_oktopk_on_every_step(law, values, complete, k, size):
    n = 20 * k + 3
    options = {"codec": "packed", "values": values, "complete": complete, "density": k / n}
    for ranks in run("oktopk", law, n=n, size=size, steps=5, **options):
        check_bound(ranks)
        check_conservation(ranks)
        check_identical(ranks)


@each_reducer
@pytest.mark.parametrize("values", SHORT)
def test_results_are_rounded_and_residuals_hold_the_rest(name, values):
    """Of one rank alone with something to send: what arrives is within the rounding, what stays is what is missing."""
    size, n = 3, 4000

    def body(transport):
        x = np.zeros(n, np.float32)
        if transport.rank == 1:
            x[::2] = np.random.default_rng(0).standard_normal(n // 2)
        return take_step(okrt.reducer(name, density=0.1, codec="packed", values=values, transport=transport), x)

    ranks = run_ranks(size, body)
    delivered = np.flatnonzero(ranks[0].result)
    assert delivered.size >= 350
    sent = ranks[1].gradient[delivered].astype(np.float64)
    seen = size * wide(ranks[0].result)[delivered]
    assert (np.abs(seen - sent) <= 3 * ROUNDING[values] * np.abs(sent)).all()
    assert name == "oktopk" or (seen != sent).mean() > 0.5
    left = sum(r.after[delivered].astype(np.float64) for r in ranks)
    np.testing.assert_allclose(seen + left, sent, rtol=1e-6)


def test_bytes_of_oktopk_are_below_what_any_exchange_of_coordinates_takes():
    """With 16-bit values at 1 %, on every rank and step after the first ones: less than 2k words."""
    size, n, k = 4, 400_000, 4000
    for values in SHORT:
        options = {"density": 0.01, "codec": "packed", "values": values}
        for step, ranks in enumerate(run("oktopk", "correlated", n=n, size=size, steps=8, **options)):
            for r in ranks:
                if step >= 3:
                    assert r.stats.bytes_received < 8 * k * (size - 1) / size
                    assert 0.95 * k <= r.stats.selected_local <= k


@each_reducer
@pytest.mark.parametrize("selector", ["sidco", "sidco-exponential", "sidco-gamma", "sidco-pareto"])
def test_with_the_thresholds_of_sidco(name, selector):
    for law in ("layers", "zero", "jump", "equal"):
        for step, ranks in enumerate(run(name, law, n=4000, size=3, steps=6, density=0.05, selector=selector)):
            check_conservation(ranks)
            check_identical(ranks)
            for r in ranks:
                if law == "layers" and step > 3:
                    assert 0.95 * r.stats.k <= r.stats.selected_local <= 1.05 * r.stats.k


@each_reducer
@pytest.mark.parametrize("values", ["fp32", *SHORT])
@pytest.mark.parametrize("complete", [False, True])
def test_sums_beyond_float32_do_not_stay(name, values, complete):
    """Numbers that add up to more than float32 has: the result of that step has them, later ones and residuals not."""
    size, n = 4, 1000

    def body(transport):
        reducer = okrt.reducer(name, density=0.1, values=values, complete=complete, transport=transport)
        steps = []
        for step in range(5):
            x = gradient("normal", n, transport.rank, size, step)
            if step == 2:
                x[:5] = 2e38
            steps.append(take_step(reducer, x))
        return steps

    for step, ranks in enumerate(zip(*run_ranks(size, body), strict=True)):
        check_identical(ranks)
        for r in ranks:
            assert np.isfinite(r.after).all()
            assert step == 2 or np.isfinite(r.result).all()
            assert step != 2 or (r.result[:5] > 3e37).all()


class Damaging(LocalTransport):
    """Rank 1 gets messages that are not what was sent, in one phase."""

    phase, damage = "", staticmethod(lambda message: message)

    def exchange(self, outgoing, incoming):
        for peer, message in super().exchange(outgoing, incoming):
            is_it = self.rank == 1 and self.ledger._current == self.phase
            yield peer, self.damage(message) if is_it else message

    def receive(self, peer, out):
        length = super().receive(peer, out)
        if self.rank == 1 and self.ledger._current == self.phase:
            length = self.damage(out[:length]).size
        return length


def cut_off(message):
    return message[:-3]


def changed(message):
    message[message.size // 2] ^= 1 << 13
    return message


def emptied(message):
    return message[:0]


@pytest.mark.parametrize("damage", [cut_off, changed, emptied])
@pytest.mark.parametrize("values", ["fp32", "fp16"])
@pytest.mark.parametrize("k", [40, 400], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *(("oktopk", "split"), ("oktopk", "gather"), ("topka", "gather"), ("topkdsa", "split"), ("topkdsa", "gather")),
        *(("gtopk", "reduce"), ("gtopk", "gather")),
    ],
)
def test_damaged_messages_are_refused(name, phase, k, values, damage, monkeypatch):
    n, size = 40 * k, 4
    monkeypatch.setattr(Damaging, "phase", phase)
    monkeypatch.setattr(Damaging, "damage", staticmethod(damage))

    def body(transport):
        options = {"density": k / n, "codec": "packed", "values": values}
        return okrt.reducer(name, transport=transport, **options).allreduce(gradient("normal", n, transport.rank, 4, 0))

    if (name, phase) == ("gtopk", "reduce"):
        size = 2  # rank 1 only sends there
        monkeypatch.setattr(Damaging, "receive", lambda self, peer, out: damaged_receive(self, peer, out, damage))
    with pytest.raises(MessageError, match=r"from rank \d"):
        run_ranks(size, body, Damaging)


def damaged_receive(transport, peer, out, damage):
    length = LocalTransport.receive(transport, peer, out)
    return damage(out[:length]).size if transport.ledger._current == "reduce" else length


def test_another_number_of_entries_than_announced(monkeypatch):
    """A message that is intact but not the one that was meant to come."""
    first: dict[int, np.ndarray] = {}

    def repeated(message):
        return first.setdefault(0, message.copy())

    monkeypatch.setattr(Damaging, "phase", "split")
    monkeypatch.setattr(Damaging, "damage", staticmethod(repeated))

    def body(transport):
        reducer = okrt.reducer("topkdsa", density=0.1, codec="packed", transport=transport)
        return reducer.allreduce(gradient("layers", 5000, transport.rank, 3, 0))

    with pytest.raises(MessageError, match=r"from rank \d has \d+ entries instead of \d+"):
        run_ranks(3, body, Damaging)


def test_packed_is_the_default():
    assert okrt.reducer("oktopk").codec == "packed" and okrt.reducer("oktopk").values == "fp32"


def test_bad_options():
    with pytest.raises(UsageError, match=r"unknown kind of values 'fp8': choose one of bf16, fp16, fp32"):
        okrt.reducer("topka", codec="packed", values="fp8")
    with pytest.raises(UsageError, match=r'values="fp16" needs codec="packed": coo sends float32'):
        okrt.reducer("oktopk", codec="coo", values="fp16")
    with pytest.warns(UserWarning, match="values='fp16' has no effect on dense"):
        okrt.reducer("dense", values="fp16")


def test_dtypes_of_the_user_stay_what_they_are():
    for dtype, make in DTYPES.items():
        (ranks,) = run("oktopk", "normal", n=900, size=3, steps=1, dtype=dtype, density=0.2, codec="packed")
        assert type(ranks[0].result) is type(make(np.zeros(1, np.float32)))
