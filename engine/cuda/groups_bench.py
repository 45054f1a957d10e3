"""Measures the engine at the real geometry with its layers on one GPU and on several. Run by loadtest.groups_bench.

    python -m engine.cuda.groups_bench --groups 1,2 --out groups.json

Random weights, experts in 4 bits. Engine.run_window is called directly, one call at a time, with what a scheduler would
plan; each number of groups has processes of its own. Times are of the host's clock, over many windows after a warm-up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.cuda.random_model import RandomTensors, real_spec
from engine.interface import DecodeStep, PrefillChunk, SamplingParams, SlotStart, WindowPlan
from engine.loading import assemble, join_stages, load_cuda_step, machine_of
from engine.stage import Source, run
from engine.stages import Stages

if TYPE_CHECKING:
    from engine.engine import TorchEngine
    from engine.loading import Loaded
    from engine.model_spec import ModelSpec

_MAX_CONTEXT = 17_000
_CHUNK = 2048
_PROMPT = 512
_WARM_UP = 10
_WINDOWS = 60
_LONG_PROMPT = 16_384
_SHAPES = ((1, 0), (4, 0), (1, 4), (4, 4))
"""Slots and drafts of each."""


def read_spec(config: EngineConfig) -> ModelSpec:
    """`config.model` is the number of layers."""
    return real_spec(num_hidden_layers=int(config.model))


def load(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Loaded:
    """A part with random weights; the same tensor has the same values wherever it lies."""
    source = RandomTensors(device)
    machine = machine_of(device)
    return load_cuda_step(source, config, spec, machine, device, spec.vocab_size, random=source)


def make_engine(layers: int, groups: int) -> TorchEngine:
    """Layers on as many GPUs as there are groups."""
    config = EngineConfig(
        model=str(layers), max_context=_MAX_CONTEXT, chunk_tokens=_CHUNK, num_groups=groups
    )
    began, spec, device = time.perf_counter(), read_spec(config), torch.device("cuda")
    if groups == 1:
        return assemble(config, spec, load(config, spec, device), began)
    stages = Stages(config, spec, device, program="engine.cuda.groups_bench")
    try:
        loaded = load(config, stages.part, stages.device)
        return join_stages(config, spec, loaded, stages, began)
    except BaseException:
        stages.close()
        raise


@dataclass(slots=True)
class Decoding:
    """Sequences that decode for ever."""

    engine: TorchEngine
    slots: range
    max_draft: int
    num_tokens: int = 0
    num_windows: int = 0
    """Windows of one slot, counted when their tokens come."""
    in_flight: tuple[int, ...] = ()
    said: Any = None

    def window(self) -> None:
        """One call, for all slots that are not in flight."""
        steps = tuple(
            DecodeStep(slot=slot, max_draft=self.max_draft, spec_min_p=0.0)
            for slot in self.slots
            if slot not in self.in_flight
        )
        result = self.engine.run_window(WindowPlan(decodes=steps))
        self.in_flight = result.in_flight
        self.num_windows += len(result.tokens)
        for tokens in result.tokens:
            self.num_tokens += len(tokens.token_ids)
            self.said[tokens.slot] += tokens.token_ids

    def land(self) -> None:
        """Let everything come back."""
        while self.in_flight:
            result = self.engine.run_window(WindowPlan())
            self.in_flight = result.in_flight
            for tokens in result.tokens:
                self.said[tokens.slot] += tokens.token_ids


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, 200_000, (num_tokens,), generator=generator).tolist())


def read(engine: TorchEngine, slot: int, ids: tuple[int, ...]) -> list[int]:
    """Read a prompt alone; its first output token."""
    start = SlotStart(slot=slot, sampling=SamplingParams(temperature=0.0))
    starts: tuple[SlotStart, ...] = (start,)
    said: list[int] = []
    for first in range(0, len(ids), _CHUNK):
        piece = ids[first : first + _CHUNK]
        is_last = first + _CHUNK >= len(ids)
        chunk = PrefillChunk(slot=slot, start=first, token_ids=piece, is_last=is_last)
        result = engine.run_window(WindowPlan(starts=starts, chunks=(chunk,)))
        starts = ()
        said += [i for tokens in result.tokens for i in tokens.token_ids]
    if not said:
        raise SystemExit("a prompt gave no token")
    return said


def decode(engine: TorchEngine, slots: int, max_draft: int) -> dict[str, Any]:
    """Windows of so many slots, each with so many drafts."""
    said = {slot: read(engine, slot, prompt(_PROMPT, slot)) for slot in range(slots)}
    decoding = Decoding(engine, range(slots), max_draft, said=said)
    for _ in range(_WARM_UP):
        decoding.window()
    windows, tokens = decoding.num_windows, decoding.num_tokens
    began = time.perf_counter()
    while decoding.num_windows < windows + _WINDOWS * slots:
        decoding.window()
    seconds = time.perf_counter() - began
    windows, tokens = decoding.num_windows - windows, decoding.num_tokens - tokens
    decoding.land()
    shortest = min(map(len, said.values()))
    text = [said[slot][: min(shortest, _WINDOWS)] for slot in range(slots)]
    found: dict[str, Any] = {
        "slots": slots,
        "drafts": max_draft,
        "ms_per_window_of_all_slots": seconds / windows * slots * 1e3,
        "tokens_per_s": tokens / seconds,
        "text": hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12],
    }
    if max_draft:
        for acceptance in (0.5, 0.8):
            each = sum(acceptance**i for i in range(max_draft + 1))
            found[f"computed_tokens_per_s_at_{acceptance}"] = windows * each / seconds
    return found


def prefill(engine: TorchEngine) -> dict[str, Any]:
    """One long prompt."""
    ids = prompt(_LONG_PROMPT, 9)
    read(engine, 0, ids[: 2 * _CHUNK])
    times: list[float] = []
    said: list[int] = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        said = read(engine, 0, ids)
        times.append(time.perf_counter() - began)
    return {
        "prompt_tokens": len(ids),
        "chunk": _CHUNK,
        "tokens_per_s": len(ids) / sorted(times)[1],
        "said": said,
    }


def measure(layers: int, groups: int) -> dict[str, Any]:
    """All figures of one number of groups."""
    engine = make_engine(layers, groups)
    try:
        found = {
            "groups": groups,
            "devices": engine.info.device,
            "kernels": engine.info.kernels,
            "load_s": engine.info.load_s,
            "decode": [decode(engine, slots, drafts) for slots, drafts in _SHAPES],
            "prefill": prefill(engine),
        }
    finally:
        engine.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--groups", default="1,2", help="numbers of GPUs, with commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fd", type=int, help="inherited socket of a stage")
    options = parser.parse_args()
    if options.fd is not None:
        os._exit(run(options.fd, Source(read_spec, load)))
    counts = [int(count) for count in options.groups.split(",")]
    if len(counts) == 1:
        results = [measure(options.layers, counts[0])]
    else:
        results = [_measure_alone(options.layers, count) for count in counts]
    for one in results if len(counts) == 1 else ():
        print(json.dumps(one, indent=1), flush=True)  # noqa: T201 - the program's result
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    return 0


def _measure_alone(layers: int, groups: int) -> dict[str, Any]:
    """In a process of its own, which gives all memory back."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "one.json"
        command = [sys.executable, "-m", "engine.cuda.groups_bench", "--layers", str(layers)]
        subprocess.run([*command, "--groups", str(groups), "--out", str(out)], check=True)
        return json.loads(out.read_text())[0]


if __name__ == "__main__":
    raise SystemExit(main())
