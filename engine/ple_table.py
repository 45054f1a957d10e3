"""The n-gram table, wherever it lies: in memory, or row by row from the files that the model was loaded from.

Rows are asked for as soon as a window's ids are known (`fetch`) and waited for where they are used, so a read from
disk passes beside the first layers. Values are the same in all three: the same conversions of the same stored bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigMismatch
from engine.sources.mapped import MappedFile

if TYPE_CHECKING:
    from engine.sources.base import StoredRows
    from engine.tensor_names import Part
    from engine.weights import Checkpoint

Fetched = Callable[[], Tensor]
"""Waits for the rows: [n, head dim]."""

_BLOCK_BYTES = 4096
"""What a read past the page cache is a multiple of, in offset, length and memory."""
_READS_IN_FLIGHT = 16


class PleTable(Protocol):
    """Rows by number."""

    @property
    def num_bytes(self) -> int:
        """Memory that the table itself takes."""
        ...

    def fetch(self, rows: Tensor) -> Fetched:
        """Begin to read rows int64 [n]."""
        ...


class RamTable:
    """The whole table in the host's memory: [rows, head dim]. A GPU has better use for its own."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    @property
    def num_bytes(self) -> int:
        return self._table.numel() * self._table.element_size()

    def fetch(self, rows: Tensor) -> Fetched:
        return lambda: self._table.index_select(0, rows.cpu())


class RowReader(Protocol):
    """Rows of one stored piece of the table."""

    def read(self, rows: Tensor) -> Tensor:
        """rows int64 [n], on the CPU -> values [n, head dim]: floats as stored, anything quantised as fp32."""
        ...


class MappedRows:
    """Rows of a mapped file: the page cache holds what was read lately, as far as memory is free."""

    def __init__(self, stored: StoredRows) -> None:
        shape = (stored.num_rows, stored.row_bytes)
        self._data = MappedFile(stored.path).array(stored.offset, shape, np.uint8)
        self._decode = stored.decode

    def read(self, rows: Tensor) -> Tensor:
        return self._decode(torch.from_numpy(self._data[rows.numpy()]), rows)


class DirectRows:
    """Rows read from the disk past the page cache: no byte of the table stays in memory."""

    def __init__(self, stored: StoredRows) -> None:
        """Raises ConfigMismatch where the file system knows no such reads."""
        self._stored = stored
        try:
            self._file = os.open(stored.path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError) as error:
            raise ConfigMismatch(
                f"--ple-io direct: {stored.path} cannot be read past the page cache here ({error}); "
                "required a file system with O_DIRECT: give mmap or ram"
            ) from error
        self._buffers = threading.local()
        self._readers = ThreadPoolExecutor(_READS_IN_FLIGHT, "ple-read")

    def read(self, rows: Tensor) -> Tensor:
        wanted, at = rows.unique(return_inverse=True)
        data = b"".join(self._readers.map(self._read_row, wanted.tolist()))
        found = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(wanted.shape[0], -1)
        return self._stored.decode(found.index_select(0, at), rows)

    def _read_row(self, row: int) -> bytes:
        row_bytes = self._stored.row_bytes
        offset = self._stored.offset + row * row_bytes
        first = offset - offset % _BLOCK_BYTES
        skipped = offset - first
        blocks = -(-(skipped + row_bytes) // _BLOCK_BYTES)
        buffer = self._buffer(blocks * _BLOCK_BYTES)
        found = os.preadv(self._file, [memoryview(buffer)[: blocks * _BLOCK_BYTES]], first)
        if found < skipped + row_bytes:
            raise OSError(f"{self._stored.path}: ends within row {row} of the n-gram table")
        return buffer[skipped : skipped + row_bytes]

    def _buffer(self, num_bytes: int) -> mmap.mmap:
        """This thread's buffer; whole pages are aligned as such reads must be."""
        held: mmap.mmap | None = getattr(self._buffers, "held", None)
        if held is None or len(held) < num_bytes:
            held = self._buffers.held = mmap.mmap(-1, num_bytes)
        return held


class StoredTable:
    """A table that stays in its files, in pieces of equal numbers of rows; one thread reads ahead."""

    def __init__(
        self, pieces: Sequence[RowReader], rows_per_piece: int, dtype: torch.dtype
    ) -> None:
        """dtype: what the values are given as."""
        self._pieces = pieces
        self._rows_per_piece = rows_per_piece
        self._dtype = dtype
        self._reader = ThreadPoolExecutor(1, "ple-fetch")

    @property
    def num_bytes(self) -> int:
        return 0

    def fetch(self, rows: Tensor) -> Fetched:
        return self._reader.submit(self._read, rows.cpu()).result

    def _read(self, rows: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return self._pieces[0].read(rows).to(self._dtype)
        piece_of = rows.div(self._rows_per_piece, rounding_mode="floor")
        found: Tensor | None = None
        for piece in piece_of.unique().tolist():
            at = (piece_of == piece).nonzero().squeeze(1)
            values = self._pieces[piece].read(rows[at] - piece * self._rows_per_piece)
            if found is None:
                found = torch.empty(rows.shape[0], values.shape[1], dtype=self._dtype)
            found[at] = values.to(self._dtype)
        assert found is not None
        return found


def stored_table(
    checkpoint: Checkpoint, parts: Sequence[Part], ple_io: str, dtype: torch.dtype
) -> StoredTable:
    """The table that stays in a checkpoint's files: one tensor, or equal shards of it.

    ple_io: mmap or direct; dtype: what rows are given as. Raises ConfigMismatch where rows cannot be read that way.
    """
    shape = parts[0][1]
    pieces = [_reader(checkpoint, name, shape, ple_io) for name, shape in parts]
    return StoredTable(pieces, shape[0], dtype)


def _reader(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], ple_io: str) -> RowReader:
    stored = checkpoint.take_rows(name, shape)
    if stored is None:
        raise ConfigMismatch(
            f"--ple-io {ple_io}: the rows of {name} do not lie by themselves in its file; give ram"
        )
    return MappedRows(stored) if ple_io == "mmap" else DirectRows(stored)
