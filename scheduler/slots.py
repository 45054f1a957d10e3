"""Slot and SlotTable: the seats of the batch and who sits in them. Pure bookkeeping, owned by the loop."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from engine.interface import DecodeStep
from scheduler.sequence import Phase, SequenceState


class Slot(Struct, frozen=True, kw_only=True):
    """A taken seat."""

    index: int
    sequence: SequenceState
    plain_step: DecodeStep
    """Decoding without drafts: the same in every window."""


class SlotTable:
    """`num_slots` seats. A released seat can be taken at once: the engine clears it at the next SlotStart."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self._seats: list[Slot | None] = [None] * num_slots
        self._taken: tuple[Slot, ...] = ()
        """The seats that are taken; windows look at them more often than they change."""
        self.in_flight: frozenset[int] = frozenset()
        """Seats whose tokens come with a later window: until then nothing is planned for them, nor are they freed."""

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Slot]:
        """The seats that are taken now, by index; a snapshot."""
        return iter(self._taken)

    def __getitem__(self, index: int) -> SequenceState:
        slot = self._seats[index]
        assert slot is not None, f"slot {index} is free"
        return slot.sequence

    @property
    def num_free(self) -> int:
        return len(self._seats) - len(self._taken)

    def settled(self) -> tuple[Slot, ...]:
        """Taken seats that are not in flight."""
        flying = self.in_flight
        if not flying:
            return self._taken
        return tuple([slot for slot in self._taken if slot.index not in flying])

    def in_phase(self, phase: Phase) -> tuple[Slot, ...]:
        return tuple([slot for slot in self if slot.sequence.phase is phase])

    def seat(self, sequence: SequenceState) -> Slot:
        """Give a waiting sequence the first free seat; a suspended one goes on decoding."""
        assert sequence.phase is Phase.WAITING
        index = self._seats.index(None)
        step = DecodeStep(slot=index, max_draft=0, spec_min_p=sequence.spec_min_p)
        slot = Slot(index=index, sequence=sequence, plain_step=step)
        self._set(index, slot)
        sequence.phase = Phase.DECODING if sequence.output_ids else Phase.READING
        sequence.is_started = False
        return slot

    def release(self, index: int) -> SequenceState:
        """Free a seat for good: its sequence is over."""
        sequence = self[index]
        self._set(index, None)
        sequence.phase = Phase.ENDED
        return sequence

    def suspend(self, index: int) -> SequenceState:
        """Free the seat of a sequence that will go on later."""
        sequence = self[index]
        assert sequence.phase is Phase.DECODING
        self._set(index, None)
        sequence.phase = Phase.WAITING
        return sequence

    def _set(self, index: int, slot: Slot | None) -> None:
        self._seats[index] = slot
        self._taken = tuple([slot for slot in self._seats if slot is not None])

    def check_invariants(self) -> None:
        """Raises AssertionError when the table contradicts itself or its sequences."""
        assert self._taken == tuple(slot for slot in self._seats if slot is not None), "stale seats"
        sequences = [slot.sequence for slot in self]
        assert len({id(sequence) for sequence in sequences}) == len(sequences), "seated twice"
        for slot in self:
            sequence = slot.sequence
            is_read = sequence.num_unread_tokens == 0
            match sequence.phase:
                case Phase.READING:
                    assert not is_read and not sequence.output_ids, (
                        f"slot {slot.index}: not reading"
                    )
                case Phase.DECODING:
                    assert is_read and sequence.output_ids, f"slot {slot.index}: not decoding"
                    assert sequence.finish_reason() is None, f"slot {slot.index}: over but seated"
                case Phase.WAITING | Phase.ENDED:
                    raise AssertionError(
                        f"slot {slot.index} holds a sequence that is {sequence.phase}"
                    )
