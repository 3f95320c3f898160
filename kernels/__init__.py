"""The hot loops, with the same results in each form: `reference` (NumPy, the oracle), `host` (Numba, from `cpu`, on
several threads) and `cuda` (Numba for GPUs). What is above this room takes a Host or a Device and asks no further.

Arrays are one-dimensional and contiguous. Accumulators and values are float32; a gradient is float32, or a
16-bit float handed over as its bits: uint16 holds fp16, int16 holds bf16. Indexes are int32.

Magnitudes are compared as integers: the bits of |x| in float32 order as |x| does, so a threshold is such an
integer (`bits.threshold_bits`), at least 1. Zeros are therefore never selected.
"""
