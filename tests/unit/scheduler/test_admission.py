"""Who waits, who is next, who may enter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from scheduler.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    PreemptionRules,
    ReturnLine,
    WaitingQueue,
    pick_preempted,
)
from scheduler.sequence import SequenceState
from scheduler.slots import SlotTable
from tests.factories import make_sequence


def queue_of(*sequences: SequenceState, max_waiting: int = 100) -> WaitingQueue:
    queue = WaitingQueue(max_waiting)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def order(queue: WaitingQueue) -> list[int]:
    """Arrivals in the order of seating, every seat being free again at once."""
    return [take_next(queue).arrival for _ in range(len(queue))]


def take_next(queue: WaitingQueue, seated: Iterable[SequenceState] = ()) -> SequenceState:
    chosen = queue.next_up(seated)
    assert chosen is not None
    queue.take(chosen)
    return chosen


def test_equals_are_first_come_first_served() -> None:
    assert order(queue_of(*(make_sequence(arrival=n) for n in range(4)))) == [0, 1, 2, 3]


def test_priority_goes_first() -> None:
    sequences = (make_sequence(arrival=n, priority=n % 2) for n in range(4))
    assert order(queue_of(*sequences)) == [1, 3, 0, 2]


def test_owners_take_turns() -> None:
    greedy = [make_sequence(arrival=n, owner="a") for n in range(4)]
    modest = [make_sequence(arrival=n + 4, owner="b") for n in range(2)]
    assert order(queue_of(*greedy, *modest)) == [0, 4, 1, 5, 2, 3]


def test_who_has_fewer_seats_goes_first() -> None:
    seated = [make_sequence(owner="a"), make_sequence(owner="a"), make_sequence(owner="b")]
    queue = queue_of(
        make_sequence(arrival=0, owner="a"),
        make_sequence(arrival=1, owner="b"),
        make_sequence(arrival=2, owner="c"),
    )
    assert take_next(queue, seated).arrival == 2
    assert take_next(queue, seated).arrival == 1


def test_who_is_held_lets_others_go_first() -> None:
    leader = make_sequence(arrival=0)
    held = make_sequence(arrival=1, priority=5)
    held.leader = leader
    queue = queue_of(held, make_sequence(arrival=2))
    assert take_next(queue).arrival == 2
    assert queue.next_up(()) is None
    leader.output_ids.append(1)
    assert take_next(queue).arrival == 1


@pytest.mark.parametrize("way", ["left", "overdue", "failed"])
def test_a_leader_that_is_gone_holds_nobody(way: str) -> None:
    leader, held = make_sequence(arrival=0, deadline_at_s=1.0), make_sequence(arrival=1)
    held.leader = leader
    queue = queue_of(leader)
    match way:
        case "left":
            queue.remove(leader)
        case "overdue":
            assert queue.take_overdue(2.0) == (leader,)
        case _:
            assert queue.take_all() == (leader,)
    queue.add(held)
    assert queue.next_up(()) is held


def test_the_bound_counts_only_those_who_will_wait() -> None:
    queue = queue_of(make_sequence(), make_sequence(), max_waiting=1)
    assert not queue.has_room(0)
    assert not queue.has_room(1)
    assert queue.has_room(2)


def test_overdue_ones_leave_together() -> None:
    late = make_sequence(deadline_at_s=10.0)
    patient, endless = make_sequence(deadline_at_s=11.0), make_sequence()
    queue = queue_of(late, patient, endless)
    assert queue.take_overdue(9.9) == ()
    assert queue.take_overdue(10.0) == (late,)
    assert queue.arrivals() == {patient.arrival, endless.arrival}


def test_all_can_be_taken() -> None:
    queue = queue_of(make_sequence(arrival=1), make_sequence(arrival=2))
    assert [sequence.arrival for sequence in queue.take_all()] == [1, 2]
    assert len(queue) == 0


def line_after(*seats_s: float, num_slots: int = 4) -> ReturnLine:
    line = ReturnLine(num_slots)
    for seconds in seats_s:
        line.seat_took(seconds)
    return line


def test_the_first_who_is_refused_comes_back_when_a_slot_is_expected_to_be_free() -> None:
    assert line_after(20.0).retry_after_s(100.0, [1.0] * 4) == 5.0
    assert line_after().retry_after_s(100.0, []) == MIN_RETRY_AFTER_S
    assert line_after(10_000.0).retry_after_s(100.0, []) == MAX_RETRY_AFTER_S


def test_whoever_is_refused_next_comes_back_later() -> None:
    line = line_after(20.0)
    assert [line.retry_after_s(100.0, []) for _ in range(4)] == [5.0, 10.0, 15.0, 20.0]
    # Ten seconds later two of them have come back.
    assert line.retry_after_s(110.0, []) == 15.0
    for _ in range(20):
        line.retry_after_s(110.0, [])
    assert line.retry_after_s(110.0, []) == MAX_RETRY_AFTER_S
    assert line.retry_after_s(500.0, []) == 5.0


def test_requests_that_run_longer_than_any_before_count_with_their_time_so_far() -> None:
    assert line_after().retry_after_s(100.0, [40.0, 60.0, 40.0, 60.0]) == 12.5
    assert line_after(2.0).retry_after_s(100.0, [40.0, 60.0, 40.0, 60.0]) == 12.5


def test_the_mean_seat_time_follows_what_is_measured() -> None:
    line = line_after(*[4.0] * 3, *[40.0] * 100)
    assert line.retry_after_s(0.0, []) == pytest.approx(10.0, rel=0.01)


RULES = PreemptionRules(wait_s=2.0, run_s=3.0, max_times=1)


def running(seated_at_s: float = 0.0, **request: Any) -> SequenceState:
    """A decoding sequence that the engine knows."""
    sequence = make_sequence(prompt_ids=(1,), max_tokens=50, **request)
    sequence.num_read_tokens = 1
    sequence.output_ids.append(9)
    sequence.seated_at_s = seated_at_s
    return sequence


def gives_way(*sequences: SequenceState, now_s: float = 10.0, **waiting: Any) -> int | None:
    """The seat that is given up, if one is, to a request that waits since 0."""
    table = SlotTable(len(sequences))
    for sequence in sequences:
        table.seat(sequence)
        sequence.is_started = True
    slot = pick_preempted(make_sequence(**waiting), table, now_s, RULES)
    return None if slot is None else slot.index


def test_who_had_the_slot_longest_gives_way() -> None:
    assert gives_way(running(5.0), running(1.0), running(3.0)) == 1


def test_nobody_gives_way_before_both_have_had_their_time() -> None:
    assert gives_way(running(-9.0), now_s=1.9) is None
    assert gives_way(running(7.1), now_s=10.0) is None
    assert gives_way(running(7.0), now_s=10.0) == 0


def test_priority_is_never_given_up_to_a_lower_one() -> None:
    assert gives_way(running(priority=1)) is None
    assert gives_way(running(priority=1), priority=1) == 0
    assert gives_way(running(0.0, priority=1), running(5.0), priority=1) == 1


def test_the_owner_with_the_most_seats_gives_way_first() -> None:
    seats = (running(0.0, owner="ann"), running(2.0, owner="bob"), running(1.0, owner="bob"))
    assert gives_way(*seats) == 2


def test_a_sequence_gives_way_so_often_and_no_more() -> None:
    often = running()
    often.num_suspensions = RULES.max_times
    assert gives_way(often) is None


def test_only_those_whose_state_can_be_kept_give_way() -> None:
    left = running()
    left.cancelled = True
    assert gives_way(left) is None
    assert gives_way(make_sequence()) is None
    table = SlotTable(1)
    table.seat(running())
    assert pick_preempted(make_sequence(), table, 10.0, RULES) is None, "not started yet"
