"""Ids of pages and of checkpoints, with reference counts. Knows when the bytes behind an id must be dropped.

Who asks for an id writes the bytes later: until `mark_made` says that the order to write them has gone out, an id
whose last reference goes just vanishes; afterwards it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter


class IdLedger:
    """The live ids of one kind. An id is never used twice."""

    def __init__(self) -> None:
        self._num_created = 0
        self._counts: dict[int, int] = {}
        self._made: set[int] = set()
        self._dropped: list[int] = []

    def __len__(self) -> int:
        """Live ids."""
        return len(self._counts)

    def __contains__(self, item_id: int) -> bool:
        return item_id in self._counts

    def count(self, item_id: int) -> int:
        """References to a live id."""
        return self._counts[item_id]

    def create(self) -> int:
        """A new id with one reference."""
        item_id = self._num_created
        self._num_created += 1
        self._counts[item_id] = 1
        return item_id

    def retain(self, item_ids: Iterable[int]) -> None:
        """One more reference to each, which must be live."""
        for item_id in item_ids:
            assert item_id in self._counts, f"id {item_id} is retained but not live"
            self._counts[item_id] += 1

    def release(self, item_ids: Iterable[int]) -> None:
        """One reference to each goes; without references an id is dead."""
        for item_id in item_ids:
            assert item_id in self._counts, f"id {item_id} is released but not live"
            self._counts[item_id] -= 1
            if self._counts[item_id] == 0:
                del self._counts[item_id]
                if item_id in self._made:
                    self._dropped.append(item_id)

    def mark_made(self, item_ids: Iterable[int]) -> None:
        """The bytes of these are being written."""
        for item_id in item_ids:
            assert item_id in self._counts, f"id {item_id} is made but not live"
            self._made.add(item_id)

    def take_dropped(self) -> tuple[int, ...]:
        """The dead ids whose bytes are still there; the caller sees to it that they go."""
        taken, self._dropped = tuple(self._dropped), []
        self._made.difference_update(taken)
        return taken

    def undo(self, *, made: Iterable[int], dropped: Iterable[int]) -> None:
        """An order to write `made` and to drop `dropped` was not carried out."""
        unmade = set(made)
        self._made -= unmade
        self._dropped = [item_id for item_id in self._dropped if item_id not in unmade]
        again = list(dropped)
        self._made.update(again)
        self._dropped[:0] = again

    def clear(self) -> None:
        """All bytes are gone."""
        self._counts.clear()
        self._made.clear()
        self._dropped.clear()

    def are_made(self, item_ids: Iterable[int]) -> bool:
        """Whether the bytes of all these are there, or are being written."""
        return self._made.issuperset(item_ids)

    def made_ids(self) -> frozenset[int]:
        """Ids whose bytes are there."""
        return frozenset(self._made)

    def check_integrity(self, references: Counter[int]) -> None:
        """Raises AssertionError unless the live ids and their counts are exactly these."""
        assert self._counts == dict(references), "reference counts differ from a recount"
        assert not self._counts.keys() & set(self._dropped), "a live id is dropped"
        assert len(set(self._dropped)) == len(self._dropped), "an id is dropped twice"
        assert set(self._dropped) <= self._made, "an id without bytes is dropped"
        dead = self._made - self._counts.keys() - set(self._dropped)
        assert not dead, f"bytes of dead ids {sorted(dead)} are never dropped"
