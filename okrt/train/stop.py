"""The wish that a job should save and end: a signal, long before the time limit or from a person."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


@dataclass
class StopFlag:
    """Raised by a signal; the loop looks at it after each step."""

    raised: bool = False
    names: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def note(number: int, frame: Any) -> None:
            self.raised = True
            self.names.append(signal.Signals(number).name)

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # which may have been held back until now
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
