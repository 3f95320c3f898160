"""Entries packed into few bytes: the format, and its oracle in NumPy. `cpu_packed` is the fast form.

A message is a row of 32-bit words:

    0      a byte each: magic 0xEF, exponent of the scale (biased by 128), kind of values and layout, version
    1      entries
    2      first index
    3      checksum of all other words and of how many there are
    4 …    where the entries are, in the layout that is shorter for this message:
           gaps    how many indexes lie between neighbours, in blocks of 32 with a width in bits for each: first all
                   widths, a byte each, then the blocks, lowest bits first, each from a new word on
           bitmap  a bit for each index from the first entry to the last, lowest bits first
    …      the values: as float32, as fp16 divided by a power of two (which brings the largest near the top of the range
           of fp16, so that no gradient is too small or too large for it), as bf16, or none

Where that would be longer (a few entries), a message is plain: the indexes, the values as float32 if there are any,
and a checksum of 31 bits. Its first word has no sign, that of others has one. So no message is longer than coordinates
by more than one word.
"""

import numpy as np

from okrt.kernels.bits import MAGNITUDE_MASK, missing, narrow, widen

MAGIC, VERSION = 0xEF, 1
HEADER, CHECKSUM = 4, 3  # words of the header, and which of them is the checksum
PLAIN_MASK = 0x7FFFFFFF  # of the checksum of a plain message
BLOCK = 32  # gaps: as many words as bits in each
GAPS, BITMAP = 0, 1
KINDS = {"none": 0, "fp32": 1, "fp16": 2, "bf16": 3}
EXPONENT_BIAS = 128
TOP_EXPONENT = 14  # of the largest value, scaled: rounding up cannot overflow
EXPONENT_LIMITS = (-126, 113)  # powers of two, and their inverses, that are normal numbers of float32
FP16_LARGEST, FP16_LARGEST_IN_FLOAT32 = 0x7BFF, 0x77FF  # the latter times 2**113 is still finite
MIX = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)


