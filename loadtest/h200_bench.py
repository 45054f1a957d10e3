"""The figures of one GPU at the real geometry: starts the engine's own measuring program, which needs CUDA and Triton.

    python -m loadtest.h200_bench --out h200.json

Options are passed on; see `python -m engine.cuda.bench --help`.
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    """Exit status of the measuring program."""
    return subprocess.run(
        [sys.executable, "-m", "engine.cuda.bench", *sys.argv[1:]], check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
