"""What tells a model from another without reading all of it: parked state is good for the very same model only."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

FINGERPRINT_BYTES = 16
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.\w+")


def model_fingerprint(model: Path, facts: Iterable[object]) -> bytes:
    """Digest of the facts and of every file's name, size and evenly spaced samples; training changes all of them.

    model: a directory, or a file, whose other shards count as well.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for fact in facts:
        digest.update(f"{fact!r}\n".encode())
    for path in sorted(_files(model)):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        step = max(_SAMPLE_BYTES, num_bytes // _SAMPLES)
        with path.open("rb") as file:
            for start in range(0, num_bytes, step):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _files(model: Path) -> list[Path]:
    if model.is_dir():
        return [path for path in model.rglob("*") if path.is_file()]
    shard = _SHARD.fullmatch(model.name)
    return [model] if shard is None else list(model.parent.glob(f"{glob.escape(shard[1])}-*-of-*"))
