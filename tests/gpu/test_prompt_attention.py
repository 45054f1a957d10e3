"""A prompt piece's attention leaves out the keys that none of its rows chose.

With TRITON_INTERPRET=1 it runs on a CPU.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpu.test_cuda_step import KV, SMALL

if TYPE_CHECKING:
    from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
START, NUM_ROWS = 301, 150
"""No tile of rows or keys begins or ends there."""


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("apart", [False, True])
def test_keys_that_no_row_chose_are_left_out_and_change_no_bit(
    apart: bool, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.cuda import chunk_kernels
    from engine.cuda.random_model import real_spec
    from engine.state import SlotState

    spec = real_spec(**SMALL)
    qsa = spec.qsa
    state = SlotState(
        spec,
        num_slots=2,
        max_context=512,
        dtype=torch.bfloat16,
        kv_dtype=KV[kv],
        device=DEVICE,
    )
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for cells, scale in ((state.k, state.k_scale), (state.v, state.v_scale)):
        cells.copy_((30 * random(*cells.shape)).to(cells.dtype))
        if scale is not None:
            scale.copy_(random(*scale.shape).abs() * 0.03)
    # All rows agree which blocks count most: the first, or some anywhere.
    num_blocks = state.index_blocks.shape[2]
    share = torch.linspace(2, 0.1, num_blocks)
    share = share[torch.randperm(num_blocks, generator=generator)] if apart else share
    keys = share[:, None] * random(qsa.index_dim)
    state.index_blocks.copy_(keys.expand(state.index_blocks.shape))
    width = 2 * (qsa.num_heads + qsa.num_kv_heads) * qsa.head_dim
    rows: dict[str, Any] = {
        "projected": random(NUM_ROWS, width).to(DEVICE, torch.bfloat16),
        "q": random(NUM_ROWS, qsa.num_heads, qsa.head_dim).to(DEVICE, torch.bfloat16),
        "index_q": random(NUM_ROWS, qsa.num_index_heads, qsa.index_dim).to(DEVICE, torch.bfloat16),
        "positions": torch.arange(START, START + NUM_ROWS, dtype=torch.int32, device=DEVICE),
    }

    def attend() -> Tensor:
        return chunk_kernels.attend_chunk(
            weights=SimpleNamespace(index=0),  # pyright: ignore[reportArgumentType]
            slot=1,
            start=START,
            state=state,
            spec=qsa,
            **rows,
        )

    found = attend()
    needed_tiles = chunk_kernels.needed_tiles
    counted: list[tuple[Tensor, Tensor]] = []

    def all_tiles(*arguments: Any) -> tuple[Tensor, Tensor]:
        tiles, counts = needed_tiles(*arguments)
        whole = torch.full_like(counts, tiles.shape[1])
        counted.append((counts, whole))
        return torch.arange(tiles.shape[1]).to(tiles).expand_as(tiles).contiguous(), whole

    monkeypatch.setattr(chunk_kernels, "needed_tiles", all_tiles)
    assert torch.equal(attend(), found)
    assert found.isfinite().all()
    ((counts, whole),) = counted
    assert (counts <= whole).all()
    assert apart or (counts < whole).all()