def value_words(entries: int, kind: int) -> int:
    return {KINDS["none"]: 0, KINDS["fp32"]: entries}.get(kind, (entries + 1) // 2)


def plain_words(entries: int, kind: int) -> int:
    return (1 if kind == KINDS["none"] else 2) * entries + 1


def room_words(entries: int, kind: int, span: int) -> int:
    """The longest that a message of so many entries among `span` neighbouring indexes can be."""
    return min(plain_words(entries, kind), HEADER + -(-span // 32) + value_words(entries, kind))


def checksum(message: np.ndarray, place: int) -> int:
    """Of all words but the one at `place`: a change of any one of them changes it for certain."""
    words = message.view(np.uint32).copy()
    words[place] = words.size
    with np.errstate(over="ignore"):
        words ^= np.arange(words.size, dtype=np.uint32) * np.uint32(MIX[0])
        words *= np.uint32(MIX[1])
        words ^= words >> np.uint32(15)
        words *= np.uint32(MIX[2])
    return int(words.sum(dtype=np.uint64)) & 0xFFFFFFFF


def inspect(message: np.ndarray) -> tuple[int, int, int, int]:
    """First word and second (0 if there is none) without a sign, the checksum that a message has, and the right one."""
    words = message.view(np.uint32)
    is_plain = words[0] <= PLAIN_MASK or words.size < HEADER
    place = words.size - 1 if is_plain else CHECKSUM
    right = checksum(message, place) & (PLAIN_MASK if is_plain else 0xFFFFFFFF)
    return int(words[0]), int(words[1]) if words.size > 1 else 0, int(words[place]), right


def fp16_exponent(largest: int, terms: int = 1) -> int:
    """Of the power of two that numbers are divided by before they become fp16: so many of the largest magnitude (as its
    bits) can be added up without leaving the range."""
    low, high = EXPONENT_LIMITS
    return min(max((largest >> 23) - 127 - TOP_EXPONENT + (terms - 1).bit_length(), low), high)


def narrowed(value: np.ndarray, kind: int, exponent: int) -> np.ndarray:
    """The 16 bits of each value, as uint16."""
    if kind == KINDS["bf16"]:
        return narrow(value, np.dtype(np.int16)).view(np.uint16)
    half = narrow(value * np.float32(2.0**-exponent), np.dtype(np.uint16))
    largest = FP16_LARGEST_IN_FLOAT32 if exponent == EXPONENT_LIMITS[1] else FP16_LARGEST
    return (half & 0x8000) | np.minimum(half & 0x7FFF, largest).astype(np.uint16)


def widened(half: np.ndarray, kind: int, exponent: int) -> np.ndarray:
    if kind == KINDS["bf16"]:
        return widen(half.view(np.int16))
    return widen(half) * np.float32(2.0**exponent)


def _as_words(numbers: np.ndarray, width: int) -> np.ndarray:
    """`width` bits of each number, lowest first, in a row."""
    bits = (numbers[:, None] >> np.arange(width)) & 1
    packed = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
    return np.pad(packed, (0, -packed.size % 4)).view(np.int32)


def pack(index: np.ndarray, value: np.ndarray, kind: int, message: np.ndarray, error: np.ndarray) -> int:
    """Writes the message of sorted, distinct indexes and their values; returns how many words it has. In 16 bits an
    infinite value becomes the largest number.

    With a 16-bit kind it leaves in `value` what a reader of the message will get, and in `error` what is `missing` from
    it; with others it touches neither.
    """
    largest = int((value.view(np.uint32) & MAGNITUDE_MASK).max(initial=0))
    exponent = fp16_exponent(largest) if kind == KINDS["fp16"] else 0
    gaps = np.diff(index) - 1
    blocks = np.split(gaps, range(BLOCK, gaps.size, BLOCK)) if gaps.size else []
    widths = np.array([int(block.max()).bit_length() for block in blocks], np.uint8)
    where = [np.pad(widths, (0, -widths.size % 4)).view(np.int32)]
    where += [_as_words(block.astype(np.int64), width) for block, width in zip(blocks, widths, strict=True)]
    layout = GAPS
    if index.size and (int(index[-1]) - int(index[0])) // 32 + 1 < sum(part.size for part in where):
        layout, bitmap = BITMAP, np.zeros(int(index[-1]) - int(index[0]) + 1, np.int64)
        bitmap[index - index[0]] = 1
        where = [_as_words(bitmap, 1)]
    if HEADER + sum(part.size for part in where) + value_words(index.size, kind) > plain_words(index.size, kind):
        error[: index.size] = 0
        values = value[:0] if kind == KINDS["none"] else value
        words = np.concatenate([index, values.view(np.int32), [0]]).astype(np.int32)
        words[-1] = checksum(words, words.size - 1) & PLAIN_MASK
        message[: words.size] = words
        return words.size
    values = np.empty(0, np.int32)
    if kind == KINDS["fp32"]:
        values = value.view(np.int32)
    elif kind != KINDS["none"]:
        half = narrowed(value, kind, exponent)
        values = np.pad(half, (0, half.size % 2)).view(np.int32)
        seen = widened(half, kind, exponent)
        error[:] = missing(value, seen)
        value[:] = seen
    tag = MAGIC << 24 | (exponent + EXPONENT_BIAS) << 16 | kind << 12 | layout << 8 | VERSION
    words = np.concatenate([[tag - 2**32, index.size, index[0], 0], *where, values]).astype(np.int32)
    words.view(np.uint32)[CHECKSUM] = checksum(words, CHECKSUM)
    message[: words.size] = words
    return words.size


def unpack(message: np.ndarray, index_out: np.ndarray, value_out: np.ndarray) -> None:
    """The entries of a message that is known to be intact; values only if it has any."""
    if message[0] >= 0:
        index_out[:] = message[: index_out.size]
        value_out[:] = message[index_out.size : -1].view(np.float32)
        return
    tag, entries, first = (int(word) for word in message.view(np.uint32)[:3])
    kind, layout, exponent = tag >> 12 & 15, tag >> 8 & 15, (tag >> 16 & 255) - EXPONENT_BIAS
    end = message.size - value_words(entries, kind)
    if layout == BITMAP:
        index_out[:] = first + np.flatnonzero(np.unpackbits(message[HEADER:end].view(np.uint8), bitorder="little"))
    else:
        gaps, count = [], entries - 1
        at = HEADER + -(-count // (4 * BLOCK))
        for block, width in enumerate(message[HEADER:at].view(np.uint8)[: -(-count // BLOCK)]):
            length = min(BLOCK, count - block * BLOCK)
            used = -(-length * int(width) // 32)
            bits = np.unpackbits(message[at : at + used].view(np.uint8), bitorder="little")[: length * int(width)]
            gaps.append(bits.reshape(length, width).astype(np.int64) @ (1 << np.arange(width)))
            at += used
        index_out[:] = np.cumsum(np.concatenate([[first], *(part + 1 for part in gaps)]))
    if kind == KINDS["fp32"]:
        value_out[:] = message[end:].view(np.float32)
    elif kind != KINDS["none"]:
        value_out[:] = widened(message[end:].view(np.uint16)[:entries], kind, exponent)
