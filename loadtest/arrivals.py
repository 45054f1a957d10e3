"""When the next conversation starts: seconds after the start of the run, ascending, endless unless a trace ends.

Pure: draws from the generator it is given and never looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from loadtest.config import Arrivals, Shape

if TYPE_CHECKING:
    from random import Random


def start_times(
    arrivals: Arrivals, *, duration_s: float, trace_s: Sequence[float], rng: Random
) -> Iterator[float]:
    """Intended start times of an open loop. `duration_s` is the span over which a ramp grows."""
    match arrivals.shape:
        case Shape.CONSTANT:
            return _constant(arrivals.rate)
        case Shape.POISSON:
            return _gamma(arrivals.rate, 1.0, rng)
        case Shape.GAMMA:
            return _gamma(arrivals.rate, arrivals.burstiness, rng)
        case Shape.RAMP:
            return _ramp(arrivals.rate, arrivals.rate_end, duration_s, rng)
        case Shape.TRACE:
            return iter(sorted(trace_s))
        case Shape.CLOSED | Shape.SATURATE:
            raise ValueError("a closed loop has no start times: its clients wait for answers")


def _constant(rate: float) -> Iterator[float]:
    index = 0
    while True:
        yield index / rate
        index += 1


def _gamma(rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Gaps from a gamma distribution of shape `burstiness` with mean 1 / rate; shape 1 is Poisson."""
    now = 0.0
    while True:
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield now


def _ramp(rate: float, rate_end: float, duration_s: float, rng: Random) -> Iterator[float]:
    """Poisson with a rate linear in time, by inverting the integral of the rate; ends with the ramp."""
    slope = (rate_end - rate) / duration_s
    expected = 0.0
    while True:
        expected += rng.expovariate(1.0)
        # The time t with rate * t + slope * t^2 / 2 = expected, in the form that survives slope = 0.
        inside = rate * rate + 2 * slope * expected
        if inside < 0:
            return
        denominator = rate + math.sqrt(inside)
        now = 2 * expected / denominator if denominator > 0 else math.inf
        if now > duration_s:
            return
        yield now
