"""Lease: the pages and checkpoints that one sequence with a slot (or suspended) keeps alive.

Made and changed by the store; its owner may end it at any time, also after the store has lost everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from cache.entry import Checkpoint, TokenPrefix


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPage:
    """Page `index` of a sequence must be written under a new id."""

    page_id: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """The whole state of a sequence that will go on later; nobody else ever matches it."""

    checkpoint_id: int
    page_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """What a sequence resumed from, and what it has added since."""

    owner: str
    tokens: TokenPrefix
    """The whole prompt; behind `add_final` also what was decoded."""
    resumed: Checkpoint | None
    """None: nothing matched, the prompt is read from its start."""
    page_ids: tuple[int, ...]
    """All positions below `resumed`; the last page may be partly used."""
    checkpoints: list[Checkpoint]
    """What it will be parked with, by position."""
    on_release: Callable[[Lease], None]
    suspended: Suspended | None = None
    ended: bool = False

    @property
    def num_resumed_tokens(self) -> int:
        return 0 if self.resumed is None else self.resumed.position

    def release(self) -> None:
        """Let go of everything; nothing happens the second time."""
        if not self.ended:
            self.on_release(self)

    def held_page_ids(self) -> tuple[int, ...]:
        """Every page reference, one entry each."""
        return self.page_ids if self.suspended is None else self.page_ids + self.suspended.page_ids

    def held_checkpoint_ids(self) -> tuple[int, ...]:
        """Every checkpoint reference, one entry each."""
        held = [checkpoint.checkpoint_id for checkpoint in self.checkpoints]
        if self.resumed is not None:
            held.append(self.resumed.checkpoint_id)
        if self.suspended is not None:
            held.append(self.suspended.checkpoint_id)
        return tuple(held)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
