"""Chains that are drafted in one go are those that are drafted one by one: gate, stop ids and depth cut all alike.

In one go: by the compiled step, which ends a chain at its gate, and to the full depth, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from engine.config import EngineConfig
from engine.interface import DecodeStep, PrefillChunk, SamplingParams, SlotStart, WindowPlan
from engine.loading import load_engine
from engine.sampling import Picks
from engine.state import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from engine.engine import TorchEngine
    from engine.sampling import PickRow

PROMPTS = {0: tuple(range(5, 45)), 1: tuple(range(60, 75)), 3: tuple(range(200, 230))}


class HostChain:
    """engine.steps.DraftChain of the engine's own draft layer and picker, no step left out."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.num_chains = 0

    def can_pick(self, row: PickRow) -> bool:
        return row.history is None

    def chain(
        self,
        ids: Tensor,
        streams: Tensor,
        rows: Rows,
        first: Sequence[PickRow],
        steps: Sequence[DecodeStep],
    ) -> list[Picks]:
        layer = self._engine._draft_layer
        assert layer is not None
        self.num_chains += 1
        found: list[Picks] = []
        for depth in range(max(step.max_draft for step in steps)):
            last = torch.tensor(rows.last_rows())
            logits, streams = layer.draft(ids, streams, rows, last, self._engine.state)
            picked = self._engine._picker.pick(logits, [row.ahead(depth) for row in first])
            found.append(picked)
            ids = torch.tensor(picked.ids)
            starts = [position + 1 for position in rows.last_host_positions()]
            rows = Rows(rows.slots, [1] * len(rows.slots), starts, self._engine.state.device)
        return found


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return load_engine(EngineConfig(device="cpu", kernels="compiled", threads=1, max_context=256))


def converse(engine: TorchEngine, sampling: dict[int, SamplingParams]) -> list[tuple[object, ...]]:
    """Windows of three slots of other depths and gates: what each drafted, accepted and said."""
    for slot, ids in PROMPTS.items():
        start = SlotStart(slot=slot, sampling=sampling[slot])
        chunk = PrefillChunk(slot=slot, start=0, token_ids=ids, is_last=True)
        engine.run_window(WindowPlan(starts=(start,), chunks=(chunk,)))
    said: list[tuple[object, ...]] = []
    for window in range(6):
        steps = tuple(
            DecodeStep(slot=slot, max_draft=(window + slot) % 5, spec_min_p=0.1 * slot)
            for slot in PROMPTS
        )
        tokens = engine.run_window(WindowPlan(decodes=steps)).tokens
        said += sorted(
            (one.slot, one.token_ids, one.num_drafted, one.num_accepted) for one in tokens
        )
    return said


@pytest.mark.parametrize("kind", ["greedy", "sampled", "one by one beside"])
def test_chains_at_once_are_chains_one_by_one(engine: TorchEngine, kind: str) -> None:
    greedy = SamplingParams(temperature=0.0)
    sampling = dict.fromkeys(PROMPTS, greedy)
    if kind != "greedy":
        sampling = {
            s: SamplingParams(temperature=0.8, seed=s, stop_token_ids=(11,)) for s in PROMPTS
        }
    if kind == "one by one beside":
        sampling[1] = SamplingParams(temperature=0.8, seed=4, repetition_penalty=1.3)
    compiled, in_one = engine._chain, engine._whole
    assert compiled is not None and in_one is not None
    found = [converse(engine, sampling)]
    whole = HostChain(engine)
    engine._whole = None
    try:
        for chain in (None, compiled, whole):
            engine._chain = chain
            found.append(converse(engine, sampling))
    finally:
        engine._chain, engine._whole = compiled, in_one
    assert found[1:] == found[:1] * 3
    assert whole.num_chains
