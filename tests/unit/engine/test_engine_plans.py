"""A window plan that contradicts the slots' state is refused whole, and nothing is run."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.errors import PlanError
from engine.interface import DecodeStep, PrefillChunk, SamplingParams, SlotStart, WindowPlan
from engine.loading import load_engine
from tests.oracle.tiny import make_checkpoint

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("plans"), "no_ple")
    return load_engine(
        EngineConfig(
            model=str(checkpoint), device="cpu", dtype="float32", max_context=40, max_draft=3
        )
    )


def start(slot: int) -> SlotStart:
    return SlotStart(slot=slot, sampling=GREEDY)


def chunk(
    slot: int, first: int, count: int, *, is_last: bool = False, token: int = 5
) -> PrefillChunk:
    return PrefillChunk(slot=slot, start=first, token_ids=(token,) * count, is_last=is_last)


def decode(slot: int, max_draft: int = 0) -> DecodeStep:
    return DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=0.0)


def seat_decoding(engine: TorchEngine, slot: int, prompt: int = 4) -> None:
    engine.run_window(
        WindowPlan(starts=(start(slot),), chunks=(chunk(slot, 0, prompt, is_last=True),))
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (WindowPlan(starts=(start(4),)), "slot 4: required 0 to 3"),
        (WindowPlan(starts=(start(0), start(0))), "started twice"),
        (WindowPlan(starts=(start(2),), chunks=(chunk(2, 1, 2),)), "starts at 1, required 0"),
        (WindowPlan(chunks=(chunk(3, 0, 2),)), "slot 3: no sequence was started"),
        (WindowPlan(decodes=(decode(3),)), "slot 3: no sequence was started"),
        (WindowPlan(starts=(start(2),), decodes=(decode(2),)), "before the prompt was read"),
        (WindowPlan(decodes=(decode(1), decode(1))), "two kinds of work"),
        (WindowPlan(decodes=(decode(1, 4),)), "max_draft 4, required 0 to 3"),
        (WindowPlan(decodes=(decode(1, -1),)), "max_draft -1, required"),
        (WindowPlan(starts=(start(2),), chunks=(chunk(2, 0, 0),)), "chunk ends at 0"),
        (
            WindowPlan(starts=(start(2),), chunks=(chunk(2, 0, 41),)),
            "chunk ends at 41, required 1 to 40",
        ),
        (WindowPlan(starts=(start(2),), chunks=(chunk(2, 0, 2, token=257),)), "token ids from 257"),
        (WindowPlan(starts=(start(2),), chunks=(chunk(2, 0, 2, token=-1),)), "token ids from -1"),
        (WindowPlan(chunks=(chunk(1, 4, 2),)), "a sequence that is decoding"),
    ],
)
def test_a_contradicting_plan_is_refused(
    engine: TorchEngine, plan: WindowPlan, message: str
) -> None:
    engine.close()
    seat_decoding(engine, 1)
    with pytest.raises(PlanError, match=message):
        engine.run_window(plan)
    # The sequence that was there goes on as if nothing had happened.
    after = engine.run_window(WindowPlan(decodes=(decode(1),))).tokens[0].token_ids
    seat_decoding(engine, 0)
    assert after == engine.run_window(WindowPlan(decodes=(decode(0),))).tokens[0].token_ids


def test_a_prompt_must_be_read_before_it_decodes(engine: TorchEngine) -> None:
    engine.run_window(WindowPlan(starts=(start(0),), chunks=(chunk(0, 0, 3),)))
    with pytest.raises(PlanError, match="before the prompt was read"):
        engine.run_window(WindowPlan(decodes=(decode(0),)))


def test_a_sequence_ends_at_the_context(engine: TorchEngine) -> None:
    seat_decoding(engine, 0, prompt=38)
    with pytest.raises(PlanError, match="39 tokens and 2 drafts, required at most 40"):
        engine.run_window(WindowPlan(decodes=(decode(0, 2),)))
    engine.run_window(WindowPlan(decodes=(decode(0, 0),)))
    with pytest.raises(PlanError, match="required at most 40"):
        engine.run_window(WindowPlan(decodes=(decode(0, 1),)))


def test_only_the_slot_whose_logits_are_not_finite_fails(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat_decoding(engine, 0)
    seat_decoding(engine, 1)
    clean = engine._trunk.logits

    def poisoned(streams: torch.Tensor) -> torch.Tensor:
        logits = clean(streams)
        logits[0, 3] = float("nan")
        return logits

    # Windows in one call: test_native_windows.py.
    monkeypatch.setattr(TorchEngine, "_is_plain", lambda *_: False)
    monkeypatch.setattr(type(engine._trunk), "logits", lambda _, streams: poisoned(streams))
    result = engine.run_window(WindowPlan(decodes=(decode(0), decode(1))))
    assert [failure.slot for failure in result.failures] == [0]
    assert [tokens.slot for tokens in result.tokens] == [1]


def test_what_was_not_finite_does_not_reach_the_next_sequence_in_the_slot(
    engine: TorchEngine,
) -> None:
    seat_decoding(engine, 0)
    expected = engine.run_window(WindowPlan(decodes=(decode(0),))).tokens
    seat_decoding(engine, 0, prompt=12)
    engine._state.v[0, 0, :, 8:10] = float("nan")
    assert len(engine.run_window(WindowPlan(decodes=(decode(0),))).failures) == 1
    seat_decoding(engine, 0)
    again = engine.run_window(WindowPlan(decodes=(decode(0),)))
    assert again.failures == ()
    assert again.tokens == expected
