"""The hot loops. `reference` (NumPy, the oracle), `cpu` (Numba) and `cuda` (Numba for GPUs, most of them so far) hold
the same functions with the same results.

Arrays are one-dimensional and contiguous. Accumulators and values are float32; a gradient is float32, or a
16-bit float handed over as its bits: uint16 holds fp16, int16 holds bf16. Indexes are int32.

Magnitudes are compared as integers: the bits of |x| in float32 order as |x| does, so a threshold is such an
integer (`bits.threshold_bits`), at least 1. Zeros are therefore never selected.
"""
