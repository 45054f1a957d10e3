"""Names and layout of a model's tensors in GGUF files, against those of a Hugging Face checkpoint. Pure, no torch.

A GGUF file of `qwen4exp` differs from the checkpoint in more than names:
- zero-centred norms are stored as 1 + w (the gated norm of GDN, which has no 1, is stored as it is);
- A_log is stored as -exp(A_log);
- value heads of GDN, grouped by key head in the checkpoint, are dealt out: first one of every key head, then the next;
- the indexer's projection is split into queries and key; the draft layer's two projections stand side by side in one;
- experts are one tensor each of gate, up and down; the draft layer is one more block behind the trunk's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from engine.geometry import DRAFT_PREFIX, TRUNK_PREFIX, TensorFact, model_tensors

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

TABLE_NAME = "per_layer_token_embd.weight"
EMBEDDING_NAME = "token_embd.weight"


class Form(Enum):
    """What was done to the values."""

    PLAIN = "stored as they are"
    NORM = "1 added"
    DECAY = "-exp"


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """GDN value heads along an axis, dealt out over the key heads."""

    axis: int
    start: int
    """Rows before the first value head: q and k."""
    head_rows: int
    num_key_heads: int
    num_value_heads: int

    def from_file(self) -> list[int]:
        """Index in the file of each row of the checkpoint."""
        each = self.num_value_heads // self.num_key_heads
        heads = [
            (head % each) * self.num_key_heads + head // each
            for head in range(self.num_value_heads)
        ]
        return self._rows(heads)

    def to_file(self) -> list[int]:
        """Index in the checkpoint of each row of the file."""
        each = self.num_value_heads // self.num_key_heads
        heads = [
            (head % self.num_key_heads) * each + head // self.num_key_heads
            for head in range(self.num_value_heads)
        ]
        return self._rows(heads)

    def _rows(self, heads: list[int]) -> list[int]:
        first = list(range(self.start))
        return first + [
            self.start + head * self.head_rows + row
            for head in heads
            for row in range(self.head_rows)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint tensor lies in the file: a tensor, or a part of it along one axis."""

    name: str
    """The file's tensor."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    form: Form = Form.PLAIN
    heads: HeadOrder | None = None
    expert: int | None = None
    """Index on the first axis of an expert tensor."""
    columns: tuple[int, int] | None = None
    """Part of the last axis."""
    then: str | None = None
    """A second tensor whose rows follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor of a GGUF file and the checkpoint tensors that it is made of."""

    name: str
    shape: tuple[int, ...]
    """Last axis fastest, as the checkpoint writes shapes; GGUF headers list them the other way round."""
    sources: tuple[str, ...]
    """Checkpoint names: one; two side by side; or an expert stack, which may be stored expert by expert."""
    form: Form = Form.PLAIN
    heads: HeadOrder | None = None
    rows: tuple[int, int] | None = None
    """Part of the first axis of the (only) source, counted within each expert for a stack."""


_RESIDUAL = {
    "hc_norm.weight": ("norm.weight", Form.NORM),
    "input_mix_weight_down.weight": ("down.weight", Form.PLAIN),
    "input_mix_weight_up.weight": ("up.weight", Form.PLAIN),
    "block_inject_weight.weight": ("inject.weight", Form.PLAIN),
}
_LAYER: dict[str, tuple[str, Form]] = {
    **{
        f"{module}.{hf}": (f"{prefix}_{file}", form)
        for module, prefix in (
            ("attn_hyper_connection", "hc_attn"),
            ("mlp_hyper_connection", "hc_ffn"),
        )
        for hf, (file, form) in _RESIDUAL.items()
    },
    "self_attn.q_proj.weight": ("attn_q.weight", Form.PLAIN),
    "self_attn.k_proj.weight": ("attn_k.weight", Form.PLAIN),
    "self_attn.v_proj.weight": ("attn_v.weight", Form.PLAIN),
    "self_attn.o_proj.weight": ("attn_output.weight", Form.PLAIN),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", Form.NORM),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", Form.NORM),
    "self_attn.indexer.q_layernorm.weight": ("indexer.q_norm.weight", Form.NORM),
    "self_attn.indexer.k_layernorm.weight": ("indexer.k_norm.weight", Form.NORM),
    "linear_attn.in_proj_qkv.weight": ("attn_qkv.weight", Form.PLAIN),
    "linear_attn.in_proj_z.weight": ("attn_gate.weight", Form.PLAIN),
    "linear_attn.in_proj_b.weight": ("ssm_beta.weight", Form.PLAIN),
    "linear_attn.in_proj_a.weight": ("ssm_alpha.weight", Form.PLAIN),
    "linear_attn.conv1d.weight": ("ssm_conv1d.weight", Form.PLAIN),
    "linear_attn.A_log": ("ssm_a", Form.DECAY),
    "linear_attn.dt_bias": ("ssm_dt.bias", Form.PLAIN),
    "linear_attn.norm.weight": ("ssm_norm.weight", Form.PLAIN),
    "linear_attn.out_proj.weight": ("ssm_out.weight", Form.PLAIN),
    "mlp.gate.weight": ("ffn_gate_inp.weight", Form.PLAIN),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight", Form.PLAIN),
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp.weight", Form.PLAIN),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp.weight", Form.PLAIN),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp.weight", Form.PLAIN),
    "ple.key_proj.weight": ("ple_key.weight", Form.PLAIN),
    "ple.value_proj.weight": ("ple_value.weight", Form.PLAIN),
    "ple.norm_key.weight": ("ple_norm_key.weight", Form.NORM),
    "ple.norm_query.weight": ("ple_norm_query.weight", Form.NORM),
    "ple.norm_conv.weight": ("ple_norm_conv.weight", Form.NORM),
    "ple.conv1d.weight": ("ple_conv1d.weight", Form.PLAIN),
}
_TRUNK: dict[str, tuple[str, Form]] = {
    f"{TRUNK_PREFIX}embed_tokens.weight": (EMBEDDING_NAME, Form.PLAIN),
    "lm_head.weight": ("output.weight", Form.PLAIN),
    **{
        f"{TRUNK_PREFIX}hyper_connection_mixer.{hf}": (f"output_hc_{file}", form)
        for hf, (file, form) in _RESIDUAL.items()
    },
}
_DRAFT: dict[str, tuple[str, Form]] = {
    "pre_fc_norm_embedding.weight": ("nextn.enorm.weight", Form.NORM),
    "pre_fc_norm_hidden.weight": ("nextn.hnorm.weight", Form.NORM),
    **{
        f"hyper_connection_mixer.{hf}": (f"nextn.hc_head_{file}", form)
        for hf, (file, form) in _RESIDUAL.items()
    },
}
_FUSED_DRAFT = "nextn.eh_proj.weight"
_DRAFT_HALVES = ("fc_embedding.weight", "fc_hidden.weight")
_INDEXER = "self_attn.indexer.index_qk_proj.weight"
_INDEXER_PARTS = ("indexer.q_proj.weight", "indexer.k_proj.weight")
_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"
_TABLE = "ple.ple_embedding.ngram_embedding.weight"
_LAYER_NAME = re.compile(
    rf"(?:{re.escape(TRUNK_PREFIX)}layers\.(\d+)|{re.escape(DRAFT_PREFIX)}layers\.0)\.(.+)"
)


class NameMap:
    """Both directions for one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._facts = {fact.name: fact for fact in model_tensors(spec)}

    def places(self) -> dict[str, Place]:
        """Every checkpoint tensor, experts one by one, and where it lies."""
        return {
            name: place for fact in self._facts.values() for name, place in self._places_of(fact)
        }

    def file_tensors(self) -> Iterator[FileTensor]:
        """Every tensor of a file, in the checkpoint's order."""
        for fact in self._facts.values():
            yield from self._file_tensors_of(fact)

    def _split(self, name: str) -> tuple[str, str]:
        """Block prefix of the file (empty for what belongs to no layer) and the name within the layer."""
        match = _LAYER_NAME.fullmatch(name)
        if match:
            layer = self._spec.num_layers if match[1] is None else int(match[1])
            return f"blk.{layer}.", match[2]
        if name.startswith(DRAFT_PREFIX):
            return f"blk.{self._spec.num_layers}.", name.removeprefix(DRAFT_PREFIX)
        return "", name

    def _plain(self, fact: TensorFact) -> Place | None:
        """The place of a tensor that is one tensor of the file too."""
        block, inner = self._split(fact.name)
        table = _LAYER | _DRAFT if block else _TRUNK
        if inner == _TABLE:
            return Place(name=TABLE_NAME, shape=fact.shape)
        if inner not in table:
            return None
        name, form = table[inner]
        return Place(name=block + name, shape=fact.shape, form=form, heads=self._heads(inner))

    def _heads(self, inner: str) -> HeadOrder | None:
        gdn = self._spec.gdn
        order = HeadOrder(0, 0, 1, gdn.num_key_heads, gdn.num_value_heads)
        wide = replace(order, head_rows=gdn.value_dim)
        match inner.removeprefix("linear_attn."):
            case "in_proj_qkv.weight":
                return replace(wide, start=2 * gdn.key_channels)
            case "conv1d.weight" if inner.startswith("linear_attn."):
                return replace(wide, start=2 * gdn.key_channels)
            case "in_proj_z.weight":
                return wide
            case "out_proj.weight":
                return replace(wide, axis=1)
            case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
                return order
            case _:
                return None

    def _places_of(self, fact: TensorFact) -> Iterator[tuple[str, Place]]:
        plain = self._plain(fact)
        if plain is not None:
            yield fact.name, plain
            return
        block, inner = self._split(fact.name)
        if inner == _INDEXER:
            queries, key = _INDEXER_PARTS
            yield fact.name, Place(name=block + queries, then=block + key, shape=fact.shape)
        elif inner in _DRAFT_HALVES:
            width = fact.shape[1]
            start = _DRAFT_HALVES.index(inner) * width
            columns = (start, start + width)
            yield fact.name, Place(name=block + _FUSED_DRAFT, shape=fact.shape, columns=columns)
        else:
            yield from self._experts(fact, block, inner)

    def _experts(self, fact: TensorFact, block: str, inner: str) -> Iterator[tuple[str, Place]]:
        count, rows, columns = fact.shape
        kinds = ("gate", "up") if inner == _GATE_UP else ("down",)
        prefix = fact.name.rpartition(".")[0]
        for expert in range(count):
            for kind in kinds:
                yield (
                    f"{prefix}.{expert}.{kind}_proj.weight",
                    Place(
                        name=f"{block}ffn_{kind}_exps.weight",
                        shape=(rows // len(kinds), columns),
                        expert=expert,
                    ),
                )

    def _file_tensors_of(self, fact: TensorFact) -> Iterator[FileTensor]:
        block, inner = self._split(fact.name)
        plain = self._plain(fact)
        if plain is not None:
            yield FileTensor(
                name=plain.name,
                shape=_file_shape(inner, fact.shape),
                sources=(fact.name,),
                form=plain.form,
                heads=plain.heads,
            )
        elif inner == _INDEXER:
            dim = self._spec.qsa.index_dim
            cut = self._spec.qsa.num_index_heads * dim
            for name, rows in zip(_INDEXER_PARTS, ((0, cut), (cut, cut + dim)), strict=True):
                shape = (rows[1] - rows[0], fact.shape[1])
                yield FileTensor(name=block + name, shape=shape, sources=(fact.name,), rows=rows)
        elif inner == _DRAFT_HALVES[0]:
            halves = tuple(DRAFT_PREFIX + half for half in _DRAFT_HALVES)
            shape = (fact.shape[0], 2 * fact.shape[1])
            yield FileTensor(name=block + _FUSED_DRAFT, shape=shape, sources=halves)
        elif inner in (_GATE_UP, _DOWN):
            kinds = ("gate", "up") if inner == _GATE_UP else ("down",)
            count, rows, columns = fact.shape
            each = rows // len(kinds)
            for index, kind in enumerate(kinds):
                yield FileTensor(
                    name=f"{block}ffn_{kind}_exps.weight",
                    shape=(count, each, columns),
                    sources=(fact.name,),
                    rows=(index * each, (index + 1) * each),
                )


def is_expert_stack(name: str) -> bool:
    """Whether a tensor of a file holds routed experts."""
    return name.endswith("_exps.weight")


def _file_shape(inner: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Convolutions lose their middle axis of one, the shared expert's gate its first."""
    if inner.endswith("conv1d.weight"):
        return (shape[0], shape[2])
    return shape[1:] if inner == "mlp.shared_expert_gate.weight" else shape
