"""Checkpoints that are not what they should be are refused with tensor, found and required."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine import weights
from engine.errors import WeightMismatch
from engine.sources.safetensors import SafetensorsSource
from engine.weights import Checkpoint

EMBEDDING = "model.embed_tokens.weight"


def open_checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint(SafetensorsSource(directory))


def write(directory: Path, tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    save_file(
        {EMBEDDING: torch.zeros(4, 2), **tensors} if file == "model.safetensors" else tensors,
        directory / file,
    )
    return directory


def test_int8_rows_times_their_scales(tmp_path: Path) -> None:
    codes = torch.tensor([[[1, -2], [127, 0]]], dtype=torch.int8)
    scale = torch.tensor([[0.5, 0.25]])
    with open_checkpoint(write(tmp_path, {"w": codes, "w_scale": scale})) as checkpoint:
        taken = checkpoint.take("w", (1, 2, 2))
        assert taken.tolist() == [[[0.5, -1.0], [31.75, 0.0]]]
        checkpoint.take(EMBEDDING, (4, 2))
        checkpoint.finish()


def test_rows_are_taken_into_place_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_ROWS_VALUES", 8)
    codes = torch.randint(-127, 128, (11, 3), dtype=torch.int8)
    scale = torch.rand(11) + 0.5
    plain = torch.randn(11, 3)
    files = {"w": codes, "w_scale": scale, "p": plain, "bad": plain.clone()}
    files["bad"][10, 2] = torch.nan
    with open_checkpoint(write(tmp_path, files)) as checkpoint:
        for name in ("w", "p"):
            target = torch.empty(11, 3)
            checkpoint.take_into(name, target)
            assert torch.equal(target, checkpoint.take(name, (11, 3)))
        with pytest.raises(WeightMismatch, match=r"w: found shape \[11, 3\], required \[11, 4\]"):
            checkpoint.take_into("w", torch.empty(11, 4))
        with pytest.raises(WeightMismatch, match="bad: found values that are not finite"):
            checkpoint.take_into("bad", target)


@pytest.mark.parametrize(
    ("tensors", "shape", "message"),
    [
        ({}, (2,), r"w: found no such tensor"),
        ({"w": torch.zeros(3)}, (2,), r"w: found shape \[3\], required \[2\]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, (2,), r"w: found torch\.float64, required"),
        ({"w": torch.zeros(2, 2, dtype=torch.int8)}, (2, 2), r"w_scale: found no such tensor"),
        (
            {"w": torch.zeros(2, 2, dtype=torch.int8), "w_scale": torch.zeros(1)},
            (2, 2),
            r"w_scale: found shape \[1\], required \[2\]",
        ),
        (
            {
                "w": torch.zeros(2, 2, dtype=torch.int8),
                "w_scale": torch.zeros(2, dtype=torch.int64),
            },
            (2, 2),
            r"w_scale: found torch\.int64, required a float type",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], shape: tuple[int, ...], message: str
) -> None:
    with (
        open_checkpoint(write(tmp_path, tensors)) as checkpoint,
        pytest.raises(WeightMismatch, match=message),
    ):
        checkpoint.take("w", shape)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    tensors = {
        "w": torch.tensor([1.0, bad]),
        "q": torch.ones(1, 2, dtype=torch.int8),
        "q_scale": torch.tensor([bad]),
    }
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        for name, shape in (("w", (2,)), ("q", (1, 2))):
            with pytest.raises(WeightMismatch, match=f"{name}: found values that are not finite"):
                checkpoint.take(name, shape)


def test_ids_must_be_int64(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {"n": torch.zeros(2)})) as checkpoint:
        with pytest.raises(WeightMismatch, match=r"n: found torch\.float32, required int64"):
            checkpoint.take_ids("n", (2,))
        with pytest.raises(WeightMismatch, match=r"n: found shape \[2\], required \[3\]"):
            checkpoint.take_ids("n", (3,))


def test_what_is_left_over_is_named(tmp_path: Path) -> None:
    extra = {"extra": torch.zeros(1), "mtp.x": torch.zeros(1), "model.visual.y": torch.zeros(1)}
    with open_checkpoint(write(tmp_path, extra)) as checkpoint:
        checkpoint.take(EMBEDDING, (4, 2))
        with pytest.raises(WeightMismatch, match=r"2 tensors left over: found extra, mtp\.x"):
            checkpoint.finish()
        with pytest.raises(WeightMismatch, match="1 tensors left over: found extra,"):
            checkpoint.finish(ignore=("mtp.",))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    write(tmp_path, {EMBEDDING: torch.ones(1)}, "a.safetensors")
    write(tmp_path, {"w": torch.ones(2)}, "b.safetensors")
    index = {"weight_map": {EMBEDDING: "a.safetensors", "w": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.take("w", (2,)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"w": "missing.safetensors"}}']
)
def test_a_broken_shard_index_is_refused(tmp_path: Path, index: str) -> None:
    write(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(WeightMismatch, match="index"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    write(tmp_path, {"w": torch.zeros(1)}, "outside.safetensors")
    index = {"weight_map": {"w": "../outside.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(WeightMismatch, match="required to be a file beside it"):
        open_checkpoint(inner)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.zeros(1)})
    write(tmp_path, {"w": torch.zeros(1)}, "other.safetensors")
    with pytest.raises(WeightMismatch, match="w: found in two files"):
        open_checkpoint(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {"w": torch.zeros(64)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(WeightMismatch, match=r"model\.safetensors: cannot be read"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"found no \.safetensors file"):
        open_checkpoint(tmp_path)


def test_a_model_without_embedding_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.zeros(1)}, "other.safetensors")
    with pytest.raises(WeightMismatch, match="found no embedding"):
        open_checkpoint(tmp_path)


def test_codes_are_taken_once_and_counted_as_used(tmp_path: Path) -> None:
    tensors = {"q": torch.ones(1, 2, dtype=torch.int8), "q_scale": torch.ones(1)}
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        checkpoint.take(EMBEDDING, (4, 2))
        assert checkpoint.take_codes(EMBEDDING, (4, 2)) is None
        with pytest.raises(WeightMismatch, match="1 tensors left over: found q"):
            checkpoint.finish()
        with pytest.raises(WeightMismatch, match=r"q: found shape \[1, 2\], required \[2, 1\]"):
            checkpoint.take_codes("q", (2, 1))
        codes = checkpoint.take_codes("q", (1, 2))
        assert codes is not None
        assert codes.codes.dtype == torch.int8
        checkpoint.finish()
