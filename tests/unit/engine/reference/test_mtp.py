"""The draft chain of the reference: what must hold whatever the weights are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.reference.model import ReferenceModel, decoder_layer, last_row_of_attention_layer
from engine.reference.mtp import draft_chain, draft_logits, greedy_pick
from engine.reference.weights import under

HIDDEN, STREAMS, VOCAB = 8, 2, 23

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 0,
    "layer_types": [],
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "hc_count": STREAMS,
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
}

WIDE, RANK = STREAMS * HIDDEN, 3
HYPER = {
    "hc_norm.weight": (WIDE,),
    "input_mix_weight_down.weight": (RANK, WIDE),
    "input_mix_weight_up.weight": (WIDE, RANK),
    "block_inject_weight.weight": (STREAMS, WIDE),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
    **{f"model.hyper_connection_mixer.{name}": shape for name, shape in HYPER.items()},
    **{f"mtp.hyper_connection_mixer.{name}": shape for name, shape in HYPER.items()},
    **{f"mtp.layers.0.attn_hyper_connection.{name}": shape for name, shape in HYPER.items()},
    **{f"mtp.layers.0.mlp_hyper_connection.{name}": shape for name, shape in HYPER.items()},
    "mtp.fc_embedding.weight": (HIDDEN, HIDDEN),
    "mtp.fc_hidden.weight": (HIDDEN, HIDDEN),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (WIDE,),
    "mtp.layers.0.self_attn.q_proj.weight": (16, HIDDEN),
    "mtp.layers.0.self_attn.k_proj.weight": (4, HIDDEN),
    "mtp.layers.0.self_attn.v_proj.weight": (4, HIDDEN),
    "mtp.layers.0.self_attn.o_proj.weight": (HIDDEN, 8),
    "mtp.layers.0.self_attn.q_norm.weight": (4,),
    "mtp.layers.0.self_attn.k_norm.weight": (4,),
    "mtp.layers.0.self_attn.indexer.index_qk_proj.weight": (12, HIDDEN),
    "mtp.layers.0.self_attn.indexer.q_layernorm.weight": (4,),
    "mtp.layers.0.self_attn.indexer.k_layernorm.weight": (4,),
    "mtp.layers.0.mlp.gate.weight": (4, HIDDEN),
    "mtp.layers.0.mlp.experts.gate_up_proj": (4, 10, HIDDEN),
    "mtp.layers.0.mlp.experts.down_proj": (4, HIDDEN, 5),
    "mtp.layers.0.mlp.shared_expert.gate_proj.weight": (6, HIDDEN),
    "mtp.layers.0.mlp.shared_expert.up_proj.weight": (6, HIDDEN),
    "mtp.layers.0.mlp.shared_expert.down_proj.weight": (HIDDEN, 6),
    "mtp.layers.0.mlp.shared_expert_gate.weight": (1, HIDDEN),
}


def random_model() -> ReferenceModel:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return ReferenceModel(CONFIG, tensors)


def random_streams(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, WIDE, generator=torch.Generator().manual_seed(1))


IDS = [5, 9, 2, 2, 17, 11, 3, 8, 1, 20, 4, 6, 7, 13, 19]


def test_greedy_chain_is_its_own_forced_chain() -> None:
    model, streams = random_model(), random_streams(len(IDS) - 1)
    steps = draft_chain(model, IDS, streams, 4, greedy_pick)
    forced = draft_logits(model, IDS, streams, [step.token_id for step in steps[:-1]])
    assert forced.argmax(-1).tolist() == [step.token_id for step in steps]
    torch.testing.assert_close(torch.stack([step.logits for step in steps]), forced)


def test_picker_is_asked_for_the_position_of_the_drafted_token() -> None:
    asked: list[int] = []

    def pick(logits: Tensor, position: int) -> int:
        asked.append(position)
        return greedy_pick(logits, position)

    draft_chain(random_model(), IDS, random_streams(len(IDS) - 1), 3, pick)
    assert asked == [15, 16, 17]


def test_the_first_committed_id_is_no_input_of_the_draft_layer() -> None:
    """Cell i is made from id(i+1), so id(0) enters only through the trunk's streams."""
    model, streams = random_model(), random_streams(len(IDS) - 1)
    torch.testing.assert_close(
        draft_logits(model, IDS, streams), draft_logits(model, [0, *IDS[1:]], streams)
    )


def test_the_norm_of_the_streams_is_over_all_of_them() -> None:
    """Scaling every stream alike changes nothing, scaling one of them does."""
    model, streams = random_model(), random_streams(len(IDS) - 1)
    plain = draft_logits(model, IDS, streams)
    one = streams.clone()
    one[:, :HIDDEN] *= 3
    torch.testing.assert_close(draft_logits(model, IDS, streams * 3), plain, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(draft_logits(model, IDS, one), plain, atol=1e-2)


def test_cells_of_the_chain_are_not_those_of_the_trunk() -> None:
    """After acceptance the cells are made again from the trunk's streams, so the next chain differs."""
    model, streams = random_model(), random_streams(len(IDS) + 1)
    drafted = draft_logits(model, IDS, streams[:-2], [6, 7])[-1]
    committed = draft_logits(model, [*IDS, 6, 7], streams)[-1]
    assert not torch.allclose(drafted, committed, atol=1e-2)


def test_the_last_row_alone_is_the_last_row_of_the_layer() -> None:
    model, streams = random_model(), random_streams(19)
    layer = under(model.mtp, "layers.0")
    whole = decoder_layer(streams, layer, model.config, is_attention=True)
    torch.testing.assert_close(
        last_row_of_attention_layer(streams, layer, model.config), whole[-1:]
    )


def test_rows_of_streams_must_fit_the_ids() -> None:
    with pytest.raises(ValueError, match="15 ids need 14 rows of streams, not 15"):
        draft_logits(random_model(), IDS, random_streams(15))
