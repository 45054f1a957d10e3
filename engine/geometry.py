"""What a ModelSpec means in tensors, parameters and bytes: every number derived, none measured. Pure, no torch.

The names are those of a text-only Hugging Face checkpoint; experts and the n-gram table are one tensor each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

EXPERTS = "routed experts"
TABLE = "n-gram table"
DRAFT = "MTP"
TRUNK_PREFIX = "model."
DRAFT_PREFIX = "mtp."
_FP32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A tensor that the model must have."""

    name: str
    shape: tuple[int, ...]
    part: str
    """The row of the parameter table that it counts in."""

    @property
    def num_parameters(self) -> int:
        """Values in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFact:
    """One line of the per-sequence state: bytes in each precision, None where it is not kept in it."""

    name: str
    shape: str
    fp32: int | None
    bf16: int | None
    int8: int | None
    """Codes alone, without their scales."""
    per_token: bool
    """Bytes for each token of context instead of for the sequence."""


def model_tensors(spec: ModelSpec) -> Iterator[TensorFact]:
    """Every float tensor of the trunk and the draft layer."""
    embedding = (spec.vocab_size, spec.hidden)
    yield TensorFact(f"{TRUNK_PREFIX}embed_tokens.weight", embedding, "embedding")
    for layer in range(spec.num_layers):
        prefix = f"{TRUNK_PREFIX}layers.{layer}."
        if spec.ple and layer in spec.ple.layer_ids:
            yield from _ple(spec, f"{prefix}ple.", spec.ple.layer_ids.index(layer))
        yield from _layer(spec, prefix, is_qsa=spec.is_qsa(layer))
    mixer = f"{TRUNK_PREFIX}hyper_connection_mixer."
    yield from _residual(spec, mixer, "gated residuals", inject=False)
    yield TensorFact("lm_head.weight", embedding, "lm_head")
    if spec.num_draft_layers:
        yield from _draft(spec)


def parameters_by_part(spec: ModelSpec) -> dict[str, int]:
    """Parameters of each part, largest first."""
    parts: dict[str, int] = {}
    for tensor in model_tensors(spec):
        parts[tensor.part] = parts.get(tensor.part, 0) + tensor.num_parameters
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one token of the trunk multiplies: without embedding row, n-gram table and draft layer."""
    parts = parameters_by_part(spec)
    idle = parts["embedding"] + parts.get(TABLE, 0) + parts.get(DRAFT, 0)
    active_experts = parts[EXPERTS] * spec.moe.num_active // spec.moe.num_experts
    return sum(parts.values()) - idle - parts[EXPERTS] + active_experts


def expert_parameters(spec: ModelSpec) -> int:
    """Parameters of one routed expert: gate, up and down."""
    return 3 * spec.hidden * spec.moe.expert_dim


