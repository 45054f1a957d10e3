"""What the torch engine calls in place of its own trunk and draft layer when the kernels of this package run.

Both share one CudaStep and one Prefill over the engine's SlotState. Windows and drafts are graphs; prompt pieces are
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.first_come import FirstCome
from engine.cuda.language import triton
from engine.cuda.layout import MAX_ROWS
from engine.cuda.pick_rows import can_pick
from engine.cuda.pool import FarPool, PoolBuffers
from engine.cuda.prefill import Prefill, chunk_bytes
from engine.cuda.sizes import BUFFERS, NamesOnly, table_bytes, tensor_bytes, weight_parts
from engine.cuda.step import CudaStep
from engine.cuda.weights import CudaLoader
from engine.errors import ConfigMismatch
from engine.memory_plan import EXPERTS_4_BITS, HIT_PATH, POOL, ROUTES, TABLE, Place, PlanLine, Step
from engine.state import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.cuda.weights import CudaModel
    from engine.interface import DecodeStep
    from engine.model_spec import ModelSpec
    from engine.sampling import PickRow, Picks
    from engine.startup_plan import Limits
    from engine.state import KeptRows, Rows


class CudaTrunk:
    """The interface of engine.model.Trunk, for the one SlotState it was built with. step: for instruments."""

    def __init__(self, step: CudaStep, prefill: Prefill) -> None:
        self.step = step
        self._prefill = prefill
        ple = step.model.spec.ple
        self.ngram_context = ple.ngram_size - 1 if ple else 0

    def window(
        self, ids: Tensor, rows: Rows, state: SlotState, streams: Tensor | None = None
    ) -> Tensor:
        """See engine.model.Trunk.window. The streams are overwritten by the next window."""
        counts = rows.counts()
        return self.step.window(ids, rows.slots, counts, _starts(rows), streams)

    @property
    def num_layers(self) -> int:
        """Of the trunk."""
        return len(self.step.model.layers)

    def stages(self, rows: Rows) -> dict[str, Callable[[], None]]:
        """See engine.steps.StagedSteps."""
        return self.step.stages(sum(rows.counts()))

    def chunk(
        self, ids: Tensor, slot: int, start: int, state: SlotState, streams: Tensor | None = None
    ) -> Tensor:
        """See engine.model.Trunk.chunk."""
        return self._prefill.chunk(ids, slot, start, streams)

    def count_routes(self, run: Callable[[], object]) -> list[list[int]]:
        """See engine.steps.CountingSteps. Windows are graphs, and count nothing."""
        model = self.step.model
        self._prefill.routed = torch.zeros(
            len(model.layers),
            model.spec.moe.num_experts,
            dtype=torch.int64,
            device=self.step.state.device,
        )
        try:
            run()
            return self._prefill.routed.tolist()
        finally:
            self._prefill.routed = None

    def logits(self, streams: Tensor) -> Tensor:
        """See engine.model.Trunk.logits. A window's logits are computed with it, and overwritten by the next."""
        if self.step.owns(streams):
            return self.step.logits(streams.shape[0])
        return self._prefill.logits(streams)

    def commit(self, kept: Mapping[int, KeptRows], streams: Tensor, state: SlotState) -> None:
        """See engine.model.Trunk.commit: all slots at once. The streams are the last window's, if any must be kept."""
        assert not state.pending.shape[0] or self.step.owns(streams)
        self.step.commit(kept)


