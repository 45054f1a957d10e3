"""The compiled CPU step behind the interfaces of engine.model.Trunk and engine.mtp.DraftLayer.

Tensors stay torch's: the step gets addresses of the slots' state and of inputs and outputs. A row's arithmetic is one
fixed chain of operations, or exact sums of integers, the same for windows of any company and for prompt pieces, so
exactness needs no probing.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.layers.rotary import RotaryTable
from engine.linear import MAX_WINDOW_ROWS
from engine.memory_plan import FP32_BYTES, PlanLine, Step
from engine.native import abi
from engine.native.pick import made_ids, made_row
from engine.native.weights import KINDS, Keeper, NativeLoader, NativePlanner, geometry
from engine.sampling import Picks
from engine.state import WINDOW_ROWS, key_capacity
from engine.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from engine.config import EngineConfig
    from engine.interface import DecodeStep
    from engine.layers.ple import HashedRows
    from engine.model_spec import ModelSpec
    from engine.native.pick import NativePicker
    from engine.sampling import PickRow
    from engine.sources.base import TensorSource
    from engine.startup_plan import Limits
    from engine.state import KeptRows, Rows, SlotState

SCRATCH = "step scratch"
"""Name of the plan's line for the buffers of windows and prompt pieces."""
PORTABLE = "portable"
"""The choice of kernels that computes alike on every processor that the library is compiled for."""
_LANES = 8


def why_unsupported(config: EngineConfig, spec: ModelSpec, device: torch.device) -> str | None:
    """Why the step cannot run; None when it can."""
    if device.type != "cpu":
        return f"it runs on cpu, not on {device}"
    if config.num_groups > 1:
        return "it runs all layers in one process, without --batch-groups"
    if config.dtype not in ("auto", "float32"):
        return f"it computes in float32, not in {config.dtype}"
    if config.expert_cache is not None or config.expert_profile is not None:
        return "it keeps every expert in memory, without tiers"
    if spec.gdn.value_dim % _LANES:
        return f"linear_value_head_dim: found {spec.gdn.value_dim}, required a multiple of {_LANES}"
    return abi.why_unavailable()


def uses_tiles(config: EngineConfig) -> bool:
    """Whether int8 weights are multiplied in a processor's tiles (AMX), which is other arithmetic than without."""
    return config.kernels != PORTABLE and abi.has_tiles()


def planned_lines(
    source: TensorSource,
    spec: ModelSpec,
    limits: Limits,
    num_threads: int,
    ple_io: str,
    *,
    tiles: bool,
) -> tuple[PlanLine, ...]:
    """What a step will take beside the slots' state: weights as stored, buffers, a call's results. Loads nothing."""
    held = _planned_parts(source, spec, limits, num_threads, ple_io, tiles=tiles)
    rows = limits.piece_tokens
    ids = rows * 8 * (1 + (spec.ple.ngram_size if spec.ple else 1))
    streams = rows * spec.stream_width * FP32_BYTES + ids
    return (
        *(PlanLine(name=name, num_bytes=n, step=Step.WEIGHTS) for name, n in held.items()),
        PlanLine(name="prompt streams", num_bytes=streams, step=Step.PROMPT),
    )


def _planned_parts(
    source: TensorSource,
    spec: ModelSpec,
    limits: Limits,
    num_threads: int,
    ple_io: str,
    *,
    tiles: bool,
) -> dict[str, int]:
    """What a step will hold, by part."""
    keeper = Keeper()
    capacity = key_capacity(limits.max_context)
    numbers = geometry(spec, num_slots=limits.num_slots, capacity=capacity, tiles=tiles)
    planner = NativePlanner(Checkpoint(source), spec, keeper, ple_io, tiles=tiles)
    model = planner.load(numbers, None, with_draft=limits.max_draft > 0)
    for _ in ("cos", "sin"):
        keeper.count("rotary tables", capacity * spec.qsa.rotary_dim * 4)
    library = abi.Library(abi.LIBRARY)
    scratch = library.scratch_floats(ctypes.byref(model), most_rows(limits), num_threads)
    keeper.count(SCRATCH, FP32_BYTES * scratch)
    for num_rows in (MAX_WINDOW_ROWS, limits.num_slots):
        keeper.count(SCRATCH, FP32_BYTES * num_rows * spec.stream_width)
        keeper.count(SCRATCH, FP32_BYTES * num_rows * spec.vocab_size)
    return keeper.part_bytes


