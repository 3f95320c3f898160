"""Gradients for benchmarks: like those of a network in that ranks partly agree and layers differ in scale."""

import numpy as np

LAYERS = 16


class SyntheticGradient:
    """A shared part plus noise of each rank, of equal size; layer scales fall from 1 to 0.01. New at each step."""

    def __init__(self, elements: int, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self.elements = elements
        self._drawn: int | None = None  # the step
        self._gradient = np.empty(elements, np.float32)
        self._given = np.empty(elements, np.float32)
        self._ends = [elements * layer // LAYERS for layer in range(LAYERS + 1)]

    def __call__(self, step: int) -> np.ndarray:
        """The gradient of this step, to be overwritten by whoever gets it, in a buffer that the next call fills anew.

        Those who take turns and ask for the same step one after the other share what is drawn for it.
        """
        if step != self._drawn:
            self._draw(step)
        self._given[:] = self._gradient
        return self._given

    def _draw(self, step: int) -> None:
        shared_key, own_key = [self._seed, step], [self._seed, step, 1 + self._rank]
        np.random.default_rng(shared_key).standard_normal(out=self._given, dtype=np.float32)
        np.random.default_rng(own_key).standard_normal(out=self._gradient, dtype=np.float32)
        self._gradient += self._given
        for layer, scale in enumerate(np.geomspace(1, 0.01, LAYERS, dtype=np.float32)):
            self._gradient[self._ends[layer] : self._ends[layer + 1]] *= scale
        self._drawn = step
