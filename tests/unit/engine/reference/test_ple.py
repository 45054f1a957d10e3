"""The hash of the n-gram embedding against the published constants of the real model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine.reference.config import ReferenceConfig
from engine.reference.gdn import causal_conv
from engine.reference.ple import (
    layer_multipliers,
    ngram_context,
    ngram_embedding,
    ngram_head_sizes,
    ngram_rows,
)

REAL_MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]
REAL_SIZES = [
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
]  # fmt: skip
REAL_VOCAB = 248320
EOS = 9

TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "eos_token_id": EOS,
    "hc_count": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "indexer_n_heads": 2,
    "indexer_head_dim": 4,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "ple_layer_ids": [2],
    "ngram_size": 3,
    "heads_per_ngram": 2,
}


def test_multipliers_of_the_real_model() -> None:
    assert layer_multipliers(REAL_VOCAB) == REAL_MULTIPLIERS


def test_multipliers_are_odd_and_keep_products_within_63_bits() -> None:
    for vocab_size in (97, 8192, REAL_VOCAB):
        for multiplier in layer_multipliers(vocab_size):
            assert multiplier % 2 == 1
            assert multiplier * (vocab_size - 1) < 2**63


def test_table_sizes_and_offsets_of_the_real_model() -> None:
    sizes = ngram_head_sizes(20_000_000, 16)
    assert sizes == REAL_SIZES
    offsets = list(itertools.accumulate(sizes[:-1], initial=0))
    assert offsets[1] == 20000003
    assert offsets[15] == 300001275
    total = offsets[-1] + sizes[-1]
    assert total == 320_001_446
    assert -(-total // 128) * 128 == 320_001_536


@pytest.mark.parametrize(
    ("ids", "context"),
    [
        ([5], [5, EOS, EOS]),
        ([4, 5], [5, 4, EOS]),
        ([3, 4, 5], [5, 4, 3]),
        ([3, EOS, 5], [5, EOS, EOS]),
        ([EOS, 4, 5], [5, 4, EOS]),
        ([3, 4, EOS], [EOS, 4, 3]),
        ([EOS, EOS, EOS], [EOS, EOS, EOS]),
    ],
)
def test_context_ends_at_an_earlier_eos_or_the_start(ids: list[int], context: list[int]) -> None:
    assert ngram_context(ids, len(ids) - 1, 3, EOS) == context


def test_longer_context_stays_cut_behind_the_first_eos() -> None:
    assert ngram_context([1, 2, EOS, 4, 5], 4, 5, EOS) == [5, 4, EOS, EOS, EOS]


def test_rows_are_hashed_by_order_of_ngram() -> None:
    config = ReferenceConfig.from_dict(TEXT_CONFIG)
    rows = ngram_rows([1, 2, 3], 2, [11, 13, 17], [5, 7, 11, 13], [0, 5, 12, 23], config)
    pair, triple = 33 ^ 26, 33 ^ 26 ^ 17
    assert rows == [pair % 5, pair % 7 + 5, triple % 11 + 12, triple % 13 + 23]


def test_embedding_puts_the_rows_of_all_shards_side_by_side() -> None:
    config = ReferenceConfig.from_dict(TEXT_CONFIG)
    table = torch.arange(36.0)[:, None]
    weights = {f"ngram_embedding.shard_{i}.weight": table[i * 12 : i * 12 + 12] for i in range(3)}
    weights |= {
        "layer_multipliers": torch.tensor([11, 13, 17]),
        "ngram_heads_vocab_sizes": torch.tensor([5, 7, 11, 13]),
        "ngram_heads_offsets": torch.tensor([0, 5, 12, 23]),
    }
    rows = ngram_rows([1, 2, 3], 2, [11, 13, 17], [5, 7, 11, 13], [0, 5, 12, 23], config)
    assert ngram_embedding([1, 2, 3], weights, config)[2].tolist() == rows


def test_config_reads_one_based_ple_layers_and_every_fourth_attention_layer() -> None:
    config = ReferenceConfig.from_dict({"text_config": TEXT_CONFIG})
    assert config.ple_layers == {1}
    assert config.attention_layers == {3}


@pytest.mark.parametrize("dilation", [1, 3])
def test_causal_conv_takes_its_last_tap_from_the_row_itself(dilation: int) -> None:
    x = torch.randn(11, 2, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[0.5, 0.0, -1.0, 2.0]]])
    out = causal_conv(x, weight, dilation)
    for t in range(11):
        for channel in range(2):
            want = sum(
                float(weight[channel, 0, tap] * x[t - (3 - tap) * dilation, channel])
                for tap in range(4)
                if t - (3 - tap) * dilation >= 0
            )
            assert float(out[t, channel]) == pytest.approx(want, abs=1e-5)