def most_rows(limits: Limits) -> int:
    """Rows of the widest call: a prompt piece or a full window."""
    return max(MAX_WINDOW_ROWS, limits.piece_tokens)


class NativeStep:
    """An opened step: library, structures, scratch. Its threads end when it is no longer held."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        state: SlotState,
        limits: Limits,
        num_threads: int,
        ple_io: str = "ram",
        *,
        tiles: bool,
        wide: bool,
    ) -> None:
        """ple_io: where the n-gram tables lie; tiles: see `uses_tiles`; wide: see `geometry`.

        Raises WeightMismatch, ConfigMismatch for tables that cannot be read there, or EngineError when threads or
        memory are refused.
        """
        self.spec = spec
        self.max_rows = max_rows = most_rows(limits)
        self.library = abi.Library(abi.LIBRARY)
        planned = _planned_parts(checkpoint.source, spec, limits, num_threads, ple_io, tiles=tiles)
        self._keeper = Keeper(sum(planned.values()))
        rotary = RotaryTable(
            rotary_dim=spec.qsa.rotary_dim,
            theta=spec.qsa.rope_theta,
            num_positions=state.capacity,
            dtype=torch.float32,
            device=state.device,
        )
        numbers = geometry(
            spec, num_slots=limits.num_slots, capacity=state.capacity, tiles=tiles, wide=wide
        )
        loader = NativeLoader(checkpoint, spec, self._keeper, ple_io, tiles=tiles)
        self._model = loader.load(numbers, rotary, with_draft=limits.max_draft > 0)
        self.tables: Sequence[HashedRows] = tuple(loader.tables)
        self._state = _state(state)
        num_floats = self.library.scratch_floats(ctypes.byref(self._model), max_rows, num_threads)
        scratch = self._buffer(1, num_floats)
        self.window_streams, self.window_logits = self._results(MAX_WINDOW_ROWS)
        self.draft_streams, self.draft_logits = self._results(limits.num_slots)
        self.handle = self.library.open(
            ctypes.byref(self._model),
            ctypes.byref(self._state),
            num_threads,
            max_rows,
            scratch.data_ptr(),
        )
        if not self.handle:
            raise EngineError("the compiled step cannot be opened: no memory or no threads left")
        weakref.finalize(self, self.library.close, self.handle)

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes as held, by the names of `planned_lines`."""
        return self._keeper.part_bytes

    def _results(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Streams and logits of so many rows, which each call overwrites."""
        return self._buffer(num_rows, self.spec.stream_width), self._buffer(
            num_rows, self.spec.vocab_size
        )

    def _buffer(self, num_rows: int, width: int) -> Tensor:
        """fp32 [num_rows, width], written to, so that the memory is there before the first window."""
        memory = self._keeper.reserve(FP32_BYTES * num_rows * width, SCRATCH)
        return memory.view(torch.float32).view(num_rows, width).zero_()

    def logits(self, streams: Tensor) -> Tensor:
        """Streams [T, S*H] -> logits [T, vocab], overwritten by the next call if they are a window's at most."""
        num_rows = streams.shape[0]
        out = self.window_logits[:num_rows]
        if num_rows > out.shape[0]:
            out = streams.new_empty(num_rows, self.spec.vocab_size)
        for first in range(0, num_rows, self.max_rows):
            part = streams[first : first + self.max_rows].contiguous()
            at = out[first : first + self.max_rows]
            self.library.logits(self.handle, part.data_ptr(), part.shape[0], at.data_ptr())
        return out


class NativeTrunk:
    """See engine.model.Trunk."""

    def __init__(self, step: NativeStep) -> None:
        self._step = step
        ple = step.spec.ple
        self.ngram_context = ple.ngram_size - 1 if ple is not None and ple.layer_ids else 0

    def window(self, ids: Tensor, rows: Rows, state: SlotState) -> Tensor:
        """See Trunk.window."""
        del state  # its addresses are the step's
        streams = self._step.window_streams[: ids.shape[0]]
        return self._run(ids, window_pieces(rows), streams, keeps_all=False)

    def chunk(self, ids: Tensor, slot: int, start: int, state: SlotState) -> Tensor:
        """See Trunk.chunk; a piece longer than a call's rows is read in several calls, with the same result."""
        del state
        streams = torch.empty(ids.shape[0], self._step.spec.stream_width)
        for first in range(0, ids.shape[0], self._step.max_rows):
            part = slice(first, first + self._step.max_rows)
            count = ids[part].shape[0]
            piece = abi.Piece(slot=slot, first=0, count=count, start=start + first)
            self._run(ids[part], [piece], streams[part], keeps_all=True)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """See Trunk.logits."""
        return self._step.logits(streams)

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        return self._step.spec.num_layers

    def stage_seconds(self, run: Callable[[], object]) -> dict[str, float]:
        """See TimedSteps.stage_seconds."""
        seconds = (ctypes.c_double * len(abi.STAGES))()
        self._probed(run, seconds, None)
        return dict(zip(abi.STAGES, seconds, strict=True))

    def count_routes(self, run: Callable[[], object]) -> list[list[int]]:
        """See CountingSteps.count_routes."""
        spec = self._step.spec
        routed = torch.zeros(spec.num_layers, spec.moe.num_experts, dtype=torch.int64)
        self._probed(run, None, routed.data_ptr())
        return routed.tolist()

    def _probed(self, run: Callable[[], object], seconds: Any, routed: int | None) -> None:
        library, handle = self._step.library, self._step.handle
        library.probe(handle, seconds, routed)
        try:
            run()
        finally:
            library.probe(handle, None, None)

    def commit(self, kept: Mapping[int, KeptRows], streams: Tensor, state: SlotState) -> None:
        """See Trunk.commit."""
        del state
        rows = [abi.Kept(slot=slot, first=k.first, count=k.count) for slot, k in kept.items()]
        self._step.library.commit(
            self._step.handle, (abi.Kept * len(rows))(*rows), len(rows), streams.data_ptr()
        )

    def _run(
        self, ids: Tensor, pieces: Sequence[abi.Piece], streams: Tensor, *, keeps_all: bool
    ) -> Tensor:
        """Fills streams [R, S*H]."""
        step = self._step
        ids = ids.contiguous()
        with _Reads(step.tables, ids) as rows_of:
            step.library.trunk(
                step.handle,
                (abi.Piece * len(pieces))(*pieces),
                len(pieces),
                int(keeps_all),
                ids.data_ptr(),
                ids.shape[1] - 1,
                rows_of,
                streams.data_ptr(),
            )
        return streams


_NO_ROWS = abi.RowsOf()


class _Reads:
    """Rows of tables on the disk, asked for when the ids are known and waited for in the layer that needs them.

    A context manager around the call that needs them; what failed in a read is raised when the call has returned.
    """

    def __init__(self, tables: Sequence[HashedRows], ids: Tensor) -> None:
        self._fetched = [table.fetch(ids) for table in tables]
        self._held: list[Tensor] = []
        self._error: Exception | None = None

    def __enter__(self) -> Any:
        """Null without such tables: the step then finds its rows itself."""
        self._called = abi.RowsOf(self._rows) if self._fetched else _NO_ROWS
        return self._called

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._error is not None:
            raise self._error

    def _rows(self, index: int) -> int | None:
        # An exception would end here, printed and forgotten, with the step left to compute with nothing.
        try:
            rows = self._fetched[index]().contiguous()
        except Exception as error:
            self._error = error
            return None
        self._held.append(rows)
        return rows.data_ptr()


class NativeDraft:
    """See engine.mtp.DraftLayer."""

    def __init__(self, step: NativeStep) -> None:
        self._step = step

    def read_chunk(
        self, ids: Tensor, streams: Tensor, slot: int, start: int, state: SlotState
    ) -> None:
        """See DraftLayer.read_chunk."""
        del state
        for first in range(0, ids.shape[0], self._step.max_rows):
            part = slice(first, first + self._step.max_rows)
            count = ids[part].shape[0]
            piece = abi.Piece(slot=slot, first=0, count=count, start=start + first)
            self._cells(ids[part], streams[part], [piece])

    def read_rows(self, ids: Tensor, streams: Tensor, rows: Rows, state: SlotState) -> None:
        """See DraftLayer.read_rows."""
        del state
        self._cells(ids, streams, window_pieces(rows))

    def draft(
        self, ids: Tensor, streams: Tensor, rows: Rows, last: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """See DraftLayer.draft."""
        del last, state
        step, pieces = self._step, window_pieces(rows)
        ids, streams = ids.contiguous(), streams.contiguous()
        logits, out = step.draft_logits[: len(pieces)], step.draft_streams[: len(pieces)]
        step.library.draft(
            step.handle,
            (abi.Piece * len(pieces))(*pieces),
            len(pieces),
            ids.data_ptr(),
            streams.data_ptr(),
            logits.data_ptr(),
            out.data_ptr(),
        )
        return logits, out

    def _cells(self, ids: Tensor, streams: Tensor, pieces: Sequence[abi.Piece]) -> None:
        step = self._step
        ids, streams = ids.contiguous(), streams.contiguous()
        step.library.draft_cells(
            step.handle,
            (abi.Piece * len(pieces))(*pieces),
            len(pieces),
            ids.data_ptr(),
            streams.data_ptr(),
        )


class NativeChain:
    """See engine.steps.DraftChain."""

    def __init__(self, step: NativeStep, picker: NativePicker) -> None:
        self._step = step
        self._num_token_ids = picker.num_token_ids

    def can_pick(self, row: PickRow) -> bool:
        """See DraftChain: what a pick may be must not change along the chain."""
        return row.limit is None and row.num_output >= row.params.min_tokens

    def chain(
        self,
        ids: Tensor,
        streams: Tensor,
        rows: Rows,
        first: Sequence[PickRow],
        steps: Sequence[DecodeStep],
    ) -> list[Picks]:
        """See DraftChain."""
        step, pieces, most = self._step, window_pieces(rows), WINDOW_ROWS - 1
        count = len(pieces)
        alive: list[Any] = []
        made = (abi.PickRow * count)(*(made_row(row, alive) for row in first))
        gates = (abi.Gate * count)(
            *(_gate(one, row, alive) for one, row in zip(steps, first, strict=True))
        )
        found = (ctypes.c_int32 * (count * most))()
        probabilities = (ctypes.c_float * (count * most))()
        ids, streams = ids.contiguous(), streams.contiguous()
        step.library.chain(
            step.handle,
            (abi.Piece * count)(*pieces),
            count,
            ids.data_ptr(),
            streams.data_ptr(),
            made,
            gates,
            self._num_token_ids,
            found,
            probabilities,
        )
        return [
            Picks(ids=found[depth::most], probabilities=probabilities[depth::most])
            for depth in range(max(step.max_draft for step in steps))
        ]


def _gate(step: DecodeStep, row: PickRow, alive: list[Any]) -> abi.Gate:
    stops = row.params.stop_token_ids
    return abi.Gate(
        min_p=step.spec_min_p,
        stops=made_ids(stops, alive) if stops else None,
        num_stops=len(stops),
        max_drafts=step.max_draft,
    )


def window_pieces(rows: Rows) -> list[abi.Piece]:
    """The rows of a window as runs of one slot each."""
    pieces: list[abi.Piece] = []
    first = 0
    for slot, count in zip(rows.slots, rows.counts(), strict=True):
        start = rows.host_position[first]
        pieces.append(abi.Piece(slot=slot, first=first, count=count, start=start))
        first += count
    return pieces


def _state(state: SlotState) -> abi.State:
    """Addresses of the slots' tensors, which are never reallocated."""
    made = abi.State(ple_rows=state.ple.shape[2], kv_kind=KINDS[state.k.dtype])
    for name in abi.STATE_TENSORS:
        tensor: Tensor | None = getattr(state, name)
        setattr(made, name, None if tensor is None else tensor.data_ptr())
    return made
