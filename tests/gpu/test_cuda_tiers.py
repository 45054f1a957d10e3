"""Where a 4-bit expert lies, now or once it was moved, and who computes it, changes no bit: every number of slots
against all on the device, read over the bus by the kernels or computed in host memory by a pool.

With TRITON_INTERPRET=1 the tests of one layer run on a CPU.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cuda.quant import pack4
from engine.cuda.tiers import ExpertPlaces, StagedExperts, empty_experts, hits_ready
from engine.expert_profile import profile_of_counts
from engine.native.abi import why_unavailable
from engine.startup_budget import slots_per_layer
from engine.startup_plan import ExpertSplit
from tests.digits import split_rows

if TYPE_CHECKING:
    from engine.cuda.backend import CudaBackend
    from engine.model_spec import ModelSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.timeout(300)
gpu = pytest.mark.gpu

TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "indexer_n_heads": 2,
    "indexer_head_dim": 20,
    "indexer_budget": 32,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "hc_count": 2,
    "hc_lowrank": 12,
    "ple_layer_ids": None,
    "eos_token_id": 3,
}
PAIRS = 20
NUM_SLOTS = 4
WINDOWS = ([1], [5], [3, 1], [5, 5, 5, 5])
"""Rows of each slot."""
WORKERS = [0] if why_unavailable() is not None else [0, 1, 3]
"""Threads that compute far experts; 0: none, kernels read those."""
LONG, SHORT = 90, 9
"""Rows of a piece that stages what it needs from host memory, and of one that reads it there."""


@dataclass(frozen=True)
class Case:
    """One model with its experts divided one way."""

    spec: ModelSpec
    backend: CudaBackend

    def outcome(self) -> list[Tensor]:
        """Logits of a long and a short prompt piece, and of windows of one to four slots behind them."""
        trunk, state = self.backend.trunk, self.backend.step.state
        ids = torch.arange(200, device=DEVICE).view(-1, 1) * 7 % self.spec.vocab_size
        found: list[Tensor] = []
        for slot in range(NUM_SLOTS):
            state.begin(slot)
        start = 0
        for count in (LONG, SHORT):
            streams = trunk.chunk(ids[start : start + count], 0, start, state)
            found.append(trunk.logits(streams).clone())
            start += count
        for counts in WINDOWS:
            rows, slots = sum(counts), range(len(counts))
            starts = [start if slot == 0 else 0 for slot in slots]
            self.backend.step.window(ids[start : start + rows], slots, counts, starts)
            found.append(self.backend.step.logits(rows).clone())
            if DEVICE.type == "cuda":
                # What it chose is known before the next window, as where its picks are waited for.
                torch.cuda.synchronize()
        return found

    def near(self) -> list[set[int]]:
        """Experts in slots of each layer that has tiers, whose tables must be whole."""
        layers = [layer.moe for layer in self.backend.step.model.layers]
        assert hits_ready((x.gate_up, x.down, x.far) for x in layers)
        orders = [x.far.order.tolist() for x in layers if x.far is not None]
        return [{e for e, place in enumerate(order) if place < 0} for order in orders]


def split_of(spec: ModelSpec, num_slots: int, *, hot_last: bool) -> ExpertSplit:
    """Slots for the first experts of each layer, or for those that a profile ranks first."""
    counts = [[layer + e % 3 for e in range(spec.moe.num_experts)] for layer in range(4)]
    ranking = profile_of_counts(counts if hot_last else [[0] * spec.moe.num_experts] * 4)
    slots = slots_per_layer(num_slots, ranking.ranked_per_layer())
    return ExpertSplit(
        slots=slots,
        in_slots=frozenset(ranking.chosen(slots)),
        num_pairs=PAIRS,
        is_tiered=True,
        is_first_come=not hot_last and 0 < num_slots < PAIRS,
    )


def load(split: ExpertSplit | None, workers: int = 0) -> Case:
    from engine.cuda.backend import build_cuda_step
    from engine.cuda.random_model import RandomTensors, real_spec
    from engine.cuda.weights import CudaLoader
    from engine.state import SlotState

    spec = real_spec(**TINY)
    loader = CudaLoader(RandomTensors(DEVICE), spec, device=DEVICE, max_context=128)
    model = loader.load(with_draft=False)
    loader.open_experts(split)
    model = loader.load_experts(model)
    state = SlotState(
        spec,
        num_slots=NUM_SLOTS,
        max_context=128,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=DEVICE,
    )
    graphs = DEVICE.type == "cuda"
    backend = build_cuda_step(
        model,
        state,
        num_token_ids=spec.vocab_size,
        graphs=graphs,
        pool_workers=workers,
        first_come=split is not None and split.is_first_come,
    )
    case = Case(spec, backend)
    case.near()
    return case


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    with torch.inference_mode():
        return load(None).outcome()


@gpu
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("hot_last", [False, True], ids=["first", "profile"])
@torch.inference_mode()
def test_no_number_of_slots_changes_a_bit(
    hot_last: bool, workers: int, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long piece has room for two experts from host memory at once, so it fetches some after others.

    Without a profile one expert moves between two windows.
    """
    monkeypatch.setattr("engine.cuda.first_come.TRADED_BYTES", 1)
    spec = load(None).spec
    monkeypatch.setattr("engine.memory_plan.STAGED_BYTES", 2 * blob_bytes(spec))
    moved = 0
    for num_slots in range(PAIRS + 1):
        case = load(split_of(spec, num_slots, hot_last=hot_last), workers)
        assert (case.backend.step.pool is None) == (not workers or num_slots == PAIRS)
        near, first_come = case.near(), case.backend.step.first_come
        # As a window is run first, and as its graph is replayed.
        found = [case.outcome(), case.outcome()]
        assert (first_come is not None) == (not hot_last and 0 < num_slots < PAIRS)
        assert first_come is None or first_come.claims.num_unclaimed < num_slots
        moved += case.near() != near
        staged = case.backend.prefill.staged
        assert (staged.count if staged else 0) == (2 if num_slots < PAIRS else 0)
        for one, other in zip(itertools.chain(*found), expected * 2, strict=True):
            assert torch.isfinite(one).all()
            assert torch.equal(one, other), num_slots
    assert (moved > 0) == (not hot_last)


