"""The directory of conversation files and the thread that reads and writes them beside the windows.

Which files there should be is decided elsewhere, by id; this one sees to it that a file is whole or not used at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import FilesUnusable
from engine.interface import FileDone, KeptFile, ReadFile, WriteFile
from engine.parked_file import (
    PART_SUFFIX,
    SUFFIX,
    DamagedFile,
    FileHeader,
    FileMark,
    ForeignFile,
    checksum,
    open_private,
    read_blocks,
    read_header,
    write_file,
)

if TYPE_CHECKING:
    from io import TextIOWrapper

_LOG = logging.getLogger("engine.files")
_WAIT_S = 0.01
"""How long a window waits for file work when it has nothing else to do."""
_CLOSE_S = 2.0

Memory = Sequence[memoryview]
"""Blocks: of the pages by position, then of the checkpoints by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """What every file of this engine has in common."""

    fingerprint: bytes
    block_bytes: int
    blocks_per_checkpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """File work that is done. marks: of a read, the counters of its checkpoints."""

    done: FileDone
    read: ReadFile | None = None
    marks: tuple[FileMark, ...] = ()


class FilesDirectory:
    """A directory of conversation files, made if needed, proved to be writable, and locked until it is closed.

    By itself, so that a start can claim it before it loads a model.
    """

    def __init__(self, path: Path) -> None:
        """Raises FilesUnusable."""
        self.path = path
        self._lock = _take(path)

    def close(self) -> None:
        """Leave it to others."""
        self._lock.close()


