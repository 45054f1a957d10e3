"""`stratagate inspect`: what a model is, from its configuration and, if they are there, its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from engine.config import DEFAULT_MODEL, ModelParts, model_path
from engine.errors import WeightMismatch
from engine.geometry import (
    DRAFT,
    TABLE,
    active_parameters,
    expert_parameters,
    model_tensors,
    parameters_by_part,
    sequence_state,
)
from engine.sources.opening import has_weights, open_source, read_spec
from engine.tools.options import MODEL_HELP, MtpOption, NativeOption, PleGgufOption
from engine.tools.tables import table

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.sources.base import TensorSource

_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_SHARD = re.compile(r"\.shard_\d+\.weight$")
_OTHER = "other"


def inspect(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    native: NativeOption = None,
    ple_gguf: PleGgufOption = None,
    mtp: MtpOption = None,
) -> None:
    """Print a model's geometry, its parameters and bytes by part, and the state of one sequence."""
    path = model_path(model)
    parts = ModelParts(native=native, ple_gguf=ple_gguf, mtp=mtp)
    spec = read_spec(path, parts)
    sections = [geometry(spec), parameters(spec), state(spec)]
    try:
        source = open_source(path, spec, parts)
    except WeightMismatch as error:
        if has_weights(path):
            raise
        sections.append(f"no weights: {error}")
    else:
        sections.append(stored(spec, source))
        source.close()
    typer.echo("\n\n".join((f"{spec.name} ({path})", *sections)))


def geometry(spec: ModelSpec) -> str:
    """Every number of the contract; what follows from others is marked."""
    rows = [(name, value, "derived" if derived else "") for name, value, derived in _facts(spec)]
    return table(("geometry", "value", ""), rows)


def parameters(spec: ModelSpec) -> str:
    """Parameters of each part, and their bytes in bf16 and at one byte each."""
    parts = parameters_by_part(spec)
    total = sum(parts.values())
    trunk = total - parts.get(TABLE, 0) - parts.get(DRAFT, 0)
    sums = {
        "trunk without table": trunk,
        "all text and MTP": total,
        "active for a token, head included": active_parameters(spec),
        "one routed expert": expert_parameters(spec),
    }
    rows = [
        (name, f"{count:,}", f"{count * 2 / 1e9:.2f}", f"{count / 2**30:.2f}")
        for name, count in {**parts, **sums}.items()
    ]
    return table(("part", "parameters", "bf16 GB", "1 B/param GiB"), rows)


def state(spec: ModelSpec) -> str:
    """Bytes that one sequence keeps."""
    rows = [
        (
            row.name,
            row.shape,
            *("-" if n is None else f"{n:,}" for n in (row.fp32, row.bf16, row.int8)),
            "token" if row.per_token else "sequence",
        )
        for row in sequence_state(spec)
    ]
    return table(("state", "shape", "fp32 B", "bf16 B", "int8 B", "for each"), rows)


def stored(spec: ModelSpec, source: TensorSource) -> str:
    """Bytes and types of each part as they lie in the files."""
    part_of = {fact.name: fact.part for fact in model_tensors(spec)}
    sizes: dict[str, int] = {}
    types: dict[str, dict[str, None]] = {}
    for name in source.names():
        part = part_of.get(_whole_name(name), _OTHER)
        form = source.stored(name)
        sizes[part] = sizes.get(part, 0) + form.num_bytes
        types.setdefault(part, {})[form.type_name] = None
    order = [part for part in (*parameters_by_part(spec), _OTHER) if part in sizes]
    rows = [(part, f"{sizes[part]:,}", " ".join(types[part])) for part in order]
    rows.append(("all", f"{sum(sizes.values()):,}", f"{len(source.names())} tensors"))
    return table((f"stored in {source.where}", "bytes", "types"), rows)


def _whole_name(name: str) -> str:
    """The name that a tensor has where experts and table shards are one tensor each and the model is text alone."""
    name = name.replace("model.language_model.", "model.", 1)
    name = _SHARD.sub(".weight", name)
    return _EXPERT.sub(
        lambda m: ".experts.down_proj" if m[1] == "down" else ".experts.gate_up_proj", name
    )


def _facts(spec: ModelSpec) -> Iterator[tuple[str, str, bool]]:
    """Name, value, and whether it is derived."""
    gdn, qsa, moe, ple = spec.gdn, spec.qsa, spec.moe, spec.ple
    yield "hidden", str(spec.hidden), False
    yield "layers", str(spec.num_layers), False
    yield "attention every", f"{spec.qsa_interval} layers", False
    yield "QSA layers", _listed(spec.qsa_layers), True
    yield "GDN layers", str(len(spec.gdn_layers)), True
    yield "vocabulary", str(spec.vocab_size), False
    yield "longest context", str(spec.max_position), False
    yield "norm epsilon", f"{spec.norm_eps:g}", False
    yield "residual streams, rank", f"{spec.num_streams}, {spec.mix_rank}", False
    yield "stream width", str(spec.stream_width), True
    yield "GDN heads key/value", f"{gdn.num_key_heads}/{gdn.num_value_heads}", False
    yield "GDN dims key/value", f"{gdn.key_dim}/{gdn.value_dim}", False
    yield "GDN conv width, gate", f"{gdn.conv_width}, {gdn.gate}", False
    yield "GDN conv channels", str(gdn.conv_channels), True
    yield "GDN value channels", str(gdn.value_channels), True
    yield "QSA heads query/KV", f"{qsa.num_heads}/{qsa.num_kv_heads}", False
    yield "QSA head dim, rotary", f"{qsa.head_dim}, {qsa.rotary_dim}", False
    yield "rope theta", f"{qsa.rope_theta:g}", False
    yield "indexer query heads, dim", f"{qsa.num_index_heads}, {qsa.index_dim}", False
    yield "indexer key heads", "1", True
    yield "indexer budget, block", f"{qsa.budget_tokens}, {qsa.block_tokens} tokens", False
    yield "attention dense up to", f"{qsa.dense_tokens} tokens", True
    yield "experts, active", f"{moe.num_experts}, {moe.num_active}", False
    yield "expert width routed/shared", f"{moe.expert_dim}/{moe.shared_dim}", False
    yield "draft layers", str(spec.num_draft_layers), False
    if ple is None:
        return
    yield "PLE layers", _listed(ple.layer_ids), False
    yield "PLE n-gram, heads for each", f"{ple.ngram_size}, {ple.heads_per_ngram}", False
    yield "PLE hash heads", str(ple.num_heads), True
    yield "PLE row width", str(ple.head_dim), True
    yield "PLE history rows", str(ple.history_rows), True
    for index, layer in enumerate(ple.layer_ids):
        yield f"PLE table rows, layer {layer}", str(ple.num_rows(index)), True
        yield f"PLE multipliers, layer {layer}", _listed(ple.multipliers(index)), True


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
