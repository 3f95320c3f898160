"""The wish that a job or a sweep should save and end: a signal, before the time limit or from a person."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


@dataclass
class StopFlag:
    """Raised by a signal; who works looks at it now and then."""

    raised: bool = False
    names: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
        def note(number: int, frame: Any) -> None:
            self.raised = True
            self.names.append(signal.Signals(number).name)

        before = {number: signal.signal(number, note) for number in signals}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # which may have been held back until now
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
