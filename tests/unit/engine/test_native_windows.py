"""Windows of the compiled step: one call for all is the same as calls for the parts, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Draft, TorchEngine
from engine.instruments import count_allocations
from engine.interface import (
    DecodeStep,
    PrefillChunk,
    SamplingParams,
    SlotStart,
    SlotTokens,
    WindowPlan,
    WindowResult,
    WindowTimes,
)
from engine.loading import load_engine
from engine.native.step import NativeChain
from tests.random_weights import SMALL, write_checkpoint

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=-7)
PENALIZED = SamplingParams(
    temperature=1.3, min_p=0.01, seed=2**63, repetition_penalty=1.4, frequency_penalty=0.5
)
BIASED = SamplingParams(temperature=1.0, seed=5, logit_bias=((3, 4.0), (9, -2.0)), min_tokens=1)
PROMPTS = ([5, 9, 2, 7, 1], [3, 3, 3], [8, 1, 6, 4, 2, 9, 11], [12])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("windows") / "small", SMALL)


def seated(
    checkpoint: Path, params: Sequence[SamplingParams], uses_drafts: Sequence[bool] = (True,) * 4
) -> TorchEngine:
    """An engine whose slots have read a prompt and picked their first token."""
    config = EngineConfig(
        model=str(checkpoint), device="cpu", threads=1, max_context=160, kernels="compiled"
    )
    engine = load_engine(config)
    engine.run_window(
        WindowPlan(
            starts=tuple(
                SlotStart(slot=s, sampling=p, uses_drafts=uses_drafts[s])
                for s, p in enumerate(params)
            ),
            chunks=tuple(
                PrefillChunk(slot=s, token_ids=tuple(PROMPTS[s]), start=0, is_last=True)
                for s in range(len(params))
            ),
        )
    )
    return engine


def decode(engine: TorchEngine, steps: Sequence[DecodeStep]) -> WindowResult:
    return engine.run_window(WindowPlan(decodes=tuple(steps)))


def chains(
    checkpoint: Path,
    params: Sequence[SamplingParams],
    steps: Sequence[DecodeStep],
    num_windows: int = 3,
) -> dict[int, list[Draft]]:
    engine = seated(checkpoint, params)
    for _ in range(num_windows):
        decode(engine, steps)
    return engine.draft(steps)


@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_a_chain_in_one_call_is_the_chain_of_single_drafts(
    checkpoint: Path, min_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [GREEDY, SAMPLED, PENALIZED, BIASED]
    steps = [
        DecodeStep(slot=slot, max_draft=depth, spec_min_p=min_p)
        for slot, depth in enumerate((4, 3, 4, 2))
    ]
    at_once = chains(checkpoint, params, steps)
    monkeypatch.setattr(NativeChain, "can_pick", lambda *_: False)
    assert chains(checkpoint, params, steps) == at_once
    assert [len(at_once[slot]) for slot in range(4)] == [4, 3, 4, 2] or min_p


def test_a_chain_ends_behind_a_stop_id(checkpoint: Path) -> None:
    steps = [DecodeStep(slot=0, max_draft=4, spec_min_p=0.0)]
    whole = chains(checkpoint, [SAMPLED], steps, num_windows=0)[0]
    stop = whole[1].token_id
    assert whole[0].token_id != stop
    stopping = replace(SAMPLED, stop_token_ids=(stop,))
    assert chains(checkpoint, [stopping], steps, num_windows=0)[0] == whole[:2]


STOPPING = replace(SAMPLED, stop_token_ids=tuple(range(0, 250, 5)))
LOGPROBS = replace(SAMPLED, top_logprobs=2)


def outcome(
    checkpoint: Path, params: Sequence[SamplingParams], *, works_ahead: bool = False
) -> list[WindowResult]:
    """Windows of changing depths, gates and slots, without their times.

    works_ahead: draft before each, now as deep as is then asked for, now deeper, now less deep.
    """
    engine = seated(checkpoint, params)
    results: list[WindowResult] = []
    for number in range(12):
        steps = [
            DecodeStep(
                slot=slot,
                max_draft=_depth(number, slot),
                spec_min_p=0.01 * ((slot + number // 5) % 2),
                next_draft=_depth(number + 1, slot) + number % 3 - 1,
            )
            for slot in range(len(params))
            if (number + slot) % 4
        ]
        result = decode(engine, steps)
        if works_ahead:
            engine.work_ahead()
        results.append(replace(result, times=WindowTimes(prefill_s=0, draft_s=0, verify_s=0)))
    return results


def _depth(number: int, slot: int) -> int:
    return (number + 2 * slot) % 5


def by_slot(results: Sequence[WindowResult]) -> list[list[SlotTokens]]:
    return [sorted(result.tokens, key=lambda tokens: tokens.slot) for result in results]


@pytest.mark.parametrize(
    "params",
    [
        [GREEDY],
        [GREEDY, SAMPLED, PENALIZED, BIASED],
        [STOPPING, PENALIZED],
        [replace(PENALIZED, stop_token_ids=(3,), min_tokens=9), STOPPING],
        [LOGPROBS, GREEDY],
    ],
    ids=["one", "four", "stops", "min_tokens", "logprobs"],
)
def test_a_window_in_one_call_is_that_of_its_parts(
    checkpoint: Path, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one = outcome(checkpoint, params)
    monkeypatch.setattr(TorchEngine, "_is_plain", lambda *_: False)
    in_parts = outcome(checkpoint, params)
    assert by_slot(in_one) == by_slot(in_parts)
    assert any(tokens.num_drafted for result in in_one for tokens in result.tokens)
    # With one slot these random weights never draft what they pick.
    accepted = any(tokens.num_accepted for result in in_one for tokens in result.tokens)
    assert accepted or len(params) == 1


@pytest.mark.parametrize(
    "params",
    [[SAMPLED], [GREEDY, SAMPLED, PENALIZED, BIASED], [STOPPING, LOGPROBS]],
    ids=["one", "four", "stops"],
)
def test_windows_drafted_ahead_are_those_drafted_when_asked_for(
    checkpoint: Path, params: list[SamplingParams]
) -> None:
    assert outcome(checkpoint, params, works_ahead=True) == outcome(checkpoint, params)


def test_drafts_made_ahead_are_used(checkpoint: Path) -> None:
    engine = seated(checkpoint, [SAMPLED])
    step = DecodeStep(slot=0, max_draft=2, spec_min_p=0.0, next_draft=2)
    assert decode(engine, [step]).times.ahead_s == 0.0
    engine.work_ahead()
    times = decode(engine, [step]).times
    assert 0.0 < times.ahead_s <= times.draft_s
    assert decode(engine, [step]).times.ahead_s == 0.0


def test_drafts_made_ahead_are_not_the_next_sequences(checkpoint: Path) -> None:
    engine, fresh = (seated(checkpoint, [SAMPLED, SAMPLED]) for _ in range(2))
    step = DecodeStep(slot=0, max_draft=2, spec_min_p=0.0, next_draft=2)
    decode(engine, [step])
    engine.work_ahead()
    anew = WindowPlan(
        starts=(SlotStart(slot=0, sampling=PENALIZED),),
        chunks=(PrefillChunk(slot=0, token_ids=(9, 8, 7, 6, 5), start=0, is_last=True),),
    )
    for one in (engine, fresh):
        one.run_window(anew)
    assert decode(engine, [step]).tokens == decode(fresh, [step]).tokens


def test_no_draft_is_made_behind_the_end_of_the_context(checkpoint: Path) -> None:
    engine = seated(checkpoint, [SAMPLED])
    step = DecodeStep(slot=0, max_draft=0, spec_min_p=0.0, next_draft=4)
    cells = engine.state.k.clone()
    while len(engine.sequence_ids(0)) < engine.info.max_context:
        decode(engine, [step])
        engine.work_ahead()
    changed = (engine.state.k != cells).flatten(3).any(-1)
    assert not changed[:, 1:].any()


def test_slots_without_drafts_share_a_window_with_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens() -> list[list[SlotTokens]]:
        engine = seated(checkpoint, [SAMPLED, PENALIZED], uses_drafts=(False, True))
        steps = [
            DecodeStep(slot=0, max_draft=0, spec_min_p=0.0),
            DecodeStep(slot=1, max_draft=3, spec_min_p=0.0),
        ]
        return by_slot([decode(engine, steps) for _ in range(4)])

    in_one = tokens()
    monkeypatch.setattr(TorchEngine, "_is_plain", lambda *_: False)
    assert in_one == tokens()


def test_what_is_not_finite_fails_its_slot_alone(checkpoint: Path) -> None:
    engine = seated(checkpoint, [SAMPLED, PENALIZED])
    steps = [DecodeStep(slot=slot, max_draft=2, spec_min_p=0.0) for slot in (0, 1)]
    engine.state.s[:, 0] = float("nan")
    result = decode(engine, steps)
    assert [failure.slot for failure in result.failures] == [0]
    assert [tokens.slot for tokens in result.tokens] == [1]
    alone = decode(seated(checkpoint, [SAMPLED, PENALIZED]), steps[1:])
    assert result.tokens == alone.tokens


@pytest.mark.parametrize("max_draft", [0, 4])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_window_allocates_no_tensor(checkpoint: Path, num_slots: int, max_draft: int) -> None:
    engine = seated(checkpoint, [SAMPLED, PENALIZED, BIASED, GREEDY][:num_slots])
    steps = [
        DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=0.0) for slot in range(num_slots)
    ]
    decode(engine, steps)
    assert count_allocations(lambda: decode(engine, steps)).tensors == 0
