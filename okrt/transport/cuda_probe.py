"""Run by `cuda_aware` as a script, which spares it the import of okrt: sends device memory to itself through MPI.

Exit code 0 if it arrived, 3 if this cannot be tried here; anything else, a signal included, means that MPI cannot.
The last line of stderr says why.
"""

import sys

SIZES = (4, 1 << 20)  # words: one message that travels at once, one for which MPI asks first


def main() -> int:
    try:
        import cupy  # type: ignore[import-not-found]

        pairs = [(cupy.arange(size, dtype="int32"), cupy.zeros(size, dtype="int32")) for size in SIZES]
        cupy.cuda.get_current_stream().synchronize()
    except Exception as error:
        print(f"CuPy: {error}", file=sys.stderr)
        return 3

    from mpi4py import MPI

    for sent, received in pairs:
        MPI.COMM_SELF.Sendrecv(sent, 0, recvbuf=received, source=0)
        if not (sent == received).all():
            print("what arrived was not what was sent", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
