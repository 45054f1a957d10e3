"""Errors of the scheduler.

SchedulerError
 +-- RequestRejected          the caller's fault
 |    +-- RequestTooLong      prompt + max_tokens is more than a slot holds
 +-- NotNow                   try again after `retry_after_s`
 |    +-- Overloaded          the queue is full
 |    +-- Draining            the server is going down
 |    +-- EngineUnavailable   the engine is starting or restarting
 +-- RequestFailed            a sequence that was admitted could not be finished
      +-- DeadlineExceeded    the request's own deadline passed
      +-- EngineDead          the engine died while the request was in flight
      +-- SlotFailed          the engine gave up this sequence alone
           +-- GrammarFailed  because of what the caller's grammar asks for
 +-- EngineStartFailed        the first start: the engine cannot be loaded
"""

import engine.errors as engine_errors
from scheduler.words import counted


class SchedulerError(Exception):
    """Anything the scheduler refuses or gives up."""


class RequestRejected(SchedulerError):
    """The caller's fault."""


class RequestTooLong(RequestRejected):
    """Prompt and wanted output do not fit a slot.

    prompt_tokens, max_tokens, max_context: tokens.
    """

    def __init__(self, *, prompt_tokens: int, max_tokens: int, max_context: int) -> None:
        super().__init__(
            f"the prompt has {counted(prompt_tokens, 'token')} and {max_tokens} more were asked for: "
            f"{prompt_tokens + max_tokens} in all, but the context holds {max_context}"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_context = max_context


class NotNow(SchedulerError):
    """The server cannot take the request now; `retry_after_s` says when it may."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(NotNow):
    """The queue is full."""


class Draining(NotNow):
    """The server is going down and takes nothing new."""


class EngineUnavailable(NotNow):
    """The engine is starting or restarting."""


class RequestFailed(SchedulerError):
    """A sequence that was admitted could not be finished."""


class DeadlineExceeded(RequestFailed):
    """The request's own deadline passed."""


class EngineDead(RequestFailed):
    """The engine died while the request was in flight."""


class SlotFailed(RequestFailed):
    """The engine gave up this sequence alone."""


class GrammarFailed(SlotFailed):
    """What the sequence's grammar asks for cannot be followed, which showed only while it was: the caller's fault."""


class EngineStartFailed(SchedulerError):
    """The engine cannot be loaded; raised by `Scheduler.start` alone, never to a client.

    kind: the class name of the engine's error (`ModelLoadError`, `PlanRefused`, ...), or "" when the process died or
    took too long.
    """

    def __init__(self, message: str, *, kind: str = "") -> None:
        # The engine's own errors are written to be read; of any other the class is half of what it says.
        explains_itself = not kind or hasattr(engine_errors, kind)
        super().__init__(message if explains_itself else f"{kind}: {message}")
        self.kind = kind
