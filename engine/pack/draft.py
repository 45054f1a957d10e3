"""`mtp/` of a pack: the draft layer in files of its own. Pure, no torch, no JSON.

`dense.txt` holds a row `name kind rows cols offset bytes` for each tensor of `dense.bin`, 256-byte aligned, names as in
the checkpoint without `mtp.` and `layers.0.`; `experts.fmt` names the type of the blobs [gate | up | down] in
`experts.bin`. Norms have 1 added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import WeightMismatch
from engine.geometry import DRAFT_PREFIX
from engine.pack.index import aligned
from engine.sources.ggml_types import TYPES, GgmlType, ggml_type

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAFT_DIRECTORY = "mtp"
DENSE_TABLE = "dense.txt"
DENSE_FILE = "dense.bin"
FORMAT_FILE = "experts.fmt"
EXPERTS_FILE = "experts.bin"
DENSE_ALIGN = 256
_NUMBER = re.compile(r"0|[1-9]\d{0,18}")
_COLUMNS = "name kind rows cols offset bytes"
_LAYER = "layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """A tensor of `dense.bin`. A vector is one row."""

    name: str
    kind: GgmlType
    rows: int
    columns: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes that kind and shape make."""
        return self.kind.num_bytes((self.rows, self.columns))

    def line(self) -> str:
        """The row as text."""
        numbers = (self.rows, self.columns, self.offset, self.num_bytes)
        return " ".join((self.name, self.kind.name.lower(), *map(str, numbers)))


def short_name(name: str) -> str:
    """Name in `dense.txt` of a checkpoint tensor."""
    return name.removeprefix(DRAFT_PREFIX).removeprefix(_LAYER)


def format_line(gate_up: GgmlType, down: GgmlType) -> str:
    """Text of `experts.fmt`."""
    return f"{gate_up.name.lower()} {gate_up.number} {down.number}\n"


def parse_format(text: str) -> tuple[GgmlType, GgmlType]:
    """Types of gate and up, and of down. Raises WeightMismatch."""
    words = text.split()
    where = f"{DRAFT_DIRECTORY}/{FORMAT_FILE}"
    if len(words) != 3 or not all(_NUMBER.fullmatch(word) for word in words[1:]):
        raise WeightMismatch(f"{where}: found {text[:60]!r}, required 'name gu_type d_type'")
    gate_up, down = (ggml_type(int(word), where) for word in words[1:])
    if words[0] != gate_up.name.lower():
        raise WeightMismatch(
            f"{where}: found {words[0]!r}, required {gate_up.name.lower()!r} for type {gate_up.number}"
        )
    return gate_up, down


def parse_dense(text: str) -> tuple[DraftRow, ...]:
    """Rows of `dense.txt`. Raises WeightMismatch with row, found and required."""
    kinds = {kind.name.lower(): kind for kind in TYPES.values()}
    rows: list[DraftRow] = []
    at = 0
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{DRAFT_DIRECTORY}/{DENSE_TABLE}, row {number}"
        words = line.split(" ")
        if len(words) != len(_COLUMNS.split()):
            raise WeightMismatch(
                f"{where}: found {len(words)} fields, required 6 with single spaces: {_COLUMNS}"
            )
        name, kind, *numbers = words
        wrong = [word for word in numbers if not _NUMBER.fullmatch(word)]
        if wrong:
            raise WeightMismatch(f"{where} ({name}): found {wrong[0]!r}, required a whole number")
        if kind not in kinds:
            raise WeightMismatch(
                f"{where} ({name}): found {kind!r}, required one of {', '.join(kinds)}"
            )
        num_rows, columns, offset, num_bytes = map(int, numbers)
        row = DraftRow(name=name, kind=kinds[kind], rows=num_rows, columns=columns, offset=offset)
        for field, found, required in (("offset", offset, at), ("bytes", num_bytes, row.num_bytes)):
            if found != required:
                raise WeightMismatch(
                    f"{where} ({name}): found {field} {found}, required {required}"
                )
        at = aligned(offset + num_bytes, DENSE_ALIGN)
        rows.append(row)
    _check_names(rows)
    return tuple(rows)


def _check_names(rows: Sequence[DraftRow]) -> None:
    names = [row.name for row in rows]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise WeightMismatch(
            f"{DRAFT_DIRECTORY}/{DENSE_TABLE} ({twice}): found twice, required once"
        )
