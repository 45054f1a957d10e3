"""The n-gram table in memory, mapped and read past the page cache: the same bits, and no memory where none is due."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ConfigMismatch
from engine.loading import load_engine
from engine.ple_table import DirectRows, MappedRows, RowReader, StoredTable
from engine.sources.base import StoredRows
from engine.tools.pack import pack
from tests.oracle.conftest import Models
from tests.random_weights import SMALL, write_checkpoint

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
PROMPT = [7, 9, 1, 30, 31, 12, 7, 9, 40, 41, 1, 5, 6, 7, 9, 1, 30]


def knows_direct_reads(directory: Path) -> bool:
    probe = directory / "probe"
    probe.write_bytes(b"\0" * 4096)
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def logits(checkpoint: Path, ple_io: str, dtype: str, kernels: str = "torch") -> torch.Tensor:
    engine = load_engine(
        EngineConfig(
            model=str(checkpoint),
            device="cpu",
            dtype=dtype,
            threads=1,
            max_context=64,
            chunk_tokens=16,
            max_draft=0,
            ple_io=ple_io,
            kernels=kernels,
        )
    )
    assert ("ple table" in {i.name for i in engine.info.memory_plan}) == (ple_io == "ram")
    read = engine.prefill_logits(0, PROMPT, 0)
    return torch.cat((read, engine.verify_logits({0: (3, 4, 5)})[0]))


def with_int8_table(checkpoint: Path) -> Path:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    table = tensors[TABLE].float()
    scale = table.abs().amax(-1) / 127
    tensors[TABLE] = (table / scale.unsqueeze(-1)).round().to(torch.int8)
    save_file({**tensors, f"{TABLE}_scale": scale}, file)
    return checkpoint


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("form", ["whole", "shards", "int8", "pack of int8"])
def test_the_three_ways_give_the_same_bits(
    checkpoints: Models, tmp_path: Path, form: str, kernels: str
) -> None:
    match form:
        case "shards":
            checkpoint = checkpoints.checkpoint("gqa3_gdn2", with_mtp=False)
        case "int8":
            checkpoint = with_int8_table(write_checkpoint(tmp_path / "small", SMALL))
        case "pack of int8":
            checkpoint = tmp_path / "pack"
            pack(str(with_int8_table(write_checkpoint(tmp_path / "small", SMALL))), checkpoint)
        case _:
            checkpoint = write_checkpoint(tmp_path / "small", SMALL)
    dtype = "bfloat16" if form == "whole" and kernels == "torch" else "float32"
    expected = logits(checkpoint, "ram", dtype, kernels)
    assert torch.equal(logits(checkpoint, "mmap", dtype, kernels), expected)
    if knows_direct_reads(checkpoint):
        assert torch.equal(logits(checkpoint, "direct", dtype, kernels), expected)
        return
    with pytest.raises(
        ConfigMismatch, match="--ple-io direct: .* required a file system with O_DIRECT"
    ):
        logits(checkpoint, "direct", dtype, kernels)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_read_that_fails_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "small", SMALL)

    def fail(*_: object) -> torch.Tensor:
        raise OSError("the disk is gone")

    monkeypatch.setattr(MappedRows, "read", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        logits(checkpoint, "mmap", "float32", kernels)


def rows_file(directory: Path, num_rows: int, width: int) -> tuple[StoredRows, torch.Tensor]:
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1))
    path = directory / "rows"
    with path.open("wb") as file:
        file.write(b"\1" * 13)
        file.write(values.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return stored_floats(path, 13, num_rows, width), values


def stored_floats(path: Path, offset: int, num_rows: int, width: int) -> StoredRows:
    return StoredRows(
        path=path,
        offset=offset,
        num_rows=num_rows,
        row_bytes=4 * width,
        decode=lambda data, _rows: data.view(torch.float32),
    )


def resident_pages(path: Path) -> int:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(view))
        assert libc.mincore(address, ctypes.c_size_t(len(mapped)), found) == 0
        del view
    return sum(page & 1 for page in found)


def test_rows_that_cross_blocks_are_read_whole_and_leave_nothing_in_the_page_cache(
    tmp_path: Path,
) -> None:
    place, values = rows_file(tmp_path, 3000, 37)
    if not knows_direct_reads(tmp_path):
        with pytest.raises(ConfigMismatch, match="O_DIRECT"):
            DirectRows(place)
        return
    before = resident_pages(place.path)
    stored = DirectRows(place)
    wanted = torch.tensor([2999, 0, 27, 1500, 27, 28, 2999])
    assert torch.equal(stored.read(wanted), values[wanted])
    assert resident_pages(place.path) <= before


def test_a_table_cut_short_is_named(tmp_path: Path) -> None:
    place, _ = rows_file(tmp_path, 8, 4)
    if knows_direct_reads(tmp_path):
        stored = DirectRows(place)
        with pytest.raises(OSError, match="ends within row 8 of the n-gram table"):
            stored.read(torch.tensor([8]))


def test_pieces_are_read_by_their_own_numbers_and_before_they_are_waited_for(
    tmp_path: Path,
) -> None:
    values = torch.arange(24.0).view(12, 2)
    path = tmp_path / "rows"
    path.write_bytes(values.numpy().tobytes())
    asked: list[list[int]] = []

    class Spy(MappedRows):
        def read(self, rows: torch.Tensor) -> torch.Tensor:
            asked.append(rows.tolist())
            return super().read(rows)

    pieces: list[RowReader] = [Spy(stored_floats(path, at, 4, 2)) for at in (0, 32, 64)]
    table = StoredTable(pieces, 4, torch.float32)
    rows = torch.tensor([11, 0, 5, 0, 9])
    waited = table.fetch(rows)
    table.fetch(torch.tensor([1]))()  # one reader: what was asked before has been read by now
    assert asked == [[0, 0], [1], [3, 1], [1]]
    assert torch.equal(waited(), values[rows])
