"""Puts the scheduler's parts together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from scheduler.engine_client import launch_process
from scheduler.service import Scheduler

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig


def build_scheduler(config: SchedulerConfig) -> Scheduler:
    """A scheduler over an engine process; nothing runs before its `start`."""
    return Scheduler(config, partial(launch_process, config))
