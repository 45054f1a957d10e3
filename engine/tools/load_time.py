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

from engine.config import EngineConfig
from engine.engine import load_engine

_MAX_CONTEXT = 256


def load_time(model: str, dtype: str) -> dict[str, float | int]:
    """Load onto the CPU as a server does, with one slot and a short context beside the weights."""
    config = EngineConfig(
        model=model, device="cpu", dtype=dtype, threads=1, num_slots=1, max_context=_MAX_CONTEXT
    )
    before = _peak_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    load_engine(config)
    return {
        "wall_s": round(time.perf_counter() - began, 3),
        "cpu_s": round(time.process_time() - cpu_began, 3),
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
    sys.stdout.write(json.dumps(load_time(arguments.model, arguments.dtype)) + "\n")


if __name__ == "__main__":
    main()
