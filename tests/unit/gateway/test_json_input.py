"""Counting what stands outside strings, wherever the pieces of a text are cut."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import json_input
from gateway.json_input import CrowdedJson, load_json

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

CROWDED = (
    b'\\"[{:,', b"\\\\", b'"', b"plain", "\u00e9\U0001f600".encode()
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(CROWDED)).map(lambda parts: b"".join(parts).decode()) | st.text()
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def parts_of(value: object) -> Iterator[object]:
    yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from parts_of(item)


def counts_of(value: object) -> tuple[int, int, int]:
    """Containers, names, commas."""
    containers = [part for part in parts_of(value) if isinstance(part, list | dict)]
    names = sum(len(part) for part in containers if isinstance(part, dict))
    return len(containers), names, sum(max(0, len(part) - 1) for part in containers)


@contextmanager
def limited(**limits: int) -> Generator[None]:
    with ExitStack() as stack:
        for name, limit in limits.items():
            stack.enter_context(mock.patch.object(json_input, name, limit))
        yield


@settings(deadline=None)
@given(value=VALUES, piece_bytes=st.integers(1, 9), as_text=st.booleans(), spaced=st.booleans())
def test_as_much_is_counted_as_there_is(
    value: object, piece_bytes: int, as_text: bool, spaced: bool
) -> None:
    written = json.dumps(value, indent=1 if spaced else None, ensure_ascii=not spaced)
    text = written if as_text else written.encode(errors="replace")
    limits = counts_of(value)
    names = ("MAX_CONTAINERS", "MAX_NAMES", "MAX_ITEMS")
    allowed = dict(zip(names, limits, strict=True))
    bounds = {"SHORT_BYTES": 0, "_PIECE_BYTES": piece_bytes}
    with limited(**bounds, **allowed):
        load_json(text)
    for name, limit in allowed.items():
        lower = {**allowed, name: limit - 1}
        with limited(**bounds, **lower), pytest.raises(CrowdedJson):
            load_json(text)


def test_a_crowded_text_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> object:
        raise AssertionError("read")

    monkeypatch.setattr(orjson, "loads", read)
    for text, what in (
        (b"[" + b"[]," * 2**20 + b"0]", "65536 arrays and objects"),
        (b"[" + b'{"a":0,"b":1,"c":2},' * 50_000 + b"0]", "131072 fields"),
        (b"[" + b"0," * 2**21 + b"0]", "1114112 values"),
    ):
        with pytest.raises(CrowdedJson, match=f"more than {what}"):
            load_json(text)


def test_a_long_text_of_one_string_is_none() -> None:
    text = "[]{}:," * 1_000_000
    assert load_json(json.dumps({"text": text})) == {"text": text}
