"""Picking one row's token (product.md D2): plain and per row. The noise defined here is the contract of every sampler.

Noise of token id `i` at absolute position `p` (a prompt's first token is at position 0) under request seed `s`;
integers are modulo 2**64:

    key   = mix(s + GAMMA * (p + 1))
    bits  = mix(key + GAMMA * (i + 1))
    u     = ((bits >> 12) + 0.5) * 2**-52        float64, never 0 or 1
    noise = -log(-log(u))                        float64

where mix is the finaliser of splitmix64. The pick is the argmax over the kept ids of
processed_logit / temperature + noise, in float64 of the fp32 processed logit; the smaller id if equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface import SamplingParams, TokenLogprobs

GAMMA = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens before the one being picked."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]

    @property
    def position(self) -> int:
        """Absolute position of the token being picked."""
        return len(self.prompt_ids) + len(self.output_ids)


def pick(logits: Tensor, params: SamplingParams, history: History) -> int:
    """The token of one row. logits fp32 [V], unprocessed."""
    processed = process_logits(logits, params, history)
    if params.temperature == 0:
        return int(processed.argmax())
    scaled = processed.astype(np.float64) / params.temperature
    kept = kept_ids(scaled, params)
    noise = gumbel_noise(params.seed, history.position, len(scaled))
    return int(kept[(scaled + noise)[kept].argmax()])


def pick_probability(
    logits: Tensor, params: SamplingParams, history: History, token_id: int
) -> float:
    """Of a token among those that `pick` chooses from; greedy counts as temperature 1."""
    processed = process_logits(logits, params, history).astype(np.float64)
    if params.temperature == 0:
        return float(_softmax(processed)[token_id])
    scaled = processed / params.temperature
    kept = kept_ids(scaled, params)
    return float(_softmax(scaled[kept])[kept == token_id].sum())


def pick_window(
    logits: Tensor, params: SamplingParams, history: History, drafts: Sequence[int]
) -> list[int]:
    """The target's pick in every row of a verify window, each as if the drafts before it had been output.

    logits fp32 [len(drafts) + 1, V].
    """
    return [
        pick(
            logits[row],
            params,
            History(
                prompt_ids=history.prompt_ids,
                output_ids=[*history.output_ids, *drafts[:row]],
            ),
        )
        for row in range(len(drafts) + 1)
    ]


def process_logits(logits: Tensor, params: SamplingParams, history: History) -> Float32s:
    """Bias, penalties and the ban of early stops, in fp32 and in this order; temperature and cuts come later."""
    out: Float32s = logits.to(torch.float32).numpy().copy()
    for token_id, bias in params.logit_bias:
        out[token_id] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    for token_id in {*history.prompt_ids, *history.output_ids}:
        value = out[token_id]
        out[token_id] = value / penalty if value > 0 else value * penalty
    for token_id, count in Counter(history.output_ids).items():
        out[token_id] -= np.float32(params.presence_penalty)
        out[token_id] -= np.float32(params.frequency_penalty) * np.float32(count)
    if len(history.output_ids) < params.min_tokens:
        out[list(params.stop_token_ids)] = -np.inf
    return out


def kept_ids(scaled: Float64s, params: SamplingParams) -> NDArray[np.intp]:
    """Ids left by top_k, then top_p among those, then min_p against the largest; ascending.

    scaled: logits over temperature [V]. Equal logits rank by id, the smaller first.
    """
    order = np.argsort(-scaled, kind="stable")
    order = order[np.isfinite(scaled[order])]
    if params.top_k:
        order = order[: params.top_k]
    probabilities = _softmax(scaled[order])
    if params.top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(probabilities)[:-1]))
        num_kept = int((before < params.top_p).sum())
        order, probabilities = order[:num_kept], probabilities[:num_kept]
    order = order[probabilities >= params.min_p * probabilities[0]]
    return np.sort(order)


def gumbel_noise(seed: int, position: int, num_ids: int) -> Float64s:
    """Noise of ids 0..num_ids-1, by the definition at the top of this module."""
    key = mix((seed + GAMMA * (position + 1)) & MASK64)
    ids = np.arange(1, num_ids + 1, dtype=np.uint64)
    z = np.uint64(key) + np.uint64(GAMMA) * ids
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = z ^ (z >> np.uint64(31))
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def mix(z: int) -> int:
    """The finaliser of splitmix64, without its addition."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row under the unprocessed logits; equal ones rank by id. logits fp32 [V]."""
    logprobs = logits.to(torch.float32).log_softmax(-1)
    order = torch.argsort(logprobs, descending=True, stable=True)[:num_top].tolist()
    return TokenLogprobs(
        logprob=float(logprobs[token_id]), top=tuple((i, float(logprobs[i])) for i in order)
    )


def _softmax(x: Float64s) -> Float64s:
    weights = np.exp(x - x.max())
    return weights / weights.sum()
