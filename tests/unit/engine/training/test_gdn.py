from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.training.gdn import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
    unit_lower_inverse,
)


def _inputs(num_tokens: int, decay: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 3, num_tokens, 16) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -decay * torch.rand(2, 3, num_tokens)
    return q, k, v, g, torch.rand(2, 3, num_tokens)


@pytest.mark.parametrize("num_tokens", [64, 192])
@pytest.mark.parametrize("decay", [0.01, 1.0, 20.0])
def test_chunked_rule_equals_recurrent_rule(num_tokens: int, decay: float) -> None:
    inputs = _inputs(num_tokens, decay)
    chunked = chunk_gated_delta_rule(*inputs)
    torch.testing.assert_close(chunked, recurrent_gated_delta_rule(*inputs), atol=2e-5, rtol=1e-4)


def test_gradients_of_chunked_rule_equal_those_of_recurrent_rule() -> None:
    grads = []
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        torch.manual_seed(0)
        inputs = [x.requires_grad_() for x in _inputs(128, 0.5)]
        rule(*inputs).square().mean().backward()
        grads.append([x.grad for x in inputs])
    for chunked, recurrent in zip(*grads, strict=True):
        torch.testing.assert_close(chunked, recurrent, atol=1e-6, rtol=1e-3)


def test_inverse_holds_for_keys_that_are_all_alike() -> None:
    # Equal keys and beta = 1 make every entry 1, where a power series would cancel to nothing.
    lower = torch.ones(1, 64, 64).tril(-1)
    product = unit_lower_inverse(lower) @ (lower + torch.eye(64))
    torch.testing.assert_close(product[0], torch.eye(64), atol=1e-5, rtol=0)
