"""How 4-bit experts are divided between a device and pinned host memory, planned, and found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.quant import Packed4, pack4
from engine.cuda.tiers import ExpertPlaces, FarExperts, empty_experts, hits_ready
from engine.errors import ExpertsNotReady, PlanRefused
from engine.expert_profile import profile_of_counts, write_profile
from engine.memory_plan import (
    EXPERTS_4_BITS,
    HIT_PATH,
    MIB,
    ROUTES,
    TIER_ONE,
    TIER_TWO,
    Place,
    PlanLine,
    Step,
)
from engine.model_spec import ModelSpec, spec_from_config
from engine.startup_plan import Machine, StartPlan, plan_start
from tests.random_weights import SMALL

BLOB = MIB
LAYERS, EXPERTS = 4, 5
PAIRS = LAYERS * EXPERTS
BEFORE, LATER = 100 * MIB, 50 * MIB
TABLES = PAIRS * 36
ROUTED = LAYERS * 20 * 2 * 4
"""Experts that twenty rows of a window choose."""
CONFIG = EngineConfig(device="cuda", max_context=64, num_slots=1, vram_reserve_mib=0)
CPU = torch.device("cpu")


def make_spec() -> ModelSpec:
    return spec_from_config(SMALL, name="small")


def planned(config: EngineConfig, device_mib: float, host_mib: float = 1000) -> StartPlan:
    """A step of 100 MiB of weights, experts of 1 MiB each, and buffers of 50 MiB."""
    lines = (
        PlanLine(name="gdn", num_bytes=BEFORE, step=Step.WEIGHTS),
        PlanLine(name=EXPERTS_4_BITS, num_bytes=PAIRS * BLOB, step=Step.CACHE),
        PlanLine(name="step buffers", num_bytes=LATER, step=Step.HITS),
    )
    machine = Machine(
        has_gpu=True, device_bytes=int(device_mib * MIB), host_bytes=int(host_mib * MIB)
    )
    return plan_start(config, make_spec(), machine, torch.bfloat16, step_lines=lines)


def held(plan: StartPlan) -> dict[str, int]:
    return {line.name: line.num_bytes for line in plan.memory.lines}


def test_the_geometry_is_the_one_that_the_numbers_are_for() -> None:
    assert (make_spec().num_layers, make_spec().moe.num_experts) == (LAYERS, EXPERTS)


def test_auto_keeps_every_expert_on_the_device_where_all_fit() -> None:
    plan = planned(CONFIG, 1000)
    assert held(plan)[EXPERTS_4_BITS] == PAIRS * BLOB
    assert TIER_ONE not in held(plan)
    assert not plan.experts.is_tiered


def test_auto_takes_what_fits_where_not_all_do() -> None:
    """100 + 50 MiB beside the experts, five experts for staging, one on its way: seven slots are left of 163 MiB."""
    plan = planned(CONFIG, 164)
    assert plan.experts.is_tiered
    assert plan.experts.slots == (2, 2, 2, 1)
    # Those that are read first, until others come: no profile ranks them.
    assert plan.experts.is_first_come
    assert plan.experts.in_slots == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)}
    lines = held(plan)
    assert (lines[TIER_ONE], lines[TIER_TWO]) == (7 * BLOB, 13 * BLOB)
    assert lines[HIT_PATH] == TABLES + 13 * 4 + EXPERTS * BLOB + BLOB + 16 + ROUTED
    assert lines[ROUTES] == ROUTED
    assert EXPERTS_4_BITS not in lines
    assert plan.memory.total(Place.HOST) == 13 * BLOB + ROUTED
    assert plan.memory.total(Place.DEVICE) <= 164 * MIB


def test_what_is_measured_to_be_free_decides_in_the_end() -> None:
    plan = planned(CONFIG, 164).resized(61 * MIB)
    assert sum(plan.experts.slots) == 4
    assert held(plan)[TIER_TWO] == 16 * BLOB


@pytest.mark.parametrize("num_slots", range(PAIRS + 1))
def test_every_number_of_slots_is_planned_in_the_bytes_of_the_packed_form(num_slots: int) -> None:
    plan = planned(replace(CONFIG, expert_cache=num_slots), 1000)
    lines = held(plan)
    assert lines[TIER_ONE] == num_slots * BLOB
    assert lines[TIER_TWO] == (PAIRS - num_slots) * BLOB
    assert sum(len(plan.experts.near(layer)) for layer in range(LAYERS)) == num_slots
    assert plan.experts.is_first_come == (ROUTES in lines) == (0 < num_slots < PAIRS)


def test_a_profile_says_who_is_near(tmp_path: Path) -> None:
    file = tmp_path / "ranking.bin"
    write_profile(file, profile_of_counts([list(range(EXPERTS))] * LAYERS))
    plan = planned(replace(CONFIG, expert_cache=6, expert_profile=str(file)), 1000)
    assert [plan.experts.near(layer) for layer in range(LAYERS)] == [{3, 4}, {3, 4}, {4}, {4}]
    # They stay, so nothing is taken for others on their way.
    assert not plan.experts.is_first_come
    assert ROUTES not in held(plan)
    assert held(plan)[HIT_PATH] == TABLES + 14 * 4 + EXPERTS * BLOB


def test_what_fits_nowhere_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlanRefused, match=r"needs 13 MiB of RAM but 10 MiB are available.*experts"):
        planned(CONFIG, 164, host_mib=10)
    with pytest.raises(PlanRefused, match=r"--expert-cache 9: needs 65 MiB .* 60 MiB are free"):
        planned(replace(CONFIG, expert_cache=9), 160.5)
    with pytest.raises(PlanRefused, match=r"--expert-cache auto: one slot needs 57 MiB free"):
        planned(CONFIG, 150)


class Held:
    """One layer's experts, each of values that name it."""

    def __init__(self, near: set[int]) -> None:
        spec = make_spec()
        places = ExpertPlaces(spec, near, CPU)
        places.open_host()
        for expert in range(EXPERTS):
            places.put(expert, *self.packed(expert))
        self.gate_up, self.down = places.slots
        self.far = places.far()

    @staticmethod
    def packed(expert: int) -> tuple[Packed4, Packed4]:
        hidden, width = make_spec().hidden, make_spec().moe.expert_dim
        generator = torch.Generator().manual_seed(expert)
        return (
            pack4(torch.randn(1, 2 * width, hidden, generator=generator)),
            pack4(torch.randn(1, hidden, width, generator=generator)),
        )

    def ready(self) -> bool:
        return hits_ready([(self.gate_up, self.down, None), (self.gate_up, self.down, self.far)])

    def find(self, expert: int) -> tuple[Packed4, Packed4]:
        """What lies at the expert's addresses."""
        parts = ((self.far.up_at, self.gate_up, self.far.gate_up),)
        parts += ((self.far.down_at, self.down, self.far.down),)
        found: list[Packed4] = []
        for table, *tiers in parts:
            words, scales = table[expert].tolist()
            homes = {
                part.words[i].data_ptr(): part for part in tiers for i in range(len(part.words))
            }
            part = homes[words]
            place = [p.data_ptr() for p in part.words].index(words)
            assert part.scales[place].data_ptr() == scales
            found.append(Packed4(part.words[place : place + 1], part.scales[place : place + 1]))
        return found[0], found[1]


