"""Reductions beside backward: on a GPU they have a stream of their own, which waits for what they need and no more."""

from collections.abc import Callable

import torch

from okrt.buffers import is_on_gpu


class SideStream:
    """Where the model is in host memory there are no streams, and jobs are run as they are."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._device = parameter.device
        self._stream = torch.cuda.Stream(self._device) if is_on_gpu(parameter) else None

    def after_this(self, job: Callable[[], None]) -> Callable[[], None]:
        """The job, on the side stream, once all is done that the caller's stream has been given so far."""
        stream = self._stream
        if stream is None:
            return job
        done = torch.cuda.current_stream(self._device).record_event()

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_event(done)
                job()

        return run

    def join(self) -> None:
        """Whatever the caller's stream is given from now on comes after all that the side stream was given."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
