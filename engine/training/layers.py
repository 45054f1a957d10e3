"""The layers of `qwen4_exp` for training: whole sequences, no caches, parameters under the
checkpoint's names. Routed experts are computed densely and weighted: at this width all 32 cost
less than gathering four.

Axes: B rows, T tokens, H hidden, S streams, E experts, I expert width, M blocks of the indexer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.training.gdn import CHUNK_SIZE, chunk_gated_delta_rule
from engine.training.ngram import NGramHash

if TYPE_CHECKING:
    from engine.training.config import ModelConfig

_OUT_INIT_STD = 0.006
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin [T, rotary_dim] in fp32."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def build(num_tokens: int, config: ModelConfig, device: torch.device) -> RotaryTable:
        half = torch.arange(0, config.rotary_dim, 2, device=device).float() / config.rotary_dim
        positions = torch.arange(num_tokens, device=device).float()
        angle = positions[:, None] * (1.0 / config.rope_theta**half)[None, :]
        angle = torch.cat([angle, angle], dim=-1)
        return RotaryTable(angle.cos(), angle.sin())

    def shifted(self, offset: int, num_tokens: int) -> RotaryTable:
        """The table of positions offset .. offset + num_tokens - 1."""
        end = offset + num_tokens
        return RotaryTable(self.cos[offset:end], self.sin[offset:end])

    def every(self, stride: int) -> RotaryTable:
        """The table of positions 0, stride, 2 stride, ..."""
        return RotaryTable(self.cos[::stride], self.sin[::stride])

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first rotary_dim of x [B, T, heads, dim]; the halves form the pairs."""
        size = self.cos.shape[-1]
        turned, kept = x[..., :size].float(), x[..., size:]
        first, second = turned.chunk(2, dim=-1)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned.to(x.dtype), kept], dim=-1)


class ZeroCentredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), the mean square over groups of `group_size` columns."""

    def __init__(self, size: int, eps: float, group_size: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.group_size = group_size or size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return (groups.flatten(-2) * (1.0 + self.weight)).to(x.dtype)


def _linear(in_size: int, out_size: int, std: float = _INIT_STD) -> nn.Linear:
    linear = nn.Linear(in_size, out_size, bias=False)
    nn.init.normal_(linear.weight, std=std)
    return linear


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution of [B, T, channels] as shifted multiply-adds."""

    def __init__(self, channels: int, kernel_size: int, dilation: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, kernel_size) * std)
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        taps = self.weight.shape[-1]
        reach = (taps - 1) * self.dilation
        num_tokens = x.shape[1]
        padded = F.pad(x, (0, 0, reach, 0))
        total = torch.zeros_like(x, dtype=torch.float32)
        for tap in range(taps):
            begin = tap * self.dilation
            total = total + padded[:, begin : begin + num_tokens] * self.weight[:, 0, tap]
        return total.to(x.dtype)


class GatedResidual(nn.Module):
    """Reads the streams into one input and says how the output is spread over them."""

    def __init__(self, config: ModelConfig, use_inject: bool = True) -> None:
        super().__init__()
        self.num_streams = config.hc_count
        size = config.stream_size
        self.hc_norm = ZeroCentredRMSNorm(size, config.rms_norm_eps, config.hidden_size)
        self.input_mix_weight_down = _linear(size, config.hc_lowrank)
        self.input_mix_weight_up = _linear(config.hc_lowrank, size)
        if use_inject:
            self.block_inject_weight = _linear(size, config.hc_count)

    def read(self, normed: Tensor) -> Tensor:
        """[B, T, S * H] normed -> [B, T, H]."""
        low = F.silu(self.input_mix_weight_down(normed) / self.num_streams)
        mix = torch.sigmoid(self.input_mix_weight_up(low))
        return (mix * normed).unflatten(-1, (self.num_streams, -1)).mean(dim=-2)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the block's input [B, T, H] and the injection weights [B, T, S]."""
        normed = self.hc_norm(streams)
        inject = 2 * torch.sigmoid(self.block_inject_weight(normed) / self.num_streams)
        return self.read(normed), inject

    def mix(self, streams: Tensor) -> Tensor:
        """The final mixer: the read alone."""
        return self.read(self.hc_norm(streams))


def inject(streams: Tensor, weights: Tensor, update: Tensor) -> Tensor:
    """streams [B, T, S * H] plus weights [B, T, S] times update [B, T, H]."""
    spread = (weights[..., None] * update[..., None, :]).flatten(-2)
    return streams + spread.to(streams.dtype)


