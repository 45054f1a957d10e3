"""Per-layer embedding: hashed n-grams looked up and injected into the streams (model.md 1.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.reference.gdn import causal_conv
from engine.reference.norm import grouped_zero_centred_rms
from engine.reference.weights import Weights, under

if TYPE_CHECKING:
    from engine.reference.config import ReferenceConfig

MASK64 = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MIN_ROOT_INPUT = 1e-6


def per_layer_embedding(
    streams: Tensor, ids: Sequence[int], weights: Weights, config: ReferenceConfig
) -> Tensor:
    """What the layer adds to its streams. streams [T, hc*H] -> [T, hc*H]."""
    streams_axis = (config.hc_count, -1)

    def norm(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        return grouped_zero_centred_rms(x, weight, config.rms_norm_eps, config.hc_count)

    embedded = ngram_embedding(ids, under(weights, "ple_embedding"), config)
    key = norm(embedded @ weights["key_proj.weight"].T, "norm_key").unflatten(-1, streams_axis)
    query = norm(streams, "norm_query").unflatten(-1, streams_axis)
    strength = (key * query).sum(-1, keepdim=True) / config.hidden_size**0.5
    strength = strength.sign() * strength.abs().clamp_min(MIN_ROOT_INPUT).sqrt()
    value = embedded @ weights["value_proj.weight"].T
    gated = (torch.sigmoid(strength) * value[:, None, :]).flatten(1)
    convolved = causal_conv(norm(gated, "norm_conv"), weights["conv1d.weight"], config.ngram_size)
    return gated + F.silu(convolved)


def ngram_embedding(ids: Sequence[int], weights: Weights, config: ReferenceConfig) -> Tensor:
    """Rows of all heads side by side. Returns [T, ple_embed_dim]."""
    shards = under(weights, "ngram_embedding")
    table = (
        shards["weight"]
        if "weight" in shards
        else torch.cat([shards[f"shard_{i}.weight"] for i in range(len(shards))])
    )
    multipliers = weights["layer_multipliers"].tolist()
    sizes = weights["ngram_heads_vocab_sizes"].tolist()
    offsets = weights["ngram_heads_offsets"].tolist()
    rows = [ngram_rows(ids, p, multipliers, sizes, offsets, config) for p in range(len(ids))]
    return table[torch.tensor(rows)].flatten(1)


def ngram_rows(
    ids: Sequence[int],
    p: int,
    multipliers: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    config: ReferenceConfig,
) -> list[int]:
    """Table rows of the token at p, one per head: all 2-gram heads, then all 3-gram heads, and so on."""
    context = ngram_context(ids, p, config.ngram_size, config.eos_token_id)
    rows: list[int] = []
    mixed = context[0] * multipliers[0]
    for order in range(1, config.ngram_size):
        mixed ^= context[order] * multipliers[order]
        for _ in range(config.heads_per_ngram):
            rows.append(mixed % sizes[len(rows)] + offsets[len(rows)])
    return rows


def ngram_context(ids: Sequence[int], p: int, ngram_size: int, eos: int) -> list[int]:
    """id(p), id(p-1), ...; from the first earlier EOS (or the start of the text) backwards all are EOS."""
    context = [ids[p]]
    for back in range(1, ngram_size):
        cut = back > p or ids[p - back] == eos or (back > 1 and context[-1] == eos)
        context.append(eos if cut else ids[p - back])
    return context


def splitmix64(x: int) -> int:
    """The n-gram hash's generator step: add the odd constant, then mix."""
    z = (x + GAMMA) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def layer_multipliers(
    vocab_size: int, ngram_size: int = 3, seed: int = 1234, ple_index: int = 0
) -> list[int]:
    """The odd factors of the hash, small enough that a product with an id fits in 63 bits."""
    bound = (2**63 - 1) // vocab_size // 2
    base = seed + 10007 * ple_index
    return [
        2 * (splitmix64((base + GAMMA * (i + 1)) & MASK64) % bound) + 1 for i in range(ngram_size)
    ]


def ngram_head_sizes(base: int, num_heads: int) -> list[int]:
    """The first primes from `base` on."""
    sizes: list[int] = []
    candidate = base
    while len(sizes) < num_heads:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    return sizes


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
