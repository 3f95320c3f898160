"""What can go wrong, and the exit code each kind ends the job with."""

EX_USAGE = 64
EX_STALL = 70
EX_IO = 74
EX_REQUEUE = 75  # checkpointed, please requeue


class UsageError(ValueError):
    """The user's mistake: one line that says what is wrong, where, and what would be right."""


class DtypeError(UsageError, TypeError):
    """An array of a type that cannot be reduced."""


class PlanMismatch(UsageError):
    """The ranks do not agree on what they are about to do."""


class NonFiniteGradient(UsageError):
    """NaN or Inf in a gradient."""


class PeerError(UsageError):
    """Another rank refused its input; that of this rank was fine."""


class StallError(RuntimeError):
    """A wait ran into its time limit; the message says what was waited for."""


class MessageError(RuntimeError):
    """A message is not what its sender sent."""


def exit_code(error: BaseException) -> int:
    if isinstance(error, UsageError):
        return EX_USAGE
    if isinstance(error, (StallError, MessageError)):
        return EX_STALL
    if isinstance(error, OSError):
        return EX_IO
    return 1
