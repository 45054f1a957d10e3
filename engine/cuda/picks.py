"""Picks on the device: the noise and the choice of engine.sampling, for rows without history or grammar.

A row's noise key, temperature and truncation come as device tensors, so a chain picks and feeds itself without the
host. Equal integers give equal noise; logarithms may differ from the host's in the last bit.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import LAUNCH, wait
from engine.sampling import row_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampling import PickRow

_TILE = 2048
TOP = 64
"""Largest top_k that is picked here."""
GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@dataclass(frozen=True, slots=True)
class PickInputs:
    """Per row: keys int64 (`sampling.row_key`), temperatures fp64 (0: greedy), top_ks int64 (0: all);
    top_ps and min_ps fp64.
    """

    keys: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor


class PickTable:
    """PickInputs of some steps of some rows in memory that graphs read: one copy from the host fills it."""

    def __init__(self, num_steps: int, num_rows: int, device: torch.device) -> None:
        self._num_steps = num_steps
        self.packed = torch.zeros(num_steps + 4, num_rows, dtype=torch.int64, device=device)

    def fill(self, steps: Sequence[Sequence[PickRow]]) -> bool:
        """By step, then by row; rows that are not there repeat the first. Whether any row keeps only some ids."""
        num_steps, rows = self._num_steps, steps[0]
        host = np.zeros(self.packed.shape, np.int64)
        sampled = [row.params.temperature > 0 for row in rows]
        for step, picks in enumerate(steps):
            keys = [row_key(row.params.seed, row.position) for row in picks]
            host[step, : len(rows)] = np.array(keys, np.uint64).view(np.int64)
        columns = host[num_steps:, : len(rows)]
        columns[1] = [row.params.top_k * yes for row, yes in zip(rows, sampled, strict=True)]
        for place, name in ((0, "temperature"), (2, "top_p"), (3, "min_p")):
            values = [getattr(row.params, name) for row in rows]
            columns[place] = np.array(values, np.float64).view(np.int64)
        host[:, len(rows) :] = host[:, :1]
        # Memory that is not pinned is copied before the call returns, and nobody waits for the device.
        self.packed.copy_(torch.from_numpy(host), non_blocking=True)
        return bool(columns[1].any())

    def inputs(self, step: int, num_rows: int) -> PickInputs:
        """Of the first rows in one step."""
        columns = self.packed[self._num_steps :, :num_rows]
        temperatures, top_ps, min_ps = (columns[i].view(torch.float64) for i in (0, 2, 3))
        keys = self.packed[step, :num_rows]
        return PickInputs(keys, temperatures, columns[1], top_ps, min_ps)


@triton.jit
def _gumbel(key, ids):
    """fp64 noise of ids int64: the splitmix finaliser of key + (id + 1) * gamma, 52 bits of it as a uniform number."""
    z = key + (ids + 1) * GAMMA
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    uniform = (((z >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best_of_tile(
    logits,
    keys,
    temperatures,
    values,
    ids_out,
    maxima,
    sums,
    V,
    NUM_IDS,
    TILES: tl.constexpr,
    BV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows, tiles): each tile's best noisy logit, and its share of the softmax's sum over the ids.

    A share is no number if one of the tile's logits is not finite, of ids that are never picked too.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    v = tile * BV + tl.arange(0, BV)
    wait(OVERLAP)
    logit = tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=0.0)
    temperature = tl.load(temperatures + row)
    wide = logit.to(tl.float64)
    if temperature > 0:
        wide = wide / temperature
    share = tl.where(v < NUM_IDS, wide.to(tl.float32), -1e30)
    largest = tl.max(share, 0)
    total = tl.sum(tl.where(v < NUM_IDS, tl.exp(share - largest), 0.0), 0)
    # Not `>=`: that is false for what is no number as well.
    strange = tl.sum((~(tl.abs(logit) < float("inf"))).to(tl.int32), 0)
    tl.store(maxima + row * TILES + tile, largest)
    tl.store(sums + row * TILES + tile, tl.where(strange > 0, float("nan"), total))
    if temperature > 0:
        wide += _gumbel(tl.load(keys + row), v.to(tl.int64))
    wide = tl.where(v < NUM_IDS, wide, -float("inf"))
    best = tl.max(wide, 0)
    tl.store(values + row * TILES + tile, best)
    tl.store(ids_out + row * TILES + tile, tl.min(tl.where(wide == best, v, V), 0))


@triton.jit
def _best_of_row(
    logits,
    temperatures,
    values,
    ids_in,
    maxima,
    sums,
    picks,
    probabilities,
    V,
    TILES: tl.constexpr,
    PT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows): pick int64 and its probability among all ids fp32."""
    row = tl.program_id(0)
    t = tl.arange(0, PT)
    wait(OVERLAP)
    inside = t < TILES
    value = tl.load(values + row * TILES + t, mask=inside, other=-float("inf"))
    index = tl.load(ids_in + row * TILES + t, mask=inside, other=V)
    best = tl.max(value, 0)
    pick = tl.minimum(tl.min(tl.where(value == best, index, V), 0), V - 1)
    maximum = tl.load(maxima + row * TILES + t, mask=inside, other=-1e30)
    largest = tl.max(maximum, 0)
    total = tl.sum(
        tl.load(sums + row * TILES + t, mask=inside, other=0.0) * tl.exp(maximum - largest), 0
    )
    chosen = tl.load(logits + row.to(tl.int64) * V + pick)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        chosen = (chosen.to(tl.float64) / temperature).to(tl.float32)
    tl.store(picks + row, pick.to(tl.int64))
    tl.store(probabilities + row, tl.exp(chosen - largest) / total)


