"""Instruments: what a step allocates, and how long the stages of a window take.

Each refuses where it could only print plausible zeros.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import InstrumentRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """What a step allocated. tensors: new storages that torch's operations gave back; device_calls: cudaMalloc."""

    tensors: int
    num_bytes: int
    peak_bytes: int
    """Most of them that were alive together."""
    device_calls: int


def count_allocations(step: Callable[[], object]) -> Allocations:
    """Run a step in this thread and count. Memory that an operation frees before it returns is not seen."""
    device_calls_before = _device_calls()
    with _Counter() as counter:
        step()
    return Allocations(
        tensors=counter.tensors,
        num_bytes=counter.num_bytes,
        peak_bytes=counter.peak_bytes,
        device_calls=_device_calls() - device_calls_before,
    )


class _Counter(TorchDispatchMode):
    """Sees every operation's results: a storage that was not there before is an allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0
        self.num_bytes = 0
        self.peak_bytes = 0
        self._live_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The wrapper that torch would add loads its compiler, which takes seconds; nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in _tensors((args, list((kwargs or {}).values())))
        }
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.tensors += 1
        self.num_bytes += size
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        # The Python object of a storage lives exactly as long as the storage.
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._live_bytes -= size


def _tensors(tree: object) -> Iterator[Tensor]:
    """Tensors with memory of their own kind, in an operation's arguments or results."""
    if isinstance(tree, Tensor):
        if tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for item in cast("Sequence[object]", tree):
            yield from _tensors(item)


def _device_calls() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


class StageTimer:
    """Seconds of named stages, added up over windows.

    On a CUDA device it records events; an event recorded while a graph is captured is dropped in silence and the
    numbers would be zeros that read as "every stage is free", so it refuses there.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time what is run inside. Raises InstrumentRefused while a graph is captured."""
        if not self._on_device:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)
            return
        if torch.cuda.is_current_stream_capturing():
            raise InstrumentRefused(
                f"stage {name}: a graph is being captured, where timing events are dropped: time without capture"
            )
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

    def seconds(self) -> dict[str, float]:
        """Sum of each stage so far; waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            for name, first, last in self._events:
                self._add(name, first.elapsed_time(last) / 1000)
            self._events.clear()
        return dict(self._seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
