"""The job: config, loop, data, checkpoint, metrics."""

from okrt.train.task import Task

__all__ = ["Task"]
