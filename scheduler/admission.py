"""The waiting queue: who may enter, who is next, who waited too long. Pure bookkeeping, owned by the loop.

Next is the highest priority; among equals the owner with the fewest seats, then the owner served longest ago, then
the earliest arrival. Priority is strict: it can starve lower ones, fairness cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.sequence import Phase, SequenceState

if TYPE_CHECKING:
    from scheduler.slots import Slot


class WaitingQueue:
    """Sequences without a seat."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[SequenceState] = []
        self._num_served = 0
        self._last_served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._waiting)

    def arrivals(self) -> frozenset[int]:
        """Who waits."""
        return frozenset(sequence.arrival for sequence in self._waiting)

    def has_room(self, num_free_slots: int) -> bool:
        """Whether one more may enter; those who will find a free slot at once do not count as waiting."""
        return len(self._waiting) - num_free_slots < self._max_waiting

    def add(self, sequence: SequenceState) -> None:
        self._waiting.append(sequence)

    def next_up(self, seated: Iterable[SequenceState]) -> SequenceState | None:
        """Who is next, None when nobody can be; `seated` are the sequences that have seats now."""
        num_seats = Counter(sequence.request.owner for sequence in seated)

        def rank(sequence: SequenceState) -> tuple[int, int, int, int]:
            owner = sequence.request.owner
            served = self._last_served.get(owner, 0)
            return -sequence.request.priority, num_seats[owner], served, sequence.arrival

        ready = [sequence for sequence in self._waiting if not sequence.is_held]
        return min(ready, key=rank) if ready else None

    def take(self, chosen: SequenceState) -> None:
        """Remove who is next: it gets a seat."""
        self._waiting.remove(chosen)
        self._num_served += 1
        self._last_served[chosen.request.owner] = self._num_served

    def remove(self, sequence: SequenceState) -> None:
        """It is over, before it got its seat or without getting one again."""
        self._waiting.remove(sequence)
        sequence.phase = Phase.ENDED

    def take_overdue(self, now_s: float) -> tuple[SequenceState, ...]:
        """Remove and return those whose deadline has passed."""
        overdue = tuple(sequence for sequence in self._waiting if sequence.is_overdue(now_s))
        for sequence in overdue:
            self.remove(sequence)
        return overdue

    def take_all(self) -> tuple[SequenceState, ...]:
        """Remove and return everyone: all are over."""
        taken, self._waiting = tuple(self._waiting), []
        for sequence in taken:
            sequence.phase = Phase.ENDED
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRules:
    """When a decoding sequence gives its slot to one that waits."""

    wait_s: float
    """So long the one who is next must have waited."""
    run_s: float
    """So long the one who gives way must have had its slot."""
    max_times: int
    """So often a sequence gives way, at most."""


def pick_preempted(
    next_up: SequenceState, slots: Iterable[Slot], now_s: float, rules: PreemptionRules
) -> Slot | None:
    """Who gives way to `next_up` when all slots are taken, if anyone has to.

    Never one of higher priority. First of the lowest priority, then of the owner with the most seats, then who had
    its slot longest.
    """
    if now_s - next_up.waiting_since_s < rules.wait_s:
        return None
    taken = tuple(slots)
    num_seats = Counter(slot.sequence.request.owner for slot in taken)

    def gives_way(sequence: SequenceState) -> bool:
        return (
            sequence.phase is Phase.DECODING
            and sequence.is_started
            and not sequence.cancelled
            and sequence.request.priority <= next_up.request.priority
            and sequence.num_suspensions < rules.max_times
            and now_s - sequence.seated_at_s >= rules.run_s
        )

    def rank(slot: Slot) -> tuple[int, int, float, int]:
        request = slot.sequence.request
        since_s = slot.sequence.seated_at_s
        return request.priority, -num_seats[request.owner], since_s, slot.sequence.arrival

    return min((slot for slot in taken if gives_way(slot.sequence)), key=rank, default=None)


MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
_SEAT_TIME_DECAY = 0.9


class ReturnLine:
    """When those who found the queue full may come back: one for each place that becomes free, in turn.

    A place becomes free whenever a request ends, so every mean seat time / slots seconds. Whoever is refused is sent
    behind those who were refused before: told the same moment, they would come together and be refused again.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._mean_seat_s = 0.0
        self._last_at_s = 0.0
        """When the one refused last should come back."""

    def seat_took(self, seconds: float) -> None:
        """A request has ended that had a slot for so long."""
        keep = _SEAT_TIME_DECAY if self._mean_seat_s else 0.0
        self._mean_seat_s = keep * self._mean_seat_s + (1.0 - keep) * seconds

    def retry_after_s(self, now_s: float, seated_s: Iterable[float]) -> float:
        """Seconds until a place for one more; seated_s: how long the running requests have had their slots.

        While they run longer than requests used to, that is what is to be expected.
        """
        running = tuple(seated_s)
        so_far_s = sum(running) / len(running) if running else 0.0
        between_s = max(self._mean_seat_s, so_far_s) / self._num_slots
        self._last_at_s = max(self._last_at_s, now_s) + between_s
        self._last_at_s = min(self._last_at_s, now_s + MAX_RETRY_AFTER_S)
        return max(self._last_at_s - now_s, MIN_RETRY_AFTER_S)
