"""Work that the first stages have begun and the last one has not finished, oldest first. No torch.

Slots form groups by their index. A call of Engine.run_window begins what its plan says and finishes what has waited
longest, so that the stages work on one group's rows while the scheduler and the last stage are busy with another's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from engine.interface import DecodeStep, WindowPlan

Work = TypeVar("Work")


class Flight(Generic[Work]):
    """What is begun. Between two calls at most one piece of work less than there are groups."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._begun: deque[tuple[Work, frozenset[int]]] = deque()

    @property
    def slots(self) -> tuple[int, ...]:
        """Those that wait for tokens: no plan may name them."""
        return tuple(sorted({slot for _, slots in self._begun for slot in slots}))

    def begin(self, work: Work, slots: Iterable[int]) -> None:
        """slots: those that get tokens when it is finished."""
        self._begun.append((work, frozenset(slots)))

    def next_due(self, *, answered: bool) -> Work | None:
        """What must be finished before the call returns, if anything; answered: it has tokens for somebody already."""
        too_many = len(self._begun) >= self.num_groups
        return self._take() if too_many or (self.slots and not answered) else None

    def next(self) -> Work | None:
        """The oldest, if any."""
        return self._take() if self._begun else None

    def groups(self, steps: Iterable[DecodeStep]) -> list[tuple[DecodeStep, ...]]:
        """Steps that are run as one window each."""
        parts: list[list[DecodeStep]] = [[] for _ in range(self.num_groups)]
        for step in steps:
            parts[step.slot % self.num_groups].append(step)
        return [tuple(part) for part in parts if part]

    def _take(self) -> Work:
        return self._begun.popleft()[0]


def must_land_first(plan: WindowPlan) -> bool:
    """Whether all that is in flight must be finished before the plan is begun: it moves or replaces slots' state."""
    moves: tuple[Sequence[object], ...] = (
        plan.drop_page_ids,
        plan.drop_checkpoint_ids,
        plan.suspends,
        plan.saves,
        plan.writes,
        plan.reads,
        plan.starts,
    )
    return any(moves)


def named_slots(plan: WindowPlan) -> set[int]:
    """Slots that get work. Not those whose pages are saved: what flies lands before, and the cells are read already."""
    works = (plan.suspends, plan.starts, plan.chunks, plan.decodes)
    return {work.slot for some in works for work in some}