def blob_bytes(spec: ModelSpec) -> int:
    up, down = empty_experts(spec, 1, torch.device("meta"))
    return up.num_bytes + down.num_bytes


@gpu
@torch.inference_mode()
def test_routes_are_counted_where_they_are_asked_for() -> None:
    case = load(None)
    counts = case.backend.trunk.count_routes(case.outcome)
    assert [sum(layer) for layer in counts] == [2 * (LONG + SHORT)] * 4
    assert case.backend.prefill.routed is None


class Layer:
    """The experts of one layer, and what rows of a window and of a prompt piece give with them."""

    def __init__(self, near: set[int] | None, workers: int = 0, **sizes: int) -> None:
        """near: those in slots; None: all, without tiers; sizes: that differ from TINY's."""
        from engine.cuda.moe import MoeWeights
        from engine.cuda.pool import FarPool
        from engine.cuda.random_model import real_spec

        self.spec = real_spec(**{**TINY, **sizes})
        moe, hidden = self.spec.moe, self.spec.hidden
        generator = torch.Generator().manual_seed(4)
        up = torch.randn(moe.num_experts, 2 * moe.expert_dim, hidden, generator=generator) / 8
        down = torch.randn(moe.num_experts, hidden, moe.expert_dim, generator=generator) / 6
        places = ExpertPlaces(self.spec, range(5) if near is None else near, DEVICE)
        places.open_host()
        for expert in range(moe.num_experts):
            places.put(expert, pack4(up[expert : expert + 1]), pack4(down[expert : expert + 1]))
        empty = torch.empty(0, device=DEVICE)
        self.weights = MoeWeights(
            head=empty,
            shared_down=empty,
            gate_up=places.slots[0],
            down=places.slots[1],
            far=None if near is None else places.far(),
        )
        self.pool = None
        if workers:
            # One layer's table for four: that of the last is filled.
            layers = [None] * (self.spec.num_layers - 1) + [self.weights.far]
            self.pool = FarPool(self.spec, layers, 20, DEVICE, workers)
        self.generator = torch.Generator().manual_seed(9)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, torch.bfloat16)

    def ids(self, num_rows: int) -> Tensor:
        """Two different experts for every row; nobody asks for expert 4, nearly all for expert 3."""
        rows = [[3, row % 3] if row % 8 else [row % 3, (row + 1) % 3] for row in range(num_rows)]
        return torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    def window(self, num_rows: int) -> Tensor:
        from engine.cuda.moe import MoeScratch, multiply_window

        scratch = MoeScratch.make(self.spec.moe, self.spec.hidden, num_rows, DEVICE)
        scratch.ids.copy_(self.ids(num_rows))
        scratch.parts.fill_(float("nan"))
        x = self.random(num_rows, self.spec.hidden)
        # A column's size differs from another's as much as an activation's.
        x *= torch.logspace(-4, 1, self.spec.hidden, device=DEVICE)
        split_rows(x, scratch.x)
        multiply_window(x, self.weights, scratch, self.spec.moe, self.pool, rests=True)
        return scratch.parts

    def piece(self, num_rows: int) -> Tensor:
        from engine.cuda.chunk_kernels import experts_into_streams

        spec, moe = self.spec, self.spec.moe
        streams = self.random(num_rows, spec.stream_width)
        experts_into_streams(
            self.random(num_rows, spec.hidden),
            self.random(num_rows, moe.num_experts + 1 + 2 * moe.shared_dim),
            self.weights,
            self.random(num_rows, moe.num_active).to(torch.float32),
            self.ids(num_rows),
            self.random(num_rows, spec.hidden),
            streams,
            self.random(num_rows, spec.num_streams),
            moe,
            None if self.weights.far is None else StagedExperts.make(spec, DEVICE),
        )
        return streams


