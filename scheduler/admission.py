"""The waiting queue: who may enter, who is next, who waited too long. Pure bookkeeping, owned by the loop.

Next is the highest priority; among equals the owner with the fewest seats, then the owner served longest ago, then
the earliest arrival. Priority is strict: it can starve lower ones, fairness cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.sequence import SequenceState


class WaitingQueue:
    """Sequences without a seat."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[SequenceState] = []
        self._num_served = 0
        self._last_served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def arrivals(self) -> frozenset[int]:
        """Who waits."""
        return frozenset(sequence.arrival for sequence in self._waiting)

    def has_room(self, num_free_slots: int) -> bool:
        """Whether one more may enter; those who will find a free slot at once do not count as waiting."""
        return len(self._waiting) - num_free_slots < self._max_waiting

    def add(self, sequence: SequenceState) -> None:
        self._waiting.append(sequence)

    def take_next(self, seated: Iterable[SequenceState]) -> SequenceState:
        """Remove and return who is next; `seated` are the sequences that have seats now."""
        num_seats = Counter(sequence.request.owner for sequence in seated)

        def rank(sequence: SequenceState) -> tuple[int, int, int, int]:
            owner = sequence.request.owner
            served = self._last_served.get(owner, 0)
            return -sequence.request.priority, num_seats[owner], served, sequence.arrival

        chosen = min(self._waiting, key=rank)
        self._waiting.remove(chosen)
        self._num_served += 1
        self._last_served[chosen.request.owner] = self._num_served
        return chosen

    def remove(self, sequence: SequenceState) -> None:
        """Its caller has left."""
        self._waiting.remove(sequence)

    def take_overdue(self, now_s: float) -> tuple[SequenceState, ...]:
        """Remove and return those whose deadline has passed."""
        overdue = tuple(sequence for sequence in self._waiting if sequence.is_overdue(now_s))
        for sequence in overdue:
            self._waiting.remove(sequence)
        return overdue

    def take_all(self) -> tuple[SequenceState, ...]:
        taken, self._waiting = tuple(self._waiting), []
        return taken


MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


def retry_after_s(mean_seat_s: float, num_slots: int) -> float:
    """When a place in a full queue is expected: a seat frees every mean_seat_s / num_slots seconds."""
    return min(max(mean_seat_s / num_slots, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
