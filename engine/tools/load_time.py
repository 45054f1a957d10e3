"""Seconds and peak memory of loading one model's weights, in a process that does nothing else.

    python -m engine.tools.load_time MODEL [--dtype bfloat16]

Prints one JSON line. `loadtest.load_bench` compares the forms of a model with it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import torch

from engine.config import model_path
from engine.loader import ModelLoader
from engine.sources.opening import open_source, read_spec
from engine.weights import Checkpoint

_MAX_CONTEXT = 256


def load_time(model: str, dtype: torch.dtype) -> dict[str, float | int]:
    """Load onto the CPU as the engine does, without sessions and buffers."""
    torch.set_num_threads(1)
    before = _peak_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    path = model_path(model)
    spec = read_spec(path)
    with Checkpoint(open_source(path, spec)) as checkpoint:
        loader = ModelLoader(
            checkpoint,
            spec,
            dtype=dtype,
            device=torch.device("cpu"),
            exact=True,
            max_context=min(_MAX_CONTEXT, spec.max_position),
        )
        loaded = loader.load(with_draft=spec.num_draft_layers > 0)
    return {
        "wall_s": round(time.perf_counter() - began, 3),
        "cpu_s": round(time.process_time() - cpu_began, 3),
        "weight_bytes": sum(loaded.part_bytes.values()),
        "peak_rss_bytes": _peak_bytes(),
        "rss_before_bytes": before,
    }


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.tools.load_time")
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.dtype == "float32" else torch.bfloat16
    sys.stdout.write(json.dumps(load_time(arguments.model, dtype)) + "\n")


if __name__ == "__main__":
    main()
