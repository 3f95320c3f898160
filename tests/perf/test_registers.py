"""The CUDA kernels compile without a GPU for the oldest and the newest architecture, and keep what they work with in
registers. `python -m okrt.perf.registers` shows those between them, too."""

import pytest

from okrt.perf import registers

pytest.importorskip("numba_cuda", reason="needs numba-cuda: pip install 'okrt[cuda12]'")

BLOCK_THREADS = 256
REGISTERS = 65536  # of a multiprocessor, from sm_60 to sm_90
SHARED_BYTES = 65536  # of one of P100, the smallest
ARCHITECTURES = (registers.ARCHITECTURES[0], registers.ARCHITECTURES[-1])
BLOCKS = 3  # that a multiprocessor should hold at the least


@pytest.fixture(scope="module")
def figures():
    return registers.compiled(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(figures, architecture):
    rows = figures[architecture]
    assert {"select", "keep", "histogram", "merge_add", "accumulate_select bfloat16"} <= rows.keys()
    for name, row in rows.items():
        assert (row["stack_bytes"], row["spill_store_bytes"], row["spill_load_bytes"]) == (0, 0, 0), (name, row)
        assert 0 < row["registers"] * BLOCK_THREADS * BLOCKS <= REGISTERS, (name, row)
        assert row["shared_bytes"] * BLOCKS <= SHARED_BYTES, (name, row)


def test_table(figures):
    table = registers.table(figures)
    assert (table.row_count, len(table.columns)) == (len(figures[60]), 1 + len(ARCHITECTURES))
