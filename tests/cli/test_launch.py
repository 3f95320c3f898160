"""Starting the ranks of a command."""

from collections.abc import Callable

# A launcher that asks for the end of the command that started it, and ends when it is told to.
FORWARD = """
import os
from okrt.cli.launch import run_forwarding

for name in ("TERM", "USR2"):
    script = f"trap 'exit 75' TERM; sleep 0.5; kill -{name} $PPID; while :; do sleep 0.05; done"
    print(name, run_forwarding(["sh", "-c", script], dict(os.environ)), flush=True)
"""


def test_signals_reach_the_launcher_as_sigterm(start: Callable) -> None:
    done = start("python", "-c", FORWARD, limit_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "TERM 75\nUSR2 75\n", "")
