"""Which samples come when: every one once an epoch, in an order that a seed decides."""

import numpy as np

ROUNDS = 4


class SampleOrder:
    """Numbers for any positions of an endless sequence of epochs, each epoch a permutation of its own.

    The permutation is a Feistel network over the smallest even number of bits that holds all numbers; a number that is
    too large is sent through again. So any part of any epoch costs only its own length, whatever the number of ranks.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)

    def __call__(self, first: int, count: int) -> np.ndarray:
        """The numbers at positions first to first + count."""
        epochs, places = np.divmod(np.arange(first, first + count), self._samples)
        numbers = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            numbers[epochs == epoch] = self._permuted(places[epochs == epoch], int(epoch))
        return numbers

    def _permuted(self, places: np.ndarray, epoch: int) -> np.ndarray:
        keys = np.random.default_rng([self._seed, epoch]).integers(1, 2**63, ROUNDS, dtype=np.uint64)
        numbers = self._network(places.astype(np.uint64), keys)
        while (too_large := numbers >= self._samples).any():
            numbers[too_large] = self._network(numbers[too_large], keys)
        return numbers.astype(np.int64)

    def _network(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        half = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = numbers >> half, numbers & mask
        for key in keys:
            left, right = right, left ^ (mixed(right + key) & mask)
        return (left << half) | right


def mixed(words: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of a word (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
