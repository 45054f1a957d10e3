"""Plans from slots, progress from results: no engine, no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from engine.interface import SlotFailure, SlotTokens, WindowPlan, WindowResult, WindowTimes
from scheduler.draft import EXPLORE_EVERY
from scheduler.errors import SlotFailed
from scheduler.messages import Failed, Finished, FinishReason, Tokens
from scheduler.prefill import ReadShare
from scheduler.sequence import Phase, SequenceState
from scheduler.slots import SlotTable
from scheduler.window import Pace, WindowRules, apply_result, measured, plan_window
from tests.factories import make_sequence

RULES = WindowRules(chunk_tokens=4, turn_token_id=None, max_passes=2)
PACE = Pace(share=ReadShare(decode_share=0.5))
NO_TIME = WindowTimes(prefill_s=0.0, draft_s=0.0, verify_s=0.0)


def tokens(slot: int, *token_ids: int, num_drafted: int = 0, num_accepted: int = 0) -> SlotTokens:
    return SlotTokens(
        slot=slot,
        token_ids=token_ids,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        logprobs=None,
    )


def result(*produced: SlotTokens, failures: tuple[SlotFailure, ...] = ()) -> WindowResult:
    return WindowResult(tokens=produced, failures=failures, times=NO_TIME)


def planned(table: SlotTable, pace: Pace = PACE) -> WindowPlan:
    plan = plan_window(table, RULES, pace)
    assert plan is not None
    return plan


def table_of(*sequences: SequenceState, num_slots: int = 4) -> SlotTable:
    table = SlotTable(num_slots)
    for sequence in sequences:
        table.seat(sequence)
    return table


def decoding(max_tokens: int = 20, *, max_draft: int = 4) -> SequenceState:
    """A sequence to be seated whose prompt will count as read, with one token out."""
    return make_sequence(prompt_ids=(1,), max_tokens=max_tokens, max_draft=max_draft)


def read_all(table: SlotTable) -> None:
    for slot in table:
        slot.sequence.num_read_tokens = slot.sequence.num_prompt_tokens
        slot.sequence.phase = Phase.DECODING
        slot.sequence.output_ids.append(50)
        slot.sequence.is_started = True


def test_empty_seats_make_no_plan() -> None:
    assert plan_window(SlotTable(4), RULES, PACE) is None


def test_a_new_prompt_is_started_with_its_first_chunk_only() -> None:
    table = table_of(make_sequence(prompt_ids=tuple(range(10, 16))))
    plan = planned(table)
    assert [start.slot for start in plan.starts] == [0]
    assert plan.starts[0].sampling == table[0].request.sampling
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.token_ids, chunk.is_last) == (0, (10, 11, 12, 13), False)

    assert apply_result(table, plan, result()) == ()
    plan = planned(table)
    assert plan.starts == ()
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.token_ids, chunk.is_last) == (4, (14, 15), True)


def test_the_last_chunk_brings_the_first_token_and_the_next_window_decodes() -> None:
    table = table_of(make_sequence(prompt_ids=(1, 2)))
    ((_, event),) = apply_result(table, planned(table), result(tokens(0, 77)))
    assert event == Tokens(token_ids=(77,))
    table.check_invariants()
    plan = planned(table)
    assert plan.chunks == ()
    assert [step.slot for step in plan.decodes] == [0]


def test_reading_and_decoding_share_a_window() -> None:
    table = table_of(decoding())
    read_all(table)
    table.seat(make_sequence(prompt_ids=(1,) * 9))
    plan = planned(table)
    assert [chunk.slot for chunk in plan.chunks] == [1]
    assert [step.slot for step in plan.decodes] == [0]


def test_while_decoding_is_owed_nothing_is_read() -> None:
    table = table_of(decoding())
    read_all(table)
    table.seat(make_sequence(prompt_ids=(1,) * 9))
    owing = replace(PACE, share=ReadShare(decode_share=0.5, owed_s=0.1))
    plan = planned(table, owing)
    assert plan.chunks == ()
    assert plan.starts == ()
    table.release(0)
    assert planned(table, owing).chunks != ()


def test_an_overtaken_prompt_ages_and_then_goes_first() -> None:
    table = table_of(make_sequence(prompt_ids=(1,) * 100))
    for _ in range(RULES.max_passes):
        short = table.seat(make_sequence(prompt_ids=(1,) * 4, max_tokens=1))
        plan = planned(table)
        assert [chunk.slot for chunk in plan.chunks] == [short.index]
        apply_result(table, plan, result(tokens(short.index, 9)))
    assert table[0].num_passes == RULES.max_passes
    short = table.seat(make_sequence(prompt_ids=(1,) * 4, max_tokens=1))
    plan = planned(table)
    assert [chunk.slot for chunk in plan.chunks] == [0]
    apply_result(table, plan, result())
    assert table[0].num_passes == 0
    assert table[short.index].num_passes == 1


@pytest.mark.parametrize(("wanted", "depth"), [(1, 0), (2, 1), (3, 2), (5, 4), (9, 4)])
def test_drafts_never_overshoot_max_tokens(wanted: int, depth: int) -> None:
    table = table_of(decoding(max_tokens=wanted + 1))
    read_all(table)
    assert planned(table).decodes[0].max_draft == depth


def test_a_request_without_drafts_gets_none() -> None:
    table = table_of(decoding(max_draft=0), decoding(max_draft=1))
    assert [start.uses_drafts for start in planned(table).starts] == [False, True]
    read_all(table)
    assert planned(table).decodes[0].max_draft == 0


def test_a_hopeless_slot_stops_drafting_but_looks_again() -> None:
    table = table_of(decoding(max_tokens=1000))
    read_all(table)
    pace, depths = PACE, list[int]()
    for _ in range(200):
        plan = planned(table, pace)
        depth = plan.decodes[0].max_draft
        depths.append(depth)
        times = WindowTimes(prefill_s=0.0, draft_s=depth * 0.002, verify_s=0.01 + 0.002 * depth)
        answer = replace(result(tokens(0, 7, num_drafted=depth)), times=times)
        pace = measured(table, pace, plan, answer, 0.01)
        apply_result(table, plan, answer)
    assert depths[0] == 4
    assert sum(depths[100:]) <= 4 * (100 // EXPLORE_EVERY + 1)
    assert 4 in depths[100:]


def test_sequences_without_drafts_decode_in_the_same_step_every_window() -> None:
    table = table_of(decoding(max_draft=0), decoding(max_draft=0))
    read_all(table)
    steps = planned(table).decodes
    assert [(step.slot, step.max_draft, step.spec_min_p) for step in steps] == [
        (0, 0, 0.5),
        (1, 0, 0.5),
    ]
    table.seat(decoding(max_tokens=50))
    read_all(table)
    assert [step.max_draft for step in planned(table).decodes] == [0, 0, 4]
    assert planned(table).decodes[:2] == steps


def test_only_decoded_rows_are_priced() -> None:
    """A prompt's last chunk brings a token as well, and its time is not the window's decoding."""
    table = table_of(decoding(max_draft=0))
    read_all(table)
    table.seat(make_sequence(prompt_ids=(1,), max_draft=0))
    plan = planned(table)
    assert plan.chunks and plan.decodes
    costs = measured(table, PACE, plan, result(tokens(0, 7), tokens(1, 7)), 0.01).costs
    assert costs.verify.sum_amount == 1
    assert not costs.draft.is_measured
    (first, _), (second, _) = apply_result(table, plan, result(tokens(0, 7), tokens(1, 7)))
    assert (first.num_steps, second.num_steps) == (1, 0)


def test_slots_explore_in_the_same_window() -> None:
    """However long each has been seated: what one chain costs the draft layer, four nearly share."""
    table = table_of(decoding(max_tokens=1000))
    read_all(table)
    pace, explored = PACE, list[tuple[int, ...]]()
    for window in range(2 * EXPLORE_EVERY):
        if window == 5:
            table.seat(decoding(max_tokens=1000))
            read_all(table)
        plan = planned(table, pace)
        depths = tuple(step.max_draft for step in plan.decodes)
        if pace.explores:
            explored.append(depths)
        times = WindowTimes(prefill_s=0.0, draft_s=0.01, verify_s=0.01)
        answer = replace(result(*(tokens(step.slot, 7) for step in plan.decodes)), times=times)
        pace = measured(table, pace, plan, answer, 0.02)
        apply_result(table, plan, answer)
    assert explored == [(4,), (4, 4)]


def test_the_engine_is_told_how_deep_the_next_window_will_draft() -> None:
    table = table_of(decoding(max_tokens=1000))
    read_all(table)
    pace, told, asked = PACE, list[int](), list[int]()
    times = WindowTimes(prefill_s=0.0, draft_s=0.05, verify_s=0.01)
    for _ in range(3 * EXPLORE_EVERY + 1):
        plan = planned(table, pace)
        step = plan.decodes[0]
        asked.append(step.max_draft)
        told.append(step.next_draft)
        answer = replace(result(tokens(0, 7, num_drafted=step.max_draft)), times=times)
        pace = measured(table, pace, plan, answer, 0.06)
        apply_result(table, plan, answer)
    explores = range(0, len(told), EXPLORE_EVERY)
    assert [asked[window] for window in explores] == [4, 4, 4, 4]
    assert [told[window - 1] for window in explores[1:]] == [4, 4, 4]
    # What was explored is dear: the next window is not expected to go so deep.
    assert max(told[window] for window in explores[1:]) < 4
    settled = [w for w in range(1, len(told)) if w not in explores and w + 1 not in explores]
    assert [told[window] for window in settled] == [asked[window] for window in settled]


@pytest.mark.parametrize(
    ("max_tokens", "max_draft", "next_draft"), [(5, 3, 2), (3, 1, 0), (2, 0, 0)]
)
def test_drafts_for_the_next_window_fit_behind_a_token_of_this_one(
    max_tokens: int, max_draft: int, next_draft: int
) -> None:
    table = table_of(decoding(max_tokens=max_tokens))
    read_all(table)
    step = planned(table).decodes[0]
    assert (step.max_draft, step.next_draft) == (max_draft, next_draft)


def test_what_a_window_takes_beside_the_engine_is_measured() -> None:
    table = table_of(decoding(max_tokens=1000))
    read_all(table)
    plan = planned(table)
    times = WindowTimes(prefill_s=0.001, draft_s=0.002, verify_s=0.003)
    answer = replace(result(tokens(0, 7)), times=times)
    after = measured(table, PACE, plan, answer, 0.010)
    assert after.costs.rest.base_s == pytest.approx(0.004)
    ahead = replace(answer, times=structs.replace(times, ahead_s=0.002))
    after = measured(table, PACE, plan, ahead, 0.010)
    assert after.costs.rest.base_s == pytest.approx(0.006)
    # Ahead of its plan, which came 1.5 ms after the last result, it drafted for 2 ms.
    after = measured(table, PACE, plan, ahead, 0.010, 0.0015)
    assert after.costs.rest.base_s == pytest.approx(0.010 + 0.0015 - 0.004 - 0.0005)
    assert after.costs.hidden.base_s == pytest.approx(0.0015)
    flying = replace(answer, in_flight=(3,))
    assert not measured(table, PACE, plan, flying, 0.010).costs.rest.is_measured


def test_the_cap_ends_a_sequence_and_frees_its_seat() -> None:
    table = table_of(decoding(max_tokens=4))
    read_all(table)
    sequence = table[0]
    answer = result(tokens(0, 7, 8, 9, num_drafted=2, num_accepted=2))
    news = apply_result(table, planned(table), answer)
    _, finished = news[1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    assert finished.usage.completion_tokens == 4
    assert (finished.usage.drafted_tokens, finished.usage.accepted_tokens) == (2, 2)
    assert sequence.output_ids == [50, 7, 8, 9]
    assert table.num_free == 4


def test_accepted_drafts_behind_a_stop_do_not_count_as_kept() -> None:
    table = table_of(make_sequence(prompt_ids=(1,), stop_token_ids=(8,), max_tokens=20))
    read_all(table)
    answer = result(tokens(0, 7, 8, num_drafted=4, num_accepted=4))
    _, finished = apply_result(table, planned(table), answer)[1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, 8)
    assert finished.usage.accepted_tokens == 2


def test_a_failed_slot_leaves_alone() -> None:
    table = table_of(decoding(), decoding())
    read_all(table)
    failure = SlotFailure(slot=0, message="non-finite logits")
    news = apply_result(table, planned(table), result(tokens(1, 7), failures=(failure,)))
    failed, kept = (event for _, event in news)
    assert isinstance(failed, Failed) and isinstance(failed.error, SlotFailed)
    assert "non-finite" in str(failed.error)
    assert kept == Tokens(token_ids=(7,))
    assert [slot.index for slot in table] == [1]


def test_a_slot_that_the_engine_forgot_fails() -> None:
    table = table_of(decoding())
    read_all(table)
    ((_, event),) = apply_result(table, planned(table), result())
    assert isinstance(event, Failed)
    assert table.num_free == 4


def test_a_prompt_may_fail_before_its_last_chunk() -> None:
    table = table_of(make_sequence(prompt_ids=(1,) * 9))
    failure = SlotFailure(slot=0, message="broken")
    ((_, event),) = apply_result(table, planned(table), result(failures=(failure,)))
    assert isinstance(event, Failed)


def test_a_cancelled_sequence_leaves_without_a_word() -> None:
    table = table_of(decoding(), make_sequence(prompt_ids=(1,) * 9))
    table[0].num_read_tokens = 1
    table[0].phase = Phase.DECODING
    table[0].output_ids.append(50)
    plan = planned(table)
    for slot in table:
        slot.sequence.cancelled = True
    assert apply_result(table, plan, result(tokens(0, 7))) == ()
    assert table.num_free == 4


def test_an_overshooting_engine_is_a_contradiction() -> None:
    table = table_of(decoding(max_tokens=2))
    read_all(table)
    with pytest.raises(AssertionError, match="overshot"):
        apply_result(table, planned(table), result(tokens(0, 7, 8)))


def test_turn_starts_cut_chunks() -> None:
    rules = replace(RULES, turn_token_id=99)
    table = table_of(make_sequence(prompt_ids=(99, 1, 99, 2, 3)))
    plan = plan_window(table, rules, PACE)
    assert plan is not None
    assert plan.chunks[0].token_ids == (99, 1)
