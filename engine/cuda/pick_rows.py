"""engine.sampling.RowPicker on a CUDA device: kernels where they can pick a row, torch operations for the others.

Which of the two a row gets depends on the row alone, so its pick does not depend on its company.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.cuda.picks import TOP
from engine.sampling import Picker, Picks, finite_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.cuda.step import CudaStep
    from engine.sampling import PickRow


def can_pick(row: PickRow) -> bool:
    """Whether the kernels know everything that the row asks for."""
    params = row.params
    adjusted = params.logit_bias or row.history is not None or row.limit is not None
    must_go_on = bool(params.stop_token_ids) and row.num_output < params.min_tokens
    if adjusted or must_go_on:
        return False
    if params.temperature == 0.0:
        return True
    truncated = params.top_p < 1.0 or params.min_p > 0.0
    return params.top_k <= TOP if params.top_k else not truncated


class CudaPicker:
    """See the module and RowPicker."""

    def __init__(self, step: CudaStep) -> None:
        self._step = step
        self._others = Picker(step.num_token_ids)

    def pick(self, logits: Tensor, rows: Sequence[PickRow], *, check: bool = False) -> Picks:
        """See RowPicker."""
        able = [can_pick(row) for row in rows]
        if all(able):
            return self._step.pick(logits, rows)
        finite = finite_rows(logits) if check else []
        ids, probabilities = [0] * len(rows), [0.0] * len(rows)
        for kind, picker in ((True, self._step), (False, self._others)):
            members = [i for i, yes in enumerate(able) if yes == kind]
            if not members:
                continue
            at = torch.tensor(members).to(logits.device, non_blocking=True)
            found = picker.pick(logits.index_select(0, at), [rows[i] for i in members])
            for i, token_id, share in zip(members, found.ids, found.probabilities, strict=True):
                ids[i], probabilities[i] = token_id, share
        return Picks(ids=ids, probabilities=probabilities, finite=finite)
