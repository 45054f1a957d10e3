"""Gated DeltaNet: a recurrent layer with a matrix state per value head (model.md 1.4).

Two readings of one formula: `window` steps row by row (decode and verification), `chunk` reads a prompt piece at once.
Axes: B slots, T rows of a slot, V value heads, K key heads, dk and dv head widths, C convolution channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.elementwise import sigmoid, silu, softplus
from engine.layers.norm import l2_normalized

if TYPE_CHECKING:
    from engine.linear import ItemProducts, RowLinear
    from engine.model_spec import GdnSpec
    from engine.state import GdnWindow, Rows

_CHUNK = 64
_TRIANGLE = 16


class GdnLayer:
    """One GDN layer.

    in_proj: W [C + V*dv + 2*V, H]: qkv, z, b, a in one product; conv [C, width]; norm [dv] (plain w);
    decay [V] = -exp(A_log) and dt_bias [V] in fp32; out_proj W [H, V*dv].
    """

    __slots__ = (
        "_conv",
        "_decay",
        "_dt_bias",
        "_eps",
        "_in_proj",
        "_norm",
        "_out_proj",
        "_products",
        "_spec",
    )

    def __init__(
        self,
        *,
        in_proj: RowLinear,
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        out_proj: RowLinear,
        products: ItemProducts,
        spec: GdnSpec,
        eps: float,
    ) -> None:
        self._in_proj = in_proj
        self._conv = conv.t().contiguous()
        self._decay = -a_log.to(torch.float32).exp()
        self._dt_bias = dt_bias.to(torch.float32)
        self._norm = norm
        self._out_proj = out_proj
        self._products = products
        self._spec = spec
        self._eps = eps

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        small = (self._conv, self._decay, self._dt_bias, self._norm)
        return (
            self._in_proj.num_bytes
            + self._out_proj.num_bytes
            + sum(t.numel() * t.element_size() for t in small)
        )

    def window(self, x: Tensor, rows: Rows, state: GdnWindow) -> Tensor:
        """One verify window: x [R, H] of all slots' rows -> [R, H].

        Advances each slot's S by its first row, which is always kept, and leaves in `state` what a commit needs to
        replay the others; S after the drafted rows lives in scratch only.
        """
        qkv, z, beta, decay = self._project(x)
        conv_in = state.put_rows(rows.padded(qkv))
        taps = conv_in.shape[1] - self._conv.shape[0] + 1
        mixed = self._convolved(conv_in, taps)
        q, k, v = self._heads(mixed)
        beta, decay = rows.padded(beta), rows.padded(decay)
        out = self._steps(rows, state, q, k, v, beta, decay)
        return self._output(rows.flat(out), z)

    def chunk(self, x: Tensor, s: Tensor, history: Tensor) -> Tensor:
        """One prompt piece of one slot: x [T, H] -> [T, H]; S [V, dk, dv] and history [width-1, C] are advanced."""
        qkv, z, beta, decay = self._project(x)
        conv_in = torch.cat((history, qkv))
        history.copy_(conv_in[-history.shape[0] :])
        q, k, v = self._heads(self._convolved(conv_in.unsqueeze(0), x.shape[0]))
        out, new_s = chunked_delta_rule(q[0], k[0], v[0], beta, decay, s, num_repeat=self._repeat)
        s.copy_(new_s)
        return self._output(out, z)

    @property
    def _repeat(self) -> int:
        return self._spec.num_value_heads // self._spec.num_key_heads

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [R, H] -> qkv [R, C], z [R, V*dv], beta [R, V] and log decay g [R, V] in fp32."""
        spec = self._spec
        heads = spec.num_value_heads
        sizes = [spec.conv_channels, spec.value_channels, heads, heads]
        qkv, z, b, a = torch.split_with_sizes(self._in_proj(x), sizes, -1)
        beta = sigmoid(b.to(torch.float32))
        g = softplus(a.to(torch.float32) + self._dt_bias) * self._decay
        return qkv, z, beta, g

    def _convolved(self, padded: Tensor, num_rows: int) -> Tensor:
        """Causal depthwise convolution and SiLU: [B, width-1+T, C] -> [B, T, C]."""
        total = padded[:, :num_rows] * self._conv[0]
        for tap in range(1, self._conv.shape[0]):
            total.addcmul_(padded[:, tap : tap + num_rows], self._conv[tap])
        return silu(total)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, C] -> q, k [B, T, K, dk] normalised, v [B, T, V, dv]; all fp32."""
        spec = self._spec
        sizes = [spec.key_channels, spec.key_channels, spec.value_channels]
        q, k, v = torch.split_with_sizes(mixed.to(torch.float32), sizes, -1)
        shape = (*mixed.shape[:2], -1, spec.key_dim)
        q = l2_normalized(q.view(shape)).mul_(spec.key_dim**-0.5)
        k = l2_normalized(k.view(shape))
        return q, k, v.view(*mixed.shape[:2], -1, spec.value_dim)

    def _steps(
        self,
        rows: Rows,
        state: GdnWindow,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor,
    ) -> Tensor:
        """The recurrence, row by row, over the slots that have that row. Returns o [B, T, V, dv] fp32."""
        repeat = self._repeat
        k = k.repeat_interleave(repeat, dim=2)
        q = q.repeat_interleave(repeat, dim=2)
        keys_queries = torch.stack((k, q), dim=3)
        overlap = (k * q).sum(-1, keepdim=True)
        factor = decay.exp().unsqueeze(-1)
        beta = beta.unsqueeze(-1)
        out = torch.zeros_like(v)
        delta = torch.zeros_like(v)
        s = state.load()
        for j in range(rows.max_rows):
            active = rows.active(j)
            part = s[:active]
            part.mul_(factor[:active, j].unsqueeze(-1))
            read = self._read(keys_queries[:active, j], part)
            d = (v[:active, j] - read[:, :, 0]) * beta[:active, j]
            delta[:active, j] = d
            out[:active, j] = read[:, :, 1] + overlap[:active, j] * d
            # A product and a sum of their own, as in the replay: no fused multiply-add may differ between the two.
            part.add_(k[:active, j].unsqueeze(-1) * d.unsqueeze(-2))
            if j == 0:
                state.store(s)
        state.keep(k=k, delta=delta, factor=factor.squeeze(-1))
        return out

    def _read(self, keys_queries: Tensor, s: Tensor) -> Tensor:
        """k^T S and q^T S of each slot and head: [B, V, 2, dk] and [B, V, dk, dv] -> [B, V, 2, dv]."""
        items = keys_queries.reshape(-1, 2, keys_queries.shape[-1])
        out = self._products(items, s.flatten(0, 1), group=self._spec.num_value_heads)
        return out.view(s.shape[0], -1, 2, s.shape[-1])

    def _output(self, out: Tensor, z: Tensor) -> Tensor:
        """Gated RMS over each head, then the output projection: out [R, V, dv] fp32, z [R, V*dv] -> [R, H]."""
        dtype = z.dtype
        normed = F.rms_norm(out, (self._spec.value_dim,), None, self._eps).to(dtype)
        gate = z.unflatten(-1, (-1, self._spec.value_dim)).to(torch.float32)
        gate = sigmoid(gate) if self._spec.gate == "sigmoid" else silu(gate)
        gated = ((self._norm * normed) * gate).to(dtype)
        return self._out_proj(gated.flatten(1))


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, s: Tensor, *, num_repeat: int
) -> tuple[Tensor, Tensor]:
    """The recurrence of model.md 1.4 over T rows at once, in chunks of 64, fp32.

    q, k [T, K, dk] normalised; v [T, V, dv]; beta, decay (log) [T, V]; s [V, dk, dv].
    Returns o [T, V, dv] and the new s.

    Within a chunk the updates d_i solve (I + A) d = beta (v - exp(g) k S0), A strictly lower triangular with
    A_ij = beta_i exp(g_i - g_j) k_i.k_j and g the running sum of log decays.
    """
    num_rows = v.shape[0]
    missing = -num_rows % _CHUNK
    q, k = (_head_chunks(x.repeat_interleave(num_repeat, dim=1), missing) for x in (q, k))
    v = _head_chunks(v, missing)
    beta = _head_chunks(beta.unsqueeze(-1), missing)
    total = _head_chunks(decay.unsqueeze(-1), missing).squeeze(-1).cumsum(-1)
    ratio = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    keys_beta = k * beta
    system = (keys_beta @ k.transpose(-1, -2) * ratio).tril(-1)
    inverse = unit_lower_inverse(system)
    values = inverse @ (v * beta)
    reads = inverse @ (keys_beta * total.exp().unsqueeze(-1))
    scores = q @ k.transpose(-1, -2) * ratio
    queries = q * total.exp().unsqueeze(-1)
    last = total[..., -1:]
    keys_out = k * (last - total).exp().unsqueeze(-1)
    out = torch.empty_like(v)
    for i in range(v.shape[1]):
        d = values[:, i] - reads[:, i] @ s
        out[:, i] = queries[:, i] @ s + scores[:, i] @ d
        s = s * last[:, i].exp().unsqueeze(-1) + keys_out[:, i].transpose(-1, -2) @ d
    return out.flatten(1, 2)[:, :num_rows].transpose(0, 1), s


def _head_chunks(x: Tensor, missing: int) -> Tensor:
    """[T, V, d] -> [V, chunks, 64, d], zero rows at the end (they change neither output nor state)."""
    return F.pad(x.transpose(0, 1), (0, 0, 0, missing)).unflatten(1, (-1, _CHUNK))


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular a [..., 64, 64].

    Diagonal blocks of 16 by the finite product (I - a)(I + a^2)(I + a^4)(I + a^8), which is exact because a^16 = 0 and
    tame at this size; then blocks are merged in pairs. The product over all 64 would cancel catastrophically.
    """
    size = a.shape[-1]
    blocks = [
        _nilpotent_inverse(a[..., i : i + _TRIANGLE, i : i + _TRIANGLE])
        for i in range(0, size, _TRIANGLE)
    ]
    width = _TRIANGLE
    while width < size:
        merged: list[Tensor] = []
        for pair in range(0, len(blocks), 2):
            top, bottom = blocks[pair], blocks[pair + 1]
            row = (pair + 1) * width
            corner = a[..., row : row + width, row - width : row]
            left = -(bottom @ corner @ top)
            upper = torch.cat((top, torch.zeros_like(top)), dim=-1)
            merged.append(torch.cat((upper, torch.cat((left, bottom), dim=-1)), dim=-2))
        blocks = merged
        width *= 2
    return blocks[0]


def _nilpotent_inverse(a: Tensor) -> Tensor:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    inverse = identity - a
    power = a
    for _ in range(3):
        power = power @ power
        inverse = inverse @ (identity + power)
    return inverse
