"""Which processes there are."""

import os


def processes(text: str) -> list[str]:
    """The command lines that have this text in them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read()
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found
