"""Throughput with one GPU and with several at the real geometry: starts the engine's own measuring program.

    python -m loadtest.groups_bench --groups 1,2 --out groups.json

Options are passed on; see `python -m engine.cuda.groups_bench --help`.
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    """Exit status of the measuring program."""
    return subprocess.run(
        [sys.executable, "-m", "engine.cuda.groups_bench", *sys.argv[1:]], check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