@pytest.mark.parametrize("near", [set[int](), {2}, {0, 3, 4}, set(range(EXPERTS))], ids=str)
def test_every_expert_is_found_wherever_it_lies(near: set[int]) -> None:
    layer = Held(near)
    assert layer.ready()
    assert layer.far.ids.tolist() == sorted(set(range(EXPERTS)) - near)
    for expert in range(EXPERTS):
        for found, wanted in zip(layer.find(expert), Held.packed(expert), strict=True):
            assert torch.equal(found.words, wanted.words)
            assert torch.equal(found.scales, wanted.scales)


def _null(far: FarExperts) -> None:
    far.up_at[3, 0] = 0


def _shared(far: FarExperts) -> None:
    far.down_at[1, 1] = far.down_at[0, 1]


def _swapped(far: FarExperts) -> None:
    far.order[[2, 4]] = far.order[[4, 2]]


def _wrong_tier(far: FarExperts) -> None:
    far.order[0] = 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_null, r"2 faults .* layer 1: gate_up words of expert 3 at 0x0 are not in host memory"),
        (_shared, r"layer 1: down scales of expert 1 at 0x\w+ are shared or misplaced"),
        (_swapped, r"1 faults .* layer 1: 3 experts in host memory are not in their order"),
        (_wrong_tier, r"layer 1: gate_up words of expert 0 at 0x\w+ are not in host memory"),
    ],
)
def test_tables_that_are_half_set_up_are_refused(
    spoil: Callable[[FarExperts], None], message: str
) -> None:
    layer = Held({0, 1})
    spoil(layer.far)
    with pytest.raises(ExpertsNotReady, match=message):
        layer.ready()


def test_no_expert_takes_no_memory() -> None:
    assert sum(part.num_bytes for part in empty_experts(make_spec(), 0, CPU)) == 0
