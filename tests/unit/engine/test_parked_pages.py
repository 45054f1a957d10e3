"""Pages copied by way of memory that is laid out like them: the same bytes, whichever way they went and come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.interface import PAGE_TOKENS
from engine.model_spec import spec_from_config
from engine.parked import ParkedStates
from engine.state import SlotState
from tests.random_weights import SMALL

PAGES = {0: 10, 1: 11, 2: 12, 5: 13, 6: 14}
"""Page ids by index: two runs, the first longer than what is staged at once."""


def make_state(kv_dtype: torch.dtype) -> SlotState:
    """Cells that all differ."""
    spec = spec_from_config({**SMALL, "mtp_num_hidden_layers": 1}, name="small")
    state = SlotState(
        spec,
        num_slots=2,
        max_context=7 * PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(3)
    for tensor in cells(state):
        tensor.copy_(torch.randint(-127, 128, tensor.shape, generator=generator))
    return state


def cells(state: SlotState) -> tuple[Tensor, ...]:
    return (*state.kv_tensors(), state.index_blocks)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_staged_pages_hold_the_same_bytes(kv_dtype: torch.dtype) -> None:
    state = make_state(kv_dtype)
    held: list[list[bytes]] = []
    for staged_pages in (1, 2, 8):
        parked = ParkedStates(state, staged_pages=staged_pages)
        parked.save_pages(0, tuple(PAGES.items()))
        held.append([bytes(block) for block in parked.memory(PAGES.values(), ())])
    assert held[1] == held[0]
    assert held[2] == held[0]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("staged_pages", [1, 2, 8])
def test_pages_come_back_to_the_cells_they_are_told(
    kv_dtype: torch.dtype, staged_pages: int
) -> None:
    state = make_state(kv_dtype)
    parked = ParkedStates(state, staged_pages=staged_pages)
    parked.save_pages(0, tuple(PAGES.items()))
    before = [tensor.clone() for tensor in cells(state)]
    parked.load_pages(1, tuple(PAGES.items()))
    for tensor, old in zip(cells(state), before, strict=True):
        own = tensor.dim() == 4 and tensor.shape[2] != state.k.shape[2]
        axis = 2 if own else 3
        per_page = tensor.shape[axis] * PAGE_TOKENS // state.capacity
        assert torch.equal(tensor[:, 0], old[:, 0])
        for index in range(state.capacity // PAGE_TOKENS):
            page = tensor.narrow(axis, index * per_page, per_page)
            wanted = old.narrow(axis, index * per_page, per_page)
            source = 0 if index in PAGES else 1
            assert torch.equal(page[:, 1], wanted[:, source])
