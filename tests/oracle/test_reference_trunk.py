"""The plain reference against Hugging Face: same checkpoint, same logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from engine.reference import qsa
from engine.reference.ple import layer_multipliers, ngram_head_sizes
from engine.reference.weights import under
from tests.oracle import tiny
from tests.oracle.tolerances import REFERENCE_LOGITS, SELECTION_MARGIN

if TYPE_CHECKING:
    from engine.reference.config import ReferenceConfig
    from engine.reference.weights import Weights
    from tests.oracle.conftest import Models

NAMES = sorted(tiny.GRID)


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3)).isnan().all()
    assert torch.ones(3).new_empty(3).isnan().all()


@pytest.mark.parametrize("length", [1, 2, 7, 17, 33, 119])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_hugging_face(checkpoints: Models, name: str, length: int) -> None:
    ids = tiny.text(name)[:length]
    logits, _ = checkpoints.reference(name).forward(ids)
    torch.testing.assert_close(
        logits, checkpoints.hf_logits(name, ids), atol=REFERENCE_LOGITS, rtol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_text_of_one_token_over_and_over(checkpoints: Models, name: str) -> None:
    ids = tiny.monotone_text(name)
    logits, _ = checkpoints.reference(name).forward(ids)
    torch.testing.assert_close(
        logits, checkpoints.hf_logits(name, ids), atol=REFERENCE_LOGITS, rtol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_eos_at_the_very_start(checkpoints: Models, name: str) -> None:
    ids = [tiny.EOS, tiny.EOS, *tiny.text(name, seed=1)[:20]]
    logits, _ = checkpoints.reference(name).forward(ids)
    torch.testing.assert_close(
        logits, checkpoints.hf_logits(name, ids), atol=REFERENCE_LOGITS, rtol=0
    )


@pytest.mark.parametrize("name", [name for name in NAMES if tiny.GRID[name].config().ple_layer_ids])
def test_hash_buffers_are_those_of_the_formula(checkpoints: Models, name: str) -> None:
    model = checkpoints.reference(name)
    config = tiny.GRID[name].config()
    buffers = under(model.layers[1], "ple.ple_embedding")
    assert buffers["layer_multipliers"].tolist() == layer_multipliers(config.vocab_size)
    num_heads = (config.ngram_size - 1) * config.heads_per_ngram
    sizes = ngram_head_sizes(config.ngram_vocab_size_base, num_heads)
    assert buffers["ngram_heads_vocab_sizes"].tolist() == sizes


@pytest.mark.parametrize("name", NAMES)
def test_texts_select_and_leave_no_choice_to_rounding(
    checkpoints: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Condition on the texts: selection happens in every sparse layer, and no chosen block ties with one left out."""
    model = checkpoints.reference(name)
    budget = model.config.indexer_budget // model.config.indexer_compress_ratio
    margins: list[float] = []
    block_scores = qsa.block_scores

    def recording(
        u: Tensor, weights: Weights, config: ReferenceConfig, first_query: int
    ) -> list[Tensor]:
        rows = block_scores(u, weights, config, first_query)
        for scores in rows:
            ranked = scores.sort(descending=True).values
            if len(ranked) > budget:
                margins.append(float(ranked[budget - 1] - ranked[budget]))
        return rows

    monkeypatch.setattr(qsa, "block_scores", recording)
    for seed in range(4):
        model.forward(tiny.text(name, seed))
    assert len(margins) > 100
    assert min(margins) > SELECTION_MARGIN
