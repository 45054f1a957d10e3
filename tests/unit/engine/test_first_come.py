"""Slots of the kernels' expert cache go to the experts that come first: who trades, what moves, and what never does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.cuda.first_come import Claims, FirstCome, Trade
from engine.cuda.moe import MoeScratch, MoeWeights
from engine.cuda.pool import FarPool
from engine.cuda.quant import pack4
from engine.cuda.random_model import real_spec
from engine.cuda.sizes import tensor_bytes
from engine.cuda.tiers import ExpertPlaces, hits_ready
from engine.experts import ExpertShape, LayerExperts
from engine.memory_plan import (
    EXPERTS_4_BITS,
    HIT_PATH,
    ROUTES,
    ExpertPlan,
    PlanLine,
    Step,
    num_pairs,
    with_tiers,
)
from engine.native.abi import why_unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.cuda.quant import Packed4

CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP = 3, 7, 2
MANY = 1000


def chosen(*layers: Sequence[Sequence[int]]) -> Tensor:
    """Ids [layers, R, k]."""
    return torch.tensor(layers, dtype=torch.int32)


def pairs(trades: Sequence[Trade]) -> list[tuple[int, int, int]]:
    return [(trade.layer, trade.comes, trade.leaves) for trade in trades]


def test_one_in_a_slot_claims_it_and_one_in_host_memory_takes_an_unclaimed_slot() -> None:
    claims = Claims([[0, 1, 2]], 6)
    assert claims.come(chosen([[1, 2]]), MANY) == []
    assert claims.num_unclaimed == 1
    assert pairs(claims.come(chosen([[5, 1]]), MANY)) == [(0, 5, 0)]
    assert claims.is_settled


def test_one_that_is_chosen_beside_it_keeps_its_slot() -> None:
    """Expert 0 comes behind expert 4, but lies there already."""
    claims = Claims([[0, 1]], 6)
    assert pairs(claims.come(chosen([[4, 5], [0, 4]]), MANY)) == [(0, 4, 1)]
    assert claims.is_settled


def test_an_expert_that_left_may_come_back_while_there_is_room() -> None:
    claims = Claims([[0, 1, 2]], 6)
    assert pairs(claims.come(chosen([[4, 4]]), MANY)) == [(0, 4, 0)]
    assert pairs(claims.come(chosen([[0, 5]]), MANY)) == [(0, 0, 1), (0, 5, 2)]
    assert claims.come(chosen([[1, 3]]), MANY) == []


def test_a_full_layer_skips_only_its_own() -> None:
    claims = Claims([[0], [0, 1], []], 4)
    assert pairs(claims.come(chosen([[3, 2]], [[0, 3]], [[1, 2]]), MANY)) == [(0, 3, 0), (1, 3, 1)]
    assert claims.is_settled
    claims = Claims([[0], [0, 1, 2], [0, 1, 2, 3]], 4)
    assert pairs(claims.come(chosen([[0, 3]], [[1, 2]], [[1, 2]]), MANY)) == []
    assert not claims.is_settled
    assert pairs(claims.come(chosen([[3, 2]], [[3, 2]], [[1, 2]]), MANY)) == [(1, 3, 0)]
    assert claims.is_settled


@pytest.mark.parametrize("in_slots", [[[]], [[0, 1, 2, 3]], []], ids=str)
def test_without_slots_or_without_experts_beside_them_nothing_is_to_be_settled(
    in_slots: list[list[int]],
) -> None:
    claims = Claims(in_slots, 4)
    assert claims.is_settled
    assert claims.num_unclaimed == 0


def test_a_limit_is_kept_and_holds_up_no_layer_for_long() -> None:
    claims = Claims([[0, 1], [0, 1], [0, 1]], 6)
    rows = [[2, 3], [4, 5]]
    found = [pairs(claims.come(chosen(rows, rows, rows), 1)) for _ in range(7)]
    assert [len(trades) for trades in found] == [1, 1, 1, 1, 1, 1, 0]
    assert [trades[0] for trades in found[:3]] == [(0, 2, 0), (1, 2, 0), (2, 2, 0)]
    assert [trades[0] for trades in found[3:6]] == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert claims.is_settled


@pytest.mark.parametrize("seed", range(5))
def test_those_have_slots_that_would_have_them_in_the_torch_layers(seed: int) -> None:
    """One row after the other with one expert each, so that nobody comes beside another."""
    num_slots, generator = 4, torch.Generator().manual_seed(seed)
    layer = LayerExperts(9, ExpertShape(hidden=4, width=4, dtype=torch.float32), CPU)
    hosts = [torch.zeros(4, 4) for _ in range(9)]
    for expert, down in enumerate(hosts):
        layer.put_host(expert, torch.zeros(8, 4), down)
    layer.open(num_slots)
    layer.admit_first_come()
    claims, near = Claims([range(num_slots)], 9), set(range(num_slots))
    for expert in torch.randint(9, (40,), generator=generator).tolist():
        layer.find(expert)
        for trade in claims.come(chosen([[expert]]), MANY):
            near = near - {trade.leaves} | {trade.comes}
        assert claims.num_unclaimed == layer.num_free
    assert claims.is_settled
    assert near == {
        e for e, down in enumerate(hosts) if layer.find(e).down.data_ptr() != down.data_ptr()
    }


class Tiers:
    """Layers of a small model, whose experts have values that name them, behind a FirstCome."""

    def __init__(self, slots: Sequence[int], *, with_pool: bool = False) -> None:
        """slots: by layer."""
        self.spec = real_spec(
            hidden_size=96,
            moe_intermediate_size=40,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP,
            num_hidden_layers=len(slots),
            ple_layer_ids=None,
        )
        self.layers = [self._layer(number, count) for number, count in enumerate(slots)]
        fars = [layer.far for layer in self.layers]
        self.pool = FarPool(self.spec, fars, 20, CPU, 1) if with_pool else None
        self.first_come = FirstCome(self.spec, self.layers, CPU, self.pool)
        self.scratch = MoeScratch.make(self.spec.moe, self.spec.hidden, 20, CPU)

    def _layer(self, number: int, count: int) -> MoeWeights:
        places = ExpertPlaces(self.spec, range(count), CPU)
        places.open_host()
        for expert in range(EXPERTS):
            places.put(expert, *self.packed(number, expert))
        empty = torch.empty(0)
        return MoeWeights(empty, empty, *places.slots, far=places.far())

    def packed(self, layer: int, expert: int) -> tuple[Packed4, Packed4]:
        hidden, width = self.spec.hidden, self.spec.moe.expert_dim
        generator = torch.Generator().manual_seed(100 * layer + expert)
        return (
            pack4(torch.randn(1, 2 * width, hidden, generator=generator)),
            pack4(torch.randn(1, hidden, width, generator=generator)),
        )

    def window(self, ids: Tensor) -> None:
        """What a window of these choices [layers, R, k] does to the experts."""
        self.first_come.admit()
        for layer, of_layer in zip(self.layers, ids, strict=True):
            assert layer.far is not None
            own = self.first_come.scratch(self.scratch, layer.far)
            own.ids.fill_(EXPERTS - 1)  # rows that are not the window's
            own.ids[: len(of_layer)].copy_(of_layer)
        self.first_come.watch(ids.shape[1])

    def near(self) -> list[set[int]]:
        """Experts in slots, by the tables."""
        fars = [layer.far for layer in self.layers if layer.far is not None]
        return [{e for e, n in enumerate(far.order.tolist()) if n < 0} for far in fars]

    def check(self) -> None:
        """Every expert has its own bits where the tables say, and the pool's table is the kernels'."""
        assert hits_ready((x.gate_up, x.down, x.far) for x in self.layers)
        for number, layer in enumerate(self.layers):
            assert layer.far is not None
            if self.pool is not None:
                assert torch.equal(self.pool.buffers.order[number], layer.far.order)
            for expert in range(EXPERTS):
                up, down = self.packed(number, expert)
                for table, part, tiers in (
                    (layer.far.up_at, up, (layer.gate_up, layer.far.gate_up)),
                    (layer.far.down_at, down, (layer.down, layer.far.down)),
                ):
                    for column, kind in enumerate(("words", "scales")):
                        found = {
                            bits.data_ptr(): bits for tier in tiers for bits in getattr(tier, kind)
                        }
                        own = found[int(table[expert, column])]
                        assert torch.equal(own, getattr(part, kind)[0])


def random_ids(num_layers: int, num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_layers, num_rows, EXPERTS, generator=generator).argsort(2)
    return order[..., :TOP].to(torch.int32)


@pytest.mark.parametrize("slots", [*((n,) * 3 for n in range(EXPERTS + 1)), (0, 3, 7)], ids=str)
@pytest.mark.parametrize("budget", [1, 1 << 40], ids=["one at a time", "all at once"])
def test_bits_and_tables_stay_whole_until_every_slot_is_claimed(
    slots: tuple[int, ...], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda.first_come.TRADED_BYTES", budget)
    tiers = Tiers(slots, with_pool=why_unavailable() is None)
    tiers.check()
    for seed in range(30):
        before = tiers.near()
        tiers.window(random_ids(len(slots), 2, seed))
        came = sum(len(now - old) for now, old in zip(tiers.near(), before, strict=True))
        assert came <= (1 if budget == 1 else MANY)
        tiers.check()
    assert tiers.first_come.claims.is_settled
    assert [len(near) for near in tiers.near()] == list(slots)
    settled = tiers.near()
    tiers.window(random_ids(len(slots), 20, 99))
    tiers.window(random_ids(len(slots), 20, 98))
    assert tiers.near() == settled


def test_what_a_window_chose_is_there_in_the_next_and_rows_beyond_it_choose_nothing() -> None:
    tiers = Tiers((2, 2, 2))
    first = chosen([[3, 4]], [[0, 5]], [[1, 0]])
    tiers.window(first)
    assert tiers.near() == [{0, 1}] * 3
    tiers.window(first)
    assert tiers.near() == [{3, 4}, {0, 5}, {0, 1}]
    tiers.check()


def test_nothing_is_copied_once_every_slot_is_claimed_and_nothing_moves_once_it_has_ended() -> None:
    tiers = Tiers((1, 1, 1))
    ids = chosen([[3, 4]], [[3, 4]], [[3, 4]])
    tiers.window(ids)
    tiers.window(ids)
    assert tiers.first_come.claims.is_settled
    seen = tiers.first_come.seen.clone()
    tiers.window(random_ids(3, 3, 1))
    assert torch.equal(tiers.first_come.seen, seen)
    other = Tiers((1, 1, 1))
    other.window(ids)
    other.first_come.end()
    other.window(ids)
    assert other.near() == [{0}] * 3


def test_a_budget_of_bytes_counts_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = sum(part.num_bytes for part in Tiers((1,)).packed(0, 0))
    for budget, trades in ((2 * blob - 1, 1), (4 * blob - 1, 1), (4 * blob, 2)):
        monkeypatch.setattr("engine.cuda.first_come.TRADED_BYTES", budget)
        tiers = Tiers((3, 3, 3))
        ids = chosen([[3, 4]], [[3, 4]], [[3, 4]])
        tiers.window(ids)
        tiers.window(ids)
        assert sum(len(near - {0, 1, 2}) for near in tiers.near()) == trades


def test_what_it_takes_is_planned() -> None:
    """Beside tables and staging, which any tiers take."""
    tiers = Tiers((2, 2, 2))
    first_come, spec = tiers.first_come, tiers.spec
    blob = sum(part.num_bytes for part in tiers.packed(0, 0))
    line = PlanLine(name=EXPERTS_4_BITS, num_bytes=num_pairs(spec) * blob, step=Step.CACHE)
    still, moving = (
        {
            x.name: x.num_bytes
            for x in with_tiers(
                [line], spec, ExpertPlan(num_slots=6, num_in_host=15, is_first_come=is_first_come)
            )
        }
        for is_first_come in (False, True)
    )
    assert ROUTES not in still
    assert moving[HIT_PATH] - still[HIT_PATH] == tensor_bytes(first_come.tensors)
    assert moving[ROUTES] == tensor_bytes(first_come.seen)
