"""Deltas of one choice to blocks, one open at a time: thought, text and calls, as APIs other than chat have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from gateway.replies import new_id
from gateway.tools import merged_calls

if TYPE_CHECKING:
    from gateway.generation import ChoiceDelta
    from gateway.tools import CallDelta


class BlockKind(StrEnum):
    """What a block holds."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """A part of the answer; `pieces` grow while it is the last one."""

    index: int
    kind: BlockKind
    name: str = ""
    """Of the function, in a call."""
    id: str = ""
    pieces: list[str] = field(default_factory=list[str])
    """Text, or a call's arguments."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """The open block has more."""

    block: Block
    piece: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is whole."""

    block: Block


BlockEvent = Opened | Grew | Closed


class Blocks:
    """The blocks of one answer so far."""

    def __init__(self, call_prefix: str) -> None:
        """call_prefix: what ids of calls begin with."""
        self.blocks: list[Block] = []
        self._call_prefix = call_prefix
        self._is_open = False
        self._call_index = -1

    def push(self, delta: ChoiceDelta) -> list[BlockEvent]:
        """Take news in; every block is closed before the next one opens."""
        events: list[BlockEvent] = []
        calls = merged_calls(delta.calls) if delta.calls else []
        # What is left of the call that is open came before any text of the same delta.
        if calls and calls[0].index == self._call_index:
            self._call(calls.pop(0), events)
        if delta.reasoning:
            self._grow(BlockKind.THOUGHT, delta.reasoning, events)
        if delta.content:
            self._grow(BlockKind.TEXT, delta.content, events)
        for call in calls:
            self._call(call, events)
        if delta.finish_reason is not None:
            self._close(events)
        return events

    def _grow(self, kind: BlockKind, piece: str, events: list[BlockEvent]) -> None:
        if not self._is_open or self.blocks[-1].kind is not kind:
            self._open(Block(index=len(self.blocks), kind=kind), events)
        self._append(piece, events)

    def _call(self, call: CallDelta, events: list[BlockEvent]) -> None:
        if call.name is not None:
            self._call_index = call.index
            block = Block(
                index=len(self.blocks),
                kind=BlockKind.CALL,
                name=call.name,
                id=new_id(self._call_prefix),
            )
            self._open(block, events)
        if call.arguments:
            self._append(call.arguments, events)

    def _append(self, piece: str, events: list[BlockEvent]) -> None:
        block = self.blocks[-1]
        block.pieces.append(piece)
        events.append(Grew(block, piece))

    def _open(self, block: Block, events: list[BlockEvent]) -> None:
        self._close(events)
        self.blocks.append(block)
        self._is_open = True
        events.append(Opened(block))

    def _close(self, events: list[BlockEvent]) -> None:
        if self._is_open:
            self._is_open = False
            events.append(Closed(self.blocks[-1]))
