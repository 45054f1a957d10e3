"""What tells a model from another without reading all of it: parked state is good for the very same model only."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

_SAMPLES = 256
_SAMPLE_BYTES = 4096
FINGERPRINT_BYTES = 16


def model_fingerprint(model: Path, facts: Iterable[object]) -> bytes:
    """Digest of the facts and of every file's name, size and evenly spaced samples; training changes all of them.

    model: a directory or a file.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for fact in facts:
        digest.update(f"{fact!r}\n".encode())
    files = (
        sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else [model]
    )
    for path in files:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        step = max(_SAMPLE_BYTES, num_bytes // _SAMPLES)
        with path.open("rb") as file:
            for start in range(0, num_bytes, step):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
