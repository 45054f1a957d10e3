"""References run on the CPU beside the device's work, in as many processes as pytest-xdist starts."""

from __future__ import annotations

import os

import torch


def pytest_sessionstart() -> None:
    """Share the cores: with every process on all of them, references took ten times as long."""
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))
