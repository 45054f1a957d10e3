from __future__ import annotations

import torch
from torch import Tensor

from engine.training.config import ModelConfig
from engine.training.layers import MixtureOfExperts
from engine.training.model import LossWeights, TrainingModel, training_loss


def _ids(config: ModelConfig, num_tokens: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (2, num_tokens))


def _chain_at(model: TrainingModel, ids: Tensor, streams: Tensor, index: int) -> list[Tensor]:
    """The draft chain begun at one index, one step at a time, over the prefix alone."""
    layer = model.mtp.layer
    attention = layer.self_attn
    rotary = model.rotary(ids.shape[1], ids.device)
    cells: list[tuple[Tensor, Tensor]] = []
    hidden = []
    # Step 0 of every earlier index leaves its cell; only this index goes on.
    state = streams[:, : index + 1]
    tokens = ids[:, 1 : index + 2]
    for step in range(4):
        state = model.mtp.combine(state, model.model.embed_tokens(tokens))
        u, weights = layer.attn_hyper_connection(state)
        here = rotary.shifted(0 if step == 0 else index + step, state.shape[1])
        q, gate, k, v = attention.project(u, here)
        cells.append((k, v))
        keys = torch.cat([k for k, _ in cells], dim=1)
        values = torch.cat([v for _, v in cells], dim=1)
        logits = attention.scores(q[:, -1:], keys)
        mixed = torch.einsum("bkgts,bskd->bkgtd", logits.softmax(-1), values)
        y = attention.output(mixed, gate[:, -1:])
        last = state[:, -1:] + (weights[:, -1:, :, None] * y[:, :, None]).flatten(-2)
        state, _ = layer._experts(last)
        hidden.append(model.mtp.hyper_connection_mixer.mix(state)[:, 0])
        tokens = ids[:, index + 2 + step : index + 3 + step]
    return hidden


def test_draft_chains_from_all_positions_equal_chains_run_one_by_one(config: ModelConfig) -> None:
    model = TrainingModel(config).eval()
    ids = _ids(config, 24)
    with torch.no_grad():
        streams = model.run_trunk(ids, is_selecting=False).streams
        together, _, _ = model.run_mtp(ids, streams, 4, is_selecting=False)
        for index in (0, 3, 11):
            alone = _chain_at(model, ids, streams, index)
            for step in range(4):
                torch.testing.assert_close(together[step][:, index], alone[step])


def test_trunk_is_causal(config: ModelConfig) -> None:
    model = TrainingModel(config).eval()
    ids = _ids(config, 70)
    with torch.no_grad():
        whole = model.run_trunk(ids, is_selecting=True).hidden
        part = model.run_trunk(ids[:, :41], is_selecting=True).hidden
    torch.testing.assert_close(whole[:, :41], part, atol=1e-5, rtol=1e-4)


def test_dense_experts_equal_routing_token_by_token(config: ModelConfig) -> None:
    block = MixtureOfExperts(config)
    u = torch.randn(1, 9, config.hidden_size)
    with torch.no_grad():
        out, _ = block(u)
        chances = block.gate(u[0]).softmax(-1)
        for token in range(9):
            best = chances[token].topk(block.top_k)
            expected = torch.sigmoid(block.shared_expert_gate(u[0, token])) * block.shared_expert(
                u[0, token]
            )
            for weight, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ u[0, token]).chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
                expected = expected + weight * (block.experts.down_proj[expert] @ hidden)
            torch.testing.assert_close(out[0, token], expected)


def test_every_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = TrainingModel(config)
    ids = _ids(config, 80)
    total, parts = training_loss(
        model, ids, torch.ones(ids.shape), LossWeights(0.3, 0.01, 0.1), 2, is_selecting=True
    )
    total.backward()
    assert {"main", "mtp0", "mtp1", "balance", "indexer"} == set(parts)
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # The n-gram convolution starts at zero, behind which its norm has nothing to learn yet.
    assert without == ["model.layers.1.ple.norm_conv.weight"]
