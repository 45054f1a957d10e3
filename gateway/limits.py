"""What each API key may use: requests and tokens a minute, requests at once.

Rates are token buckets that hold one minute's worth. Tokens are charged when they are known, prompts at the start and
output as it is delivered, so a request is never broken off; what it took too much, later ones wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import RateLimited
from scheduler.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RATE = 10**9
_MINUTE_S = 60.0
_TRY_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """None: no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    max_concurrent: int | None = None


class Bucket:
    """Fills up evenly to one minute's worth; may be owed."""

    def __init__(self, per_min: int, now_s: float) -> None:
        self.per_min = per_min
        self._level = float(per_min)
        self._at_s = now_s

    def wait_s(self, now_s: float, amount: float) -> float:
        """Seconds until it holds an amount; 0 when it does."""
        self._fill(now_s)
        return max(0.0, (amount - self._level) * _MINUTE_S / self.per_min)

    def take(self, now_s: float, amount: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        self._level += (now_s - self._at_s) * self.per_min / _MINUTE_S
        self._level = min(self._level, float(self.per_min))
        self._at_s = now_s


class Allowance:
    """One key's use so far. For the event loop's thread alone."""

    def __init__(self, limits: KeyLimits, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._running = 0
        self._requests = _bucket(limits.requests_per_min, now())
        self._tokens = _bucket(limits.tokens_per_min, now())

    def begin(self) -> None:
        """A request comes; `end` must follow. Raises RateLimited, and then nothing has been taken."""
        limits, now_s = self._limits, self._now()
        if limits.max_concurrent is not None and self._running >= limits.max_concurrent:
            raise RateLimited(
                f"this key has {counted(self._running, 'running request')}, and {limits.max_concurrent} may run",
                retry_after_s=_TRY_AGAIN_S,
            )
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now_s, 1.0)) > 0:
            raise RateLimited(
                f"this key may use {counted(self._tokens.per_min, 'token')} a minute",
                retry_after_s=wait_s,
            )
        if self._requests is not None:
            if (wait_s := self._requests.wait_s(now_s, 1.0)) > 0:
                raise RateLimited(
                    f"this key may send {counted(self._requests.per_min, 'request')} a minute",
                    retry_after_s=wait_s,
                )
            self._requests.take(now_s, 1.0)
        self._running += 1

    def end(self) -> None:
        """The request's answer has ended, in whatever way."""
        self._running -= 1

    def charge(self, num_tokens: int) -> None:
        """Tokens that were read or delivered."""
        if self._tokens is not None:
            self._tokens.take(self._now(), num_tokens)


def _bucket(per_min: int | None, now_s: float) -> Bucket | None:
    return None if per_min is None else Bucket(per_min, now_s)
