"""Seconds and peak memory of loading one model's weights, in a process that does nothing else.

    python -m engine.tools.load_time MODEL [--dtype bfloat16] [--expert-cache N]

Prints one JSON line. `loadtest.load_bench` compares the forms of a model with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.loading import load_engine

_MAX_CONTEXT = 256


def load_time(model: str, dtype: str, expert_cache: int | None) -> dict[str, float | int]:
    """Load onto the CPU as a server does, with one slot and a short context beside the weights."""
    config = EngineConfig(
        model=model,
        device="cpu",
        dtype=dtype,
        threads=1,
        num_slots=1,
        max_context=_MAX_CONTEXT,
        expert_cache=expert_cache,
    )
    gc.freeze()
    before, own_before = _peak_bytes(), _own_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    engine = load_engine(config)
    found = {
        "wall_s": round(time.perf_counter() - began, 3),
        "cpu_s": round(time.process_time() - cpu_began, 3),
        "peak_bytes": _peak_bytes() - before,
        "own_bytes": _own_bytes() - own_before,
    }
    engine.close()
    return found


def _own_bytes() -> int:
    """Memory that no file backs: what the kernel cannot take back by forgetting pages. 0 where it does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(x.split()[1]) * 1024 for x in lines if x.startswith(("RssAnon:", "RssShmem:")))


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.tools.load_time")
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--expert-cache", type=int)
    arguments = parser.parse_args()
    found = load_time(arguments.model, arguments.dtype, arguments.expert_cache)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
