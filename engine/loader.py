"""Checkpoint -> layers: which stored tensor goes where, which are fused into one product, and where they live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.layers.gdn import GdnLayer
from engine.layers.moe import MoeLayer, RoutedExperts
from engine.layers.norm import ZeroCentredNorm
from engine.layers.ple import PleLayer
from engine.layers.qsa import QsaLayer
from engine.layers.residual import GatedResidual
from engine.layers.rotary import RotaryTable
from engine.linear import ItemProducts, KernelReport, RowLinear
from engine.model import DecoderLayer, Trunk
from engine.mtp import DraftLayer
from engine.state import key_capacity

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.weights import Checkpoint

DRAFT_PREFIX = "mtp."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything with weights, and what it really takes."""

    trunk: Trunk
    draft: DraftLayer | None
    part_bytes: dict[str, int]
    """Bytes as held, by the names of `memory_plan.weight_bytes`."""
    report: KernelReport


class ModelLoader:
    """Builds a model's layers from an open checkpoint. One use."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        max_context: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._exact = exact
        self._report = KernelReport()
        self._products = ItemProducts(exact=exact)
        self._part_bytes: dict[str, int] = {}
        self._capacity = key_capacity(max_context)
        self._rotary = RotaryTable(
            rotary_dim=spec.qsa.rotary_dim,
            theta=spec.qsa.rope_theta,
            num_positions=self._capacity,
            dtype=dtype,
            device=device,
        )

    def load(self, *, with_draft: bool) -> LoadedModel:
        """Read every tensor the model has. Raises WeightMismatch for a missing, misshapen or left-over one."""
        trunk = self._trunk()
        draft = self._draft(trunk) if with_draft else None
        self._checkpoint.finish(ignore=() if with_draft else (DRAFT_PREFIX,))
        self._count("rotary tables", self._rotary.num_bytes)
        return LoadedModel(
            trunk=trunk, draft=draft, part_bytes=self._part_bytes, report=self._report
        )

    def _trunk(self) -> Trunk:
        spec, prefix = self._spec, self._checkpoint.trunk
        embedding = self._tensor(f"{prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden))
        self._count("embedding", _num_bytes(embedding))
        layers = tuple(self._decoder_layer(layer) for layer in range(spec.num_layers))
        final = self._residual(f"{prefix}hyper_connection_mixer.", inject=False)
        self._count("residual", final.num_bytes)
        head = self._linear([("lm_head.weight", (spec.vocab_size, spec.hidden))])
        self._count("head", head.num_bytes)
        return Trunk(
            embedding=embedding,
            layers=layers,
            final=final,
            head=head,
            num_streams=spec.num_streams,
        )

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        spec = self._spec
        prefix = f"{self._checkpoint.trunk}layers.{layer}."
        ple_ids = spec.ple.layer_ids if spec.ple else ()
        ple = self._ple(f"{prefix}ple.", ple_ids.index(layer)) if layer in ple_ids else None
        mixer: GdnLayer | QsaLayer
        if spec.is_qsa(layer):
            mixer = self._qsa(f"{prefix}self_attn.", spec.qsa_layers.index(layer))
            self._count("qsa", mixer.num_bytes)
        else:
            mixer = self._gdn(f"{prefix}linear_attn.")
            self._count("gdn", mixer.num_bytes)
        built = DecoderLayer(
            ple=ple,
            mixer_residual=self._residual(f"{prefix}attn_hyper_connection.", inject=True),
            mixer=mixer,
            gdn_index=0 if spec.is_qsa(layer) else spec.gdn_layers.index(layer),
            moe_residual=self._residual(f"{prefix}mlp_hyper_connection.", inject=True),
            moe=self._moe(f"{prefix}mlp."),
        )
        self._count("residual", built.mixer_residual.num_bytes + built.moe_residual.num_bytes)
        self._count("moe", built.moe.num_bytes)
        return built

    def _draft(self, trunk: Trunk) -> DraftLayer:
        spec = self._spec
        prefix, layer = DRAFT_PREFIX, f"{DRAFT_PREFIX}layers.0."
        square = (spec.hidden, spec.hidden)
        draft = DraftLayer(
            trunk=trunk,
            fc_embedding=self._linear([(f"{prefix}fc_embedding.weight", square)]),
            fc_hidden=self._linear([(f"{prefix}fc_hidden.weight", square)]),
            norm_embedding=self._norm(f"{prefix}pre_fc_norm_embedding.weight", spec.hidden),
            norm_hidden=self._norm(f"{prefix}pre_fc_norm_hidden.weight", spec.stream_width),
            attention_residual=self._residual(f"{layer}attn_hyper_connection.", inject=True),
            attention=self._qsa(f"{layer}self_attn.", len(spec.qsa_layers)),
            moe_residual=self._residual(f"{layer}mlp_hyper_connection.", inject=True),
            moe=self._moe(f"{layer}mlp."),
            final=self._residual(f"{prefix}hyper_connection_mixer.", inject=False),
            num_streams=spec.num_streams,
        )
        self._count("draft layer", draft.num_bytes)
        return draft

    def _residual(self, prefix: str, *, inject: bool) -> GatedResidual:
        spec = self._spec
        width = spec.stream_width
        norm = self._tensor(f"{prefix}hc_norm.weight", (width,), dtype=torch.float32)
        down = self._tensor(f"{prefix}input_mix_weight_down.weight", (spec.mix_rank, width))
        if inject:
            name = f"{prefix}block_inject_weight.weight"
            down = torch.cat((down, self._tensor(name, (spec.num_streams, width)) * 0.5))
        return GatedResidual(
            norm=ZeroCentredNorm(
                norm, eps=spec.norm_eps, group=spec.hidden, factor=1.0 / spec.num_streams
            ),
            down_inject=RowLinear(down, exact=self._exact, report=self._report),
            up=self._linear([(f"{prefix}input_mix_weight_up.weight", (width, spec.mix_rank))]),
            num_streams=spec.num_streams,
            rank=spec.mix_rank,
        )

    def _gdn(self, prefix: str) -> GdnLayer:
        spec, gdn = self._spec, self._spec.gdn
        heads = gdn.num_value_heads
        conv = self._tensor(f"{prefix}conv1d.weight", (gdn.conv_channels, 1, gdn.conv_width))
        return GdnLayer(
            in_proj=self._linear(
                [
                    (f"{prefix}in_proj_qkv.weight", (gdn.conv_channels, spec.hidden)),
                    (f"{prefix}in_proj_z.weight", (gdn.value_channels, spec.hidden)),
                    (f"{prefix}in_proj_b.weight", (heads, spec.hidden)),
                    (f"{prefix}in_proj_a.weight", (heads, spec.hidden)),
                ]
            ),
            conv=conv[:, 0],
            a_log=self._tensor(f"{prefix}A_log", (heads,), dtype=torch.float32),
            dt_bias=self._tensor(f"{prefix}dt_bias", (heads,), dtype=torch.float32),
            norm=self._tensor(f"{prefix}norm.weight", (gdn.value_dim,)),
            out_proj=self._linear(
                [(f"{prefix}out_proj.weight", (spec.hidden, gdn.value_channels))]
            ),
            products=self._products,
            spec=gdn,
            eps=spec.norm_eps,
        )

    def _qsa(self, prefix: str, index: int) -> QsaLayer:
        spec, qsa = self._spec, self._spec.qsa
        kv = qsa.num_kv_heads * qsa.head_dim
        queries = qsa.num_heads * qsa.head_dim
        return QsaLayer(
            index=index,
            in_proj=self._linear(
                [
                    (f"{prefix}q_proj.weight", (2 * queries, spec.hidden)),
                    (f"{prefix}k_proj.weight", (kv, spec.hidden)),
                    (f"{prefix}v_proj.weight", (kv, spec.hidden)),
                    (
                        f"{prefix}indexer.index_qk_proj.weight",
                        ((qsa.num_index_heads + 1) * qsa.index_dim, spec.hidden),
                    ),
                ]
            ),
            out_proj=self._linear([(f"{prefix}o_proj.weight", (spec.hidden, queries))]),
            q_norm=self._norm(f"{prefix}q_norm.weight", qsa.head_dim),
            k_norm=self._norm(f"{prefix}k_norm.weight", qsa.head_dim),
            index_q_norm=self._norm(f"{prefix}indexer.q_layernorm.weight", qsa.index_dim),
            index_k_norm=self._norm(f"{prefix}indexer.k_layernorm.weight", qsa.index_dim),
            rotary=self._rotary,
            products=self._products,
            spec=qsa,
            capacity=self._capacity,
        )

    def _moe(self, prefix: str) -> MoeLayer:
        spec, moe = self._spec, self._spec.moe
        gate_up, down = self._experts(f"{prefix}experts.")
        return MoeLayer(
            head=self._linear(
                [
                    (f"{prefix}gate.weight", (moe.num_experts, spec.hidden)),
                    (f"{prefix}shared_expert_gate.weight", (1, spec.hidden)),
                    (f"{prefix}shared_expert.gate_proj.weight", (moe.shared_dim, spec.hidden)),
                    (f"{prefix}shared_expert.up_proj.weight", (moe.shared_dim, spec.hidden)),
                ]
            ),
            shared_down=self._linear(
                [(f"{prefix}shared_expert.down_proj.weight", (spec.hidden, moe.shared_dim))]
            ),
            experts=RoutedExperts(gate_up, down, exact=self._exact, report=self._report),
            spec=moe,
        )

    def _experts(self, prefix: str) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2*I, H] and down [E, H, I], from fused or per-expert tensors."""
        hidden, moe = self._spec.hidden, self._spec.moe
        count, width = moe.num_experts, moe.expert_dim
        if self._checkpoint.has(f"{prefix}gate_up_proj"):
            return (
                self._tensor(f"{prefix}gate_up_proj", (count, 2 * width, hidden)),
                self._tensor(f"{prefix}down_proj", (count, hidden, width)),
            )
        gate_up = torch.empty(count, 2 * width, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(count, hidden, width, dtype=self._dtype, device=self._device)
        for expert in range(count):
            one = f"{prefix}{expert}."
            gate_up[expert, :width] = self._tensor(f"{one}gate_proj.weight", (width, hidden))
            gate_up[expert, width:] = self._tensor(f"{one}up_proj.weight", (width, hidden))
            down[expert] = self._tensor(f"{one}down_proj.weight", (hidden, width))
        return gate_up, down

    def _ple(self, prefix: str, index: int) -> PleLayer:
        spec, ple = self._spec, self._spec.ple
        assert ple is not None
        width = spec.stream_width
        self._check_hash(f"{prefix}ple_embedding.", index)
        table = self._table(f"{prefix}ple_embedding.ngram_embedding.", ple.num_rows(index))
        conv = self._tensor(f"{prefix}conv1d.weight", (width, 1, ple.conv_width))
        built = PleLayer(
            index=index,
            table=table,
            key_value=self._linear(
                [
                    (f"{prefix}key_proj.weight", (width, ple.embed_dim)),
                    (f"{prefix}value_proj.weight", (spec.hidden, ple.embed_dim)),
                ]
            ),
            norm_key=self._norm(f"{prefix}norm_key.weight", width, group=spec.hidden),
            norm_query=self._norm(f"{prefix}norm_query.weight", width, group=spec.hidden),
            norm_conv=self._norm(f"{prefix}norm_conv.weight", width, group=spec.hidden),
            conv=conv[:, 0],
            num_streams=spec.num_streams,
            spec=ple,
        )
        self._count("ple", built.num_bytes)
        self._count("ple table", built.table_bytes)
        return built

    def _table(self, prefix: str, num_rows: int) -> Tensor:
        """The n-gram table [rows, head dim], from one tensor or from equal shards."""
        ple = self._spec.ple
        assert ple is not None
        whole = f"{prefix}weight"
        if self._checkpoint.has(whole):
            return self._tensor(whole, (num_rows, ple.head_dim))
        if num_rows % ple.num_shards:
            raise WeightMismatch(
                f"{prefix}*: found split_ngram_parts {ple.num_shards}, required a divisor of {num_rows} rows"
            )
        per_shard = num_rows // ple.num_shards
        table = torch.empty(num_rows, ple.head_dim, dtype=self._dtype, device=self._device)
        for shard in range(ple.num_shards):
            name = f"{prefix}shard_{shard}.weight"
            rows = slice(shard * per_shard, (shard + 1) * per_shard)
            table[rows] = self._tensor(name, (per_shard, ple.head_dim))
        return table

    def _check_hash(self, prefix: str, index: int) -> None:
        """Stored hash constants must be the derived ones: other constants would gather wrong rows in silence."""
        ple = self._spec.ple
        assert ple is not None
        derived = {
            "layer_multipliers": ple.multipliers(index),
            "ngram_heads_vocab_sizes": ple.head_vocab_sizes(index),
            "ngram_heads_offsets": ple.head_offsets(index),
        }
        for name, values in derived.items():
            if not self._checkpoint.has(prefix + name):
                continue
            found = tuple(self._checkpoint.take_ids(prefix + name, (len(values),)).tolist())
            if found != values:
                raise WeightMismatch(f"{prefix}{name}: found {found}, required {values}")

    def _norm(self, name: str, width: int, *, group: int | None = None) -> ZeroCentredNorm:
        weight = self._tensor(name, (width,), dtype=torch.float32)
        return ZeroCentredNorm(weight, eps=self._spec.norm_eps, group=group)

    def _linear(self, parts: list[tuple[str, tuple[int, int]]]) -> RowLinear:
        """One product for weights that read the same rows: their output features follow one another."""
        weights = [self._tensor(name, shape) for name, shape in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return RowLinear(weight, exact=self._exact, report=self._report)

    def _tensor(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._checkpoint.take(name, shape).to(self._device, dtype or self._dtype)

    def _count(self, part: str, num_bytes: int) -> None:
        self._part_bytes[part] = self._part_bytes.get(part, 0) + num_bytes


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
