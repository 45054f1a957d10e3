"""The gated delta rule over whole sequences: one chunked form to train with, one step-by-step form
that says what it must equal.

Axes: B rows, H value heads, C chunks, L tokens of a chunk, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_SIZE = 64
_BLOCK_SIZE = 16


def recurrent_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Decay, read, write, read, one token after the other, in the inputs' dtype.

    q, k: [B, H, T, K], already normalised and (q) scaled; v: [B, H, T, V]; g, beta: [B, H, T].
    Returns [B, H, T, V].
    """
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        key = k[:, :, t]
        state = state * g[:, :, t].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", key, state)
        delta = beta[:, :, t, None] * (v[:, :, t] - read)
        state = state + key[..., None] * delta[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, dim=2)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[N, L, L] -> its diagonal blocks [N, L / size, size, size]."""
    count = matrix.shape[-1] // size
    grid = matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return torch.diagonal(grid, dim1=-4, dim2=-2).movedim(-1, -3)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular `lower` [N, L, L], L = 16 * 2^n.

    Inverses of small diagonal blocks are merged into those of blocks twice as large:
    [[A, 0], [X, B]]^-1 = [[A', 0], [-B' X A', B']]. No powers of `lower` are formed: their sum
    would cancel digits away for keys that resemble each other. In fp64, so that a global TF32
    setting does not reach it.
    """
    lower64 = lower.double()
    blocks = _diagonal_blocks(lower64, _BLOCK_SIZE)
    eye = torch.eye(_BLOCK_SIZE, dtype=blocks.dtype, device=blocks.device)
    index = torch.arange(_BLOCK_SIZE, device=blocks.device)
    inverse = eye.expand(blocks.shape)
    size = 1
    while size < _BLOCK_SIZE:
        row, column = index[:, None] // size, index[None, :] // size
        is_corner = (row == column + 1) & (row % 2 == 1)
        inverse = inverse - inverse @ (blocks * is_corner) @ inverse
        size *= 2
    while size < lower.shape[-1]:
        upper_left, lower_right = inverse[:, 0::2], inverse[:, 1::2]
        corner = _diagonal_blocks(lower64, 2 * size)[..., size:, :size]
        merged = -(lower_right @ corner @ upper_left)
        top = F.pad(upper_left, (0, size))
        inverse = torch.cat([top, torch.cat([merged, lower_right], dim=-1)], dim=-2)
        size *= 2
    return inverse[:, 0].to(lower.dtype)


class _UnitLowerInverse(torch.autograd.Function):
    """`unit_lower_inverse` with the short backward pass -T^t G T^t."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse = unit_lower_inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed)


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Equals `recurrent_gated_delta_rule`; fp32 inputs and output, T a multiple of 64.

    Inside a chunk the delta rule is a triangular system (its inverse is `solve`). Across chunks
    the state obeys S' = A S + B with A and B known in advance, so the only sequential part is one
    small product per chunk.
    """
    num_rows, num_heads, num_tokens, _ = q.shape
    num_chunks = num_tokens // CHUNK_SIZE
    flat = num_rows * num_heads * num_chunks
    q, k, v = (x.reshape(flat, CHUNK_SIZE, x.shape[-1]) for x in (q, k, v))
    beta = beta.reshape(flat, CHUNK_SIZE, 1)
    decay = g.reshape(flat, CHUNK_SIZE).cumsum(-1)  # log of the decay since the chunk began
    lower = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=q.device).tril()
    between = (decay[:, :, None] - decay[:, None, :]).masked_fill(~lower, float("-inf")).exp()
    keys = k.transpose(-1, -2)
    system = ((k * beta) @ keys * between).tril(-1)
    solve: Tensor = _UnitLowerInverse.apply(system)  # [flat, L, L]
    from_start = decay.exp()[..., None]
    written = solve @ (v * beta)  # [flat, L, V]
    read_keys = solve @ (k * beta * from_start)  # [flat, L, K]
    kept_keys = (k * (decay[:, -1:] - decay).exp()[..., None]).transpose(-1, -2)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    carry = eye * from_start[:, -1:] - kept_keys @ read_keys  # A [flat, K, K]
    gained = kept_keys @ written  # B [flat, K, V]
    states = _scan(
        carry.unflatten(0, (num_rows * num_heads, num_chunks)),
        gained.unflatten(0, (num_rows * num_heads, num_chunks)),
    ).flatten(0, 1)
    new_values = written - read_keys @ states
    out = (q * from_start) @ states + (q @ keys * between) @ new_values
    return out.reshape(num_rows, num_heads, num_tokens, -1)


def _scan(carry: Tensor, gained: Tensor) -> Tensor:
    """States before each chunk, [N, C, K, V], from S' = carry S + gained and S = 0 at the start."""
    state = torch.zeros_like(gained[:, 0])
    states = [state]
    for chunk in range(carry.shape[1] - 1):
        state = torch.baddbmm(gained[:, chunk], carry[:, chunk], state)
        states.append(state)
    return torch.stack(states, dim=1)
