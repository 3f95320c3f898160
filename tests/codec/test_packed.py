import numpy as np
import pytest

from okrt.codec import Packed, codec
from okrt.errors import EX_STALL, MessageError, exit_code
from okrt.kernels.host import Host
from okrt.kernels.packed import checksum

INDEX = np.flatnonzero(np.random.default_rng(0).random(40_000) < 0.01).astype(np.int32) + 2**24
VALUE = np.random.default_rng(1).standard_normal(INDEX.size).astype(np.float32)
each_kind = pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])


def space(length):
    return np.empty(length, np.int32), np.empty(length, np.float32)


def encode(values="fp16", length=INDEX.size, has_values=True):
    """The codec, the message, and what its readers get."""
    coder, seen, error = codec("packed", values, Host()), VALUE[:length].copy(), np.empty(length, np.float32)
    out = np.empty(coder.room(length, has_values), np.int32)
    return (
        coder,
        coder.encode(INDEX[:length], seen if has_values else None, out, error[: length * coder.is_lossy]),
        seen,
    )


@each_kind
@pytest.mark.parametrize("length", [0, 1, 20, INDEX.size])
def test_round_trip(values, length):
    coder, message, seen = encode(values, length)
    assert isinstance(coder, Packed) and coder.is_lossy == (values != "fp32")
    assert coder.entries(message, 0) == length
    index, value = coder.decode(message, length, True, space)
    np.testing.assert_array_equal(index, INDEX[:length])
    np.testing.assert_array_equal(value, seen)
    np.testing.assert_allclose(seen, VALUE[:length], rtol={"fp32": 0, "fp16": 2**-11, "bf16": 2**-8}[values])


@pytest.mark.parametrize("length", [0, 1, 20, INDEX.size])
def test_indexes_alone(length):
    coder, message, _ = encode(length=length, has_values=False)
    assert coder.entries(message, 0, has_values=False) == length
    index, value = coder.decode(message, length, False, space)
    np.testing.assert_array_equal(index, INDEX[:length])
    assert value is None


@each_kind
@pytest.mark.parametrize("length", [20, INDEX.size])
@pytest.mark.parametrize("left", [0, 1, 3, 10, -1])
def test_a_message_that_was_cut_off(values, length, left):
    coder, message, _ = encode(values, length)
    with pytest.raises(MessageError, match="from rank 3"):
        coder.entries(message[:left], 3)


@each_kind
@pytest.mark.parametrize("length", [20, INDEX.size])
@pytest.mark.parametrize("place", [0, 1, 2, 3, 7, -1])
def test_a_message_that_was_changed(values, length, place):
    coder, message, _ = encode(values, length)
    message[place] ^= 1 << 4
    with pytest.raises(MessageError, match=r"rank 2.*cut off or changed") as refusal:
        coder.entries(message, 2)
    assert exit_code(refusal.value) == EX_STALL


def test_a_message_of_another_version():
    coder, message, _ = encode()
    message[0] += 1
    message.view(np.uint32)[3] = checksum(message, 3)
    with pytest.raises(MessageError, match=r"rank 1 is not of the format.*same okrt"):
        coder.entries(message, 1)


def test_a_message_of_other_values():
    _, message, _ = encode("bf16")
    with pytest.raises(MessageError, match="rank 1 is not of the format"):
        codec("packed", "fp16", Host()).entries(message, 1)
    with pytest.raises(MessageError, match="rank 1 is not of the format"):
        codec("packed", "bf16", Host()).entries(message, 1, has_values=False)
