"""Properties of the reference layers that the formulas state and no other library is needed to see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.reference import norm, qsa, residual
from engine.reference.config import ReferenceConfig
from engine.reference.gdn import delta_rule
from engine.reference.moe import mixture_of_experts
from engine.reference.rotary import rotate

CONFIG = ReferenceConfig(
    vocab_size=100,
    hidden_size=8,
    num_hidden_layers=4,
    rms_norm_eps=1e-6,
    eos_token_id=0,
    attention_layers=frozenset({3}),
    hc_count=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rope_theta=100.0,
    rotary_dim=2,
    indexer_n_heads=2,
    indexer_head_dim=4,
    indexer_budget=8,
    indexer_compress_ratio=4,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    output_gate_type="sigmoid",
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    ple_layers=frozenset(),
    ngram_size=3,
    heads_per_ngram=2,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_grouped_norm_takes_each_group_by_itself() -> None:
    x, weight = random(3, 8), random(8, seed=1)
    parts = [norm.zero_centred_rms(x[:, i : i + 4], weight[i : i + 4], 1e-6) for i in (0, 4)]
    torch.testing.assert_close(
        norm.grouped_zero_centred_rms(x, weight, 1e-6, 2), torch.cat(parts, -1)
    )


def test_zero_weight_is_plain_rms() -> None:
    out = norm.zero_centred_rms(random(5, 64) * 9, torch.zeros(64), 1e-6)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(5))


@pytest.mark.parametrize(("gate_type", "share"), [("sigmoid", 0.5), ("silu", 0.0)])
def test_gate_of_the_gated_norm(gate_type: str, share: float) -> None:
    x = random(2, 16)
    out = norm.gated_rms(x, torch.zeros(2, 16), torch.full((16,), 3.0), 0.0, gate_type)
    torch.testing.assert_close(out, share * 3 * x * x.square().mean(-1, keepdim=True).rsqrt())


def test_rotary_keeps_position_zero_lengths_and_relative_angles() -> None:
    q, k = random(1, 1, 8), random(1, 1, 8, seed=1)

    def score(p: int, t: int) -> Tensor:
        turned = (rotate(x, torch.tensor([at]), 4, 100.0) for x, at in ((q, p), (k, t)))
        a, b = turned
        return (a * b).sum()

    torch.testing.assert_close(rotate(q, torch.tensor([0]), 4, 100.0), q)
    torch.testing.assert_close(rotate(q, torch.tensor([7]), 4, 100.0)[..., 4:], q[..., 4:])
    torch.testing.assert_close(rotate(q, torch.tensor([7]), 4, 100.0).norm(), q.norm())
    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)


def test_rotary_pairs_first_half_with_second_half() -> None:
    out = rotate(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), torch.tensor([1]), 4, 100.0)[0, 0]
    angle = torch.tensor(1.0)
    torch.testing.assert_close(out, torch.stack((angle.cos(), *out[1:2], angle.sin(), *out[3:])))


def test_delta_rule_recalls_what_it_wrote() -> None:
    """A unit key written with full strength and no decay answers with its value, and a rewrite replaces it."""
    k = torch.nn.functional.normalize(random(1, 1, 4), dim=-1).repeat(2, 1, 1)
    v = random(2, 1, 6, seed=1)
    out = delta_rule(k, k, v, torch.ones(2, 1), torch.zeros(2, 1))
    torch.testing.assert_close(out, v)


def test_delta_rule_decays_before_it_reads() -> None:
    k = torch.tensor([[[1.0, 0.0]]]).repeat(2, 1, 1)
    v, beta = torch.tensor([[[4.0]], [[0.0]]]), torch.tensor([[1.0], [0.5]])
    g = torch.tensor([[1.0], [0.5]]).log()
    out = delta_rule(k, k, v, beta, g)
    # 4 is written, halved to 2 by the decay, then halfway moved to 0.
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 1.0]))


def index_weights(seed: int = 0) -> dict[str, Tensor]:
    return {
        "index_qk_proj.weight": random(12, 8, seed=seed),
        "q_layernorm.weight": 0.2 * random(4, seed=seed + 1),
        "k_layernorm.weight": 0.2 * random(4, seed=seed + 2),
    }


def test_selection_is_everything_within_the_budget() -> None:
    for p, visible in enumerate(qsa.selected_positions(random(11, 8), index_weights(), CONFIG)):
        assert visible.tolist() == list(range(p + 1))


def test_selection_beyond_the_budget_is_the_best_blocks_and_the_tail() -> None:
    u, weights = random(39, 8), index_weights()
    scores = qsa.block_scores(u, weights, CONFIG)
    for p, visible in enumerate(qsa.selected_positions(u, weights, CONFIG)):
        tail = set(range((p + 1) // 4 * 4, p + 1))
        blocks = {t // 4 for t in set(visible.tolist()) - tail}
        assert tail <= set(visible.tolist())
        assert len(visible) == len(tail) + 4 * len(blocks)
        assert len(blocks) == min(2, (p + 1) // 4)
        left = set(range((p + 1) // 4)) - blocks
        if left:
            assert min(float(scores[p][b]) for b in blocks) >= max(
                float(scores[p][b]) for b in left
            )


def test_equal_scores_keep_the_earlier_block() -> None:
    weights = index_weights() | {"index_qk_proj.weight": torch.zeros(12, 8)}
    last = qsa.selected_positions(random(18, 8), weights, CONFIG)[-1]
    assert last.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 16, 17]


def test_later_tokens_change_no_earlier_score() -> None:
    u, weights = random(23, 8), index_weights()
    whole = qsa.block_scores(u, weights, CONFIG)
    for length in (5, 8, 17):
        part = qsa.block_scores(u[:length], weights, CONFIG)
        for before, after in zip(part, whole, strict=False):
            torch.testing.assert_close(before, after)


def expert_weights() -> dict[str, Tensor]:
    weights = {
        "gate.weight": random(4, 8),
        "experts.gate_up_proj": random(4, 10, 8, seed=1),
        "experts.down_proj": random(4, 8, 5, seed=2),
        "shared_expert_gate.weight": random(1, 8, seed=3),
    }
    for i, part in enumerate(("gate_proj", "up_proj", "down_proj")):
        shape = (8, 6) if part == "down_proj" else (6, 8)
        weights[f"shared_expert.{part}.weight"] = random(*shape, seed=4 + i)
    return weights


def test_fused_and_single_experts_are_the_same_model() -> None:
    fused = expert_weights()
    single = {name: t for name, t in fused.items() if not name.startswith("experts.")}
    for i in range(4):
        single[f"experts.{i}.gate_proj.weight"] = fused["experts.gate_up_proj"][i, :5]
        single[f"experts.{i}.up_proj.weight"] = fused["experts.gate_up_proj"][i, 5:]
        single[f"experts.{i}.down_proj.weight"] = fused["experts.down_proj"][i]
    u = random(7, 8, seed=9)
    torch.testing.assert_close(
        mixture_of_experts(u, fused, CONFIG), mixture_of_experts(u, single, CONFIG)
    )


def test_routed_shares_sum_to_one() -> None:
    """With equal experts the choice does not matter, so all experts or one give the same."""
    weights = expert_weights()
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        weights[name] = weights[name][:1].repeat(4, 1, 1)
    u = random(5, 8, seed=9)
    torch.testing.assert_close(
        mixture_of_experts(u, weights, CONFIG),
        mixture_of_experts(u, weights, replace(CONFIG, num_experts_per_tok=1)),
    )


def hyper_weights() -> dict[str, Tensor]:
    return {
        "hc_norm.weight": torch.zeros(16),
        "input_mix_weight_down.weight": torch.zeros(3, 16),
        "input_mix_weight_up.weight": torch.zeros(16, 3),
        "block_inject_weight.weight": torch.zeros(2, 16),
    }


def test_silent_gates_read_half_the_mean_and_inject_once() -> None:
    streams, output = random(5, 16), random(5, 8, seed=1)
    normed = norm.zero_centred_rms(streams.view(5, 2, 8), torch.zeros(8), 1e-6)
    torch.testing.assert_close(
        residual.read(streams, hyper_weights(), CONFIG), 0.5 * normed.mean(1)
    )
    torch.testing.assert_close(
        residual.inject(streams, output, hyper_weights(), CONFIG), streams + output.repeat(1, 2)
    )
