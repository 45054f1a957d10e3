"""Parameters and state bytes of the large model from its configuration alone, against the published sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import model_path
from engine.geometry import (
    active_parameters,
    expert_parameters,
    model_tensors,
    parameters_by_part,
    sequence_state,
)
from engine.model_spec import ModelSpec, spec_from_config
from engine.sources.safetensors import SafetensorsSource
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

REAL = spec_from_config(REAL_TEXT_CONFIG, name="real")


def test_parameters_of_the_large_model_by_part() -> None:
    assert parameters_by_part(REAL) == {
        "routed experts": 120_795_955_200,
        "n-gram table": 51_200_245_760,
        "MTP": 2_607_150_848,
        "GDN": 36 * 57_958_624,
        "gated residuals": 96 * 6_604_800 + 6_563_840,
        "embedding": 635_699_200,
        "lm_head": 635_699_200,
        "QSA": 12 * 51_446_528,
        "shared experts and gates": 236_052_480,
        "routers": 62_914_560,
        "PLE dense part": 32_839_680,
    }


def test_sums_of_the_large_model() -> None:
    parts = parameters_by_part(REAL)
    total = sum(parts.values())
    assert total == 179_551_050_368
    assert total - parts["MTP"] - parts["n-gram table"] == 125_743_653_760
    assert expert_parameters(REAL) == 4_915_200
    assert round(active_parameters(REAL) / 1e9, 2) == 6.67
    assert round((active_parameters(REAL) - parts["lm_head"]) / 1e9, 2) == 6.04


def test_state_of_the_large_model() -> None:
    rows = {row.name: (row.fp32, row.bf16, row.int8) for row in sequence_state(REAL)}
    assert rows == {
        "GDN recurrent S": (113_246_208, 54 << 20, 27 << 20),
        "GDN conv history": (None, 2_211_840, None),
        "PLE conv history": (None, 184_320, None),
        "K/V": (None, 24_576, 12_288),
        "raw index keys": (None, 3_072, 1_536),
        "pooled index keys": (None, 768, 384),
        "MTP K/V": (None, 2_048, 1_024),
        "MTP pooled index keys": (None, 64, 32),
    }


def test_one_index_key_whatever_the_query_heads() -> None:
    """A key store sized from the query heads is too large, which no budget check would ever notice."""
    doubled = spec_from_config({**REAL_TEXT_CONFIG, "indexer_n_heads": 8}, name="x")
    before = {row.name: row.bf16 for row in sequence_state(REAL)}
    after = {row.name: row.bf16 for row in sequence_state(doubled)}
    assert before == after


@pytest.mark.parametrize("path", [model_path("default")])
def test_the_default_model_has_exactly_these_tensors(path: Path) -> None:
    spec = ModelSpec.from_dir(path)
    source = SafetensorsSource(path)
    stored = {name: source.shape(name) for name in source.names()}
    shards = [n for n in stored if ".shard_" in n]
    tables = {n.rsplit(".shard_", 1)[0] + ".weight" for n in shards}
    facts = {fact.name: fact.shape for fact in model_tensors(spec)}
    assert tables <= set(facts)
    for table in tables:
        rows = sum(stored[n][0] for n in shards if n.startswith(table.removesuffix("weight")))
        assert facts.pop(table)[0] == rows
    constants = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    floats = {
        n: shape for n, shape in stored.items() if n not in shards and not n.endswith(constants)
    }
    assert facts == floats
    assert json.loads((path / "config.json").read_text())["vocab_size"] == spec.vocab_size
