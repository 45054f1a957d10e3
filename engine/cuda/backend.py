"""What the torch engine calls in place of its own trunk and draft layer when the kernels of this package run.

Both share one CudaStep and one Prefill over the engine's SlotState. Windows and drafts are graphs; prompt pieces are
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.prefill import Prefill
from engine.cuda.step import CudaStep
from engine.cuda.weights import CudaLoader
from engine.errors import ConfigMismatch

if TYPE_CHECKING:
    from engine.cuda.weights import CudaModel, TensorSource
    from engine.model_spec import ModelSpec
    from engine.state import Rows, SlotState


class CudaTrunk:
    """The interface of engine.model.Trunk, for the one SlotState it was built with."""

    def __init__(self, step: CudaStep, prefill: Prefill) -> None:
        self._step = step
        self._prefill = prefill
        ple = step.model.spec.ple
        self.ngram_context = ple.ngram_size - 1 if ple else 0

    def window(self, ids: Tensor, rows: Rows, state: SlotState) -> Tensor:
        """See engine.model.Trunk.window. The streams are overwritten by the next window."""
        counts = rows.counts()
        return self._step.window(ids, rows.slots, counts, _starts(rows))

    def chunk(self, ids: Tensor, slot: int, start: int, state: SlotState) -> Tensor:
        """See engine.model.Trunk.chunk."""
        return self._prefill.chunk(ids, slot, start)

    def logits(self, streams: Tensor) -> Tensor:
        """See engine.model.Trunk.logits. A window's logits are computed with it, and overwritten by the next."""
        if self._step.owns(streams):
            return self._step.logits(streams.shape[0])
        return self._prefill.logits(streams)

    def commit(self, kept: dict[int, int]) -> None:
        """Keep the first rows of slots' last window: SlotState.commit for all of them at once."""
        self._step.commit(kept)


class CudaDraft:
    """The interface of engine.mtp.DraftLayer; logits and streams are overwritten by the next call."""

    def __init__(self, step: CudaStep, prefill: Prefill) -> None:
        self._step = step
        self._prefill = prefill

    def read_chunk(
        self, ids: Tensor, streams: Tensor, slot: int, start: int, state: SlotState
    ) -> None:
        """See engine.mtp.DraftLayer.read_chunk."""
        self._prefill.draft_cells(ids, streams, slot, start)

    def read_rows(self, ids: Tensor, streams: Tensor, rows: Rows, state: SlotState) -> None:
        """See engine.mtp.DraftLayer.read_rows."""
        self._step.read_rows(ids, streams, rows.slots, rows.counts(), _starts(rows))

    def draft(
        self, ids: Tensor, streams: Tensor, rows: Rows, last: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """See engine.mtp.DraftLayer.draft."""
        return self._step.draft(ids, streams, rows.slots, rows.counts(), _starts(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBackend:
    """A model loaded for this package's kernels, over one SlotState."""

    trunk: CudaTrunk
    draft: CudaDraft | None
    step: CudaStep


def load_cuda_model(
    source: TensorSource,
    spec: ModelSpec,
    *,
    device: torch.device,
    max_context: int,
    with_draft: bool,
) -> CudaModel:
    """Read a checkpoint; experts become 4-bit. Raises WeightMismatch."""
    return CudaLoader(source, spec, device=device, max_context=max_context).load(
        with_draft=with_draft
    )


def build_cuda_step(model: CudaModel, state: SlotState, *, graphs: bool = True) -> CudaBackend:
    """Trunk, draft layer and graphs over `state`.

    Raises ConfigMismatch unless state and K/V are bf16 on a CUDA device.
    """
    for name, found in (("--dtype", state.conv.dtype), ("--kv", state.k.dtype)):
        if found != torch.bfloat16:
            raise ConfigMismatch(
                f"{name}: found {found}, required torch.bfloat16 for the CUDA kernels"
            )
    if graphs and state.device.type != "cuda":
        raise ConfigMismatch(f"--device: found {state.device}, required cuda for the CUDA kernels")
    step = CudaStep(model, state, graphs=graphs)
    prefill = Prefill(model, state)
    draft = CudaDraft(step, prefill) if model.draft is not None else None
    return CudaBackend(trunk=CudaTrunk(step, prefill), draft=draft, step=step)


def _starts(rows: Rows) -> list[int]:
    """First position of each slot."""
    firsts = [last - count + 1 for last, count in zip(rows.last_rows(), rows.counts(), strict=True)]
    return [rows.host_position[first] for first in firsts]
