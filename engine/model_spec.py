"""ModelSpec: every number a layer depends on, read from a checkpoint's config and derived never twice (D6)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigMismatch

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_PLE_SEED_STRIDE = 10007
_SIGMOID_GATE = "sigmoid"
_FAMILY = ("qwen4_exp", "qwen4_exp_text")
_BLOCK_TOKENS = (1, 2, 4, 8)
"""Blocks that fit a page a whole number of times, and the ring of raw index keys beside a window."""
_GATES = (_SIGMOID_GATE, "silu")
# Far beyond any model, and small enough that products of several stay numbers that a plan can be made of.
_MAX_WIDTH = 1 << 20
_MAX_LENGTH = 1 << 26
"""Of positions, ids and table rows."""
_MAX_TABLE_ROWS = 1 << 40
"""A GGUF file's table may be padded to any number of rows."""
_MAX_PAIRS = 1 << 16
"""Of layers, and of experts: a profile numbers them in 16 bits."""
_MAX_NUMBER = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnSpec:
    """Gated DeltaNet (model.md 1.4)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: str
    """Activation of the output gate: sigmoid or silu."""

    @property
    def key_channels(self) -> int:
        """Channels of q, and of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """Channels of v, z and the output."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k, v."""
        return 2 * self.key_channels + self.value_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class QsaSpec:
    """Sparse attention and its indexer (model.md 1.5)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    num_index_heads: int
    index_dim: int
    """Width of an index query head and of the ONE shared index key."""
    budget_tokens: int
    block_tokens: int

    @property
    def budget_blocks(self) -> int:
        """Complete blocks a query may select."""
        return self.budget_tokens // self.block_tokens

    @property
    def dense_tokens(self) -> int:
        """Visible tokens up to which selection keeps everything: the budget and an incomplete block."""
        return self.budget_tokens + self.block_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Routed and shared experts (model.md 1.6)."""

    num_experts: int
    num_active: int
    expert_dim: int
    shared_dim: int
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PleSpec:
    """Hashed n-gram embedding (model.md 1.7); constants of one PLE layer are derived here."""

    layer_ids: tuple[int, ...]
    """0-based layers."""
    embed_dim: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    vocab_multiple: int
    num_shards: int
    conv_width: int
    seed: int
    vocab_size: int
    eos_id: int

    @property
    def num_heads(self) -> int:
        """Hash heads over all n-gram orders."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def head_dim(self) -> int:
        """Columns of one table row."""
        return self.embed_dim // self.num_heads

    @property
    def history_rows(self) -> int:
        """Rows the dilated convolution looks back."""
        return (self.conv_width - 1) * self.ngram_size

    def multipliers(self, index: int) -> tuple[int, ...]:
        """Odd hash multipliers, one per n-gram position, of the index-th PLE layer."""
        half = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        base = self.seed + _PLE_SEED_STRIDE * index
        return tuple(
            2 * (_splitmix64((base + _GAMMA * (i + 1)) & _MASK64) % half) + 1
            for i in range(self.ngram_size)
        )

    def head_vocab_sizes(self, index: int) -> tuple[int, ...]:
        """Distinct primes >= vocab_base, one per head; layers take consecutive runs of primes."""
        primes = _primes_from(self.vocab_base, (index + 1) * self.num_heads)
        return tuple(primes[index * self.num_heads :])

    def head_offsets(self, index: int) -> tuple[int, ...]:
        """First table row of each head."""
        sizes = self.head_vocab_sizes(index)
        return tuple(sum(sizes[:i]) for i in range(len(sizes)))

    def num_rows(self, index: int) -> int:
        """Rows of the table, padded to a multiple of vocab_multiple."""
        return -(-sum(self.head_vocab_sizes(index)) // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Geometry of a whole model, or of the run of its layers that one stage of a pipeline holds (`part`)."""

    name: str
    vocab_size: int
    hidden: int
    num_layers: int
    """Trunk layers that are here."""
    qsa_interval: int
    """Layer L is QSA when L % qsa_interval == qsa_interval - 1, else GDN."""
    num_streams: int
    mix_rank: int
    norm_eps: float
    max_position: int
    num_draft_layers: int
    gdn: GdnSpec
    qsa: QsaSpec
    moe: MoeSpec
    ple: PleSpec | None
    first_layer: int = 0
    later_layers: int = 0
    """Trunk layers behind those that are here."""

    @property
    def layers(self) -> range:
        """Trunk layers that are here, counted through the whole model."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def is_first(self) -> bool:
        """Whether ids come in here: the trunk's embedding belongs to it."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out here: final mixer, head and draft layer belong to it."""
        return self.later_layers == 0

    @property
    def ple_layers(self) -> tuple[int, ...]:
        """Those of `layers` that have an n-gram injection."""
        return tuple(i for i in (self.ple.layer_ids if self.ple else ()) if i in self.layers)

    def part(self, layers: range) -> ModelSpec:
        """This model reduced to a run of its layers and to what belongs to its ends."""
        later = self.num_layers - layers.stop
        part = replace(
            self,
            num_layers=len(layers),
            first_layer=layers.start,
            later_layers=later,
            num_draft_layers=0 if later else self.num_draft_layers,
        )
        return part if part.ple_layers else replace(part, ple=None)

    @property
    def stream_width(self) -> int:
        """Columns of all residual streams together."""
        return self.num_streams * self.hidden

    def is_qsa(self, layer: int) -> bool:
        """Whether a trunk layer is attention."""
        return layer % self.qsa_interval == self.qsa_interval - 1

    @property
    def qsa_layers(self) -> tuple[int, ...]:
        """Trunk layers that are attention."""
        return tuple(i for i in self.layers if self.is_qsa(i))

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Trunk layers that are GDN."""
        return tuple(i for i in self.layers if not self.is_qsa(i))

    @staticmethod
    def from_dir(path: Path) -> ModelSpec:
        """Read `config.json` of a Hugging Face checkpoint directory.

        Raises ConfigMismatch with key, found and required.
        """
        file = path / "config.json"
        if not file.is_file():
            raise ConfigMismatch(f"{path}: no config.json; a checkpoint directory is required")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigMismatch(f"{file}: not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigMismatch(f"{file}: found {type(config).__name__}, required an object")
        return spec_from_config(config, name=path.resolve().name)


def spec_from_config(config: dict[str, Any], *, name: str) -> ModelSpec:
    """Build a ModelSpec from a parsed `config.json` (the text model's part is taken if there are several)."""
    family = config.get("model_type")
    if family not in _FAMILY:
        raise ConfigMismatch(f"model_type: found {family!r}, required one of {_FAMILY}")
    nested = config.get("text_config")
    text = _Keys(nested if isinstance(nested, dict) else config)
    num_layers = text.count("num_hidden_layers", maximum=_MAX_PAIRS)
    interval = _interval(text, num_layers)
    spec = ModelSpec(
        name=name,
        vocab_size=text.count("vocab_size", maximum=_MAX_LENGTH),
        hidden=text.count("hidden_size"),
        num_layers=num_layers,
        qsa_interval=interval,
        num_streams=text.count("hc_count", 4),
        mix_rank=text.count("hc_lowrank", 320),
        norm_eps=text.number("rms_norm_eps", 1e-6, maximum=1.0),
        max_position=text.count("max_position_embeddings", maximum=_MAX_LENGTH),
        num_draft_layers=text.count("mtp_num_hidden_layers", 0, minimum=0),
        gdn=_gdn(text),
        qsa=_qsa(text),
        moe=_moe(text),
        ple=_ple(text, num_layers),
    )
    if text.text("hidden_act", "silu") != "silu":
        raise ConfigMismatch(f"hidden_act: found {text.raw('hidden_act')!r}, required 'silu'")
    if text.raw("tie_word_embeddings"):
        raise ConfigMismatch("tie_word_embeddings: found true, required false")
    if spec.num_streams < 2:
        raise ConfigMismatch(f"hc_count: found {spec.num_streams}, required at least 2")
    if spec.num_draft_layers > 1:
        raise ConfigMismatch(
            f"mtp_num_hidden_layers: found {spec.num_draft_layers}, required 0 or 1"
        )
    return spec


class _Keys:
    """Typed access to a config object; errors name the key, what was found and what is required.

    A number that is left out has the default of the family's configuration class; null is not left out.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def count(
        self,
        key: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = _MAX_WIDTH,
    ) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigMismatch(f"{key}: found {value!r}, required an integer >= {minimum}")
        if value > maximum:
            raise ConfigMismatch(f"{key}: found {value}, required at most {maximum}")
        return value

    def number(
        self, key: str, default: float | None = None, *, maximum: float = _MAX_NUMBER
    ) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigMismatch(f"{key}: found {value!r}, required a number > 0")
        if value > maximum:
            raise ConfigMismatch(f"{key}: found {value!r}, required at most {maximum:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise ConfigMismatch(f"{key}: found {value!r}, required a string")
        return value


def _interval(text: _Keys, num_layers: int) -> int:
    interval = text.count("full_attention_interval", 4)
    types = text.raw("layer_types")
    if types is None:
        return interval
    if not isinstance(types, list) or len(types) != num_layers:
        raise ConfigMismatch(f"layer_types: found {types!r}, required a list of {num_layers} names")
    attention = [i for i, kind in enumerate(types) if kind != "linear_attention"]
    if attention:
        interval = attention[0] + 1
    for layer, kind in enumerate(types):
        wanted = layer % interval == interval - 1
        if (kind != "linear_attention") != wanted:
            raise ConfigMismatch(
                f"layer_types[{layer}]: found {kind!r}, required every {interval}th layer to be attention"
            )
    return interval


def _gdn(text: _Keys) -> GdnSpec:
    gate = text.text("output_gate_type", text.text("hidden_act", "silu"))
    if gate not in _GATES:
        raise ConfigMismatch(f"output_gate_type: found {gate!r}, required one of {_GATES}")
    spec = GdnSpec(
        num_key_heads=text.count("linear_num_key_heads", 16),
        num_value_heads=text.count("linear_num_value_heads", 32),
        key_dim=text.count("linear_key_head_dim", 128),
        value_dim=text.count("linear_value_head_dim", 128),
        conv_width=text.count("linear_conv_kernel_dim", 4, minimum=2),
        gate=gate,
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise ConfigMismatch(
            f"linear_num_value_heads: found {spec.num_value_heads}, "
            f"required a multiple of linear_num_key_heads {spec.num_key_heads}"
        )
    return spec


def _qsa(text: _Keys) -> QsaSpec:
    rope = text.raw("rope_parameters")
    if not isinstance(rope, dict):
        raise ConfigMismatch(f"rope_parameters: found {rope!r}, required an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigMismatch(f"rope_parameters.rope_type: found {kind!r}, required 'default'")
    rope_keys = _Keys(rope)
    head_dim = text.count("head_dim", 256)
    spec = QsaSpec(
        num_heads=text.count("num_attention_heads"),
        num_kv_heads=text.count("num_key_value_heads", 2),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rope_keys.number("partial_rotary_factor", 1.0)),
        rope_theta=rope_keys.number("rope_theta"),
        num_index_heads=text.count("indexer_n_heads"),
        index_dim=text.count("indexer_head_dim"),
        budget_tokens=text.count("indexer_budget"),
        block_tokens=text.count("indexer_compress_ratio"),
    )
    draft = text.raw("mtp")
    own_theta = draft.get("rope_theta") if isinstance(draft, dict) else None
    if own_theta not in (None, spec.rope_theta):
        raise ConfigMismatch(
            f"mtp.rope_theta: found {own_theta!r}, required the trunk's {spec.rope_theta:g}"
        )
    if text.count("indexer_kv_heads", 1) != 1:
        raise ConfigMismatch(
            f"indexer_kv_heads: found {text.raw('indexer_kv_heads')!r}, required 1"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigMismatch(
            f"num_attention_heads: found {spec.num_heads}, "
            f"required a multiple of num_key_value_heads {spec.num_kv_heads}"
        )
    if spec.block_tokens not in _BLOCK_TOKENS:
        raise ConfigMismatch(
            f"indexer_compress_ratio: found {spec.block_tokens}, required one of {_BLOCK_TOKENS}"
        )
    if spec.budget_tokens % spec.block_tokens:
        raise ConfigMismatch(
            f"indexer_budget: found {spec.budget_tokens}, "
            f"required a multiple of indexer_compress_ratio {spec.block_tokens}"
        )
    if spec.rotary_dim > spec.index_dim or spec.rotary_dim % 2:
        raise ConfigMismatch(
            f"partial_rotary_factor: found {spec.rotary_dim} rotary dims, "
            f"required an even number <= indexer_head_dim {spec.index_dim}"
        )
    return spec


def _moe(text: _Keys) -> MoeSpec:
    num_experts = text.count("num_experts", maximum=_MAX_PAIRS)
    num_active = text.count("num_experts_per_tok", maximum=_MAX_PAIRS)
    if num_active > num_experts:
        raise ConfigMismatch(
            f"num_experts_per_tok: found {num_active}, required at most num_experts {num_experts}"
        )
    normalize = text.raw("norm_topk_prob")
    return MoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        expert_dim=text.count("moe_intermediate_size"),
        shared_dim=text.count("shared_expert_intermediate_size"),
        normalize=True if normalize is None else bool(normalize),
    )


def _ple(text: _Keys, num_layers: int) -> PleSpec | None:
    ids = text.raw("ple_layer_ids") or []
    if not ids:
        return None
    if any(isinstance(i, bool) or not isinstance(i, int) or not 1 <= i <= num_layers for i in ids):
        raise ConfigMismatch(
            f"ple_layer_ids: found {ids!r}, required 1-based layers up to {num_layers}"
        )
    eos = text.raw("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if isinstance(eos, bool) or not isinstance(eos, int):
        raise ConfigMismatch(f"eos_token_id: found {eos!r}, required an id (PLE hashes it)")
    spec = PleSpec(
        layer_ids=tuple(sorted({i - 1 for i in ids})),
        embed_dim=text.count(
            "hidden_size" if text.raw("ple_embed_dim") is None else "ple_embed_dim"
        ),
        ngram_size=text.count("ngram_size", 3, minimum=2),
        heads_per_ngram=text.count("heads_per_ngram", 8),
        vocab_base=text.count("ngram_vocab_size_base", 20_000_000, maximum=_MAX_LENGTH),
        vocab_multiple=text.count(
            "make_ngram_vocab_size_divisible_by", 128, maximum=_MAX_TABLE_ROWS
        ),
        num_shards=text.count("split_ngram_parts", 512),
        conv_width=text.count("ple_conv_kernel_size", 4),
        seed=text.count("seed", 1234, minimum=0, maximum=_MASK64),
        vocab_size=text.count("vocab_size", maximum=_MAX_LENGTH),
        eos_id=eos,
    )
    if spec.embed_dim % spec.num_heads:
        raise ConfigMismatch(
            f"ple_embed_dim: found {spec.embed_dim}, required a multiple of {spec.num_heads} hash heads"
        )
    return spec


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _primes_from(start: int, count: int) -> list[int]:
    primes: list[int] = []
    candidate = max(2, start)
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes


def _is_prime(value: int) -> bool:
    if value < 4:
        return value >= 2
    if value % 2 == 0:
        return False
    return all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))
