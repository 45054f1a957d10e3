"""Checkpoint -> tensors as the CUDA kernels read them: fused projections in bf16, experts in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from engine.cuda.tiers import ExpertPlaces, empty_experts
from engine.geometry import DRAFT_PREFIX
from engine.layers.ple import HashedRows
from engine.layers.rotary import RotaryTable
from engine.ple_table import stored_table
from engine.state import key_capacity
from engine.tensor_names import elsewhere
from engine.weights import expert_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.cuda.random_model import RandomTensors
    from engine.model_spec import ModelSpec
    from engine.startup_plan import ExpertSplit
    from engine.weights import Checkpoint

_EXPERTS_AT_ONCE = 8
"""Packed together: what that takes in between must fit beside a full expert cache."""


class TensorSource(Protocol):
    """What engine.weights.Checkpoint gives."""

    trunk: str

    def has(self, name: str) -> bool: ...
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def take_each(self, name: str, shape: tuple[int, ...]) -> Callable[[int], Tensor]: ...
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
    """Builds a CudaModel: `load`, `open_experts`, `load_experts`, `finish`. One use.

    Raises WeightMismatch as the source does.
    """

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
        self._is_tiered = False
        self._places: list[ExpertPlaces] = []

    def load(self, *, with_draft: bool) -> CudaModel:
        """Read every tensor but the trunk's experts."""
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
        return CudaModel(
            spec=spec,
            embedding=self._tensor(f"{prefix}embed_tokens.weight", vocab) if embeds else None,
            layers=tuple(self._layer(i) for i in spec.layers),
            final=self._residual(mixer, inject=False) if is_last else None,
            head=self._tensor("lm_head.weight", vocab) if is_last else None,
            draft=self._draft() if with_draft else None,
            cos=cos,
            sin=sin,
        )

    def open_experts(self, split: ExpertSplit | None = None) -> None:
        """Allocate what the trunk's experts take on the device.

        split: which of them go where; None: all to the device, without tiers.
        """
        everyone = range(self._spec.moe.num_experts)
        self._is_tiered = split is not None and split.is_tiered
        self._places = [
            ExpertPlaces(
                self._spec,
                split.near(number) if split is not None else everyone,
                self._device,
            )
            for number in range(self._spec.num_layers)
        ]

    def load_experts(self, model: CudaModel) -> CudaModel:
        """The same with the trunk's experts, each read once and packed to where it goes."""
        layers: list[CudaLayer] = []
        for layer, index, places in zip(model.layers, self._spec.layers, self._places, strict=True):
            self._fill(places, f"{self._source.trunk}layers.{index}.mlp.experts.")
            gate_up, down = places.slots
            far = places.far() if self._is_tiered else None
            moe = replace(layer.moe, gate_up=gate_up, down=down, far=far)
            layers.append(replace(layer, moe=moe))
        return replace(model, layers=tuple(layers))

    def finish(self, *, with_draft: bool) -> None:
        """Raise WeightMismatch if a tensor is left over that belongs to no other stage either."""
        ignored = elsewhere(self._source.trunk, self._spec, with_draft=with_draft)
        self._source.finish(ignore=ignored)

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
            moe=self._draft_moe(f"{layer}mlp."),
            final=self._residual(f"{prefix}hyper_connection_mixer.", inject=False),
        )

    def _residual(self, prefix: str, *, inject: bool) -> ResidualWeights:
        spec = self._spec
        width = spec.stream_width
        down = self._tensor(f"{prefix}input_mix_weight_down.weight", (spec.mix_rank, width))
        if inject:
            name = f"{prefix}block_inject_weight.weight"
            down = _padded(torch.cat((down, self._tensor(name, (spec.num_streams, width)) * 0.5)))
        scale = self._norm(f"{prefix}hc_norm.weight", width) / spec.num_streams
        return ResidualWeights(
            scale=scale,
            down=(down.to(torch.float32) * scale).to(torch.bfloat16),
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
        """With no experts yet."""
        spec, moe = self._spec, self._spec.moe
        gate_up, down = empty_experts(spec, 0, self._device)
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

    def _draft_moe(self, prefix: str) -> MoeWeights:
        """All experts on the device: every draft needs some."""
        places = ExpertPlaces(self._spec, range(self._spec.moe.num_experts), self._device)
        self._fill(places, f"{prefix}experts.")
        gate_up, down = places.slots
        return replace(self._moe(prefix), gate_up=gate_up, down=down)

    def _fill(self, places: ExpertPlaces, prefix: str) -> None:
        """gate_up with gate and up rows alternating, and down, of every expert."""
        if self._device.type == "meta":
            return
        places.open_host()
        for expert, packed in enumerate(self._packed_experts(prefix)):
            places.put(expert, *packed)

    def _packed_experts(self, prefix: str) -> Iterator[tuple[Packed4, Packed4]]:
        """gate_up and down of one expert after the other; packed a few at a time."""
        count = self._spec.moe.num_experts
        if self._random is not None:
            parts = [
                self._random.packed_experts(*part)
                for part in names.fused_experts(prefix, self._spec)
            ]
            yield from zip(*(_singly(part) for part in parts), strict=True)
            return
        read = expert_reader(self._source, prefix, self._spec)
        for first in range(0, count, _EXPERTS_AT_ONCE):
            run = [read(e) for e in range(first, min(first + _EXPERTS_AT_ONCE, count))]
            gate_up = self._pack_pairs(torch.stack([one[0] for one in run]))
            down = self._pack(torch.stack([one[1] for one in run]))
            yield from zip(_singly(gate_up), _singly(down), strict=True)

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


def _singly(packed: Packed4) -> Iterator[Packed4]:
    for words, scales in zip(packed.words.split(1), packed.scales.split(1), strict=True):
        yield Packed4(words=words, scales=scales)


def _padded(weight: Tensor) -> Tensor:
    """Zero rows up to a multiple of 8: library products of other widths are several times slower."""
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 8))
