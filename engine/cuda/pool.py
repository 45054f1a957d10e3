"""Threads of the host that compute the experts which lie there, while kernels compute the others of the same rows.

A window's graph sends rows and chosen experts to pinned memory, calls the compiled pool (engine/native/src/far_pool.c)
from a branch of its own, and fetches what it made before rows are combined. The pool's bits are the kernels'.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, wait
from engine.cuda.quant import GROUP
from engine.errors import KernelFailure
from engine.native.abi import LIBRARY, FarBuffers, FarWork, Library, PackedExperts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.cuda.quant import Packed4
    from engine.cuda.tiers import FarExperts
    from engine.model_spec import ModelSpec

_COPIED = 1024
"""Values that one program copies."""


@dataclass(frozen=True, slots=True)
class PoolBuffers:
    """All that the pool reads and writes beside weights, for windows of up to `max_rows` rows.

    Pinned: x bf16 [R, H]; ids int32 [R, k]; parts fp32 [R, k, H]; order int32 [layers, E], as in FarExperts. The pool's
    own: of rows and of pairs (row, rank) digits int8, units fp32 and excess int32; middle fp32.
    """

    x: Tensor
    ids: Tensor
    parts: Tensor
    order: Tensor
    x_digits: Tensor
    x_units: Tensor
    x_excess: Tensor
    hidden_digits: Tensor
    hidden_units: Tensor
    hidden_excess: Tensor
    middle: Tensor

    @staticmethod
    def make(
        spec: ModelSpec, max_rows: int, device: torch.device, *, pin: bool = False
    ) -> PoolBuffers:
        """device: the CPU, or `meta` to count bytes."""
        moe = spec.moe
        num_pairs = max_rows * moe.num_active
        up_groups, down_groups = -(-spec.hidden // GROUP), -(-moe.expert_dim // GROUP)

        def empty(*shape: int, dtype: torch.dtype, pin: bool = False) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin)

        bf16, fp32, int32, int8 = torch.bfloat16, torch.float32, torch.int32, torch.int8
        return PoolBuffers(
            x=empty(max_rows, spec.hidden, dtype=bf16, pin=pin),
            ids=empty(max_rows, moe.num_active, dtype=int32, pin=pin),
            parts=empty(max_rows, moe.num_active, spec.hidden, dtype=fp32, pin=pin),
            order=empty(spec.num_layers, moe.num_experts, dtype=int32, pin=pin),
            x_digits=empty(max_rows, 2, up_groups * GROUP, dtype=int8),
            x_units=empty(max_rows, up_groups, dtype=fp32),
            x_excess=empty(max_rows, up_groups, dtype=int32),
            hidden_digits=empty(num_pairs, 2, down_groups * GROUP, dtype=int8),
            hidden_units=empty(num_pairs, 2 * down_groups, dtype=fp32),
            hidden_excess=empty(num_pairs, 2 * down_groups, dtype=int32),
            middle=empty(num_pairs, down_groups * GROUP, dtype=fp32),
        )


class FarPool:
    """The threads, for the far experts of one model's layers. All its memory is taken here: nothing fails later."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[FarExperts | None],
        max_rows: int,
        device: torch.device,
        num_workers: int,
        *,
        wide: bool = True,
    ) -> None:
        """layers: of the trunk; num_workers: threads, at least 1; wide: use the processor's widest vectors.

        Raises KernelFailure if its tables cannot be allocated.
        """
        is_cuda = device.type == "cuda"
        self.buffers = PoolBuffers.make(spec, max_rows, torch.device("cpu"), pin=is_cuda)
        self._library = Library(LIBRARY)
        self._layers = layers
        self._numbers = {id(far): number for number, far in enumerate(layers) if far is not None}
        for far, row in zip(layers, self.buffers.order, strict=True):
            if far is not None:
                row.copy_(far.order)
        sizes = self._sizes(spec, max_rows, wide=wide)
        self._handle: int | None = self._library.far_open(ctypes.byref(sizes), num_workers)
        if self._handle is None:
            raise KernelFailure("no memory for the tables of the experts' pool")
        weakref.finalize(self, self._library.far_close, self._handle).atexit = False
        self._works: dict[tuple[int, int, bool], FarWork] = {}
        self._branch = _Branch(self._library, device) if is_cuda else None

    @property
    def num_workers(self) -> int:
        """Threads that were started, the caller's included."""
        return self._library.far_threads(self._handle)

    def follow(self, far: FarExperts) -> None:
        """Take over the order of a layer whose experts traded places, by the current stream and between windows."""
        self.buffers.order[self._numbers[id(far)]].copy_(far.order, non_blocking=True)

    def begin(self, x: Tensor, ids: Tensor, far: FarExperts, *, rests: bool) -> None:
        """Start on the far experts of rows x bf16 [R, H]; ids int32 [rows, k].

        rests: the threads may sleep after it; otherwise they stay awake for a layer that follows.
        """
        num_rows, hidden = x.shape
        b = self.buffers
        _send[(num_rows, triton.cdiv(hidden, _COPIED))](
            x,
            ids,
            b.x,
            b.ids,
            H=hidden,
            TOP=ids.shape[1],
            PT=triton.next_power_of_2(ids.shape[1]),
            BH=_COPIED,
            OVERLAP=LAUNCH.overlap,
            **LAUNCH.options(4, 1),
        )
        if self._branch is None:
            self.compute(far, num_rows, rests=rests)
        else:
            self._branch.call(self._work(far, num_rows, rests=rests))

    def compute(self, far: FarExperts, num_rows: int, *, rests: bool = True) -> None:
        """buffers.parts of the first rows of buffers.x and ids, with this thread as one of the pool's."""
        self._library.far_parts(ctypes.byref(self._work(far, num_rows, rests=rests)))

    def finish(self, num_rows: int, ids: Tensor, parts: Tensor, far: FarExperts) -> None:
        """Wait for them: parts fp32 [rows, k, H] of all pairs whose experts are far."""
        if self._branch is not None:
            self._branch.join()
        top, hidden = parts.shape[1:]
        # Starts when all before it is done: a start ahead would wait for kernels, but not for the host.
        _fetch[(num_rows * top, triton.cdiv(hidden, _COPIED))](
            self.buffers.parts,
            far.order,
            ids,
            parts,
            H=hidden,
            BH=_COPIED,
            num_warps=4,
        )

    def _work(self, far: FarExperts, num_rows: int, *, rests: bool) -> FarWork:
        """Lives as long as the pool: graphs hold its address."""
        number = self._numbers[id(far)]
        key = (number, num_rows, rests)
        if key not in self._works:
            b = self.buffers
            self._works[key] = FarWork(
                self._handle,
                _packed(far.gate_up),
                _packed(far.down),
                b.order[number].data_ptr(),
                b.ids.data_ptr(),
                b.x.data_ptr(),
                b.parts.data_ptr(),
                num_rows,
                rests,
            )
        return self._works[key]

    def _sizes(self, spec: ModelSpec, max_rows: int, *, wide: bool) -> FarBuffers:
        b, moe = self.buffers, spec.moe
        return FarBuffers(
            max_rows,
            moe.num_active,
            moe.num_experts,
            spec.hidden,
            moe.expert_dim,
            wide,
            b.x_digits.data_ptr(),
            b.hidden_digits.data_ptr(),
            b.x_units.data_ptr(),
            b.hidden_units.data_ptr(),
            b.middle.data_ptr(),
            b.x_excess.data_ptr(),
            b.hidden_excess.data_ptr(),
        )