class _GatedNorm(nn.Module):
    """RMS norm times a plain weight times sigmoid(gate)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight * torch.sigmoid(gate.float())


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_key_heads = config.linear_num_key_heads
        self.num_value_heads = config.linear_num_value_heads
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        key_size = self.num_key_heads * self.key_dim
        value_size = self.num_value_heads * self.value_dim
        hidden, channels = config.hidden_size, 2 * key_size + value_size
        self.in_proj_qkv = _linear(hidden, channels)
        self.in_proj_z = _linear(hidden, value_size)
        self.in_proj_b = _linear(hidden, self.num_value_heads)
        self.in_proj_a = _linear(hidden, self.num_value_heads)
        self.conv1d = DepthwiseConv(channels, config.linear_conv_kernel_dim, 1, std=0.3)
        # Decay rates from "forget within a few tokens" to "keep for a thousand".
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads).uniform_(1, 16).log())
        step = torch.empty(self.num_value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = _GatedNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = _linear(value_size, hidden, _OUT_INIT_STD)

    def forward(self, u: Tensor) -> Tensor:
        num_tokens = u.shape[1]
        mixed = F.silu(self.conv1d(self.in_proj_qkv(u)))
        key_size = self.num_key_heads * self.key_dim
        q, k, v = mixed.split([key_size, key_size, mixed.shape[-1] - 2 * key_size], dim=-1)
        beta = self.in_proj_b(u).float().sigmoid()
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(u).float() + self.dt_bias)
        gate = self.in_proj_z(u).unflatten(-1, (self.num_value_heads, self.value_dim))
        with torch.autocast(u.device.type, enabled=False):
            out = self._delta_rule(q, k, v, log_decay, beta)[:, :, :num_tokens].transpose(1, 2)
            out = self.norm(out, gate).flatten(-2)
        return self.out_proj(out.to(u.dtype))

    def _delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Split heads, normalise, pad to whole chunks, run. Returns [B, heads, T', V] fp32."""
        repeats = self.num_value_heads // self.num_key_heads
        q, k = (x.float().unflatten(-1, (self.num_key_heads, self.key_dim)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q / math.sqrt(self.key_dim)
        v = v.float().unflatten(-1, (self.num_value_heads, self.value_dim))
        q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
        pad = -q.shape[1] % CHUNK_SIZE
        q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x.transpose(1, 2), (0, pad)) for x in (g, beta))
        return chunk_gated_delta_rule(q, k, v, g, beta)


