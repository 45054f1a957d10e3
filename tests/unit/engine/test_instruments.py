"""Instruments count what happens, and refuse where they could not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.config import EngineConfig, text_path
from engine.engine import TorchEngine
from engine.errors import ConversationsMismatch, InstrumentRefused
from engine.expert_profile import profile_of_counts, read_profile
from engine.instruments import StageTimer, count_allocations
from engine.interface import DecodeStep, PrefillChunk, SamplingParams, SlotStart, WindowPlan
from engine.loading import load_engine
from engine.state import Rows
from engine.steps import TimedSteps
from engine.tools.app import app
from engine.tools.floor import _staged, measure_floor
from engine.tools.profile import count_routes, hit_rate, read_conversations
from tests.random_weights import SMALL, write_checkpoint


def test_allocations_are_counted_and_views_are_not() -> None:
    kept = torch.zeros(1000)
    out = torch.zeros(1000)

    def step() -> None:
        a = kept + 1  # 4000 bytes
        b = a[:500].view(5, 100).transpose(0, 1)
        del a
        b.add_(1)
        del b
        torch.mul(kept, 2, out=out)
        c = torch.cat((kept, out))  # 8000 bytes, after the first are gone
        c[:10] = 0

    found = count_allocations(step)
    assert (found.tensors, found.num_bytes, found.peak_bytes) == (2, 12_000, 8000)
    assert count_allocations(lambda: out.add_(kept)).tensors == 0


def test_storages_that_live_together_add_up() -> None:
    def step() -> None:
        held = [torch.empty(100) for _ in range(3)]
        held.pop()
        held.append(torch.empty(100))

    assert count_allocations(step).peak_bytes == 1200


def test_stages_add_up_by_name() -> None:
    timer = StageTimer(torch.device("cpu"))
    for name in ("a", "b", "a"):
        with timer.stage(name):
            pass
    assert list(timer.seconds()) == ["a", "b"]
    assert all(seconds >= 0 for seconds in timer.seconds().values())


def test_stage_timing_refuses_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    timer = StageTimer(torch.device("cuda"))
    with pytest.raises(InstrumentRefused, match="stage head: a graph is being captured"):
        timer.stage("head").__enter__()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("floor") / "small", SMALL)


def torch_engine(checkpoint: Path, kernels: str = "torch", **numbers: int) -> TorchEngine:
    """By default one whose layers can be looked at."""
    config = EngineConfig(model=str(checkpoint), device="cpu", threads=1, kernels=kernels)
    return load_engine(replace(config, **numbers))


def test_the_floor_times_every_layer_of_the_window_that_the_engine_runs(checkpoint: Path) -> None:
    engine = torch_engine(checkpoint, num_slots=2, max_context=64)
    floor = measure_floor(engine, rows=3, position=10, windows=2)
    assert (floor.num_rows, floor.num_layers) == (6, 4)
    kinds = {"GDN layers", "GDN layers with PLE", "QSA layers"}
    assert set(floor.stages) == {"start", *kinds, "head"}
    assert min(floor.stages.values()) > 0 < floor.window_s
    assert floor.allocations.tensors > 0
    text = floor.text()
    for part in ("CPU floor layers+head", "ms layers (4)", "ms per layer", "ms LM head", "6 rows"):
        assert part in text
    assert engine.info.kernels in text


def test_the_floor_of_the_compiled_step() -> None:
    config = EngineConfig(device="cpu", threads=1, num_slots=2, max_context=64, kernels="compiled")
    engine = load_engine(config)
    floor = measure_floor(engine, rows=3, position=10, windows=3)
    assert set(floor.stages) == {"start", "PLE", "GDN", "QSA", "MoE", "head"}
    assert 0 < sum(floor.stages.values())
    assert (floor.num_rows, floor.num_layers, floor.allocations.tensors) == (6, 8, 0)
    assert "ms all MoE" in floor.text()
    # Without a probe nothing is timed or counted.
    assert isinstance(engine.steps, TimedSteps)
    seconds = engine.steps.stage_seconds(lambda: None)
    assert set(seconds.values()) == {0.0}
    engine.close()


def test_the_staged_window_is_the_window(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = torch_engine(checkpoint, num_slots=1, max_context=64)
    seen: list[torch.Tensor] = []
    head = type(engine.trunk).logits
    monkeypatch.setattr(
        type(engine.trunk), "logits", lambda trunk, x: seen.append(x) or head(trunk, x)
    )
    rows = Rows([0], [2], [5], torch.device("cpu"))
    ids = torch.arange(6).view(2, 3)
    with torch.inference_mode():
        engine.start(0)
        _staged(engine, ids, rows, StageTimer(torch.device("cpu")))
        engine.start(0)  # a window moves the slot on by its first row
        assert torch.equal(engine.trunk.window(ids, rows, engine.state), seen[0])


def test_a_steady_window_of_the_compiled_step_allocates_no_tensor() -> None:
    """Drafting, verifying, accepting and picking for four slots, some chains kept whole and some cut."""
    engine = load_engine(EngineConfig(device="cpu", threads=1, max_context=128, kernels="compiled"))
    sampling = SamplingParams(temperature=1.0, seed=3)
    starts = tuple(SlotStart(slot=slot, sampling=sampling) for slot in range(4))
    chunks = tuple(
        PrefillChunk(slot=slot, start=0, token_ids=(*range(100, 120), slot), is_last=True)
        for slot in range(4)
    )
    engine.run_window(WindowPlan(starts=starts, chunks=chunks))
    seen: set[tuple[int, int]] = set()

    def window(min_p: float) -> None:
        decodes = tuple(DecodeStep(slot=s, max_draft=4, spec_min_p=min_p) for s in range(4))
        tokens = engine.run_window(WindowPlan(decodes=decodes)).tokens
        seen.update((t.num_drafted, t.num_accepted) for t in tokens)

    window(0.5)
    for min_p in (0.0, 0.5, 0.9, 0.0):
        found = count_allocations(lambda min_p=min_p: window(min_p))
        assert (found.tensors, found.num_bytes) == (0, 0)
    assert len({drafted for drafted, _ in seen}) > 1
    assert any(0 < accepted < drafted for drafted, accepted in seen)
    engine.close()


def test_a_profile_counts_every_row_and_ranks_what_was_routed(checkpoint: Path) -> None:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", threads=1, num_slots=1, max_context=16,
        max_draft=0, kernels="torch",
    )  # fmt: skip
    engine = load_engine(config)
    texts = [[5, 6, 7, 8] * 10, [9, 1, 9]]  # the first is longer than the context
    counts = count_routes(engine, texts)
    assert [sum(layer) for layer in counts] == [2 * 43] * 4
    ranking = profile_of_counts(counts)
    rates = [hit_rate(ranking, counts, n) for n in range(21)]
    assert rates[0] == 0 and rates[20] == 1 and rates == sorted(rates)
    assert all(layer.moe.routed is None for layer in engine.trunk.layers)
    compiled = torch_engine(checkpoint, "compiled", num_slots=1, max_context=16)
    assert count_routes(compiled, texts) == counts  # with a draft layer, whose routes are its own


def test_conversations_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    lines = [
        {"ids": [1, 2, 3]},
        {"text": "a tide"},
        {"messages": [{"role": "user", "content": "a tide"}]},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    ids, text, chat = read_conversations(file, text_path("default"), 8192)
    assert ids == [1, 2, 3]
    assert len(chat) > len(text) > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: "),
        ("[]", "line 1: required an object with messages"),
        ('{"ids": [8192]}', "line 1: ids: required whole numbers from 0 to 8191"),
        ('{"ids": [true]}', "line 1: ids: required whole numbers"),
        ("", "has no conversation"),
        ('{"ids": []}', "its conversations have no token"),
    ],
)
def test_bad_conversations_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(ConversationsMismatch, match=message):
        list(read_conversations(file, tmp_path, 8192))
    with pytest.raises(ConversationsMismatch, match="nowhere: cannot be read"):
        list(read_conversations(tmp_path / "nowhere", tmp_path, 8192))


def test_the_command_writes_a_profile_that_a_start_takes(checkpoint: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "c.jsonl", tmp_path / "p.bin"
    file.write_text('{"ids": [5, 6, 7, 8, 9]}', encoding="utf-8")
    done = CliRunner().invoke(
        app, ["profile", str(file), str(checkpoint), "--out", str(out), "--dtype", "float32"]
    )
    assert done.exit_code == 0, done.output
    assert "5 ids, 20 pairs of layer and expert ranked" in done.output
    assert read_profile(out).ranked_per_layer() == (5, 5, 5, 5)


@pytest.mark.parametrize("out", ["nowhere/p.bin", "."])
def test_a_profile_that_could_not_be_written_is_refused_before_the_work(
    tmp_path: Path, out: str
) -> None:
    missing = str(tmp_path / "c.jsonl")
    done = CliRunner().invoke(app, ["profile", missing, "--out", str(tmp_path / out)])
    assert isinstance(done.exception, SystemExit), done.output
    assert "--out: found" in done.output.replace("\n", " ")
    assert done.exit_code == 2
