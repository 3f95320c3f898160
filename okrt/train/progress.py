"""What rank 0 tells: a live line in a terminal, plain lines now and then in a log."""

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

AVERAGED_STEPS = 20


class Progress:
    """Silent on all ranks but the first."""

    def __init__(self, console: Console, speaks: bool, steps: int, log_every: int, dense_bytes: float) -> None:
        """dense_bytes: what a rank would receive in a step if every gradient travelled whole."""
        self._console, self._speaks = console, speaks
        self._steps, self._log_every, self._dense_bytes = steps, log_every, dense_bytes
        self._live: Live | None = None
        self._recent: list[tuple[float, float]] = []
        self._taken, self._received = 0, 0.0
        self._figures = ""

    def __enter__(self) -> "Progress":
        if self._speaks and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def log(self, text: str) -> None:
        if self._speaks:
            self._console.print(Text(text), soft_wrap=True)

    def step(self, step: int, rows: np.ndarray, figures: dict[str, float], samples: int) -> None:
        """rows: of each rank loss, step_s, comm_s, idle_s, selected, bytes_received, …"""
        if not self._speaks:
            return
        self._taken += 1
        self._received += float(rows[:, 5].max())
        self._recent = [*self._recent[1 - AVERAGED_STEPS :], (float(rows[:, 1].max()), float(rows[:, 3].max()))]
        if figures:
            self._figures = "  held out: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        line = self._line(step, float(rows[:, 0].mean()), samples)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            if figures:
                self.log(line)
        elif figures or step % self._log_every == 0 or self._taken == 1:
            self.log(line)

    def _line(self, step: int, loss: float, samples: int) -> str:
        seconds, waited = (sum(column) for column in zip(*self._recent, strict=True))
        saved = ""
        if self._received and self._dense_bytes:
            saved = f"  {self._dense_bytes * self._taken / self._received:.1f}x fewer bytes than dense"
        return (
            f"step {step}/{self._steps}  loss {loss:.4f}  {samples * len(self._recent) / seconds:.0f} samples/s  "
            f"waiting for communication {100 * waited / seconds:.0f} %{saved}{self._figures}"
        )
