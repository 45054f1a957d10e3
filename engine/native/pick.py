"""Picks by the compiled library: engine.sampling.RowPicker without a tensor operation."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.native import abi
from engine.sampling import Picks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engine.sampling import PickRow


_MASK64 = (1 << 64) - 1


class NativePicker:
    """See engine.sampling.RowPicker. num_token_ids: ids from here on have no text and are never picked."""

    def __init__(self, num_token_ids: int, vocab_size: int) -> None:
        self.num_token_ids = num_token_ids
        self._vocab_size = vocab_size
        self._library = abi.Library(abi.LIBRARY)
        self._work = torch.empty(3 * vocab_size, dtype=torch.float32)

    def pick(self, logits: Tensor, rows: Sequence[PickRow], *, check: bool = False) -> Picks:
        """See RowPicker."""
        logits = logits.contiguous()
        count = len(rows)
        alive: list[Any] = []
        made = (abi.PickRow * count)(*(made_row(row, alive) for row in rows))
        ids = (ctypes.c_int32 * count)()
        probabilities = (ctypes.c_float * count)()
        finite = (ctypes.c_bool * count)()
        self._library.pick(
            logits.data_ptr(),
            self._vocab_size,
            self.num_token_ids,
            made,
            count,
            self._work.data_ptr(),
            ids,
            probabilities,
            finite,
        )
        return Picks(
            ids=list(ids), probabilities=list(probabilities), finite=list(finite) if check else []
        )


def made_row(row: PickRow, alive: list[Any]) -> abi.PickRow:
    """A row for the library. alive: keeps what it points to until the call is over."""
    params, limit = row.params, row.limit
    banned: list[int] = []
    may_stop = row.num_output >= params.min_tokens or (limit and limit.overrules_min_tokens)
    if not may_stop:
        banned += params.stop_token_ids
    if limit is not None:
        banned += limit.banned
    made = abi.PickRow(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed & _MASK64,
        position=row.position,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        top_k=params.top_k,
    )
    if row.history is not None:
        made.seen = row.history.seen.data_ptr()
        made.counts = row.history.counts.data_ptr()
        made.drafts, made.num_drafts = made_ids(row.drafts, alive), len(row.drafts)
    if params.logit_bias:
        made.bias_ids = made_ids([i for i, _ in params.logit_bias], alive)
        made.biases = _address(np.array([b for _, b in params.logit_bias], np.float32), alive)
        made.num_biases = len(params.logit_bias)
    if banned:
        made.banned, made.num_banned = made_ids(banned, alive), len(banned)
    if limit is not None and limit.allowed is not None:
        made.allowed = _address(np.ascontiguousarray(limit.allowed), alive)
    return made


def made_ids(ids: Sequence[int], alive: list[Any]) -> int:
    """Address of ids as int32."""
    return _address(np.array(ids, np.int32), alive)


def _address(values: NDArray[Any], alive: list[Any]) -> int:
    alive.append(values)
    return values.ctypes.data
