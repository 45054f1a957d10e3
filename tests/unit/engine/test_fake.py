"""The scripted engine refuses contradictory plans and gives tokens that no schedule changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import KernelFailure, ModelLoadError, PlanError
from engine.fake import FakeEngine, FakeScript, Fault, FaultKind, expected_output
from engine.interface import (
    DecodeStep,
    PrefillChunk,
    Resume,
    SamplingParams,
    SavePage,
    SlotStart,
    SlotTokens,
    Suspend,
    WindowPlan,
)

SCRIPT = FakeScript(chunk_tokens=4, max_context=16, vocab_size=1000)
GREEDY = SamplingParams(temperature=0.0)


def start(slot: int = 0, sampling: SamplingParams = GREEDY) -> SlotStart:
    return SlotStart(slot=slot, sampling=sampling)


def chunk(*token_ids: int, slot: int = 0, at: int = 0, last: bool = True) -> PrefillChunk:
    return PrefillChunk(slot=slot, start=at, token_ids=token_ids, is_last=last)


def step(slot: int = 0, *, max_draft: int = 0, spec_min_p: float = 0.5) -> DecodeStep:
    return DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=spec_min_p)


def seated(script: FakeScript = SCRIPT, sampling: SamplingParams = GREEDY) -> FakeEngine:
    """An engine whose slot 0 has read (1, 2, 3)."""
    engine = FakeEngine(script)
    engine.run_window(WindowPlan(starts=(start(sampling=sampling),), chunks=(chunk(1, 2, 3),)))
    return engine


BAD_FIRST_PLANS = {
    "nothing to do": WindowPlan(),
    "a start without a chunk": WindowPlan(starts=(start(1),), decodes=(step(0),)),
    "a slot not started": WindowPlan(chunks=(chunk(1, slot=1),)),
    "decode of a slot not started": WindowPlan(decodes=(step(1),)),
    "a start beyond 0": WindowPlan(starts=(start(1),), chunks=(chunk(1, slot=1, at=2),)),
    "a slot twice": WindowPlan(decodes=(step(0), step(0))),
    "a start twice": WindowPlan(starts=(start(1), start(1)), chunks=(chunk(1, slot=1),)),
    "a slot that is not there": WindowPlan(starts=(start(4),), chunks=(chunk(1, slot=4),)),
    "an empty chunk": WindowPlan(starts=(start(1),), chunks=(chunk(slot=1),)),
    "a chunk over a multiple": WindowPlan(starts=(start(1),), chunks=(chunk(*range(5), slot=1),)),
    "an id that is not there": WindowPlan(starts=(start(1),), chunks=(chunk(1000, slot=1),)),
    "more prompt": WindowPlan(chunks=(chunk(1, at=3),)),
    "too deep a chain": WindowPlan(decodes=(step(0, max_draft=5),)),
    "a negative chain": WindowPlan(decodes=(step(0, max_draft=-1),)),
    "a gate above 1": WindowPlan(decodes=(step(0, spec_min_p=1.5),)),
}


@pytest.mark.parametrize("plan", BAD_FIRST_PLANS.values(), ids=BAD_FIRST_PLANS.keys())
def test_a_contradictory_plan_is_refused_and_changes_nothing(plan: WindowPlan) -> None:
    engine = seated()
    with pytest.raises(PlanError):
        engine.run_window(plan)
    tokens = engine.run_window(WindowPlan(decodes=(step(0),))).tokens
    assert tokens[0].token_ids == expected_output(SCRIPT, (1, 2, 3), GREEDY, 2)[1:]


def test_rows_beyond_the_context_are_refused() -> None:
    engine = FakeEngine(replace(SCRIPT, max_context=6))
    engine.run_window(WindowPlan(starts=(start(),), chunks=(chunk(1, 2, 3),)))
    engine.run_window(WindowPlan(decodes=(step(max_draft=2),)))  # rows 3, 4, 5
    with pytest.raises(PlanError, match="context is 6"):
        engine.run_window(WindowPlan(decodes=(step(max_draft=2),)))


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    engine = FakeEngine(replace(SCRIPT, max_context=4))
    with pytest.raises(PlanError):
        engine.run_window(WindowPlan(starts=(start(),), chunks=(chunk(1, 2, 3, 4),)))


def test_decoding_beyond_a_stop_is_refused() -> None:
    script = replace(SCRIPT, output_ids=(5, 6))
    engine = seated(script, SamplingParams(stop_token_ids=(6,)))
    (tokens,) = engine.run_window(WindowPlan(decodes=(step(max_draft=4),))).tokens
    assert tokens.token_ids == (6,)
    assert tokens.num_accepted == 4
    with pytest.raises(PlanError, match="ended"):
        engine.run_window(WindowPlan(decodes=(step(),)))


def test_a_sequence_started_without_drafts_has_none() -> None:
    engine = FakeEngine(SCRIPT)
    plain = SlotStart(slot=0, sampling=GREEDY, uses_drafts=False)
    engine.run_window(WindowPlan(starts=(plain,), chunks=(chunk(1),)))
    engine.run_window(WindowPlan(decodes=(step(),)))
    with pytest.raises(PlanError, match="started without"):
        engine.run_window(WindowPlan(decodes=(step(max_draft=1),)))


def run_alone(max_drafts: tuple[int, ...], prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    engine = FakeEngine(replace(SCRIPT, max_context=200))
    produced: list[SlotTokens] = []
    for at in range(0, len(prompt_ids), 4):
        part = prompt_ids[at : at + 4]
        plan = WindowPlan(
            starts=(start(),) if at == 0 else (),
            chunks=(chunk(*part, at=at, last=at + 4 >= len(prompt_ids)),),
        )
        produced += engine.run_window(plan).tokens
    for max_draft in max_drafts:
        produced += engine.run_window(WindowPlan(decodes=(step(max_draft=max_draft),))).tokens
    return tuple(token_id for tokens in produced for token_id in tokens.token_ids)


def test_tokens_depend_on_prompt_seed_and_position_alone() -> None:
    prompt_ids = tuple(range(1, 12))
    outputs = [run_alone(drafts, prompt_ids) for drafts in ((0,) * 30, (4,) * 20, (1, 3, 0, 2) * 6)]
    expected = expected_output(SCRIPT, prompt_ids, GREEDY, 100)
    assert all(output == expected[: len(output)] for output in outputs)
    assert expected != expected_output(SCRIPT, prompt_ids[1:], GREEDY, 100)
    assert expected != expected_output(SCRIPT, prompt_ids, replace(GREEDY, seed=1), 100)


def test_a_largest_seed_works() -> None:
    assert expected_output(SCRIPT, (1,), replace(GREEDY, seed=2**64 - 1), 3)


def test_stops_wait_for_min_tokens() -> None:
    sampling = replace(GREEDY, stop_token_ids=tuple(range(0, 1000, 2)), min_tokens=6)
    output = expected_output(SCRIPT, (1, 2), sampling, 50)
    assert len(output) >= 7
    assert all(token_id % 2 for token_id in output[:-1])


def test_the_gate_ends_a_chain_after_the_first_miss() -> None:
    script = replace(SCRIPT, accepted=(1,))
    gated, ungated = seated(script), seated(script)
    (short,) = gated.run_window(WindowPlan(decodes=(step(max_draft=4),))).tokens
    (full,) = ungated.run_window(WindowPlan(decodes=(step(max_draft=4, spec_min_p=0.0),))).tokens
    assert (short.num_drafted, short.num_accepted) == (2, 1)
    assert (full.num_drafted, full.num_accepted) == (4, 1)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FaultKind.ERROR, RuntimeError),
        (FaultKind.KERNEL, KernelFailure),
        (FaultKind.PLAN, PlanError),
    ],
)
def test_faults_come_in_their_window(kind: FaultKind, error: type[Exception]) -> None:
    engine = seated(replace(SCRIPT, faults=(Fault(window=1, kind=kind),)))
    with pytest.raises(error, match=r"scripted .* in window 1"):
        engine.run_window(WindowPlan(decodes=(step(),)))


def test_a_broken_slot_must_be_started_again() -> None:
    engine = seated(replace(SCRIPT, faults=(Fault(window=1, kind=FaultKind.SLOT, slot=0),)))
    result = engine.run_window(WindowPlan(decodes=(step(),)))
    assert result.tokens == ()
    assert [failure.slot for failure in result.failures] == [0]
    with pytest.raises(PlanError):
        engine.run_window(WindowPlan(decodes=(step(),)))


def test_times_follow_the_script() -> None:
    script = replace(SCRIPT, prompt_token_s=1e-4, decode_s=1e-3, row_s=1e-4, accepted=(2,))
    engine = FakeEngine(script)
    first = engine.run_window(WindowPlan(starts=(start(),), chunks=(chunk(1, 2, 3),)))
    assert first.times.prefill_s == pytest.approx(3e-4)
    assert first.times.verify_s == 0.0
    second = engine.run_window(WindowPlan(decodes=(step(max_draft=2),)))
    assert second.times.verify_s == pytest.approx(1e-3 + 3e-4)


def test_windows_with_decodes_wait_for_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = seated(replace(SCRIPT, tick_s=0.5))
    waits: list[float] = []
    monkeypatch.setattr(engine._closed, "wait", waits.append)
    monkeypatch.setattr("engine.fake.time.monotonic", lambda: 100.125)
    engine.run_window(WindowPlan(decodes=(step(0),)))
    assert waits[-1] == 0.375


def test_a_load_can_fail_and_a_closed_engine_refuses() -> None:
    with pytest.raises(ModelLoadError, match="no such tensor"):
        FakeEngine(FakeScript(load_error="no such tensor"))
    engine = seated()
    engine.close()
    with pytest.raises(PlanError, match="closed"):
        engine.run_window(WindowPlan(decodes=(step(),)))


def parked_prompt() -> FakeEngine:
    """Slot 0 has read (1, 2, 3) and gives tokens; checkpoint 5 after (1, 2), checkpoint 6 and page 7 of all."""
    engine = FakeEngine(SCRIPT)
    kept = replace(chunk(1, 2, last=False), checkpoint_id=5)
    engine.run_window(WindowPlan(starts=(start(),), chunks=(kept,)))
    engine.run_window(WindowPlan(chunks=(chunk(3, at=2),)))
    suspend = Suspend(slot=0, checkpoint_id=6)
    engine.run_window(
        WindowPlan(suspends=(suspend,), saves=(SavePage(slot=0, page_id=7, index=0),))
    )
    return engine


def resumed(checkpoint_id: int, *token_ids: int, page: int = 7, num_output: int = 0) -> SlotStart:
    resume = Resume(
        checkpoint_id=checkpoint_id, page_ids=(page,), token_ids=token_ids, num_output=num_output
    )
    return replace(start(1), resume=resume)


FIRST, SECOND = expected_output(SCRIPT, (1, 2, 3), GREEDY, 2)
RESUMED_CHUNK = (chunk(3, slot=1, at=2),)

BAD_PARKING = {
    "a page that is not there is dropped": WindowPlan(drop_page_ids=(8,)),
    "a page is dropped twice": WindowPlan(drop_page_ids=(7, 7)),
    "a checkpoint that is not there is dropped": WindowPlan(drop_checkpoint_ids=(7,)),
    "a page id is used again": WindowPlan(saves=(SavePage(slot=0, page_id=7, index=0),)),
    "a page behind the last token": WindowPlan(saves=(SavePage(slot=0, page_id=8, index=1),)),
    "a page of no slot": WindowPlan(saves=(SavePage(slot=9, page_id=8, index=0),)),
    "a checkpoint id is used again": WindowPlan(suspends=(Suspend(slot=0, checkpoint_id=6),)),
    "an empty slot is suspended": WindowPlan(suspends=(Suspend(slot=1, checkpoint_id=9),)),
    "a checkpoint that is not there": WindowPlan(starts=(resumed(9, 1, 2),), chunks=RESUMED_CHUNK),
    "a checkpoint that is dropped": WindowPlan(
        drop_checkpoint_ids=(5,), starts=(resumed(5, 1, 2),), chunks=RESUMED_CHUNK
    ),
    "a page that is dropped": WindowPlan(
        drop_page_ids=(7,), starts=(resumed(5, 1, 2),), chunks=RESUMED_CHUNK
    ),
    "a page that is only being saved": WindowPlan(
        saves=(SavePage(slot=0, page_id=8, index=0),),
        starts=(resumed(5, 1, 2, page=8),),
        chunks=RESUMED_CHUNK,
    ),
    "other tokens": WindowPlan(starts=(resumed(5, 1, 9),), chunks=RESUMED_CHUNK),
    "output forgotten": WindowPlan(starts=(resumed(6, 1, 2, 3, num_output=0),), decodes=(step(1),)),
    "no work": WindowPlan(starts=(resumed(5, 1, 2),)),
}


@pytest.mark.parametrize("plan", BAD_PARKING.values(), ids=BAD_PARKING.keys())
def test_contradictory_parking_is_refused(plan: WindowPlan) -> None:
    engine = parked_prompt()
    with pytest.raises(PlanError):
        engine.run_window(plan)
    assert engine.parked_ids() == ({7}, {5, 6})


def test_a_resumed_prompt_goes_on_and_so_does_a_suspended_sequence() -> None:
    engine = parked_prompt()
    tokens = engine.run_window(WindowPlan(starts=(resumed(5, 1, 2),), chunks=RESUMED_CHUNK)).tokens
    assert tokens[0].token_ids == (FIRST,)
    again = resumed(6, 1, 2, 3, FIRST, num_output=1)
    tokens = engine.run_window(WindowPlan(starts=(again,), decodes=(step(1),))).tokens
    assert tokens[0].token_ids == (SECOND,)
    engine.run_window(WindowPlan(drop_page_ids=(7,), drop_checkpoint_ids=(5, 6)))
    assert engine.parked_ids() == (frozenset(), frozenset())
