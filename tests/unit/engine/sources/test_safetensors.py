"""Safetensors as a tensor source: fp8 blocks, fp8 tables, parts of tensors, and where bytes lie."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import WeightMismatch
from engine.ple_table import MappedRows
from engine.sources.safetensors import SafetensorsSource

FP8 = torch.float8_e4m3fn


def source(directory: Path, **tensors: Tensor) -> SafetensorsSource:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors")
    return SafetensorsSource(directory)


def random_fp8(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(FP8)


def test_fp8_blocks_are_scaled_block_by_block_with_ragged_edges(tmp_path: Path) -> None:
    stored = random_fp8(200, 300)
    scales = torch.rand(2, 3) + 0.5
    opened = source(tmp_path, w__weight=stored, w__weight_scale_inv=scales)
    expected = stored.float()
    for row, column in itertools.product(range(2), range(3)):
        block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
        expected[block] *= scales[row, column]
    assert torch.equal(opened.get("w.weight"), expected)
    assert torch.equal(opened.rows("w.weight", 120, 140), expected[120:140])
    assert set(opened.names()) == {"w.weight"}


def test_an_fp8_table_has_one_scale_for_all_its_shards(tmp_path: Path) -> None:
    prefix = "ple__ngram_embedding__"
    shards = {f"{prefix}shard_{i}__weight": random_fp8(6, 4) for i in range(2)}
    scale = torch.tensor([0.375], dtype=torch.bfloat16)
    opened = source(tmp_path, **shards, **{f"{prefix}weight_scale": scale})
    name = "ple.ngram_embedding.shard_1.weight"
    assert torch.equal(opened.get(name), random_fp8(6, 4).float() * 0.375)
    assert torch.equal(opened.rows(name, 2, 3), random_fp8(6, 4)[2:3].float() * 0.375)
    assert set(opened.names()) == {f"ple.ngram_embedding.shard_{i}.weight" for i in range(2)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": random_fp8(2, 2)}, r"w: found F8_E4M3 without scales, required w_scale_inv"),
        (
            {"w": random_fp8(200, 2), "w_scale_inv": torch.ones(1, 1)},
            r"w_scale_inv: found shape \[1, 1\], required \[2, 1\]",
        ),
        (
            {"w": random_fp8(2, 2), "w_scale": torch.ones(2)},
            r"w_scale: found shape \[2\], required \[1\]",
        ),
        (
            {"w": random_fp8(2, 2, 2), "w_scale_inv": torch.ones(1, 1)},
            r"w: found shape \[2, 2, 2\], required 2 axes",
        ),
        (
            {"w": random_fp8(2, 2), "w_scale_inv": torch.ones(1, 1, dtype=torch.int64)},
            r"w_scale_inv: found torch\.int64, required a float type",
        ),
    ],
)
def test_fp8_scales_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    opened = source(tmp_path, **tensors)
    with pytest.raises(WeightMismatch, match=message):
        opened.get("w")


def test_int8_codes_and_parts_of_them(tmp_path: Path) -> None:
    codes = torch.arange(-12, 12, dtype=torch.int8).view(2, 3, 4)
    scales = torch.rand(2, 3)
    opened = source(tmp_path, w=codes, w_scale=scales, plain=torch.ones(2))
    held = opened.codes("w")
    assert held is not None
    assert torch.equal(held.codes, codes)
    assert torch.equal(held.scales, scales)
    assert torch.equal(opened.rows("w", 1, 2), opened.get("w")[1:2])
    assert opened.codes("plain") is None
    assert set(opened.names()) == {"w", "plain"}


def test_rows_that_lie_in_the_file_are_read_by_themselves(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (6, 5), dtype=torch.int8)
    fp8 = torch.randn(6, 130).to(torch.float8_e4m3fn)
    opened = source(
        tmp_path,
        w=torch.randn(6, 5).to(torch.bfloat16),
        q=codes,
        q_scale=torch.rand(6).to(torch.bfloat16),
        one=fp8,
        one_scale=torch.tensor([0.3]),
        blocks=fp8.clone(),  # one file does not hold one memory under two names
        blocks_scale_inv=torch.rand(1, 2),
        vector=torch.randn(4),
    )
    for name in ("w", "q", "one"):
        found = opened.stored_rows(name)
        assert found is not None
        rows = torch.tensor([5, 0, 3, 3])
        values = MappedRows(found).read(rows)
        expected = opened.get(name)[rows]
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected), name
    assert opened.stored_rows("blocks") is None
    assert opened.stored_rows("vector") is None


def test_tensors_outlive_their_source(tmp_path: Path) -> None:
    opened = source(tmp_path, w=torch.arange(4.0))
    tensor = opened.get("w")
    opened.close()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
