"""Seats: who sits where, and what the table refuses to believe."""

from __future__ import annotations

import pytest

from scheduler.sequence import Phase
from scheduler.slots import SlotTable
from tests.factories import make_sequence


def test_seats_are_given_and_given_back() -> None:
    table = SlotTable(2)
    first, second = make_sequence(), make_sequence()
    assert table.seat(first).index == 0
    assert table.seat(second).index == 1
    assert table.num_free == 0
    assert first.phase is Phase.READING
    assert table.release(0) is first
    assert first.phase is Phase.ENDED
    assert [slot.index for slot in table] == [1]
    third = make_sequence()
    assert table.seat(third).index == 0
    assert table[0] is third


def test_slots_are_found_by_phase() -> None:
    table = SlotTable(3)
    for _ in range(2):
        table.seat(make_sequence())
    table[1].phase = Phase.DECODING
    assert [slot.index for slot in table.in_phase(Phase.READING)] == [0]
    assert [slot.index for slot in table.in_phase(Phase.DECODING)] == [1]


def test_a_full_table_seats_nobody() -> None:
    table = SlotTable(1)
    table.seat(make_sequence())
    with pytest.raises(ValueError, match="None"):
        table.seat(make_sequence())


def test_a_free_seat_has_no_sequence() -> None:
    with pytest.raises(AssertionError, match="slot 1 is free"):
        _ = SlotTable(2)[1]


def test_nobody_is_seated_in_the_middle_of_something() -> None:
    sequence = make_sequence()
    SlotTable(1).seat(sequence)
    with pytest.raises(AssertionError):
        SlotTable(1).seat(sequence)


def test_invariants_hold_through_a_life() -> None:
    table = SlotTable(2)
    sequence = make_sequence(prompt_ids=(1, 2, 3), max_tokens=4)
    table.seat(sequence)
    table.check_invariants()
    sequence.num_read_tokens = 3
    sequence.phase = Phase.DECODING
    sequence.output_ids.append(9)
    table.check_invariants()
    table.release(0)
    table.check_invariants()


def test_invariants_catch_a_finished_sequence_that_keeps_its_seat() -> None:
    table = SlotTable(1)
    sequence = make_sequence(prompt_ids=(1,), max_tokens=1)
    table.seat(sequence)
    sequence.num_read_tokens = 1
    sequence.phase = Phase.DECODING
    sequence.output_ids.append(9)
    with pytest.raises(AssertionError, match="over but seated"):
        table.check_invariants()


def test_invariants_catch_a_reader_with_nothing_to_read() -> None:
    table = SlotTable(1)
    sequence = make_sequence(prompt_ids=(1,))
    table.seat(sequence)
    sequence.num_read_tokens = 1
    with pytest.raises(AssertionError, match="not reading"):
        table.check_invariants()


def test_invariants_catch_a_seat_of_the_dead() -> None:
    table = SlotTable(1)
    sequence = make_sequence()
    table.seat(sequence)
    sequence.phase = Phase.ENDED
    with pytest.raises(AssertionError, match="ended"):
        table.check_invariants()
