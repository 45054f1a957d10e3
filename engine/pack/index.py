"""`index.txt` of a pack, version 3: one flat row a tensor, and every claim of a row checked. Pure, no torch, no JSON.

A wrong byte offset decodes to a plausible weight and to plausible logits, so nothing is taken on trust: a row that
contradicts its type, its neighbours or the file sizes is refused with row, found and required.
Format: docs/pack-format.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from engine.errors import WeightMismatch
from engine.sources import ggml_types as types

INDEX_FILE = "index.txt"
VERSION = 3
ALIGN = 64
FIELDS = (
    *("name", "file", "kind", "src_off", "src_bytes", "dst_off", "dst_bytes", "ne0", "ne1"),
    *("code_bits", "code_bias", "group_elems", "codebook", "has_offset"),
    *("codes_bytes", "scales_bytes", "offset_bytes", "scales_fp16", "act_kind"),
)
_FIRST_LINE = re.compile(r"# strata pack index v(\d+)( .*)?")
_SIZES = re.compile(r"# align (\d+) pool (\d+) tensors (\d+)")
_NUMBER = re.compile(r"0|[1-9]\d{0,18}")
_WIDE_SCALE_BYTES = 4


class PackFile(IntEnum):
    """Which file a tensor's bytes lie in."""

    DENSE = 0
    EMBEDDING = 1
    EXPERTS = 2
    EXTRA = 3

    @property
    def file_name(self) -> str:
        """Name in the pack's directory."""
        return ("dense.bin", "embd.bin", "experts.bin", "extra.bin")[self]


class Kind(IntEnum):
    """How a tensor is stored."""

    PLANES = 0
    """Codes, then scales; without bytes: a shape alone, the tensor lies in the model's GGUF file."""
    BF16_IN_F32 = 1
    F32 = 2
    F16_IN_F32 = 3
    BF16 = 4
    F16 = 5
    BLOCKS = 6
    """GGML blocks as they are; `codebook` holds the type number."""


_FLOATS = {
    Kind.BF16_IN_F32: (4, 2),
    Kind.F32: (4, 4),
    Kind.F16_IN_F32: (4, 2),
    Kind.BF16: (2, 2),
    Kind.F16: (2, 2),
}
"""Bytes of a value in the pack and in the engine."""


@dataclass(frozen=True, slots=True)
class PlaneType:
    """Codes of a number of bits with one scale a group."""

    code_bits: int
    code_bias: int
    group_elems: int
    codebook: int


