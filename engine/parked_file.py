"""The format of a conversation file: parked pages and checkpoints of one conversation, versioned and checked.

    8 bytes   magic
    3 x u32   version, length of the header, its CRC-32 (little-endian)
    header    MessagePack of FileHeader, then zeros to a multiple of 4096 bytes
    blocks    the pages by position, then the checkpoints by position; each block's CRC-32 is in the header

The file holds no token and no key: whose it is and what was said only shows in the digests of its checkpoints.
What was said can still be guessed from its state, so only the server's own user may read it.
It is written under another name, flushed, and renamed, so that a file that has its name is whole.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.interface import KeptCheckpoint

MAGIC = b"STRATAPK"
VERSION = 1
SUFFIX = ".parked"
PART_SUFFIX = ".part"
_PREFIX = struct.Struct("<8sIII")
_ALIGN = 4096
_MAX_HEADER_BYTES = 1 << 26


class DamagedFile(Exception):
    """The file is not what was written: the message says what was found and what is required."""


class ForeignFile(Exception):
    """A good file that this server cannot use: of another version, or of another model."""


class FileMark(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of the file."""

    key: KeptCheckpoint
    num_draft_cells: int | None


class FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks are."""

    fingerprint: bytes
    """Of the model, and of all that decides what its state is."""
    block_bytes: int
    num_pages: int
    """One block each."""
    blocks_per_checkpoint: int
    marks: tuple[FileMark, ...]
    checksums: tuple[int, ...]
    """CRC-32 of every block."""

    @property
    def num_blocks(self) -> int:
        return self.num_pages + self.blocks_per_checkpoint * len(self.marks)

    def first_block(self, index: int) -> int:
        """Where the blocks of a checkpoint begin."""
        return self.num_pages + self.blocks_per_checkpoint * index


def file_bytes(header: FileHeader) -> int:
    """Size of the whole file."""
    return _blocks_at(len(msgspec.msgpack.encode(header))) + header.num_blocks * header.block_bytes


def checksum(block: memoryview) -> int:
    """CRC-32 of a block."""
    return zlib.crc32(block)


def write_file(path: Path, header: FileHeader, blocks: Sequence[memoryview]) -> int:
    """Write the file whole or not at all; returns its size. Raises OSError."""
    body = msgspec.msgpack.encode(header)
    start = _PREFIX.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body
    part = path.with_suffix(PART_SUFFIX)
    try:
        part.unlink(missing_ok=True)  # one that is there would keep the mode that it has
        with open(part, "xb", opener=open_private) as file:
            file.write(start.ljust(_blocks_at(len(body)), b"\0"))
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):  # the first error is the one to tell; a start removes what is left
            part.unlink()
        raise
    _flush_directory(path.parent)
    return file_bytes(header)


def open_private(path: str, flags: int) -> int:
    """An `opener`: what it makes is for this user alone, whatever the directory allows."""
    return os.open(path, flags, mode=0o600)


def read_header(path: Path) -> FileHeader:
    """The header, of a file that has its whole length. Raises DamagedFile, ForeignFile or OSError."""
    with path.open("rb") as file:
        start = file.read(_PREFIX.size)
        if len(start) < _PREFIX.size:
            raise DamagedFile(f"{len(start)} bytes, required at least {_PREFIX.size}")
        magic, version, length, check = _PREFIX.unpack(start)
        if magic != MAGIC:
            raise DamagedFile(f"begins with {magic!r}, required {MAGIC!r}")
        if version != VERSION:
            raise ForeignFile(f"version {version}, required {VERSION}")
        body = file.read(min(length, _MAX_HEADER_BYTES))
        found_bytes = os.fstat(file.fileno()).st_size
    if len(body) != length or zlib.crc32(body) != check:
        raise DamagedFile("the header does not have its checksum")
    try:
        header = msgspec.msgpack.decode(body, type=FileHeader)
    except msgspec.DecodeError as error:
        raise DamagedFile(f"the header cannot be read: {error}") from error
    required = _blocks_at(length) + header.num_blocks * header.block_bytes
    if found_bytes != required:
        raise DamagedFile(f"{found_bytes} bytes, required {required}")
    return header


def read_blocks(path: Path, header: FileHeader, wanted: Sequence[tuple[int, memoryview]]) -> None:
    """Fill memory with blocks of the file, each by its index. Raises DamagedFile or OSError, and some may be filled."""
    first = _blocks_at(len(msgspec.msgpack.encode(header)))
    with path.open("rb", buffering=0) as file:
        for index, memory in wanted:
            file.seek(first + index * header.block_bytes)
            done = 0
            while done < len(memory):
                count = file.readinto(memory[done:])
                if not count:
                    raise DamagedFile(f"ends inside block {index} of {header.num_blocks}")
                done += count
            if zlib.crc32(memory) != header.checksums[index]:
                raise DamagedFile(
                    f"block {index} of {header.num_blocks} does not have its checksum"
                )


def _blocks_at(header_bytes: int) -> int:
    return -(-(_PREFIX.size + header_bytes) // _ALIGN) * _ALIGN


def _flush_directory(directory: Path) -> None:
    """So that the new name survives a power cut as well."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
