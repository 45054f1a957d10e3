"""Programs of the engine, run beside the gateway so that nothing here loads tensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def engine_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of `python -m MODULE ARGUMENTS`, importing from where this package was imported."""
    root = str(Path(__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join((root, inherited) if inherited else (root,))
    command = [sys.executable, "-P", "-m", module, *arguments]
    return command, os.environ | {"PYTHONPATH": paths}
