"""What to run, for how long, and what counts as good. Frozen; parsed and checked once by __main__."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

SLO_METRICS = ("ttft", "itl", "tpot", "e2e")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s|m)")


class Shape(StrEnum):
    """When requests start."""

    CLOSED = "closed"
    """A fixed number of clients; each sends its next request when the last one is answered."""
    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    """Like Poisson, with burstiness: below 1 in bursts, above 1 more even."""
    SATURATE = "saturate"
    """Closed loops of 1, 2, 4, ... clients, until the output stops growing."""
    RAMP = "ramp"
    """Poisson, with a rate that grows linearly from `rate` to `rate_end`."""
    TRACE = "trace"
    """At the timestamps of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under load: only what the user names is ever contacted."""

    base_url: str
    """With /v1, as OpenAI clients take it."""
    model: str
    api_key: str | None
    timeout_s: float
    """For a whole request."""

    @property
    def root_url(self) -> str:
        """Where /metrics and /health live."""
        return self.base_url.removesuffix("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a stage ends: whichever comes first. Requests in flight are then still waited for."""

    max_requests: int
    duration_s: float
    warmup_s: float
    """Requests meant to start before this are sent, but appear in no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Parameters of a Shape; those it does not use are ignored."""

    shape: Shape
    concurrency: int = 1
    rate: float = 1.0
    """Conversations per second."""
    rate_end: float = 1.0
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in seconds by metric; a request is good when it succeeded and meets all of them."""

    limits: tuple[tuple[str, float], ...] = ()

    def describe(self) -> str:
        return ", ".join(f"{name} <= {limit * 1000:g} ms" for name, limit in self.limits)


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,itl=50ms` -> Slo. Raises ValueError naming the part that is wrong."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.strip().partition("=")
        if not separator or name not in SLO_METRICS:
            raise ValueError(f"{part.strip()!r}: expected NAME=TIME with NAME in {SLO_METRICS}")
        if name in limits:
            raise ValueError(f"{name} is given twice")
        limits[name] = parse_duration(value)
    return Slo(limits=tuple(limits.items()))


def parse_duration(text: str) -> float:
    """`500ms`, `2s` or `30m` -> seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r}: expected a time such as 500ms, 2s or 30m")
    return float(match["number"]) * _UNITS_S[match["unit"]]
