"""JSON that a client sent, bounded before it is read.

A reader of JSON lets nobody else run until it is through, and sixteen megabytes can be six million arrays. So what is
long is counted first, a piece at a time, and meant to be read in a thread.
"""

from __future__ import annotations

import orjson

MAX_CONTAINERS = 2**16
"""Arrays and objects of one text."""
MAX_NAMES = 2**17
"""Names of fields."""
MAX_ITEMS = 2**20 + 2**16
"""What commas part: the ids of the longest prompt, and room beside them."""
SHORT_BYTES = 2**15
"""Has fewer of anything than takes long, and is read where it is."""
_PIECE_BYTES = 2**16


class CrowdedJson(ValueError):
    """More values than are read."""


def load_json(text: bytes | str) -> object:
    """The value of a text. Raises orjson.JSONDecodeError, or CrowdedJson before anything of it is read."""
    if len(text) > SHORT_BYTES:
        _check_crowd(text.encode(errors="replace") if isinstance(text, str) else text)
    return orjson.loads(text)


def _check_crowd(data: bytes) -> None:
    """Count what stands outside strings. Of a text that is no JSON the count means nothing, and is not needed."""
    counts = {b"[": 0, b"{": 0, b":": 0, b",": 0}
    in_string, begun = 0, b""
    for start in range(0, len(data), _PIECE_BYTES):
        piece = begun + data[start : start + _PIECE_BYTES]
        # An escape is not torn from its backslash.
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        begun = b"\\" * (num_backslashes % 2)
        piece = piece.removesuffix(begun)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) % 2
        for mark in counts:
            counts[mark] += outside.count(mark)
        _refuse_above(counts[b"["] + counts[b"{"], MAX_CONTAINERS, "arrays and objects")
        _refuse_above(counts[b":"], MAX_NAMES, "fields")
        _refuse_above(counts[b","], MAX_ITEMS, "values")


def _refuse_above(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise CrowdedJson(f"more than {limit} {what}, the limit of this server")
