"""Routed experts that are held one by one: where each lies, and how its rows are computed.

Tier one is slots on the device, tier two the host's memory. An expert's product is the same function of the same bits
at the same alignment in both tiers, so where it lies cannot change a token. On a CPU the two differ only in who owns
the bytes; beside a GPU, tier two is computed on the host, or with `exact` fetched and computed where tier one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.elementwise import silu
from engine.errors import ExpertsNotReady
from engine.linear import MAX_WINDOW_ROWS, KernelReport, SharedProduct
from engine.memory_plan import ALIGN_BYTES, aligned

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate_up [2*I, H], gate rows first; down [H, I]; each at a multiple of ALIGN_BYTES."""

    gate_up: Tensor
    down: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return (self.gate_up.numel() + self.down.numel()) * self.down.element_size()

    def on(self, device: torch.device) -> ExpertWeights:
        """Themselves if they lie there, else copies."""
        return ExpertWeights(
            self.gate_up.to(device, non_blocking=True), self.down.to(device, non_blocking=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What one expert takes."""

    hidden: int
    width: int
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of a blob: both parts, each padded to ALIGN_BYTES."""
        return (self._gate_up_bytes + aligned(self._down_bytes)) // self.dtype.itemsize

    def views(self, blob: Tensor) -> ExpertWeights:
        """The parts of a blob [num_elements]."""
        at = self._gate_up_bytes // self.dtype.itemsize
        size = self.hidden * self.width
        return ExpertWeights(
            blob[: 2 * size].view(2 * self.width, self.hidden),
            blob[at : at + size].view(self.hidden, self.width),
        )

    @property
    def _down_bytes(self) -> int:
        return self.hidden * self.width * self.dtype.itemsize

    @property
    def _gate_up_bytes(self) -> int:
        return aligned(2 * self._down_bytes)


class ExpertPool:
    """Threads that compute one expert each, on one core each: a small product gains nothing from more."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        threads_before = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(num_workers, "expert", initializer=_begin_worker)
        # Start all of them now: a worker's number of threads is also what later threads begin with, so it is put back.
        barrier = threading.Barrier(num_workers)
        list(self._threads.map(lambda _: barrier.wait(), range(num_workers)))
        torch.set_num_threads(threads_before)

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """function(item) of every item, in inference mode; results in the items' order."""

        def run(item: _Item) -> _Result:
            with torch.inference_mode():
                return function(item)

        return list(self._threads.map(run, items))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _begin_worker() -> None:
    # The first question fills in the process's default, which would come over a number set before it.
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class ExpertProducts:
    """down(silu(gate x) * up x) of one expert's rows; one method for each shape of weights, chosen once."""

    def __init__(self, pool: ExpertPool, *, exact: bool, report: KernelReport) -> None:
        self.pool = pool
        self.exact = exact
        self._report = report
        self._products: dict[_Key, SharedProduct] = {}

    def prepare(self, weights: ExpertWeights) -> None:
        """Choose the methods of these shapes. In the pool: what is probed must run as what is used does."""
        for weight in (weights.gate_up, weights.down):
            key = _key(weight)
            if key not in self._products:

                def probe(_: None, weight: Tensor = weight) -> SharedProduct:
                    return SharedProduct(weight, exact=self.exact, report=self._report)

                self._products[key] = self.pool.map(probe, [None])[0]

    def __call__(self, rows: Tensor, weights: ExpertWeights) -> Tensor:
        """rows [R, H] -> [R, H], in tiles of a window's rows."""
        if rows.shape[0] <= MAX_WINDOW_ROWS:
            return self._tile(rows, weights)
        return torch.cat([self._tile(tile, weights) for tile in rows.split(MAX_WINDOW_ROWS)])

    def _tile(self, rows: Tensor, weights: ExpertWeights) -> Tensor:
        gate_up, down = weights.gate_up, weights.down
        gate, up = self._products[_key(gate_up)](rows, gate_up).chunk(2, dim=-1)
        return self._products[_key(down)](silu(gate).mul_(up), down)


_Key = tuple[torch.Size, torch.dtype, str]


def _key(weight: Tensor) -> _Key:
    return weight.shape, weight.dtype, weight.device.type


class LayerExperts:
    """Where each expert of one layer lies. Filled once: what has a slot keeps it."""

    def __init__(self, num_experts: int, shape: ExpertShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._slots: list[ExpertWeights] = []
        self._num_taken = 0
        self._admits = False
        self._in_slot: list[ExpertWeights | None] = [None] * num_experts
        self._in_host: list[ExpertWeights | None] = [None] * num_experts

    @property
    def num_slots(self) -> int:
        """Slots of tier one."""
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing yet."""
        return len(self._slots) - self._num_taken

    def open(self, num_slots: int) -> None:
        """Allocate the slots, and touch them: memory that was promised only counts once it is used."""
        arena = torch.empty(
            num_slots, self._shape.num_elements, dtype=self._shape.dtype, device=self._device
        ).zero_()
        self._slots = [self._shape.views(blob) for blob in arena]
        self._num_taken = 0
        self._in_slot = [None] * len(self._in_slot)

    def put_slot(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Copy an expert's weights into the next free slot."""
        slot = self._slots[self._num_taken]
        slot.gate_up.copy_(gate_up)
        slot.down.copy_(down)
        self._num_taken += 1
        self._in_slot[expert] = slot

    def put_host(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Hold an expert's weights in the host's memory: where they lie if they can be used there, else in a copy.

        Beside a GPU always a copy, pinned. A file that they lie in must stay as it is.
        """
        pin = self._device.type == "cuda"
        if not pin and self._can_stay(gate_up) and self._can_stay(down):
            self._in_host[expert] = ExpertWeights(gate_up, down)
            return
        blob = torch.empty(self._shape.num_elements, dtype=self._shape.dtype, pin_memory=pin)
        held = self._shape.views(blob)
        held.gate_up.copy_(gate_up)
        held.down.copy_(down)
        self._in_host[expert] = held

    def _can_stay(self, weight: Tensor) -> bool:
        """Whether a weight has the type and the place of one in a blob, and keeps no other memory alive."""
        storage = weight.untyped_storage()
        is_alone = storage.filename is not None or storage.nbytes() == weight.nbytes
        is_placed = weight.is_contiguous() and weight.data_ptr() % ALIGN_BYTES == 0
        return weight.dtype == self._shape.dtype and is_placed and is_alone

    def admit_first_come(self) -> None:
        """From now on an expert that is asked for takes a free slot, as long as there is one."""
        self._admits = self.num_free > 0

    def find(self, expert: int) -> ExpertWeights:
        """The weights of an expert: those in a slot if it has one."""
        found = self._in_slot[expert]
        if found is not None:
            return found
        held = self._in_host[expert]
        assert held is not None
        if not self._admits:
            return held
        self.put_slot(expert, held.gate_up, held.down)
        self._admits = self.num_free > 0
        return self._slots[self._num_taken - 1]

    def samples(self, *, are_fetched: bool) -> list[ExpertWeights]:
        """One expert's weights of each place where they are used. are_fetched: all on the layer's device."""
        held = [
            next((w for w in tier if w is not None), None) for tier in (self._slots, self._in_host)
        ]
        found = [weights for weights in held if weights is not None]
        return [weights.on(self._device) for weights in found] if are_fetched else found

    def faults(self) -> list[str]:
        """What stands in the way of using this layer: nothing, or one sentence for each fault."""
        missing = [
            e
            for e, (slot, host) in enumerate(zip(self._in_slot, self._in_host, strict=True))
            if slot is None and host is None
        ]
        found = [f"expert {e} is in neither tier" for e in missing]
        taken = [slot for slot in self._in_slot if slot is not None]
        if len({id(slot) for slot in taken}) != len(taken) or len(taken) != self._num_taken:
            found.append(f"{len(taken)} experts share {self._num_taken} taken slots")
        homes = (*taken, *(host for host in self._in_host if host is not None))
        parts = [part for held in homes for part in (held.gate_up, held.down)]
        found += [
            f"weights at {part.data_ptr():#x} in {part.dtype}"
            for part in parts
            if part.data_ptr() % ALIGN_BYTES or part.dtype != self._shape.dtype
        ]
        return found

    @property
    def slot_bytes(self) -> int:
        """Bytes of tier one."""
        return self.num_slots * self._shape.num_elements * self._shape.dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Bytes of tier two."""
        held = sum(1 for weights in self._in_host if weights is not None)
        return held * self._shape.num_elements * self._shape.dtype.itemsize


class GroupedExperts:
    """The routed part of a layer: x [T, H], weights [T, k], ids [T, k] -> [T, H].

    Runs each selected expert once over its rows.
    """

    __slots__ = ("_num_experts", "_products", "layer")

    def __init__(self, layer: LayerExperts, products: ExpertProducts, num_experts: int) -> None:
        self.layer = layer
        self._products = products
        self._num_experts = num_experts

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        num_rows, num_active = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self._num_experts).tolist()
        parts = x.new_empty(num_rows * num_active, x.shape[1])
        jobs: list[_Job] = []
        start = 0
        for expert, count in enumerate(counts):
            if count:
                jobs.append(_Job(self.layer.find(expert), order[start : start + count]))
            start += count
        self._run(jobs, x, num_active, parts)
        # A row's experts are added in rank order, so the sum does not depend on who else is in the window.
        weighted = parts.view(num_rows, num_active, -1).mul_(weights.unsqueeze(-1))
        total = weighted[:, 0]
        for rank in range(1, num_active):
            total = total + weighted[:, rank]
        return total

    def _run(self, jobs: Sequence[_Job], x: Tensor, num_active: int, parts: Tensor) -> None:
        """Write every job's rows to `parts` [T * k, H]; no two jobs have a row in common."""
        if x.device.type == "cpu":
            self._run_in_pool(jobs, x, num_active, parts)
            return
        near, far = [], []
        for job in jobs:
            (far if job.weights.down.device.type == "cpu" else near).append(job)
        if far and self._products.exact:
            near += [job.fetched(x.device) for job in far]
            far = []
        for job in near:
            rows = x.index_select(0, job.at // num_active)
            parts[job.at] = self._products(rows, job.weights)
        if far:
            host_parts = parts.new_empty(parts.shape, device="cpu")
            host_jobs = [_Job(job.weights, job.at.cpu()) for job in far]
            self._run_in_pool(host_jobs, x.cpu(), num_active, host_parts)
            for job, host_job in zip(far, host_jobs, strict=True):
                parts[job.at] = host_parts[host_job.at].to(x.device)

    def _run_in_pool(self, jobs: Sequence[_Job], x: Tensor, num_active: int, parts: Tensor) -> None:
        def run(job: _Job) -> None:
            rows = x.index_select(0, job.at // num_active)
            parts[job.at] = self._products(rows, job.weights)

        self._products.pool.map(run, jobs)


@dataclass(frozen=True, slots=True)
class _Job:
    """One expert and where its rows lie among all T * k of them, int64 [R]."""

    weights: ExpertWeights
    at: Tensor

    def fetched(self, device: torch.device) -> _Job:
        """The same with the weights copied to a device."""
        return _Job(self.weights.on(device), self.at)


class ExpertStore:
    """The routed experts of the trunk that are held one by one: opened, filled once, then found by the layers.

    layers: by trunk layer. `hits_ready` is all or nothing: a store that is half set up would compute some experts
    twice and others not at all, and a token made of that is wrong instead of refused.
    """

    def __init__(self, products: ExpertProducts, shape: ExpertShape, num_experts: int) -> None:
        self.products = products
        self._shape = shape
        self._num_experts = num_experts
        self.layers: list[LayerExperts] = []

    def add_layer(self, device: torch.device) -> GroupedExperts:
        """The next layer, empty."""
        layer = LayerExperts(self._num_experts, self._shape, device)
        self.layers.append(layer)
        return GroupedExperts(layer, self.products, self._num_experts)

    def open(self, slots: Sequence[int]) -> None:
        """Allocate tier one: so many slots for each layer."""
        for layer, count in zip(self.layers, slots, strict=True):
            layer.open(count)

    def prepare(self) -> None:
        """Choose how experts are computed, wherever they lie. Raises ExpertsNotReady if some cannot be."""
        self.hits_ready()
        for layer in self.layers:
            for weights in layer.samples(are_fetched=self.products.exact):
                self.products.prepare(weights)

    def hits_ready(self) -> bool:
        """Whether every expert of every layer can be computed. Raises ExpertsNotReady naming the first faults."""
        faults = [
            f"layer {number}: {fault}"
            for number, layer in enumerate(self.layers)
            for fault in layer.faults()
        ]
        if faults:
            shown = "; ".join(faults[:3])
            raise ExpertsNotReady(f"{len(faults)} faults in the expert store: {shown}")
        return True

    @property
    def slot_bytes(self) -> int:
        """Bytes of tier one."""
        return sum(layer.slot_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes of tier two."""
        return sum(layer.host_bytes for layer in self.layers)

    def close(self) -> None:
        """End the threads; nothing can be computed any more."""
        self.products.pool.close()
