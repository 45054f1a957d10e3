"""Gated DeltaNet, one token after the other (model.md 1.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.reference.norm import gated_rms, l2

if TYPE_CHECKING:
    from engine.reference.config import ReferenceConfig
    from engine.reference.weights import Weights


def gated_delta_net(u: Tensor, weights: Weights, config: ReferenceConfig) -> Tensor:
    """u [T, H] -> [T, H], from an empty state."""
    num_tokens = u.shape[0]
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    value_heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim

    mixed = F.silu(causal_conv(u @ weights["in_proj_qkv.weight"].T, weights["conv1d.weight"], 1))
    q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], -1)
    repeat = value_heads // key_heads
    q = (l2(q.view(num_tokens, key_heads, key_dim)) / key_dim**0.5).repeat_interleave(repeat, 1)
    k = l2(k.view(num_tokens, key_heads, key_dim)).repeat_interleave(repeat, 1)
    v = v.view(num_tokens, value_heads, value_dim)
    beta = torch.sigmoid(u @ weights["in_proj_b.weight"].T)
    decay = u @ weights["in_proj_a.weight"].T + weights["dt_bias"]
    g = -weights["A_log"].exp() * F.softplus(decay)

    out = delta_rule(q, k, v, beta, g)
    z = (u @ weights["in_proj_z.weight"].T).view(num_tokens, value_heads, value_dim)
    gated = gated_rms(out, z, weights["norm.weight"], config.rms_norm_eps, config.output_gate_type)
    return gated.flatten(1) @ weights["out_proj.weight"].T


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """Decay, read, write, then read out with the written state.

    Axes: T tokens, N value heads, K key columns, V value columns. q, k [T, N, K]; v [T, N, V]; beta, g [T, N].
    Returns [T, N, V].
    """
    state = torch.zeros(k.shape[1], k.shape[2], v.shape[2])
    outputs: list[Tensor] = []
    for t in range(q.shape[0]):
        state = g[t].exp()[:, None, None] * state
        remembered = torch.einsum("nk,nkv->nv", k[t], state)
        delta = beta[t][:, None] * (v[t] - remembered)
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("nk,nkv->nv", q[t], state))
    return torch.stack(outputs)


def causal_conv(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Depthwise convolution; the last tap multiplies the row itself, each earlier tap `dilation` rows before.

    x [T, C]; weight [C, 1, taps]. Rows before the start are zero.
    """
    taps = weight.shape[-1]
    out = torch.zeros_like(x)
    for tap in range(taps):
        back = (taps - 1 - tap) * dilation
        out[back:] += x[: max(x.shape[0] - back, 0)] * weight[:, 0, tap]
    return out
