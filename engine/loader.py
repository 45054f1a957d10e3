"""Checkpoint -> layers: which stored tensor goes where, which are fused into one product, and where they live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import engine.tensor_names as names
from engine.experts import (
    ExpertPool,
    ExpertProducts,
    ExpertShape,
    ExpertStore,
    GroupedExperts,
    LayerExperts,
)
from engine.layers.gdn import GdnLayer
from engine.layers.moe import DenseExperts, MoeLayer
from engine.layers.norm import ZeroCentredNorm
from engine.layers.ple import PleLayer
from engine.layers.qsa import QsaLayer
from engine.layers.residual import GatedResidual
from engine.layers.rotary import RotaryTable
from engine.linear import ItemProducts, KernelReport, RowLinear
from engine.memory_plan import Step, experts_are_dense
from engine.model import DecoderLayer, Trunk
from engine.mtp import DraftLayer
from engine.ple_table import RamTable, stored_table
from engine.state import key_capacity
from engine.weights import expert_reader

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.ple_table import PleTable
    from engine.startup import StartupMarks
    from engine.startup_plan import ExpertSplit
    from engine.weights import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything with weights, and what it really takes."""

    trunk: Trunk
    draft: DraftLayer | None
    experts: ExpertStore | None
    """The trunk's experts where they are held one by one."""
    part_bytes: dict[str, int]
    """Bytes as held, by the names of `memory_plan.weight_bytes`."""
    report: KernelReport


