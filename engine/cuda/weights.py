"""Checkpoint -> tensors as the CUDA kernels read them: fused projections in bf16, experts in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

import engine.tensor_names as names
from engine.arena import pin_memory
from engine.cuda.gdn import GdnWeights
from engine.cuda.moe import MoeWeights
from engine.cuda.ple import PleWeights
from engine.cuda.qsa import QsaWeights
from engine.cuda.quant import Packed4, pack4
from engine.cuda.residual import ResidualWeights
from engine.geometry import DRAFT_PREFIX
from engine.layers.ple import HashedRows
from engine.layers.rotary import RotaryTable
from engine.ple_table import stored_table
from engine.state import key_capacity
from engine.tensor_names import elsewhere

if TYPE_CHECKING:
    from engine.cuda.random_model import RandomTensors
    from engine.model_spec import ModelSpec
    from engine.weights import Checkpoint

_EXPERTS_AT_ONCE = 64


class TensorSource(Protocol):
    """What engine.weights.Checkpoint gives."""

    trunk: str

    def has(self, name: str) -> bool: ...
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def finish(self, *, ignore: tuple[str, ...] = ()) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayer:
    """One trunk layer; exactly one of gdn and qsa is there."""

    ple: PleWeights | None
    mixer_residual: ResidualWeights
    gdn: GdnWeights | None
    gdn_index: int
    qsa: QsaWeights | None
    moe_residual: ResidualWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDraftLayer:
    """The draft layer; norms fp32 (1 + w)."""

    fc_embedding: Tensor
    fc_hidden: Tensor
    norm_embedding: Tensor
    norm_hidden: Tensor
    attention_residual: ResidualWeights
    attention: QsaWeights
    moe_residual: ResidualWeights
    moe: MoeWeights
    final: ResidualWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaModel:
    """All weights on one device. cos, sin bf16 [positions, rotary dim], the sign of rotate_half in sin.

    Where spec is a stage's part: embedding is None if neither ids come in nor a draft layer is; final and head are None
    if no logits come out.
    """

    spec: ModelSpec
    embedding: Tensor | None
    layers: tuple[CudaLayer, ...]
    final: ResidualWeights | None
    head: Tensor | None
    draft: CudaDraftLayer | None
    cos: Tensor
    sin: Tensor

    @property
    def tables(self) -> tuple[HashedRows, ...]:
        """N-gram tables that lie on the disk."""
        found = (layer.ple.rows for layer in self.layers if layer.ple is not None)
        return tuple(rows for rows in found if rows is not None)


class CudaLoader:
    """Builds a CudaModel. One use. Raises WeightMismatch as the source does."""

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        *,
        device: torch.device,
        max_context: int,
        ple_io: str = "ram",
        random: RandomTensors | None = None,
    ) -> None:
        """ple_io: with `ram` the n-gram table stays in host memory, pinned where there is a GPU, and kernels read its
        rows there; with `mmap` or `direct` it stays in its files, and rows are copied to the device.

        random: makes the experts' 4-bit words at once, for measuring; their values then mean nothing.
        """
        self._random = random
        self._ple_io = ple_io
        self._source = source
        self._spec = spec
        self._device = device
        self._capacity = key_capacity(max_context)

    def load(self, *, with_draft: bool) -> CudaModel:
        """Read every tensor the model has."""
        spec, prefix = self._spec, self._source.trunk
        vocab = (spec.vocab_size, spec.hidden)
        table = RotaryTable(
            rotary_dim=spec.qsa.rotary_dim,
            theta=spec.qsa.rope_theta,
            num_positions=self._capacity,
            dtype=torch.bfloat16,
            device=self._device,
        )
        cos, sin = table.at(torch.arange(self._capacity, device=self._device))
        embeds, is_last = spec.is_first or with_draft, spec.is_last
        mixer = f"{prefix}hyper_connection_mixer."
        model = CudaModel(
            spec=spec,
            embedding=self._tensor(f"{prefix}embed_tokens.weight", vocab) if embeds else None,
            layers=tuple(self._layer(i) for i in spec.layers),
            final=self._residual(mixer, inject=False) if is_last else None,
            head=self._tensor("lm_head.weight", vocab) if is_last else None,
            draft=self._draft() if with_draft else None,
            cos=cos,
            sin=sin,
        )
        self._source.finish(ignore=elsewhere(prefix, spec, with_draft=with_draft))
        return model

    def _layer(self, layer: int) -> CudaLayer:
        spec = self._spec
        prefix = f"{self._source.trunk}layers.{layer}."
        ple_ids = spec.ple.layer_ids if spec.ple else ()
        is_qsa = spec.is_qsa(layer)
        return CudaLayer(
            ple=self._ple(f"{prefix}ple.", ple_ids.index(layer)) if layer in ple_ids else None,
            mixer_residual=self._residual(f"{prefix}attn_hyper_connection.", inject=True),
            gdn=None if is_qsa else self._gdn(f"{prefix}linear_attn."),
            gdn_index=0 if is_qsa else spec.gdn_layers.index(layer),
            qsa=self._qsa(f"{prefix}self_attn.", spec.qsa_layers.index(layer)) if is_qsa else None,
            moe_residual=self._residual(f"{prefix}mlp_hyper_connection.", inject=True),
            moe=self._moe(f"{prefix}mlp."),
        )

    def _draft(self) -> CudaDraftLayer:
        spec = self._spec
        prefix, layer = DRAFT_PREFIX, f"{DRAFT_PREFIX}layers.0."
        square = (spec.hidden, spec.hidden)
        return CudaDraftLayer(
            fc_embedding=self._tensor(f"{prefix}fc_embedding.weight", square),
            fc_hidden=self._tensor(f"{prefix}fc_hidden.weight", square),
            norm_embedding=self._norm(f"{prefix}pre_fc_norm_embedding.weight", spec.hidden),
            norm_hidden=self._norm(f"{prefix}pre_fc_norm_hidden.weight", spec.stream_width),
            attention_residual=self._residual(f"{layer}attn_hyper_connection.", inject=True),
            attention=self._qsa(f"{layer}self_attn.", len(spec.qsa_layers)),
            moe_residual=self._residual(f"{layer}mlp_hyper_connection.", inject=True),
            moe=self._moe(f"{layer}mlp."),
            final=self._residual(f"{prefix}hyper_connection_mixer.", inject=False),
        )

    def _residual(self, prefix: str, *, inject: bool) -> ResidualWeights:
        spec = self._spec
        width = spec.stream_width
        down = self._tensor(f"{prefix}input_mix_weight_down.weight", (spec.mix_rank, width))
        if inject:
            name = f"{prefix}block_inject_weight.weight"
            down = _padded(torch.cat((down, self._tensor(name, (spec.num_streams, width)) * 0.5)))
        return ResidualWeights(
            scale=self._norm(f"{prefix}hc_norm.weight", width) / spec.num_streams,
            down=down,
            up=self._tensor(f"{prefix}input_mix_weight_up.weight", (width, spec.mix_rank)),
            rank=spec.mix_rank,
            num_streams=spec.num_streams,
            eps=spec.norm_eps,
        )

    def _gdn(self, prefix: str) -> GdnWeights:
        spec, gdn = self._spec, self._spec.gdn
        heads = gdn.num_value_heads
        conv = self._tensor(f"{prefix}conv1d.weight", (gdn.conv_channels, 1, gdn.conv_width))
        a_log = self._tensor(f"{prefix}A_log", (heads,), torch.float32)
        return GdnWeights(
            in_proj=self._fused(
                (f"{prefix}in_proj_qkv.weight", (gdn.conv_channels, spec.hidden)),
                (f"{prefix}in_proj_z.weight", (gdn.value_channels, spec.hidden)),
                (f"{prefix}in_proj_b.weight", (heads, spec.hidden)),
                (f"{prefix}in_proj_a.weight", (heads, spec.hidden)),
            ),
            conv=conv[:, 0].t().contiguous(),
            decay=-a_log.exp(),
            dt_bias=self._tensor(f"{prefix}dt_bias", (heads,), torch.float32),
            norm=self._tensor(f"{prefix}norm.weight", (gdn.value_dim,)),
            out_proj=self._tensor(f"{prefix}out_proj.weight", (spec.hidden, gdn.value_channels)),
        )

    def _qsa(self, prefix: str, index: int) -> QsaWeights:
        spec, qsa = self._spec, self._spec.qsa
        kv = qsa.num_kv_heads * qsa.head_dim
        queries = qsa.num_heads * qsa.head_dim
        index_rows = (qsa.num_index_heads + 1) * qsa.index_dim
        return QsaWeights(
            index=index,
            in_proj=self._fused(
                (f"{prefix}q_proj.weight", (2 * queries, spec.hidden)),
                (f"{prefix}k_proj.weight", (kv, spec.hidden)),
                (f"{prefix}v_proj.weight", (kv, spec.hidden)),
                (f"{prefix}indexer.index_qk_proj.weight", (index_rows, spec.hidden)),
            ),
            out_proj=self._tensor(f"{prefix}o_proj.weight", (spec.hidden, queries)),
            q_norm=self._norm(f"{prefix}q_norm.weight", qsa.head_dim),
            k_norm=self._norm(f"{prefix}k_norm.weight", qsa.head_dim),
            index_q_norm=self._norm(f"{prefix}indexer.q_layernorm.weight", qsa.index_dim),
            index_k_norm=self._norm(f"{prefix}indexer.k_layernorm.weight", qsa.index_dim),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        spec, moe = self._spec, self._spec.moe
        gate_up, down = self._experts(f"{prefix}experts.")
        return MoeWeights(
            head=_padded(
                self._fused(
                    (f"{prefix}gate.weight", (moe.num_experts, spec.hidden)),
                    (f"{prefix}shared_expert_gate.weight", (1, spec.hidden)),
                    (f"{prefix}shared_expert.gate_proj.weight", (moe.shared_dim, spec.hidden)),
                    (f"{prefix}shared_expert.up_proj.weight", (moe.shared_dim, spec.hidden)),
                )
            ),
            shared_down=self._tensor(
                f"{prefix}shared_expert.down_proj.weight", (spec.hidden, moe.shared_dim)
            ),
            gate_up=gate_up,
            down=down,
        )

    def _experts(self, prefix: str) -> tuple[Packed4, Packed4]:
        """gate_up with gate and up rows alternating, and down; packed a few experts at a time."""
        hidden, moe = self._spec.hidden, self._spec.moe
        count, width = moe.num_experts, moe.expert_dim
        if self._random is not None:
            return (
                self._random.packed_experts(f"{prefix}gate_up_proj", (count, 2 * width, hidden)),
                self._random.packed_experts(f"{prefix}down_proj", (count, hidden, width)),
            )
        if self._source.has(f"{prefix}gate_up_proj"):
            whole = self._source.take(f"{prefix}gate_up_proj", (count, 2 * width, hidden))
            down = self._source.take(f"{prefix}down_proj", (count, hidden, width))
            pairs = [
                (self._pack_pairs(g), self._pack(d))
                for g, d in zip(
                    whole.split(_EXPERTS_AT_ONCE), down.split(_EXPERTS_AT_ONCE), strict=True
                )
            ]
        else:
            pairs = [
                self._expert_run(prefix, range(first, min(first + _EXPERTS_AT_ONCE, count)))
                for first in range(0, count, _EXPERTS_AT_ONCE)
            ]
        return _joined([p[0] for p in pairs]), _joined([p[1] for p in pairs])

    def _expert_run(self, prefix: str, experts: range) -> tuple[Packed4, Packed4]:
        hidden, width = self._spec.hidden, self._spec.moe.expert_dim
        shapes = {
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        }
        gate, up, down = (
            torch.stack([self._source.take(f"{prefix}{e}.{name}.weight", shape) for e in experts])
            for name, shape in shapes.items()
        )
        return self._pack_pairs(torch.cat((gate, up), dim=1)), self._pack(down)

    def _pack_pairs(self, gate_up: Tensor) -> Packed4:
        return self._pack(gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))

    def _pack(self, weight: Tensor) -> Packed4:
        return pack4(weight.to(self._device))

    def _ple(self, prefix: str, index: int) -> PleWeights:
        spec, ple = self._spec, self._spec.ple
        assert ple is not None
        width = spec.stream_width
        conv = self._tensor(f"{prefix}conv1d.weight", (width, 1, ple.conv_width))

        def ids(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, device=self._device)

        if self._device.type != "meta":
            names.check_hash(cast("Checkpoint", self._source), prefix, ple, index)
        table, rows = self._table(prefix, index)
        return PleWeights(
            index=index,
            table=table,
            rows=rows,
            key_value=self._fused(
                (f"{prefix}key_proj.weight", (width, ple.embed_dim)),
                (f"{prefix}value_proj.weight", (spec.hidden, ple.embed_dim)),
            ),
            norm_key=self._norm(f"{prefix}norm_key.weight", width),
            norm_query=self._norm(f"{prefix}norm_query.weight", width),
            norm_conv=self._norm(f"{prefix}norm_conv.weight", width),
            conv=conv[:, 0].t().contiguous(),
            multipliers=ids(ple.multipliers(index)),
            sizes=ids(ple.head_vocab_sizes(index)),
            offsets=ids(ple.head_offsets(index)),
        )

    def _table(self, prefix: str, index: int) -> tuple[Tensor | None, HashedRows | None]:
        """The n-gram table bf16 [rows, head dim] in memory, or what reads its rows."""
        ple, source = self._spec.ple, cast("Checkpoint", self._source)
        assert ple is not None
        parts = names.ple_table(source, prefix, ple, index)
        if self._ple_io != "ram":
            if self._device.type == "meta":
                return None, None
            stored = stored_table(source, parts, self._ple_io, torch.bfloat16)
            return None, HashedRows(ple, index, stored)
        shape = (ple.num_rows(index), ple.head_dim)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=torch.bfloat16, device="meta"), None
        table = torch.empty(shape, dtype=torch.bfloat16)
        for place, (name, _) in zip(table.split(parts[0][1][0]), parts, strict=True):
            source.take_into(name, place)
        if self._device.type == "cuda":
            pin_memory(table)
        return table, None

    def _norm(self, name: str, width: int) -> Tensor:
        return self._tensor(name, (width,), torch.float32) + 1.0

    def _fused(self, *parts: tuple[str, tuple[int, int]]) -> Tensor:
        return torch.cat([self._tensor(name, shape) for name, shape in parts])

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        return self._source.take(name, shape).to(self._device, dtype).contiguous()


def _joined(parts: list[Packed4]) -> Packed4:
    return Packed4(
        words=torch.cat([part.words for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
    )


def _padded(weight: Tensor) -> Tensor:
    """Zero rows up to a multiple of 8: library products of other widths are several times slower."""
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 8))
