"""Writes a planned pack: file after file, in order, so that what an interrupted run wrote is kept.

A file under way ends in `.part`. The source's identity and the plan's tables lie beside it in `unfinished.txt`: a later
run goes on only if it has the same. index.txt comes last, so a directory with one holds a whole pack.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import WeightMismatch
from engine.pack.index import INDEX_FILE

if TYPE_CHECKING:
    from engine.pack.plan import FilePlan, PackPlan

UNFINISHED = "unfinished.txt"
_PART = ".part"
Progress = Callable[[str, int, int], None]


def write_pack(plan: PackPlan, directory: Path, progress: Progress) -> int:
    """Write all files; returns the bytes that an earlier, interrupted run had written already.

    progress: called with what is being written, bytes done and bytes in all.
    Raises WeightMismatch if the directory holds a pack, or an unfinished one of another source.
    """
    if (directory / INDEX_FILE).exists():
        raise WeightMismatch(f"{directory}: found a pack, required a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    _claim(plan, directory)
    kept = done = 0
    for file in plan.files:
        start = _written(file, directory)
        kept += start
        _write_file(
            file, directory, start, lambda name, n, at=done: progress(name, at + n, plan.num_bytes)
        )
        done += file.num_bytes
    for name, text in plan.texts.items():
        _write_text(directory / name, text)
    (directory / UNFINISHED).unlink()
    return kept


def _claim(plan: PackPlan, directory: Path) -> None:
    """Note what is being written, or check that it is the same as before."""
    note = directory / UNFINISHED
    text = "".join((plan.origin, *plan.texts.values()))
    if not note.exists():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", _PART))
        if others:
            raise WeightMismatch(
                f"{directory}: found {others[0]}, required a directory without packs"
            )
        _write_text(note, text)
    elif note.read_text(encoding="utf-8") != text:
        raise WeightMismatch(
            f"{directory}: found an unfinished pack of another source or with other options; "
            "required the same, or a new directory"
        )


def _written(file: FilePlan, directory: Path) -> int:
    """Whole pieces that lie in the file already, in bytes."""
    final = directory / file.path
    if final.exists():
        return file.num_bytes
    part = final.with_name(final.name + _PART)
    size = part.stat().st_size if part.exists() else 0
    ends = [piece.offset + piece.num_bytes for piece in file.pieces]
    return max((end for end in ends if end <= size), default=0)


def _write_file(
    file: FilePlan, directory: Path, start: int, progress: Callable[[str, int], None]
) -> None:
    final = directory / file.path
    if final.exists():
        return
    final.parent.mkdir(exist_ok=True)
    part = final.with_name(final.name + _PART)
    part.touch()
    with part.open("r+b") as out:
        out.truncate(start)
        out.seek(start)
        for piece in file.pieces:
            if piece.offset >= start:
                progress(piece.name, piece.offset)
                _pad(out, piece.offset)
                data = piece.make()
                assert data.numel() == piece.num_bytes, piece.name
                out.write(data.contiguous().numpy().data)
        _pad(out, file.num_bytes)
        out.flush()
        os.fsync(out.fileno())
    part.rename(final)


def _pad(out: BinaryIO, offset: int) -> None:
    out.write(bytes(offset - out.tell()))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(path.name + _PART)
    part.write_text(text, encoding="utf-8")
    part.rename(path)