class ModelLoader:
    """Builds a model's layers from an open checkpoint, in the order of a start. One use.

    First `load`, then `load_head`, then `load_experts`; `finish` proves that nothing is left over.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        max_context: int,
        num_workers: int,
        tiered: bool = False,
        ple_io: str = "ram",
    ) -> None:
        """num_workers: threads that compute experts; tiered: hold the trunk's experts one by one, however small."""
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._ple_io = ple_io
        self._device = device
        self._exact = exact
        self._report = KernelReport()
        self._products = ItemProducts(exact=exact)
        self._part_bytes: dict[str, int] = {}
        self._is_dense = experts_are_dense(spec, dtype.itemsize)
        self._expert_prefixes: list[str] = []
        self._store = self._expert_store(num_workers) if tiered or not self._is_dense else None
        self._capacity = key_capacity(max_context)
        self._rotary = RotaryTable(
            rotary_dim=spec.qsa.rotary_dim,
            theta=spec.qsa.rope_theta,
            num_positions=self._capacity,
            dtype=dtype,
            device=device,
        )

    def load(self, *, with_draft: bool) -> LoadedModel:
        """Read all but the head and the experts that are held one by one.

        Raises WeightMismatch for a missing or misshapen tensor.
        """
        trunk = self._trunk(with_embedding=self._spec.is_first or with_draft)
        draft = self._draft(trunk) if with_draft else None
        self._count("rotary tables", self._rotary.num_bytes)
        return LoadedModel(
            trunk=trunk,
            draft=draft,
            experts=self._store,
            part_bytes=self._part_bytes,
            report=self._report,
        )

    def load_head(self, trunk: Trunk) -> None:
        """Read the head: before the expert cache, which is sized by what is left."""
        spec = self._spec
        if not spec.is_last:
            return
        trunk.set_head(self._linear([("lm_head.weight", (spec.vocab_size, spec.hidden))]))
        self._count("head", trunk.head_bytes)

    def load_experts(self, split: ExpertSplit, marks: StartupMarks) -> None:
        """Open the store's slots and read every expert once, to a slot or to the host's memory."""
        store = self._store
        if store is not None:
            store.open(split.slots)
        marks.reach(Step.CACHE)
        if store is not None:
            for number, layer in enumerate(store.layers):
                read = expert_reader(self._checkpoint, self._expert_prefixes[number], self._spec)
                for expert in range(self._spec.moe.num_experts):
                    in_slot = (number, expert) in split.in_slots
                    put = layer.put_slot if in_slot else layer.put_host
                    put(expert, *read(expert))
                layer.admit_first_come()
        marks.reach(Step.FILL)
        if store is not None:
            store.prepare()
        marks.reach(Step.HITS)

    def finish(self, *, with_draft: bool) -> None:
        """Raise WeightMismatch if a tensor is left over that belongs to no other stage either."""
        elsewhere = names.elsewhere(self._checkpoint.trunk, self._spec, with_draft=with_draft)
        self._checkpoint.finish(ignore=elsewhere)

    def _trunk(self, *, with_embedding: bool) -> Trunk:
        spec, prefix = self._spec, self._checkpoint.trunk
        embedding = final = None
        if with_embedding:
            embedding = self._tensor(f"{prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden))
            self._count("embedding", _num_bytes(embedding))
        layers = tuple(self._decoder_layer(layer) for layer in spec.layers)
        if spec.is_last:
            final = self._residual(f"{prefix}hyper_connection_mixer.", inject=False)
            self._count("residual", final.num_bytes)
        return Trunk(embedding=embedding, layers=layers, final=final, num_streams=spec.num_streams)

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
            moe=self._moe(f"{prefix}mlp.", self._trunk_experts(f"{prefix}mlp.experts.")),
        )
        self._count("residual", built.mixer_residual.num_bytes + built.moe_residual.num_bytes)
        self._count("moe", built.moe.num_bytes)
        return built

    def _draft(self, trunk: Trunk) -> DraftLayer:
        spec = self._spec
        prefix, layer = names.DRAFT_PREFIX, f"{names.DRAFT_PREFIX}layers.0."
        square = (spec.hidden, spec.hidden)
        experts = self._draft_experts(f"{layer}mlp.experts.")
        draft = DraftLayer(
            trunk=trunk,
            fc_embedding=self._linear([(f"{prefix}fc_embedding.weight", square)]),
            fc_hidden=self._linear([(f"{prefix}fc_hidden.weight", square)]),
            norm_embedding=self._norm(f"{prefix}pre_fc_norm_embedding.weight", spec.hidden),
            norm_hidden=self._norm(f"{prefix}pre_fc_norm_hidden.weight", spec.stream_width),
            attention_residual=self._residual(f"{layer}attn_hyper_connection.", inject=True),
            attention=self._qsa(f"{layer}self_attn.", len(spec.qsa_layers)),
            moe_residual=self._residual(f"{layer}mlp_hyper_connection.", inject=True),
            moe=self._moe(f"{layer}mlp.", experts),
            final=self._residual(f"{prefix}hyper_connection_mixer.", inject=False),
            num_streams=spec.num_streams,
        )
        self._count("draft layer", draft.num_bytes)
        if isinstance(experts, GroupedExperts):
            self._count("draft layer", experts.layer.slot_bytes)
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
            in_proj=self._linear(names.gdn_in(prefix, spec)),
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
        queries = qsa.num_heads * qsa.head_dim
        return QsaLayer(
            index=index,
            in_proj=self._linear(names.qsa_in(prefix, spec)),
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

    def _moe(self, prefix: str, experts: DenseExperts | GroupedExperts) -> MoeLayer:
        spec, moe = self._spec, self._spec.moe
        return MoeLayer(
            head=self._linear(names.moe_head(prefix, spec)),
            shared_down=self._linear(
                [(f"{prefix}shared_expert.down_proj.weight", (spec.hidden, moe.shared_dim))]
            ),
            experts=experts,
            spec=moe,
        )

    def _trunk_experts(self, prefix: str) -> DenseExperts | GroupedExperts:
        if self._store is None:
            return self._dense_experts(prefix)
        self._expert_prefixes.append(prefix)
        return self._store.add_layer(self._device)

    def _draft_experts(self, prefix: str) -> DenseExperts | GroupedExperts:
        """All in slots: every draft needs them."""
        if self._is_dense:
            return self._dense_experts(prefix)
        assert self._store is not None
        count = self._spec.moe.num_experts
        layer = LayerExperts(count, self._expert_shape(), self._device)
        layer.open(count)
        read = expert_reader(self._checkpoint, prefix, self._spec)
        for expert in range(count):
            layer.put_slot(expert, *read(expert))
        return GroupedExperts(layer, self._store.products, count)

    def _expert_store(self, num_workers: int) -> ExpertStore:
        products = ExpertProducts(ExpertPool(num_workers), exact=self._exact, report=self._report)
        return ExpertStore(products, self._expert_shape(), self._spec.moe.num_experts)

    def _expert_shape(self) -> ExpertShape:
        spec = self._spec
        return ExpertShape(hidden=spec.hidden, width=spec.moe.expert_dim, dtype=self._dtype)

    def _dense_experts(self, prefix: str) -> DenseExperts:
        hidden, moe = self._spec.hidden, self._spec.moe
        count, width = moe.num_experts, moe.expert_dim
        gate_up = torch.empty(count, 2 * width, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(count, hidden, width, dtype=self._dtype, device=self._device)
        read = expert_reader(self._checkpoint, prefix, self._spec)
        for expert in range(count):
            gate_up[expert], down[expert] = read(expert)
        return DenseExperts(gate_up, down, exact=self._exact, report=self._report)

    def _ple(self, prefix: str, index: int) -> PleLayer:
        spec, ple = self._spec, self._spec.ple
        assert ple is not None
        width = spec.stream_width
        names.check_hash(self._checkpoint, prefix, ple, index)
        table = self._table(names.ple_table(self._checkpoint, prefix, ple, index))
        conv = self._tensor(f"{prefix}conv1d.weight", (width, 1, ple.conv_width))
        built = PleLayer(
            index=index,
            table=table,
            key_value=self._linear(names.ple_key_value(prefix, spec, ple)),
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

    def _table(self, parts: list[names.Part]) -> PleTable:
        """The n-gram table [rows, head dim], from one tensor or from equal shards."""
        if self._ple_io != "ram":
            return stored_table(self._checkpoint, parts, self._ple_io, self._dtype)
        shape = (parts[0][1][0], parts[0][1][1])
        table = torch.empty(shape[0] * len(parts), shape[1], dtype=self._dtype)
        for part, (name, _) in zip(table.split(shape[0]), parts, strict=True):
            self._checkpoint.take_into(name, part)
        return RamTable(table)

    def _norm(self, name: str, width: int, *, group: int | None = None) -> ZeroCentredNorm:
        weight = self._tensor(name, (width,), dtype=torch.float32)
        return ZeroCentredNorm(weight, eps=self._spec.norm_eps, group=group)

    def _linear(self, parts: list[names.Part]) -> RowLinear:
        """One product for weights that read the same rows: their output features follow one another."""
        return RowLinear(self._joined(parts), exact=self._exact, report=self._report)

    def _joined(self, parts: list[names.Part]) -> Tensor:
        """Parts one after the other on the first axis; never twice in memory."""
        if len(parts) == 1:
            return self._tensor(*parts[0])
        total = sum(shape[0] for _, shape in parts)
        joined = torch.empty(total, *parts[0][1][1:], dtype=self._dtype, device=self._device)
        first = 0
        for name, shape in parts:
            joined[first : first + shape[0]] = self._checkpoint.take(name, shape)
            first += shape[0]
        return joined

    def _tensor(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._checkpoint.take(name, shape).to(self._device, dtype or self._dtype)

    def _count(self, part: str, num_bytes: int) -> None:
        self._part_bytes[part] = self._part_bytes.get(part, 0) + num_bytes


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