@pytest.fixture
def rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiply-add of the interpreter's as the device and the pool have it: numpy's would round twice."""
    if not INTERPRETED:
        return
    interpreter: Any = import_module("triton.runtime.interpreter")

    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    libm.fmaf.restype, libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    fmaf = np.frompyfunc(libm.fmaf, 3, 1)

    def once(_: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(
            fmaf(x.data, y.data, z.data).astype(np.float32), z.dtype.scalar
        )

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", once)


NEAR = [set[int](), {3}, {0, 4}, {1, 2, 4}, {0, 1, 2, 3}, set(range(5))]


# Runs on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1); compiled kernels need the device.
@pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="no device")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("near", NEAR, ids=str)
def test_a_layer_gives_the_same_bits_wherever_its_experts_lie(
    near: set[int], workers: int, rounds_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    # An expert's 128 and 128 lines are copied by two programs each.
    monkeypatch.setattr("engine.cuda.chunk_kernels._FETCH_LINES", 64)
    monkeypatch.setattr("engine.memory_plan.STAGED_BYTES", 2 * blob_bytes(Layer(None).spec))
    for num_rows in (1, 5, 20):
        wanted = Layer(None).window(num_rows)
        assert torch.isfinite(wanted).all()
        assert torch.equal(Layer(near, workers).window(num_rows), wanted)
    if workers:
        return  # prompt pieces know no pool
    for num_rows in (SHORT, LONG):
        wanted = Layer(None).piece(num_rows)
        assert torch.isfinite(wanted).all()
        assert torch.equal(Layer(near).piece(num_rows), wanted)


# Runs on a CPU too, as the one before.
@pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="no device")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("near", [{4}, {3, 4}, {0, 1, 2, 4}], ids=str)
def test_experts_that_trade_places_between_windows_change_no_bit(
    near: set[int], workers: int, rounds_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert moves at a time; nobody asks for expert 4, so it is not left where it began."""
    pytest.importorskip("triton")
    from engine.cuda.first_come import FirstCome
    from engine.cuda.moe import MoeScratch

    monkeypatch.setattr("engine.cuda.first_come.TRADED_BYTES", 1)
    plain, tiered = Layer(None), Layer(near, workers)
    moe, far = tiered.spec.moe, tiered.weights.far
    assert far is not None
    first_come = FirstCome(tiered.spec, [tiered.weights], DEVICE, tiered.pool)
    scratch = first_come.scratch(MoeScratch.make(moe, tiered.spec.hidden, 20, DEVICE), far)
    for num_rows in (1, 5, 20, 5):
        assert torch.equal(tiered.window(num_rows), plain.window(num_rows))
        scratch.ids[:num_rows].copy_(tiered.ids(num_rows))
        first_come.watch(num_rows)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        order = far.order.clone()
        first_come.admit()
        # Of two that change, one comes and one leaves.
        assert int((far.order != order).sum()) in (0, 2)
        assert hits_ready([(tiered.weights.gate_up, tiered.weights.down, far)])
    assert first_come.claims.is_settled
    assert int(far.order[4]) >= 0
    for num_rows in (1, 20):
        assert torch.equal(tiered.window(num_rows), plain.window(num_rows))


@gpu
@pytest.mark.parametrize("workers", WORKERS)
@torch.inference_mode()
def test_a_layer_of_the_real_widths_gives_the_same_bits(workers: int) -> None:
    sizes = {"hidden_size": 2560, "moe_intermediate_size": 640}
    for num_rows in (1, 5, 20):
        wanted = Layer(None, **sizes).window(num_rows)
        assert torch.isfinite(wanted).all()
        assert torch.equal(Layer({0, 4}, workers, **sizes).window(num_rows), wanted)
