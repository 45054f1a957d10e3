"""The draft layer and its chain, recomputed from the first cell at every step (model.md 3.2 to 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.reference.model import ReferenceModel, last_row_of_attention_layer
from engine.reference.norm import zero_centred_rms
from engine.reference.weights import under

DraftPick = Callable[[Tensor, int], int]
"""(logits [V], absolute position of the token being drafted) -> token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """One drafted token."""

    token_id: int
    logits: Tensor
    """fp32 [V]."""


def draft_logits(
    model: ReferenceModel, ids: Sequence[int], streams: Tensor, drafts: Sequence[int] = ()
) -> Tensor:
    """Logits of every step of a chain whose drafted tokens are given.

    drafts: d1..dk, the tokens that follow ids. Returns [k + 1, V]; with n + 1 ids, row j is the distribution of the
    token at position n + 1 + j. See draft_chain for the rest.
    """
    steps = draft_chain(
        model,
        ids,
        streams,
        len(drafts) + 1,
        # The last step's own token leads nowhere.
        lambda _, position: [*drafts, 0][position - len(ids)],
    )
    return torch.stack([step.logits for step in steps])


def draft_chain(
    model: ReferenceModel, ids: Sequence[int], streams: Tensor, num_drafts: int, pick: DraftPick
) -> list[DraftStep]:
    """The chain in which each step continues from the token picked by the one before.

    ids: the committed tokens 0..n, the last one sampled and not yet read by the trunk. streams [n, hc*H]: the
    trunk's, of positions 0..n-1.

    Cell i (RoPE position i) is made from id(i+1) and the trunk's streams at i; the cells behind the last trunk
    position are made from the drafted tokens and the draft layer's own streams. Every step selects its blocks afresh.
    """
    if streams.shape[0] != len(ids) - 1:
        raise ValueError(
            f"{len(ids)} ids need {len(ids) - 1} rows of streams, not {streams.shape[0]}"
        )
    layer, mixer = under(model.mtp, "layers.0"), under(model.mtp, "hyper_connection_mixer")
    cells = draft_inputs(model, ids[1:], streams)
    steps: list[DraftStep] = []
    for position in range(len(ids), len(ids) + num_drafts):
        own = last_row_of_attention_layer(cells, layer, model.config)
        logits = model.logits(own, mixer)[0]
        token_id = pick(logits, position)
        steps.append(DraftStep(token_id=token_id, logits=logits))
        cells = torch.cat((cells, draft_inputs(model, [token_id], own)))
    return steps


def greedy_pick(logits: Tensor, position: int) -> int:
    """Largest logit, the smaller id if equal."""
    del position
    return int(logits.numpy().argmax())


def draft_inputs(model: ReferenceModel, next_ids: Sequence[int], streams: Tensor) -> Tensor:
    """The draft layer's input streams out of each position's streams and the token after it.

    next_ids [T]; streams [T, hc*H] -> [T, hc*H]. The norm of the streams takes ONE mean square over all of them.
    """
    weights, eps = model.mtp, model.config.rms_norm_eps
    embedded = model.embedding[torch.tensor(next_ids)]
    embedded = zero_centred_rms(embedded, weights["pre_fc_norm_embedding.weight"], eps)
    token_part = embedded @ weights["fc_embedding.weight"].T
    normed = zero_centred_rms(streams, weights["pre_fc_norm_hidden.weight"], eps)
    stream_parts = normed.unflatten(-1, (model.config.hc_count, -1)) @ weights["fc_hidden.weight"].T
    return (stream_parts + token_part[:, None, :]).flatten(1)
