"""A start as a contract: what is taken at each checkpoint against what was planned (product.md D7).

`held_bytes` looks at every tensor that is alive, so memory that no line of the plan names shows as well.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import PlanMismatch
from engine.memory_plan import MIB, MemoryPlan, Step

_TOLERANCE = 0.02
_TOLERANCE_BYTES = 64 * MIB
_UNNAMED_BYTES = MIB
"""Hash constants, tables of fixed size and the like: two percent of a toy model would not hold them."""
USUAL_LIBRARY_BYTES = 32 * MIB
"""`library_bytes` of a device of compute capability 9, for plans of machines that are not this one."""
_log = logging.getLogger("engine.startup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One checkpoint that was reached."""

    step: Step
    planned_bytes: int
    actual_bytes: int


@dataclass(slots=True)
class StartupMarks:
    """Checks each checkpoint as it is reached. The plan may be made more precise between two of them.

    taken_bytes: what the plan names of memory that was taken before.
    """

    plan: MemoryPlan
    marks: list[Mark] = field(default_factory=list[Mark])
    taken_bytes: int = 0
    _base_bytes: int = field(default_factory=lambda: _settled_bytes())
    _passing_bytes: int = 0

    def reach(self, step: Step, *, passing_bytes: int = 0) -> None:
        """Compare. passing_bytes: what a rehearsal of this step took and gave back, as every later one will.

        Raises PlanMismatch if the two differ by more than `allowed_bytes`.
        """
        self._passing_bytes += passing_bytes
        actual = held_bytes() - self._base_bytes + self.taken_bytes + self._passing_bytes
        mark = Mark(step=step, planned_bytes=self.plan.until(step), actual_bytes=actual)
        self.marks.append(mark)
        _log.info(
            "memory, %s: planned %.1f MiB, actual %.1f MiB",
            step,
            mark.planned_bytes / MIB,
            mark.actual_bytes / MIB,
        )
        allowed = allowed_bytes(mark.planned_bytes)
        if abs(mark.planned_bytes - mark.actual_bytes) > allowed:
            raise PlanMismatch(
                f"at the checkpoint '{step}' {mark.planned_bytes / MIB:.1f} MiB were planned but "
                f"{mark.actual_bytes / MIB:.1f} MiB are taken; allowed is a difference of {allowed / MIB:.1f} MiB"
            )


def allowed_bytes(planned_bytes: int) -> float:
    """How far a checkpoint may be off: 2 % or 64 MiB, whichever is less, but always 1 MiB."""
    return max(_UNNAMED_BYTES, min(_TOLERANCE * planned_bytes, _TOLERANCE_BYTES))


def held_bytes() -> int:
    """Bytes of all live tensors on the CPU, and what torch's allocator was asked for on CUDA devices.

    What the allocator gives beyond that, by rounding up, is its own and depends on what was freed before.
    Of a file that is mapped as a whole only what float tensors use in place counts: those are weights.
    """
    storages: dict[int, int] = {}
    in_files: set[tuple[int, int]] = set()
    packed = 0
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor):
            continue
        if thing.layout != torch.strided:
            packed += thing.numel() * thing.element_size()
        elif thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.filename is None:
                storages[storage.data_ptr()] = storage.nbytes()
            elif thing.dtype.is_floating_point:
                in_files.add((thing.data_ptr(), thing.numel() * thing.element_size()))
    return sum(storages.values()) + _union(in_files) + packed + _device_bytes()


def _settled_bytes() -> int:
    """`held_bytes` without what only cycles of references keep, an engine that failed say: it may go at any time."""
    gc.collect()
    return held_bytes()


def _union(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes that ranges (start, length) cover together."""
    covered = end = 0
    for start, length in sorted(ranges):
        covered += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return covered


def _device_bytes() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return sum(_requested_bytes(i) for i in range(torch.cuda.device_count()))


def _requested_bytes(device: int | torch.device) -> int:
    return torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0)


@functools.cache
def library_bytes(device: torch.device) -> int:
    """Memory that torch's product library keeps on a device, from its first product on; 0 if it has had that before.

    Asks for that product, so that a plan can name what would otherwise show up somewhere on the way.
    """
    if device.type != "cuda":
        return 0
    before = _requested_bytes(device)
    ones = torch.ones(16, 16, device=device)
    product = ones @ ones
    torch.cuda.synchronize(device)
    del ones, product
    return _requested_bytes(device) - before


def free_bytes(device: torch.device) -> int:
    """What a device has left for this process; on the CPU what the host could give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def free_host_bytes() -> int:
    """Memory that the host could give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