def pick(
    logits: Tensor, inputs: PickInputs, num_token_ids: int, *, truncated: bool
) -> tuple[Tensor, Tensor]:
    """logits fp32 [B, vocab] -> picked ids int64 [B] and their probabilities fp32 [B] (RowPicker.pick). No host sync.

    A probability is no number if one of the row's logits is not finite. truncated: rows with 0 < top_k <= TOP keep
    those, and of them what top_p and min_p leave; the others, and without it all rows, take every id.
    """
    num_rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, _TILE)
    device = logits.device
    values = torch.empty(num_rows, tiles, dtype=torch.float64, device=device)
    ids = torch.empty(num_rows, tiles, dtype=torch.int32, device=device)
    maxima, sums = torch.empty(2, num_rows, tiles, device=device)
    picks = torch.empty(num_rows, dtype=torch.int64, device=device)
    probabilities = torch.empty(num_rows, device=device)
    _best_of_tile[(num_rows, tiles)](
        logits,
        inputs.keys,
        inputs.temperatures,
        values,
        ids,
        maxima,
        sums,
        vocab,
        num_token_ids,
        TILES=tiles,
        BV=_TILE,
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
    _best_of_row[(num_rows,)](
        logits,
        inputs.temperatures,
        values,
        ids,
        maxima,
        sums,
        picks,
        probabilities,
        vocab,
        TILES=tiles,
        PT=triton.next_power_of_2(tiles),
        OVERLAP=LAUNCH.overlap,
        **LAUNCH.options(4, 1),
    )
    if not truncated:
        return picks, probabilities
    few = inputs.top_ks > 0
    chosen, shares = _truncated(logits, inputs, num_token_ids)
    # Keeps what says that a logit is not finite.
    shares = torch.where(probabilities.isnan(), probabilities, shares)
    return torch.where(few, chosen, picks), torch.where(few, shares, probabilities)


def _truncated(logits: Tensor, inputs: PickInputs, num_token_ids: int) -> tuple[Tensor, Tensor]:
    """As engine.sampling picks among the top_k: ids int64 [B] and probabilities fp32 [B]; any for rows without."""
    values, ids = logits[:, :num_token_ids].topk(min(TOP, num_token_ids), dim=-1)
    ids, order = ids.sort(dim=-1)
    values, again = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, again)
    rank = torch.arange(values.shape[1], device=logits.device)
    temperatures = inputs.temperatures.clamp_min(1e-30).unsqueeze(1)
    scaled = values.to(torch.float64) / temperatures
    scaled = scaled.masked_fill(rank >= inputs.top_ks.unsqueeze(1), float("-inf"))
    probabilities = torch.softmax(scaled, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < inputs.top_ps.unsqueeze(1)) & (
        probabilities >= inputs.min_ps.unsqueeze(1) * probabilities[:, :1]
    )
    kept[:, 0] = True
    scaled = scaled.masked_fill(~kept, float("-inf"))
    best = (scaled + _noise(inputs.keys.unsqueeze(1), ids)).argmax(-1, keepdim=True)
    share = scaled.gather(1, best) - scaled.logsumexp(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1), share.exp().squeeze(1).to(torch.float32)


def _noise(keys: Tensor, ids: Tensor) -> Tensor:
    """`_gumbel` in torch."""
    z = keys + (ids + 1) * GAMMA.value
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1.value
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2.value
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    uniform = (((z >> 12) & 0xFFFFFFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))