class CudaDraft:
    """The interface of engine.mtp.DraftLayer; logits and streams are overwritten by the next call."""

    def __init__(self, step: CudaStep, prefill: Prefill) -> None:
        self.step = step
        self._prefill = prefill

    def read_chunk(
        self, ids: Tensor, streams: Tensor, slot: int, start: int, state: SlotState
    ) -> None:
        """See engine.mtp.DraftLayer.read_chunk."""
        self._prefill.draft_cells(ids, streams, slot, start)

    def read_rows(self, ids: Tensor, streams: Tensor, rows: Rows, state: SlotState) -> None:
        """See engine.mtp.DraftLayer.read_rows."""
        self.step.read_rows(ids, streams, rows.slots, rows.counts(), _starts(rows))

    def draft(
        self, ids: Tensor, streams: Tensor, rows: Rows, last: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """See engine.mtp.DraftLayer.draft."""
        return self.step.draft(ids, streams, rows.slots, rows.counts(), _starts(rows))

    def can_pick(self, row: PickRow) -> bool:
        """See engine.steps.DraftChain."""
        return can_pick(row)

    def chain(
        self,
        ids: Tensor,
        streams: Tensor,
        rows: Rows,
        first: Sequence[PickRow],
        steps: Sequence[DecodeStep],
    ) -> list[Picks]:
        """See engine.steps.DraftChain. No chain ends early: the host learns of its drafts when all are made."""
        depths = range(max(step.max_draft for step in steps))
        picks = [[row.ahead(depth) for row in first] for depth in depths]
        return self.step.chain(ids, streams, rows.slots, rows.counts(), _starts(rows), picks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBackend:
    """A model loaded for this package's kernels, over one SlotState."""

    trunk: CudaTrunk
    draft: CudaDraft | None
    step: CudaStep
    prefill: Prefill

    def prepare(self) -> None:
        """Compile the kernels and capture the graphs. Spoils all slots: call it before any is seated."""
        self.step.prepare()
        self.prefill.prepare()

    @property
    def name(self) -> str:
        """What computes, with all that decides the numbers."""
        return f"Triton {triton.__version__} kernels, experts in 4 bits"

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes as held, by the names of `planned_cuda_lines`."""
        model = self.step.model
        path = table_bytes(model) + tensor_bytes(self.prefill.staged)
        parts = {**weight_parts(model), BUFFERS: self.step.num_bytes, HIT_PATH: path}
        if self.step.pool is not None:
            parts[POOL] = tensor_bytes(self.step.pool.buffers)
        if (first_come := self.step.first_come) is not None:
            parts[HIT_PATH] += tensor_bytes(first_come.tensors)
            parts[ROUTES] = tensor_bytes(first_come.seen)
        return parts


def planned_cuda_lines(
    spec: ModelSpec, limits: Limits, ple_io: str = "ram", *, pooled: bool = False
) -> tuple[PlanLine, ...]:
    """What a backend with all experts on the device will take beside the slots' state, by part. Needs no device.

    Built as it will be, of tensors without memory. pooled: with a line for the pool that computes far experts, of
    which a plan without such experts makes nothing.
    """
    nowhere = torch.device("meta")
    with_draft = limits.max_draft > 0
    loader = CudaLoader(
        NamesOnly(), spec, device=nowhere, max_context=limits.max_context, ple_io=ple_io
    )
    model = loader.load(with_draft=with_draft)
    loader.open_experts()
    model = loader.load_experts(model)
    state = SlotState(
        spec,
        num_slots=limits.num_slots,
        max_context=limits.max_context,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=nowhere,
    )
    step = CudaStep(model, state, spec.vocab_size, graphs=False)
    lines = [
        PlanLine(
            name=name,
            num_bytes=num_bytes,
            step=Step.CACHE if name == EXPERTS_4_BITS else Step.WEIGHTS,
            place=Place.HOST if name == TABLE else Place.DEVICE,
        )
        for name, num_bytes in weight_parts(model).items()
    ]
    piece = chunk_bytes(spec, limits.piece_tokens, limits.max_context)
    lines += [
        PlanLine(name=BUFFERS, num_bytes=step.num_bytes, step=Step.HITS),
        PlanLine(name="prefill buffers", num_bytes=piece, step=Step.PROMPT),
    ]
    if pooled:
        buffers = tensor_bytes(PoolBuffers.make(spec, MAX_ROWS, nowhere))
        lines.append(
            PlanLine(name=POOL, num_bytes=buffers, step=Step.HITS, place=Place.HOST),
        )
    return tuple(lines)


def build_cuda_step(
    model: CudaModel,
    state: SlotState,
    *,
    num_token_ids: int,
    graphs: bool = True,
    pool_workers: int = 0,
    first_come: bool = False,
) -> CudaBackend:
    """Trunk, draft layer and graphs over `state`; num_token_ids: see CudaStep.

    pool_workers: threads that compute far experts, if there are any; 0 lets kernels read them over the bus. first_come:
    slots go to the experts that come first, in a model with tiers; otherwise none moves.
    Raises ConfigMismatch unless the state is bf16, K/V are that or int8, and both are on a CUDA device.
    """
    for name, found, able in (
        ("--dtype", state.conv.dtype, (torch.bfloat16,)),
        ("--kv", state.k.dtype, (torch.bfloat16, torch.int8)),
    ):
        if found not in able:
            required = " or ".join(map(str, able))
            raise ConfigMismatch(f"{name}: found {found}, required {required} for the CUDA kernels")
    if graphs and state.device.type != "cuda":
        raise ConfigMismatch(f"--device: found {state.device}, required cuda for the CUDA kernels")
    far = [layer.moe.far for layer in model.layers]
    pool = None
    if pool_workers and any(x is not None and x.count for x in far):
        pool = FarPool(model.spec, far, MAX_ROWS, state.device, pool_workers)
    firsts = None
    if first_come:
        experts = [layer.moe for layer in model.layers]
        firsts = FirstCome(model.spec, experts, state.device, pool)
    step = CudaStep(model, state, num_token_ids, graphs=graphs, pool=pool, first_come=firsts)
    prefill = Prefill(model, state)
    draft = CudaDraft(step, prefill) if model.draft is not None else None
    return CudaBackend(trunk=CudaTrunk(step, prefill), draft=draft, step=step, prefill=prefill)


def _starts(rows: Rows) -> list[int]:
    """First position of each slot."""
    firsts = [last - count + 1 for last, count in zip(rows.last_rows(), rows.counts(), strict=True)]
    return [rows.host_position[first] for first in firsts]
