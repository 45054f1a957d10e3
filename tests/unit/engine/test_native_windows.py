"""Windows of the compiled step: a chain in one call is that of single drafts, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Draft, TorchEngine
from engine.instruments import count_allocations
from engine.interface import DecodeStep, PrefillChunk, SamplingParams, SlotStart, WindowPlan
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


def seated(checkpoint: Path, params: Sequence[SamplingParams]) -> TorchEngine:
    """An engine whose slots have read a prompt and picked their first token."""
    config = EngineConfig(
        model=str(checkpoint), device="cpu", threads=1, max_context=160, kernels="compiled"
    )
    engine = load_engine(config)
    engine.run_window(
        WindowPlan(
            starts=tuple(SlotStart(slot=s, sampling=p) for s, p in enumerate(params)),
            chunks=tuple(
                PrefillChunk(slot=s, token_ids=tuple(PROMPTS[s]), start=0, is_last=True)
                for s in range(len(params))
            ),
        )
    )
    return engine


def decode(engine: TorchEngine, steps: Sequence[DecodeStep]) -> None:
    engine.run_window(WindowPlan(decodes=tuple(steps)))


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


@pytest.mark.parametrize("max_draft", [0, 4])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_window_allocates_no_tensor(checkpoint: Path, num_slots: int, max_draft: int) -> None:
    engine = seated(checkpoint, [SAMPLED, PENALIZED, BIASED, GREEDY][:num_slots])
    steps = [
        DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=0.0) for slot in range(num_slots)
    ]
    decode(engine, steps)
    assert count_allocations(lambda: decode(engine, steps)).tensors == 0
