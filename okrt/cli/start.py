"""Run by its path, this is `okrt` with SIGUSR2 held back until the command listens for it.

Loading all of okrt takes seconds, in which that signal, Slurm's word that time is running out, would end a rank.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    sys.path[0] = str(Path(__file__).absolute().parents[2])
    sys.argv[0] = "okrt"

    from okrt.cli.main import main

    main()
