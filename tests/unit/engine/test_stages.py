"""How layers, slots and work are divided over stages, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigMismatch
from engine.flight import Flight, must_land_first, named_slots
from engine.interface import DecodeStep, PrefillChunk, SavePage, WindowPlan
from engine.model_spec import spec_from_config
from engine.stages import check_stages, split_layers, stage_device
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

SPEC = spec_from_config(REAL_TEXT_CONFIG, name="real")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [4, 5, 8, 13, 48])
def test_stages_share_the_layers(num_layers: int, count: int) -> None:
    runs = split_layers(num_layers, count)
    assert len(runs) == count
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    assert min(map(len, runs)) >= 1
    # The last stage also drafts and picks.
    assert len(runs[-1]) <= min(map(len, runs))


def test_a_part_has_its_layers_and_its_end_of_the_model() -> None:
    first, middle, last = (SPEC.part(run) for run in (range(20), range(20, 40), range(40, 48)))
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (
        True,
        False,
        False,
        True,
    )
    assert not middle.is_first and not middle.is_last
    for kind in ("qsa_layers", "gdn_layers", "ple_layers"):
        parts = [layer for part in (first, middle, last) for layer in getattr(part, kind)]
        assert parts == list(getattr(SPEC, kind))
    assert first.ple is not None
    assert middle.ple is None
    assert [part.num_draft_layers for part in (first, middle, last)] == [0, 0, 1]
    assert SPEC.part(range(48)) == SPEC


def test_groups_that_the_machine_cannot_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(num_groups=3)
    cuda = torch.device("cuda")
    with pytest.raises(ConfigMismatch, match="found 3, required at most the 2 GPUs"):
        check_stages(config, SPEC, cuda)
    with pytest.raises(ConfigMismatch, match="found cuda:1, required cuda or auto"):
        check_stages(replace(config, num_groups=2), SPEC, torch.device("cuda:1"))
    check_stages(replace(config, num_groups=2), SPEC, cuda)
    assert [str(stage_device(cuda, index)) for index in range(2)] == ["cuda:0", "cuda:1"]


def test_of_two_groups_one_flies_between_calls() -> None:
    flight: Flight[str] = Flight(2)
    steps = [DecodeStep(slot=slot, max_draft=0, spec_min_p=0.0) for slot in (0, 1, 2, 3)]
    even, odd = flight.groups(steps)
    assert [step.slot for step in even] == [0, 2]
    assert [step.slot for step in odd] == [1, 3]
    flight.begin("even", [0, 2])
    flight.begin("odd", [1, 3])
    assert flight.next_due(answered=False) == "even"
    assert flight.next_due(answered=True) is None
    assert flight.slots == (1, 3)
    # Somebody waits for these, and nobody else is answered.
    assert flight.next_due(answered=False) == "odd"
    assert flight.next_due(answered=False) is None


def test_a_piece_that_nobody_waits_for_flies_on() -> None:
    flight: Flight[str] = Flight(2)
    flight.begin("piece", ())
    assert flight.next_due(answered=False) is None
    assert flight.slots == ()
    flight.begin("next piece", ())
    assert flight.next_due(answered=False) == "piece"
    assert flight.next() == "next piece"
    assert flight.next() is None


def test_one_group_never_flies() -> None:
    flight: Flight[str] = Flight(1)
    flight.begin("piece", ())
    assert flight.next_due(answered=True) == "piece"


def test_what_moves_state_waits_for_what_flies() -> None:
    chunk = PrefillChunk(slot=2, start=0, token_ids=(1,), is_last=True)
    save = SavePage(slot=1, page_id=0, index=0)
    assert not must_land_first(WindowPlan(chunks=(chunk,)))
    assert must_land_first(WindowPlan(chunks=(chunk,), saves=(save,)))
    assert must_land_first(WindowPlan(drop_page_ids=(3,)))
    assert named_slots(WindowPlan(chunks=(chunk,), saves=(save,))) == {2}
