"""A GPU's 4-bit experts in compiled code. That the bits are the GPU's is tests/gpu/test_cuda_step.py's to show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.cuda.quant import pack4, unpack4
from engine.native.abi import LIBRARY, Library, why_unavailable
from engine.native.experts import expert_parts

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SHAPES = [(96, 40), (300, 200), (256, 128), (1, 1), (520, 90)]
"""Hidden size and width of an expert: whole tiles and groups, and parts of them."""


class Expert:
    """One of two random experts, and rows."""

    def __init__(self, hidden: int, width: int) -> None:
        generator = torch.Generator().manual_seed(hidden + width)
        gate_up = torch.randn(2, 2 * width, hidden, generator=generator) * hidden**-0.5
        down = torch.randn(2, hidden, width, generator=generator) * width**-0.5
        self.gate_up, self.down = pack4(gate_up), pack4(down)
        self.hidden, self.width = hidden, width
        self.x = torch.randn(7, hidden, generator=generator).to(torch.bfloat16)
        self._library = Library(LIBRARY)

    def parts(self, x: Tensor) -> Tensor:
        return expert_parts(self._library, self.gate_up, self.down, 1, x, self.width)

    def wanted(self, x: Tensor) -> Tensor:
        middle = (
            x.to(torch.float64) @ unpack4(self.gate_up, 2 * self.width, self.hidden)[1].double().t()
        )
        middle = torch.nn.functional.silu(middle[:, 0::2]) * middle[:, 1::2]
        return middle @ unpack4(self.down, self.hidden, self.width)[1].double().t()


@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_an_expert_is_what_its_weights_say(hidden: int, width: int) -> None:
    expert = Expert(hidden, width)
    wanted = expert.wanted(expert.x)
    error = (expert.parts(expert.x) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < 5e-4


@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(hidden: int, width: int) -> None:
    expert = Expert(hidden, width)
    together = expert.parts(expert.x)
    for row in range(7):
        assert torch.equal(expert.parts(expert.x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_ends_so_and_spoils_no_other(strange: float) -> None:
    expert = Expert(300, 200)
    good = expert.parts(expert.x)
    expert.x[3, 290] = strange
    parts = expert.parts(expert.x)
    assert not bool(parts[3].isfinite().any())
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(parts[others], good[others])


def test_zeros_and_very_different_sizes() -> None:
    expert = Expert(300, 200)
    expert.x[0] = 0.0
    expert.x[1, :128] *= 1e-30
    expert.x[2] *= 1e-12
    parts, wanted = expert.parts(expert.x[:3]), expert.wanted(expert.x[:3])
    assert bool((parts[0] == 0.0).all())
    for row in (1, 2):
        assert float((parts[row] - wanted[row]).norm() / wanted[row].norm()) < 5e-4