def sequence_state(spec: ModelSpec) -> Iterator[StateFact]:
    """What one sequence keeps."""
    gdn, qsa, num_gdn, num_qsa = spec.gdn, spec.qsa, len(spec.gdn_layers), len(spec.qsa_layers)
    heads, dims = gdn.num_value_heads, (gdn.key_dim, gdn.value_dim)
    recurrent = num_gdn * heads * math.prod(dims)
    yield StateFact(
        name="GDN recurrent S",
        shape=f"{num_gdn} x [{heads}, {dims[0]}, {dims[1]}]",
        fp32=recurrent * _FP32_BYTES,
        bf16=recurrent * _BF16_BYTES,
        int8=recurrent,
        per_token=False,
    )
    history = gdn.conv_width - 1
    yield _bf16_state(
        "GDN conv history",
        f"{num_gdn} x [{gdn.conv_channels}, {history}]",
        num_gdn * gdn.conv_channels * history,
    )
    if spec.ple:
        yield _bf16_state(
            "PLE conv history",
            f"[{spec.stream_width}, {spec.ple.history_rows}]",
            spec.stream_width * spec.ple.history_rows,
        )
    kv, index = qsa.num_kv_heads * qsa.head_dim, qsa.index_dim
    yield _token_state(
        "K/V", f"{num_qsa} x 2 x [n, {qsa.num_kv_heads}, {qsa.head_dim}]", num_qsa * 2 * kv
    )
    # One shared index key a token, whatever the number of query heads.
    yield _token_state("raw index keys", f"{num_qsa} x [n, {index}]", num_qsa * index)
    blocks = f"{num_qsa} x [n/{qsa.block_tokens}, {index}]"
    yield _token_state("pooled index keys", blocks, num_qsa * index // qsa.block_tokens)
    if spec.num_draft_layers:
        yield _token_state("MTP K/V", f"2 x [n, {qsa.num_kv_heads}, {qsa.head_dim}]", 2 * kv)
        yield _token_state(
            "MTP pooled index keys", f"[n/{qsa.block_tokens}, {index}]", index // qsa.block_tokens
        )


def _bf16_state(name: str, shape: str, values: int) -> StateFact:
    return StateFact(
        name=name, shape=shape, fp32=None, bf16=values * _BF16_BYTES, int8=None, per_token=False
    )


def _token_state(name: str, shape: str, values: int) -> StateFact:
    return StateFact(
        name=name, shape=shape, fp32=None, bf16=values * _BF16_BYTES, int8=values, per_token=True
    )


def _layer(
    spec: ModelSpec, prefix: str, *, is_qsa: bool, draft: bool = False
) -> Iterator[TensorFact]:
    """A decoder layer; a draft layer's tensors all count as one part."""

    def part(name: str) -> str:
        return DRAFT if draft else name

    residual = part("gated residuals")
    yield from _residual(spec, f"{prefix}attn_hyper_connection.", residual, inject=True)
    if is_qsa:
        yield from _qsa(spec, f"{prefix}self_attn.", part("QSA"))
    else:
        yield from _gdn(spec, f"{prefix}linear_attn.")
    yield from _residual(spec, f"{prefix}mlp_hyper_connection.", residual, inject=True)
    hidden, moe, mlp = spec.hidden, spec.moe, f"{prefix}mlp."
    shared = part("shared experts and gates")
    yield TensorFact(f"{mlp}gate.weight", (moe.num_experts, hidden), part("routers"))
    yield TensorFact(
        f"{mlp}experts.gate_up_proj", (moe.num_experts, 2 * moe.expert_dim, hidden), part(EXPERTS)
    )
    yield TensorFact(
        f"{mlp}experts.down_proj", (moe.num_experts, hidden, moe.expert_dim), part(EXPERTS)
    )
    yield TensorFact(f"{mlp}shared_expert.gate_proj.weight", (moe.shared_dim, hidden), shared)
    yield TensorFact(f"{mlp}shared_expert.up_proj.weight", (moe.shared_dim, hidden), shared)
    yield TensorFact(f"{mlp}shared_expert.down_proj.weight", (hidden, moe.shared_dim), shared)
    yield TensorFact(f"{mlp}shared_expert_gate.weight", (1, hidden), shared)


def _residual(spec: ModelSpec, prefix: str, part: str, *, inject: bool) -> Iterator[TensorFact]:
    width, rank = spec.stream_width, spec.mix_rank
    yield TensorFact(f"{prefix}hc_norm.weight", (width,), part)
    yield TensorFact(f"{prefix}input_mix_weight_down.weight", (rank, width), part)
    yield TensorFact(f"{prefix}input_mix_weight_up.weight", (width, rank), part)
    if inject:
        yield TensorFact(f"{prefix}block_inject_weight.weight", (spec.num_streams, width), part)


def _gdn(spec: ModelSpec, prefix: str) -> Iterator[TensorFact]:
    gdn, hidden, part = spec.gdn, spec.hidden, "GDN"
    heads = gdn.num_value_heads
    yield TensorFact(f"{prefix}in_proj_qkv.weight", (gdn.conv_channels, hidden), part)
    yield TensorFact(f"{prefix}in_proj_z.weight", (gdn.value_channels, hidden), part)
    yield TensorFact(f"{prefix}in_proj_b.weight", (heads, hidden), part)
    yield TensorFact(f"{prefix}in_proj_a.weight", (heads, hidden), part)
    yield TensorFact(f"{prefix}conv1d.weight", (gdn.conv_channels, 1, gdn.conv_width), part)
    yield TensorFact(f"{prefix}A_log", (heads,), part)
    yield TensorFact(f"{prefix}dt_bias", (heads,), part)
    yield TensorFact(f"{prefix}norm.weight", (gdn.value_dim,), part)
    yield TensorFact(f"{prefix}out_proj.weight", (hidden, gdn.value_channels), part)


def _qsa(spec: ModelSpec, prefix: str, part: str) -> Iterator[TensorFact]:
    qsa, hidden = spec.qsa, spec.hidden
    queries, kv = qsa.num_heads * qsa.head_dim, qsa.num_kv_heads * qsa.head_dim
    index = (qsa.num_index_heads + 1) * qsa.index_dim
    yield TensorFact(f"{prefix}q_proj.weight", (2 * queries, hidden), part)
    yield TensorFact(f"{prefix}k_proj.weight", (kv, hidden), part)
    yield TensorFact(f"{prefix}v_proj.weight", (kv, hidden), part)
    yield TensorFact(f"{prefix}o_proj.weight", (hidden, queries), part)
    yield TensorFact(f"{prefix}q_norm.weight", (qsa.head_dim,), part)
    yield TensorFact(f"{prefix}k_norm.weight", (qsa.head_dim,), part)
    yield TensorFact(f"{prefix}indexer.index_qk_proj.weight", (index, hidden), part)
    yield TensorFact(f"{prefix}indexer.q_layernorm.weight", (qsa.index_dim,), part)
    yield TensorFact(f"{prefix}indexer.k_layernorm.weight", (qsa.index_dim,), part)


def _ple(spec: ModelSpec, prefix: str, index: int) -> Iterator[TensorFact]:
    ple, part, width = spec.ple, "PLE dense part", spec.stream_width
    assert ple is not None
    table = f"{prefix}ple_embedding.ngram_embedding.weight"
    yield TensorFact(table, (ple.num_rows(index), ple.head_dim), TABLE)
    yield TensorFact(f"{prefix}key_proj.weight", (width, ple.embed_dim), part)
    yield TensorFact(f"{prefix}value_proj.weight", (spec.hidden, ple.embed_dim), part)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield TensorFact(f"{prefix}{norm}.weight", (width,), part)
    yield TensorFact(f"{prefix}conv1d.weight", (width, 1, ple.conv_width), part)


def _draft(spec: ModelSpec) -> Iterator[TensorFact]:
    prefix, hidden = DRAFT_PREFIX, spec.hidden
    yield TensorFact(f"{prefix}fc_embedding.weight", (hidden, hidden), DRAFT)
    yield TensorFact(f"{prefix}fc_hidden.weight", (hidden, hidden), DRAFT)
    yield TensorFact(f"{prefix}pre_fc_norm_embedding.weight", (hidden,), DRAFT)
    yield TensorFact(f"{prefix}pre_fc_norm_hidden.weight", (spec.stream_width,), DRAFT)
    yield from _residual(spec, f"{prefix}hyper_connection_mixer.", DRAFT, inject=False)
    yield from _layer(spec, f"{prefix}layers.0.", is_qsa=True, draft=True)