def _packed(experts: Packed4) -> PackedExperts:
    words, scales = experts.words, experts.scales
    return PackedExperts(words.data_ptr(), scales.data_ptr(), experts.num_groups, words.shape[1])


class _Branch:
    """A stream beside the current one, on which the host works; captured, it becomes a branch of the graph."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._function = ctypes.cast(library.far_parts, ctypes.c_void_p)

    def call(self, work: FarWork) -> None:
        """Have it done once all that the current stream was asked for is done. Raises KernelFailure."""
        self._begun.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._begun)
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        error = _driver().cuLaunchHostFunc(stream, self._function, ctypes.byref(work))
        if error:
            raise KernelFailure(f"the host's part of a window: CUDA driver error {error}")
        self._done.record(self._stream)

    def join(self) -> None:
        """The current stream's next work waits for it."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


@functools.cache
def _driver() -> Any:
    """CUDA's driver: torch has no name for functions of the host's within a stream."""
    return ctypes.CDLL("libcuda.so.1")


@triton.jit
def _send(
    x,
    ids,
    to_x,
    to_ids,
    H: tl.constexpr,
    TOP: tl.constexpr,
    PT: tl.constexpr,
    BH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, runs of BH columns): x [R, H] and ids [R, TOP] to the host."""
    row = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    t = tl.arange(0, PT)
    wait(OVERLAP)
    tl.store(to_x + row * H + h, tl.load(x + row * H + h, mask=h < H), mask=h < H)
    if tl.program_id(1) == 0:
        tl.store(to_ids + row * TOP + t, tl.load(ids + row * TOP + t, mask=t < TOP), mask=t < TOP)


@triton.jit
def _fetch(parts, order, ids, to, H: tl.constexpr, BH: tl.constexpr):
    """Grid (pairs, runs of BH columns): parts [pairs, H] of far experts from the host."""
    pair = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    if tl.load(order + tl.load(ids + pair)) >= 0:
        tl.store(to + pair * H + h, tl.load(parts + pair * H + h, mask=h < H), mask=h < H)