class ParkedFiles:
    """Conversation files of one engine. The engine's thread calls it; the bytes move in a thread of its own."""

    def __init__(self, directory: FilesDirectory, layout: FileLayout) -> None:
        """Owns the directory from here on. Raises FilesUnusable."""
        self._claim = directory
        self._directory = directory.path
        self._layout = layout
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._paths: dict[str, Path] = {}
        try:
            self.kept = self._scan()
        except OSError as error:
            raise _unusable(self._directory, error) from error
        self._thread = threading.Thread(target=self._work, name="files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let what has begun finish for a moment; what has not is not done."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        self._claim.close()

    def delete(self, file_id: str) -> None:
        """Delete a file, behind all earlier work."""
        self._jobs.put(partial(self._delete, file_id))

    def write(
        self,
        order: WriteFile,
        num_draft_cells: Sequence[int | None],
        memory: Memory,
        ready: Callable[[], None],
    ) -> None:
        """Write `memory`, which must stay as it is once `ready` returned; num_draft_cells: by checkpoint."""
        self._jobs.put(partial(self._write, order, tuple(num_draft_cells), memory, ready))

    def read(self, order: ReadFile, memory: Memory, ready: Callable[[], None]) -> None:
        """Fill `memory`, which nobody may use, once `ready` returned."""
        self._jobs.put(partial(self._read, order, memory, ready))

    def take_finished(self, *, wait: bool) -> tuple[Finished, ...]:
        """What was done since the last call; `wait` a moment when there is nothing."""
        found: list[Finished] = []
        with contextlib.suppress(queue.Empty):
            found.append(
                self._finished.get(timeout=_WAIT_S) if wait else self._finished.get_nowait()
            )
            while True:
                found.append(self._finished.get_nowait())
        return tuple(found)

    def _scan(self) -> tuple[KeptFile, ...]:
        """Index the files that are there, delete what a crash or a broken disk has left."""
        for part in self._regular(PART_SUFFIX):
            part.unlink()
        files = sorted(self._regular(SUFFIX), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return tuple(kept for path in files if (kept := self._index(path)) is not None)

    def _regular(self, suffix: str) -> Iterator[Path]:
        """Files of this name. A folder or a link was not made here: it stays, and the log says it."""
        for path in self._directory.glob(f"*{suffix}"):
            if path.is_file() and not path.is_symlink():
                yield path
            else:
                _LOG.warning("%s is left alone: it is not a regular file", path)

    def _path(self, file_id: str) -> Path:
        return self._directory / f"{self._layout.fingerprint.hex()[:8]}-{file_id}{SUFFIX}"

    def _index(self, path: Path) -> KeptFile | None:
        file_id = path.name.removesuffix(SUFFIX)
        try:
            header = self._header(path)
            own_id = file_id.partition("-")[2]
            if path != self._path(own_id):
                # Under a name of its own, or it would take the id of the file it is a copy of.
                raise ForeignFile("its name is not the one it was written under")
        except ForeignFile as error:
            _LOG.info("%s is not used: %s", path, error)
            checkpoints = ()
        except DamagedFile as error:
            self._discard(path, error)
            return None
        else:
            file_id = own_id
            checkpoints = tuple(mark.key for mark in header.marks)
        self._paths[file_id] = path
        return KeptFile(file_id=file_id, num_bytes=path.stat().st_size, checkpoints=checkpoints)

    def _header(self, path: Path) -> FileHeader:
        """Raises DamagedFile, ForeignFile or OSError."""
        header, layout = read_header(path), self._layout
        if header.fingerprint != layout.fingerprint:
            raise ForeignFile(
                f"of model {header.fingerprint.hex()}, required {layout.fingerprint.hex()}"
            )
        found = (header.block_bytes, header.blocks_per_checkpoint)
        if found != (layout.block_bytes, layout.blocks_per_checkpoint):
            raise DamagedFile(f"blocks of {found}, required those of the same model")
        return header

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _delete(self, file_id: str) -> None:
        path = self._paths.pop(file_id, None)
        if path is not None:
            _unlink(path)

    def _write(
        self,
        order: WriteFile,
        num_draft_cells: tuple[int | None, ...],
        memory: Memory,
        ready: Callable[[], None],
    ) -> None:
        ready()
        layout = self._layout
        keys = zip(order.checkpoints, num_draft_cells, strict=True)
        header = FileHeader(
            fingerprint=layout.fingerprint,
            block_bytes=layout.block_bytes,
            num_pages=len(order.page_ids),
            blocks_per_checkpoint=layout.blocks_per_checkpoint,
            marks=tuple(FileMark(key=key, num_draft_cells=cells) for key, cells in keys),
            checksums=tuple(map(checksum, memory)),
        )
        path = self._path(order.file_id)
        try:
            write_file(path, header, memory)
        except OSError as error:
            _LOG.warning("%s is not written: %s", path, error.strerror or error)
            ok = False
        else:
            self._paths[order.file_id] = path
            ok = True
        self._finished.put(Finished(done=FileDone(file_id=order.file_id, is_write=True, ok=ok)))

    def _read(self, order: ReadFile, memory: Memory, ready: Callable[[], None]) -> None:
        ready()
        marks: tuple[FileMark, ...] = ()
        path = self._paths.get(order.file_id)
        try:
            if path is None:
                raise DamagedFile("the file is not there")
            header = self._header(path)
            marks = header.marks[: len(order.checkpoints)]
            if tuple(mark.key for mark in marks) != order.checkpoints:
                raise DamagedFile("its checkpoints are not those of the index")
            read_blocks(path, header, tuple(zip(_wanted(header, order), memory, strict=True)))
            os.utime(path)
            ok = True
        except (DamagedFile, ForeignFile, OSError) as error:
            self._discard(self._paths.pop(order.file_id, None), error)
            ok = False
        done = FileDone(file_id=order.file_id, is_write=False, ok=ok)
        self._finished.put(Finished(done=done, read=order, marks=marks if ok else ()))

    def _discard(self, path: Path | None, error: Exception) -> None:
        _LOG.warning("%s is refused and deleted: %s", path or "a conversation file", error)
        if path is not None:
            _unlink(path)


def _wanted(header: FileHeader, order: ReadFile) -> list[int]:
    """Indices of the blocks: pages up to the last wanted checkpoint, then the checkpoints."""
    first, count = header.first_block(0), header.blocks_per_checkpoint * len(order.checkpoints)
    return [*range(len(order.page_ids)), *range(first, first + count)]


def _take(directory: Path) -> TextIOWrapper:
    """Make the directory and lock it, proving that it can be written. Raises FilesUnusable."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(directory / "lock", "w", encoding="ascii", opener=open_private)
        with contextlib.suppress(PermissionError):  # another user's; there is nothing in it
            os.fchmod(lock.fileno(), 0o600)  # one that was there keeps the mode that it has
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise FilesUnusable(
            f"--conversation-cache-dir {directory}: another server uses it"
        ) from error
    return lock


def _unusable(directory: Path, error: OSError) -> FilesUnusable:
    return FilesUnusable(f"--conversation-cache-dir {directory}: {error.strerror or error}")


def _unlink(path: Path) -> None:
    """Delete a file that is forgotten already; one that stays takes disk beyond the limit, so the log says it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("%s cannot be deleted and stays: %s", path, error)
