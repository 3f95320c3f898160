"""The kernels for GPUs, compiled by Numba: see `reference` for what each one does. Nothing here has run on a GPU yet.

`Device` has the functions of `cpu`, for device arrays (CuPy, or whatever has __cuda_array_interface__), with the same
results to the last bit. Launches go to one stream and nothing waits for them, but for the functions that return a
number that the host needs. Working memory is made once and grows when it must.

A kernel that joins: write it in `cuda_code` with `cuda.jit` and integer or order-preserving arithmetic, so that results
do not depend on the order of threads, and add its arguments to SIGNATURES, from which the tests compile it for every
architecture; launch it here, from a method of Device that is named as in `reference`. The tests of the simulator ask
for its case then.
"""

from typing import Any

import numpy as np
from numba import cuda

from okrt.kernels import cuda_code as code
from okrt.kernels.bits import COARSE_BINS, COARSE_SHIFT


def _kind_of(gradient: Any) -> str:
    return {"float32": "float32", "uint16": "float16", "int16": "bfloat16"}[str(gradient.dtype)]


class Device:
    """The kernels on one stream of the current GPU, and the memory they work in."""

    def __init__(self, stream: Any = 0) -> None:
        self._stream = stream
        limit = getattr(cuda.get_current_device(), "MULTIPROCESSOR_COUNT", 1)
        self._blocks_limit = code.BLOCKS_PER_MULTIPROCESSOR * limit
        self._state = cuda.device_array(0, np.int64)
        self._found = cuda.device_array(1, np.int64)
        self._counts = cuda.device_array(COARSE_BINS, np.int64)
        self._control = cuda.device_array(2, np.int32)
        self._zero_control = cuda.device_array(2, np.int32)
        for words in (self._counts, self._zero_control):
            self._launch(code.clear, words.size, words)

    def _launch(self, kernel: Any, length: int, *arguments: Any) -> None:
        """Over `length` elements, each thread taking several where there are many."""
        blocks = min(self._blocks_limit, -(-length // code.THREADS))
        kernel[blocks, code.THREADS, self._stream](*arguments)

    def _launch_tiles(self, kernel: Any, length: int, *arguments: Any) -> None:
        """A block for each tile; kernels of this kind end in the state of the tiles and what was found."""
        tiles = -(-length // code.TILE)
        if self._state.size < 1 + tiles:
            self._state = cuda.device_array(1 + tiles + tiles // 8, np.int64)
        self._launch(code.clear, 1 + tiles, self._state[: 1 + tiles])
        kernel[tiles, code.THREADS, self._stream](*arguments, self._state, self._found)

    def _read(self, words: Any) -> np.ndarray:
        """Waits for the stream."""
        return words.copy_to_host(stream=self._stream)

    def all_finite(self, gradient: Any) -> bool:
        if gradient.size == 0:
            return True
        self._launch(code.clear, 1, self._found)
        self._launch(code.FIND_NOT_FINITE[_kind_of(gradient)], gradient.size, gradient, self._found)
        return not self._read(self._found)[0]

    def accumulate(self, residual: Any, gradient: Any) -> None:
        if residual.size:
            self._launch(code.ACCUMULATE[_kind_of(gradient)], residual.size, residual, gradient)

    def accumulate_select(self, residual, gradient, threshold: int, first_index: int, index_out, value_out) -> int:
        if residual.size == 0:
            return 0
        rest = (np.int32(threshold), np.int32(code.ALL_TIES), np.int32(first_index), index_out, value_out)
        self._launch_tiles(code.ACCUMULATE_SELECT[_kind_of(gradient)], residual.size, residual, gradient, *rest)
        return int(self._read(self._found)[0])

    def select(self, values, threshold: int, first_index: int, index_out, value_out) -> int:
        return self._select(values, threshold, code.ALL_TIES, first_index, index_out, value_out)

    def select_top(self, values, threshold: int, ties: int, index_out, value_out) -> int:
        return self._select(values, threshold, ties, 0, index_out, value_out)

    def _select(self, values, threshold: int, ties: int, first_index: int, index_out, value_out) -> int:
        if values.size == 0:
            return 0
        rest = (np.int32(threshold), np.int32(ties), np.int32(first_index), index_out, value_out)
        self._launch_tiles(code.SELECT, values.size, values, values, *rest)
        return int(self._read(self._found)[0])

    def count(self, values, threshold: int) -> int:
        self._count_above(values, threshold - 1)
        return int(self._read(self._found)[0])

    def _count_above(self, values, limit: int) -> None:
        self._launch(code.clear, 1, self._found)
        if values.size:
            self._launch(code.count_above, values.size, values, np.int32(limit), self._found)

    def histogram(self, values, low: int, shift: int, counts) -> None:
        """At most COARSE_BINS bins."""
        if values.size:
            bins = (np.int32(low), np.int32(shift), self._zero_control, counts)
            self._launch(code.histogram, values.size, values, *bins)

    def accumulate_histogram(self, residual, gradient, low: int, shift: int, counts) -> None:
        self.accumulate(residual, gradient)
        self.histogram(residual, low, shift, counts)

    def _find_kth(self, values, k: int) -> None:
        """control becomes the k-th largest magnitude, and how many that are equal to it belong to the top k."""
        self._launch(code.clear, 1, self._found)
        code.set_control[1, 1, self._stream](self._control, np.int32(0), np.int64(k), self._found)
        shift, bins = COARSE_SHIFT, COARSE_BINS
        while True:
            counts = self._counts[:bins]
            self._launch(code.histogram, values.size, values, np.int32(0), np.int32(shift), self._control, counts)
            code.pick_bin[1, code.THREADS, self._stream](counts, np.int32(bins), np.int32(shift), self._control)
            if shift == 0:
                return
            bins = 1 << min(12, shift)
            shift = max(0, shift - 12)

    def kth_magnitude(self, values, k: int) -> int:
        self._find_kth(values, k)
        return max(1, int(self._read(self._control)[0]))

    def keep_reaching(self, index, value, threshold: int, k: int) -> int:
        if index.size == 0:
            return 0
        self._count_above(value, threshold)
        code.set_control[1, 1, self._stream](self._control, np.int32(threshold), np.int64(k), self._found)
        self._launch_tiles(code.keep, index.size, index, value, self._control)
        return int(self._read(self._found)[0])

    def keep_top(self, index, value, k: int) -> int:
        """Nothing waits: how many are kept is known."""
        if k <= 0 or index.size <= k:
            return min(index.size, max(0, k))
        self._find_kth(value, k)
        self._launch_tiles(code.keep, index.size, index, value, self._control)
        return k

    def scatter_add(self, dense, index, value) -> None:
        if index.size:
            self._launch(code.scatter_add, index.size, dense, index, value)

    def clear_common(self, residual, index_a, index_b) -> None:
        if index_a.size and index_b.size:
            self._launch(code.clear_common, index_a.size, residual, index_a, index_b)

    def merge_add(self, index_a, value_a, index_b, value_b, index_out, value_out) -> int:
        if index_a.size + index_b.size == 0:
            return 0
        lists = (index_a, value_a, index_b, value_b, index_out, value_out)
        self._launch_tiles(code.merge_add, index_a.size + index_b.size, *lists)
        return int(self._read(self._found)[0])
