"""Sparse attention: an indexer chooses blocks of earlier tokens for each query by itself (model.md 1.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.reference.norm import zero_centred_rms
from engine.reference.rotary import rotate
from engine.reference.weights import Weights, under

if TYPE_CHECKING:
    from engine.reference.config import ReferenceConfig


def sparse_attention(
    u: Tensor, weights: Weights, config: ReferenceConfig, first_query: int = 0
) -> Tensor:
    """u [T, H] of positions 0..T-1 -> [T - first_query, H], the output rows from first_query on."""
    num_tokens, head_dim = u.shape[0], config.head_dim
    eps, positions = config.rms_norm_eps, torch.arange(num_tokens)
    q, gate = (u @ weights["q_proj.weight"].T).view(num_tokens, -1, 2 * head_dim).chunk(2, -1)
    k = (u @ weights["k_proj.weight"].T).view(num_tokens, -1, head_dim)
    v = (u @ weights["v_proj.weight"].T).view(num_tokens, -1, head_dim)
    q = zero_centred_rms(q, weights["q_norm.weight"], eps)
    k = zero_centred_rms(k, weights["k_norm.weight"], eps)
    q = rotate(q, positions, config.rotary_dim, config.rope_theta)
    k = rotate(k, positions, config.rotary_dim, config.rope_theta)
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    rows: list[Tensor] = []
    indexer = under(weights, "indexer")
    for p, visible in enumerate(selected_positions(u, indexer, config, first_query), first_query):
        scores = torch.einsum("nd,tnd->nt", q[p], k[visible]) / head_dim**0.5
        rows.append(torch.einsum("nt,tnd->nd", scores.softmax(-1), v[visible]))
    attended = torch.stack(rows) * torch.sigmoid(gate[first_query:])
    return attended.flatten(1) @ weights["o_proj.weight"].T


def selected_positions(
    u: Tensor, weights: Weights, config: ReferenceConfig, first_query: int = 0
) -> list[Tensor]:
    """For each query from first_query on, the positions it may attend to, ascending.

    Blocks with equal scores: the earlier one first.
    """
    ratio = config.indexer_compress_ratio
    budget_blocks = config.indexer_budget // ratio
    selected: list[Tensor] = []
    for p, scores in enumerate(block_scores(u, weights, config, first_query), first_query):
        order = torch.argsort(scores, descending=True, stable=True)
        blocks = order[:budget_blocks].sort().values
        tokens = (blocks[:, None] * ratio + torch.arange(ratio)).flatten()
        tail = torch.arange(scores.shape[0] * ratio, p + 1)
        selected.append(torch.cat((tokens, tail)))
    return selected


def block_scores(
    u: Tensor, weights: Weights, config: ReferenceConfig, first_query: int = 0
) -> list[Tensor]:
    """For each query at p >= first_query, the score of each of its (p + 1) // ratio complete blocks."""
    num_tokens, dim = u.shape[0], config.indexer_head_dim
    ratio, eps = config.indexer_compress_ratio, config.rms_norm_eps
    qk = (u @ weights["index_qk_proj.weight"].T).view(num_tokens, config.indexer_n_heads + 1, dim)
    queries, raw_keys = qk[:, :-1], qk[:, -1]
    queries = zero_centred_rms(queries, weights["q_layernorm.weight"], eps)
    queries = rotate(queries, torch.arange(num_tokens), config.rotary_dim, config.rope_theta)

    num_blocks = num_tokens // ratio
    pooled = raw_keys[: num_blocks * ratio].view(num_blocks, ratio, dim).mean(1)
    pooled = zero_centred_rms(pooled, weights["k_layernorm.weight"], eps)
    first = torch.arange(num_blocks) * ratio
    keys = rotate(pooled[:, None], first, config.rotary_dim, config.rope_theta)[:, 0]
    return [
        (queries[p] @ keys[: (p + 1) // ratio].T).relu().sum(0) / dim**0.5
        for p in range(first_query, num_tokens)
    ]