class QSAIndexer(nn.Module):
    """Scores blocks of keys for each query."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.indexer_n_heads
        self.head_dim = config.indexer_head_dim
        self.ratio = config.indexer_compress_ratio
        self.num_selected = config.indexer_budget // config.indexer_compress_ratio
        heads = self.num_heads + 1
        self.index_qk_proj = _linear(config.hidden_size, heads * self.head_dim)
        self.q_layernorm = ZeroCentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_layernorm = ZeroCentredRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, u: Tensor, rotary: RotaryTable) -> Tensor:
        """Scores [B, T, M] in fp32, M = T // ratio; blocks not complete at a query included."""
        heads = self.index_qk_proj(u).unflatten(-1, (self.num_heads + 1, self.head_dim))
        num_blocks = u.shape[1] // self.ratio
        raw_keys = heads[:, : num_blocks * self.ratio, -1].float()
        pooled = raw_keys.unflatten(1, (num_blocks, self.ratio)).mean(dim=2).to(u.dtype)
        firsts = rotary.every(self.ratio).shifted(0, num_blocks)
        keys = firsts.rotate(self.k_layernorm(pooled)[:, :, None])[:, :, 0]
        queries = rotary.rotate(self.q_layernorm(heads[:, :, :-1]))
        dots = torch.einsum("bthd,bmd->bthm", queries, keys)
        return dots.float().relu().sum(dim=2) / math.sqrt(self.head_dim)

    def complete(self, num_tokens: int, device: torch.device) -> Tensor:
        """bool [T, M]: block m lies wholly at or before query t."""
        last = torch.arange(num_tokens // self.ratio, device=device) * self.ratio + self.ratio - 1
        return last[None, :] <= torch.arange(num_tokens, device=device)[:, None]

    def select(self, scores: Tensor, complete: Tensor) -> Tensor:
        """bool [B, T, M]: the best `num_selected` complete blocks of every query."""
        masked = scores.masked_fill(~complete, float("-inf"))
        best = masked.topk(min(self.num_selected, scores.shape[-1]), dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, value=True)
        return chosen & complete


@dataclass(frozen=True, slots=True)
class Cells:
    """Keys and values [B, T, kv heads, D] of one pass, and which of them a query sees [.., T, T]."""

    keys: Tensor
    values: Tensor
    visible: Tensor


class QSAttention(nn.Module):
    """Grouped-query attention with an output gate, over the blocks that the indexer selects."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = _linear(config.hidden_size, 2 * size)
        self.k_proj = _linear(config.hidden_size, kv_size)
        self.v_proj = _linear(config.hidden_size, kv_size)
        self.o_proj = _linear(size, config.hidden_size, _OUT_INIT_STD)
        self.q_norm = ZeroCentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.indexer = QSAIndexer(config)

    def project(self, u: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B, T, heads, D], output gate [B, T, heads * D], keys and values."""
        q, gate = self.q_proj(u).unflatten(-1, (self.num_heads, -1)).chunk(2, dim=-1)
        q = rotary.rotate(self.q_norm(q))
        k = self.k_proj(u).unflatten(-1, (self.num_kv_heads, self.head_dim))
        k = rotary.rotate(self.k_norm(k))
        v = self.v_proj(u).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return q, gate.flatten(-2), k, v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, kv heads, group, T, T'] scaled dot products; a KV head serves a run of query heads."""
        grouped = q.unflatten(2, (self.num_kv_heads, -1))
        return torch.einsum("btkgd,bskd->bkgts", grouped, k) / math.sqrt(self.head_dim)

    def own_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, kv heads, group, T]: each query with the one key of the same index."""
        grouped = q.unflatten(2, (self.num_kv_heads, -1))
        dots = (grouped.float() * k[:, :, :, None].float()).sum(-1) / math.sqrt(self.head_dim)
        return dots.permute(0, 2, 3, 1)

    def output(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """mixed [B, kv heads, group, T, D] -> [B, T, H]."""
        flat = mixed.flatten(1, 2).transpose(1, 2).flatten(-2)
        return self.o_proj(flat * torch.sigmoid(gate))

    def forward(
        self, u: Tensor, rotary: RotaryTable, *, is_selecting: bool
    ) -> tuple[Tensor, Cells, Tensor]:
        """Returns the output, this pass's cells, and the indexer's loss (a scalar)."""
        num_tokens = u.shape[1]
        q, gate, k, v = self.project(u, rotary)
        index_scores = self.indexer(u.detach(), rotary)
        complete = self.indexer.complete(num_tokens, u.device)
        blocks = self.indexer.select(index_scores, complete) if is_selecting else complete
        visible = self._visible(num_tokens, blocks, complete) if is_selecting else _causal(u)
        logits = self.scores(q, k).float().masked_fill(~_over_heads(visible), float("-inf"))
        weights = logits.softmax(dim=-1).to(v.dtype)
        mixed = torch.einsum("bkgts,bskd->bkgtd", weights, v)
        loss = self._indexer_loss(index_scores, weights.detach(), blocks)
        return self.output(mixed, gate), Cells(k, v, visible), loss

    def _visible(self, num_tokens: int, blocks: Tensor, complete: Tensor) -> Tensor:
        """bool [B, T, T]: tokens of selected blocks and the tail after the last complete block."""
        ratio = self.indexer.ratio
        pad = num_tokens - blocks.shape[-1] * ratio
        chosen = F.pad(blocks.repeat_interleave(ratio, dim=-1), (0, pad))
        closed = F.pad(complete.repeat_interleave(ratio, dim=-1), (0, pad))
        device = blocks.device
        past = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
        return chosen | (past & ~closed)

    def _indexer_loss(self, scores: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
        """KL from the attention's share of each visible block to the softmax of its score."""
        num_blocks, ratio = scores.shape[-1], self.indexer.ratio
        mass = weights.float().mean(dim=(1, 2))[..., : num_blocks * ratio]
        mass = mass.unflatten(-1, (num_blocks, ratio)).sum(-1) * blocks  # [B, T, M]
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-6)
        # A finite floor: rows without a complete block stay defined and have target 0.
        log_share = scores.masked_fill(~blocks, -1e4).log_softmax(dim=-1)
        return (target * (target.clamp_min(1e-9).log() - log_share)).sum(-1).mean()

    def chain(
        self, u: Tensor, rotary: RotaryTable, base: Cells, own: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Draft step j >= 1: index i stands at position i + j (which `rotary` says).

        It sees what step 0 saw at index i, and the cells that the chain begun there has made since
        (`own`, earlier steps), its own included. Returns the output and its own new cell.
        """
        q, gate, k, v = self.project(u, rotary)
        own = [*own, (k, v)]
        logits = self.scores(q, base.keys).float()
        logits = logits.masked_fill(~_over_heads(base.visible), float("-inf"))
        mine = torch.stack([self.own_scores(q, key) for key, _ in own], dim=-1)
        weights = torch.cat([logits, mine.float()], dim=-1).softmax(dim=-1).to(v.dtype)
        num_tokens = u.shape[1]
        mixed = torch.einsum("bkgts,bskd->bkgtd", weights[..., :num_tokens], base.values)
        for step, (_, value) in enumerate(own):
            per_token = value.transpose(1, 2)[:, :, None]  # [B, kv heads, 1, T, D]
            mixed = mixed + weights[..., num_tokens + step, None] * per_token
        return self.output(mixed, gate), (k, v)


def _causal(u: Tensor) -> Tensor:
    return torch.ones(u.shape[1], u.shape[1], dtype=torch.bool, device=u.device).tril()


def _over_heads(visible: Tensor) -> Tensor:
    """[T, T] or [B, T, T] -> a shape that broadcasts over [B, kv heads, group, T, T]."""
    return visible if visible.dim() == 2 else visible[:, None, None]


class _Experts(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate_up_proj = nn.Parameter(torch.randn(shape[0], 2 * shape[1], shape[2]) * _INIT_STD)
        self.down_proj = nn.Parameter(torch.randn(shape[0], shape[2], shape[1]) * _OUT_INIT_STD)

    def forward(self, u: Tensor, weights: Tensor) -> Tensor:
        """All experts on u [N, H], each times its column of weights [N, E] (0 where not routed)."""
        num_experts, width = weights.shape[-1], self.down_proj.shape[-1]
        both = F.linear(u, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (num_experts, 2, width))
        hidden = F.silu(both[:, :, 0]) * both[:, :, 1] * weights[..., None].to(both.dtype)
        down = self.down_proj.transpose(0, 1).flatten(1)  # [H, E * I]
        return F.linear(hidden.flatten(1), down)


class _SharedExpert(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.shared_expert_intermediate_size
        self.gate_proj = _linear(config.hidden_size, width)
        self.up_proj = _linear(config.hidden_size, width)
        self.down_proj = _linear(width, config.hidden_size, _OUT_INIT_STD)

    def forward(self, u: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(u)) * self.up_proj(u))
        return out


class MixtureOfExperts(nn.Module):
    """Router, routed experts, gated shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = _linear(config.hidden_size, config.num_experts)
        self.experts = _Experts(config)
        self.shared_expert = _SharedExpert(config)
        self.shared_expert_gate = _linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [B, T, H] and the load-balancing loss: 1 for even routing, up to E."""
        u = x.flatten(0, 1)
        chances = self.gate(u).float().softmax(dim=-1)
        best = chances.topk(self.top_k, dim=-1)
        routed = best.values / best.values.sum(dim=-1, keepdim=True)
        weights = torch.zeros_like(chances).scatter(-1, best.indices, routed)
        share = (weights.detach() > 0).float().mean(dim=0) / self.top_k
        balance = (share * chances.mean(dim=0)).sum() * chances.shape[-1]
        shared = torch.sigmoid(self.shared_expert_gate(u)) * self.shared_expert(u)
        out = self.experts(u, weights) + shared
        return out.unflatten(0, x.shape[:2]), balance


class _PLEEmbedding(nn.Module):
    """The hashed n-gram table and the three integer buffers that address it."""

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hash = NGramHash.from_config(config)
        for name, numbers in self.hash.buffers().items():
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.long))
        width = config.ple_embed_dim // config.num_ngram_heads
        self.ngram_embedding = nn.Embedding(self.hash.num_rows, width)
        nn.init.normal_(self.ngram_embedding.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.hash.rows(
            ids, self.layer_multipliers, self.ngram_heads_vocab_sizes, self.ngram_heads_offsets
        )
        out: Tensor = self.ngram_embedding(rows).flatten(-2)
        return out


class PerLayerEmbedding(nn.Module):
    """Adds hashed n-gram features to every stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_streams = config.hc_count
        self.hidden_size = config.hidden_size
        size = config.stream_size
        self.ple_embedding = _PLEEmbedding(config)
        self.key_proj = _linear(config.ple_embed_dim, size)
        self.value_proj = _linear(config.ple_embed_dim, config.hidden_size)
        self.norm_key = ZeroCentredRMSNorm(size, config.rms_norm_eps, config.hidden_size)
        self.norm_query = ZeroCentredRMSNorm(size, config.rms_norm_eps, config.hidden_size)
        self.norm_conv = ZeroCentredRMSNorm(size, config.rms_norm_eps, config.hidden_size)
        self.conv1d = DepthwiseConv(size, config.ple_conv_kernel_size, config.ngram_size, std=0.0)

    def forward(self, streams: Tensor, ids: Tensor) -> Tensor:
        """streams [B, T, S * H], ids [B, T]: returns what is added to the streams."""
        embedded = self.ple_embedding(ids).to(streams.dtype)
        split = (self.num_streams, self.hidden_size)
        key = self.norm_key(self.key_proj(embedded)).unflatten(-1, split)
        query = self.norm_query(streams).unflatten(-1, split)
        match = (key.float() * query.float()).sum(-1, keepdim=True) / math.sqrt(self.hidden_size)
        match = match.abs().clamp_min(1e-6).sqrt() * match.sign()
        value = self.value_proj(embedded)[..., None, :]
        gated = (torch.sigmoid(match) * value).flatten(-2).to(streams.dtype)
        return gated + F.silu(self.conv1d(self.norm_conv(gated)))