PLANE_TYPES = {
    PlaneType(8, 0, 32, 0): types.Q8_0,
    PlaneType(4, 8, 32, 0): types.Q4_0,
    PlaneType(5, 16, 32, 0): types.Q5_0,
    PlaneType(4, 0, 32, 1): types.IQ4_NL,
    PlaneType(2, 1, 64, 0): types.Q2_0,
}
"""GGML types whose blocks are one fp16 scale and codes. Anything else in planes is int8 with one scale a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """One tensor. Fields as in FIELDS, in this order."""

    name: str
    file: PackFile
    kind: Kind
    src_off: int
    src_bytes: int
    dst_off: int
    dst_bytes: int
    ne0: int
    ne1: int
    code_bits: int = 0
    code_bias: int = 0
    group_elems: int = 1
    codebook: int = 0
    has_offset: int = 0
    codes_bytes: int = 0
    scales_bytes: int = 0
    offset_bytes: int = 0
    scales_fp16: int = 0
    act_kind: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Last axis fastest."""
        return (self.ne1, self.ne0) if self.ne1 else (self.ne0,)

    @property
    def num_values(self) -> int:
        """Values of the tensor."""
        return self.ne0 * (self.ne1 or 1)

    @property
    def is_shape_only(self) -> bool:
        """Whether the tensor is served from the model's GGUF file."""
        return self.kind is Kind.PLANES and self.src_bytes == 0

    @property
    def plane_type(self) -> PlaneType:
        """What the plane fields say."""
        return PlaneType(self.code_bits, self.code_bias, self.group_elems, self.codebook)

    @property
    def widened_bytes(self) -> int:
        """Bytes that fp16 scales gain when they become fp32."""
        return self.scales_bytes if self.scales_fp16 else 0

    def line(self) -> str:
        """The row as text."""
        return " ".join(str(int(v)) if i else str(v) for i, v in enumerate(self._values()))

    def _values(self) -> tuple[str | int, ...]:
        return tuple(getattr(self, field) for field in FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackIndex:
    """A whole index."""

    align: int
    pool_bytes: int
    """Arena that the engine needs for all tensors."""
    rows: tuple[IndexRow, ...]

    def text(self, comment: str) -> str:
        """The file's text; comment: where the pack comes from, on a line of its own."""
        head = (
            f"# strata pack index v{VERSION}",
            f"# {comment}",
            f"# align {self.align} pool {self.pool_bytes} tensors {len(self.rows)}",
        )
        return "\n".join((*head, *(row.line() for row in self.rows))) + "\n"

    def file_bytes(self, file: PackFile) -> int:
        """Size that a file must have."""
        ends = [r.src_off + r.src_bytes for r in self.rows if r.file is file and r.src_bytes]
        return aligned(max(ends, default=0), self.align)


def aligned(num_bytes: int, align: int) -> int:
    """The next multiple."""
    return -(-num_bytes // align) * align


def parse_index(text: str) -> PackIndex:
    """Read and check an index. Raises WeightMismatch with row, found and required."""
    lines = text.splitlines()
    align, pool_bytes, count = _header(lines)
    rows = tuple(
        _row(number, line)
        for number, line in enumerate(lines, start=1)
        if line and not line.startswith("#")
    )
    if len(rows) != count:
        raise WeightMismatch(f"{INDEX_FILE}: found {len(rows)} rows, required {count}")
    index = PackIndex(align=align, pool_bytes=pool_bytes, rows=rows)
    _check_names(rows)
    for row in rows:
        check_row(row)
    _check_files(index)
    _check_arena(index)
    return index


def _header(lines: list[str]) -> tuple[int, int, int]:
    first = _FIRST_LINE.fullmatch(lines[0]) if lines else None
    if first is None:
        found = lines[0][:60] if lines else "nothing"
        raise WeightMismatch(
            f"{INDEX_FILE}, row 1: found {found!r}, required '# strata pack index v{VERSION}'"
        )
    if int(first[1]) != VERSION:
        raise WeightMismatch(f"{INDEX_FILE}, row 1: found version {first[1]}, required {VERSION}")
    sizes = [m for line in lines if (m := _SIZES.fullmatch(line))]
    if len(sizes) != 1:
        raise WeightMismatch(
            f"{INDEX_FILE}: found {len(sizes)} lines '# align A pool P tensors N', required 1"
        )
    align, pool_bytes, count = (int(group) for group in sizes[0].groups())
    if align < 1:
        raise WeightMismatch(f"{INDEX_FILE}: found align {align}, required at least 1")
    return align, pool_bytes, count


def _row(number: int, line: str) -> IndexRow:
    where = f"{INDEX_FILE}, row {number}"
    words = line.split(" ")
    if len(words) != len(FIELDS):
        raise WeightMismatch(
            f"{where}: found {len(words)} fields, required {len(FIELDS)} with single spaces and none in the name"
        )
    name, *numbers = words
    for field, word in zip(FIELDS[1:], numbers, strict=True):
        if not _NUMBER.fullmatch(word):
            raise WeightMismatch(
                f"{where} ({name}): found {field} {word!r}, required a whole number"
            )
    values = dict(zip(FIELDS[1:], map(int, numbers), strict=True))
    for field, enum in (("file", PackFile), ("kind", Kind)):
        if values[field] > max(enum):
            raise WeightMismatch(
                f"{where} ({name}): found {field} {values[field]}, required 0 to {int(max(enum))}"
            )
    file, kind = PackFile(values.pop("file")), Kind(values.pop("kind"))
    return IndexRow(name=name, file=file, kind=kind, **values)


def check_row(row: IndexRow) -> None:
    """Sizes must be those that kind and shape make."""
    _require(row, "ne0", row.ne0, max(row.ne0, 1))
    if row.is_shape_only:
        for field in ("dst_bytes", "codes_bytes", "scales_bytes", "offset_bytes"):
            _require(row, field, getattr(row, field), 0)
        return
    if row.kind in _FLOATS:
        source, target = _FLOATS[row.kind]
        _require(row, "src_bytes", row.src_bytes, row.num_values * source)
        _require(row, "dst_bytes", row.dst_bytes, row.num_values * target)
        return
    if row.kind is Kind.BLOCKS:
        kind = types.ggml_type(row.codebook, f"{INDEX_FILE} ({row.name}) codebook")
        _require(row, "src_bytes", row.src_bytes, kind.num_bytes(row.shape))
        _require(row, "dst_bytes", row.dst_bytes, row.src_bytes)
        return
    _check_planes(row)


def _check_planes(row: IndexRow) -> None:
    if row.plane_type not in PLANE_TYPES and row.plane_type != PlaneType(8, 0, row.ne0, 0):
        raise WeightMismatch(
            f"{INDEX_FILE} ({row.name}): found code_bits {row.code_bits}, code_bias {row.code_bias}, "
            f"group_elems {row.group_elems}, codebook {row.codebook}, required those of int8 rows or of "
            f"{', '.join(t.name for t in PLANE_TYPES.values())}"
        )
    _require(row, "scales_fp16", row.scales_fp16, min(row.scales_fp16, 1))
    _require(row, "has_offset", row.has_offset, 0)
    _require(row, "offset_bytes", row.offset_bytes, 0)
    _require(row, "ne0 % group_elems", row.ne0 % row.group_elems, 0)
    num_scales = row.num_values // row.group_elems
    _require(row, "codes_bytes", row.codes_bytes, row.num_values * row.code_bits // 8)
    scale_bytes = 2 if row.scales_fp16 else _WIDE_SCALE_BYTES
    _require(row, "scales_bytes", row.scales_bytes, num_scales * scale_bytes)
    _require(row, "src_bytes", row.src_bytes, row.codes_bytes + row.scales_bytes)
    _require(row, "dst_bytes", row.dst_bytes, row.codes_bytes + num_scales * _WIDE_SCALE_BYTES)


def _require(row: IndexRow, field: str, found: int, required: int) -> None:
    if found != required:
        raise WeightMismatch(
            f"{INDEX_FILE} ({row.name}): found {field} {found}, required {required} for kind {int(row.kind)} "
            f"and shape {list(row.shape)}"
        )


def _check_names(rows: tuple[IndexRow, ...]) -> None:
    seen: set[str] = set()
    for row in rows:
        if not row.name or row.name in seen:
            raise WeightMismatch(f"{INDEX_FILE} ({row.name}): found the name twice, required once")
        seen.add(row.name)


def _check_files(index: PackIndex) -> None:
    """The tensors of a file follow one another, each at the next aligned offset."""
    for file in PackFile:
        stored = [row for row in index.rows if row.file is file and row.src_bytes]
        at = 0
        for row in sorted(stored, key=lambda r: r.src_off):
            _check_next(row, "src_off", row.src_off, at, file.file_name)
            at = aligned(row.src_off + row.src_bytes, index.align)


def _check_arena(index: PackIndex) -> None:
    at = 0
    for row in (r for r in index.rows if r.dst_bytes):
        _check_next(row, "dst_off", row.dst_off, at, "the arena")
        at = aligned(row.dst_off + row.dst_bytes, index.align)
    if at != index.pool_bytes:
        raise WeightMismatch(
            f"{INDEX_FILE}: found pool {index.pool_bytes}, required {at} for an arena of all rows"
        )


def _check_next(row: IndexRow, field: str, found: int, required: int, where: str) -> None:
    if found != required:
        what = "an overlap" if found < required else "a gap"
        raise WeightMismatch(
            f"{INDEX_FILE} ({row.name}): found {field} {found}, {what} in {where}, required {required}"
        )
