"""Which stored tensors make up each weight: their names and shapes, in the order in which they are joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import WeightMismatch
from engine.geometry import DRAFT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.model_spec import ModelSpec, PleSpec
    from engine.weights import Checkpoint

Part = tuple[str, tuple[int, ...]]
"""Name and shape of a stored tensor."""


def elsewhere(trunk: str, spec: ModelSpec, *, with_draft: bool) -> tuple[str, ...]:
    """How names begin that a loader of `spec` leaves alone: other stages' tensors, and the draft layer if not wanted.

    trunk: prefix of the trunk's tensors.
    """
    others = (
        *range(spec.first_layer),
        *range(spec.layers.stop, spec.layers.stop + spec.later_layers),
    )
    left = [f"{trunk}layers.{layer}." for layer in others]
    if not with_draft:
        left.append(DRAFT_PREFIX)
    if not (spec.is_first or with_draft):
        left.append(f"{trunk}embed_tokens.")
    if not spec.is_last:
        left += ["lm_head.", f"{trunk}hyper_connection_mixer."]
    return tuple(left)


def gdn_in(prefix: str, spec: ModelSpec) -> list[Part]:
    """qkv, z, b, a: [C + V*dv + 2*V, H]."""
    gdn = spec.gdn
    return [
        (f"{prefix}in_proj_qkv.weight", (gdn.conv_channels, spec.hidden)),
        (f"{prefix}in_proj_z.weight", (gdn.value_channels, spec.hidden)),
        (f"{prefix}in_proj_b.weight", (gdn.num_value_heads, spec.hidden)),
        (f"{prefix}in_proj_a.weight", (gdn.num_value_heads, spec.hidden)),
    ]


def qsa_in(prefix: str, spec: ModelSpec) -> list[Part]:
    """Query and gate by head, k, v, index queries and index key: [2*A*D + 2*N*D + (index heads + 1)*I, H]."""
    qsa = spec.qsa
    kv = qsa.num_kv_heads * qsa.head_dim
    index = (qsa.num_index_heads + 1) * qsa.index_dim
    return [
        (f"{prefix}q_proj.weight", (2 * qsa.num_heads * qsa.head_dim, spec.hidden)),
        (f"{prefix}k_proj.weight", (kv, spec.hidden)),
        (f"{prefix}v_proj.weight", (kv, spec.hidden)),
        (f"{prefix}indexer.index_qk_proj.weight", (index, spec.hidden)),
    ]


def moe_head(prefix: str, spec: ModelSpec) -> list[Part]:
    """Router, shared gate, shared expert's gate and up: [E + 1 + 2*shared, H]."""
    moe, shared = spec.moe, f"{prefix}shared_expert."
    return [
        (f"{prefix}gate.weight", (moe.num_experts, spec.hidden)),
        (f"{prefix}shared_expert_gate.weight", (1, spec.hidden)),
        (f"{shared}gate_proj.weight", (moe.shared_dim, spec.hidden)),
        (f"{shared}up_proj.weight", (moe.shared_dim, spec.hidden)),
    ]


def ple_key_value(prefix: str, spec: ModelSpec, ple: PleSpec) -> list[Part]:
    """[S*H + H, embed dim]."""
    return [
        (f"{prefix}key_proj.weight", (spec.stream_width, ple.embed_dim)),
        (f"{prefix}value_proj.weight", (spec.hidden, ple.embed_dim)),
    ]


def ple_table(checkpoint: Checkpoint, prefix: str, ple: PleSpec, index: int) -> list[Part]:
    """The n-gram table [rows, head dim]: one tensor, or equal shards. Raises WeightMismatch for shards that are not."""
    prefix = f"{prefix}ple_embedding.ngram_embedding."
    num_rows = ple.num_rows(index)
    if checkpoint.has(f"{prefix}weight"):
        return [(f"{prefix}weight", (num_rows, ple.head_dim))]
    if num_rows % ple.num_shards:
        raise WeightMismatch(
            f"{prefix}*: found split_ngram_parts {ple.num_shards}, required a divisor of {num_rows} rows"
        )
    shape = (num_rows // ple.num_shards, ple.head_dim)
    return [(f"{prefix}shard_{shard}.weight", shape) for shard in range(ple.num_shards)]


def expert_parts(prefix: str, spec: ModelSpec) -> tuple[list[Part], list[Part]]:
    """Tensors of one expert each: gate and up of expert 0, of 1, ... [I, H], and down of each [H, I]."""
    hidden, moe = spec.hidden, spec.moe
    gate_up: list[Part] = []
    down: list[Part] = []
    for expert in range(moe.num_experts):
        one = f"{prefix}{expert}."
        gate_up.append((f"{one}gate_proj.weight", (moe.expert_dim, hidden)))
        gate_up.append((f"{one}up_proj.weight", (moe.expert_dim, hidden)))
        down.append((f"{one}down_proj.weight", (hidden, moe.expert_dim)))
    return gate_up, down


def fused_experts(prefix: str, spec: ModelSpec) -> tuple[Part, Part]:
    """Tensors of all experts: gate_up [E, 2*I, H], gate rows first, and down [E, H, I]."""
    hidden, moe = spec.hidden, spec.moe
    return (
        (f"{prefix}gate_up_proj", (moe.num_experts, 2 * moe.expert_dim, hidden)),
        (f"{prefix}down_proj", (moe.num_experts, hidden, moe.expert_dim)),
    )


def check_hash(checkpoint: Checkpoint, prefix: str, ple: PleSpec, index: int) -> None:
    """Stored hash constants must be the derived ones: other constants would gather wrong rows in silence."""
    for name, values in hash_constants(prefix, ple, index).items():
        if not checkpoint.has(name):
            continue
        found = tuple(checkpoint.take_ids(name, (len(values),)).tolist())
        if found != tuple(values):
            raise WeightMismatch(f"{name}: found {found}, required {tuple(values)}")


def hash_constants(prefix: str, ple: PleSpec, index: int) -> dict[str, Sequence[int]]:
    """What a checkpoint may store of a table's hash, by name; prefix: of the n-gram layer."""
    prefix = f"{prefix}ple_embedding."
    return {
        f"{prefix}layer_multipliers": ple.multipliers(index),
        f"{prefix}ngram_heads_vocab_sizes": ple.head_vocab_sizes(index),
        f"{prefix}ngram_heads_offsets": ple.head_offsets(index),
    }
