"""`native_experts.txt` of a pack, version 3: where the routed experts of each layer lie. Pure, no torch, no JSON.

The size of an expert follows from its layer's types and is never the same for all: every row is computed on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import WeightMismatch
from engine.pack.index import PackFile
from engine.sources.ggml_types import GgmlType, ggml_type

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

EXPERTS_FILE = "native_experts.txt"
VERSION = 3
_FIRST_LINE = re.compile(r"# strata native experts v(\d+): .*")
_SIZES = re.compile(r"# \(n_expert (\d+), total (\d+); absolute offsets in ([^ ,)]+).*\)")
_NUMBER = re.compile(r"0|[1-9]\d{0,18}")
_COLUMNS = "layer gu_type d_type offset blob_bytes gate_off up_off down_off [shard]"
_NUM_FIELDS = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """One expert: gate and up [width, hidden], down [hidden, width]."""

    hidden: int
    width: int

    def gate_bytes(self, kind: GgmlType) -> int:
        """Bytes of the gate, or of up."""
        return kind.num_bytes((self.width, self.hidden))

    def down_bytes(self, kind: GgmlType) -> int:
        """Bytes of down."""
        return kind.num_bytes((self.hidden, self.width))

    def blob_bytes(self, gate_up: GgmlType, down: GgmlType) -> int:
        """Bytes of an expert."""
        return 2 * self.gate_bytes(gate_up) + self.down_bytes(down)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Row of a layer. Its blobs, [gate | up | down] each, follow one another in experts.bin from `offset`."""

    layer: int
    gate_up: GgmlType
    down: GgmlType
    offset: int
    blob_bytes: int
    gate_off: int
    up_off: int
    down_off: int
    shard: str | None = None
    """File that the last three offsets are in, where it is not the header's."""

    def parts(self) -> tuple[tuple[str, GgmlType, int], ...]:
        """Name, type and offset of gate, up and down in the file that the header, or `shard`, names."""
        return (
            ("gate", self.gate_up, self.gate_off),
            ("up", self.gate_up, self.up_off),
            ("down", self.down, self.down_off),
        )

    def line(self) -> str:
        """The row as text."""
        numbers = (self.layer, self.gate_up.number, self.down.number, self.offset, self.blob_bytes)
        offsets = (self.gate_off, self.up_off, self.down_off)
        return " ".join(map(str, (*numbers, *offsets, *((self.shard,) if self.shard else ()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTable:
    """All layers."""

    num_experts: int
    total_bytes: int
    file: str
    """File of the absolute offsets: experts.bin, or the model's GGUF file."""
    layers: tuple[ExpertLayer, ...]

    @property
    def is_in_pack(self) -> bool:
        """Whether the experts lie in experts.bin, not in a GGUF file."""
        return self.file == PackFile.EXPERTS.file_name

    def text(self) -> str:
        """The file's text."""
        head = (
            f"# strata native experts v{VERSION}: {_COLUMNS}",
            f"# (n_expert {self.num_experts}, total {self.total_bytes}; absolute offsets in {self.file})",
        )
        return "\n".join((*head, *(layer.line() for layer in self.layers))) + "\n"


def make_table(spec: ModelSpec, kinds: list[tuple[GgmlType, GgmlType]]) -> ExpertTable:
    """The table of a pack that holds its experts itself; kinds: type of gate and up, and of down, by layer."""
    shape = ExpertShape(hidden=spec.hidden, width=spec.moe.expert_dim)
    layers: list[ExpertLayer] = []
    offset = 0
    for number, (gate_up, down) in enumerate(kinds):
        part = shape.gate_bytes(gate_up)
        layers.append(
            ExpertLayer(
                layer=number,
                gate_up=gate_up,
                down=down,
                offset=offset,
                blob_bytes=shape.blob_bytes(gate_up, down),
                gate_off=offset,
                up_off=offset + part,
                down_off=offset + 2 * part,
            )
        )
        offset += spec.moe.num_experts * layers[-1].blob_bytes
    return ExpertTable(
        num_experts=spec.moe.num_experts,
        total_bytes=offset,
        file=PackFile.EXPERTS.file_name,
        layers=tuple(layers),
    )


def parse_experts(text: str, shape: ExpertShape) -> ExpertTable:
    """Read and check a table. Raises WeightMismatch with row, found and required."""
    lines = text.splitlines()
    num_experts, total_bytes, file = _header(lines)
    layers: list[ExpertLayer] = []
    offset = 0
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        where = f"{EXPERTS_FILE}, row {number}"
        layer = _row(where, line)
        _require(where, "layer", layer.layer, len(layers))
        part = shape.gate_bytes(layer.gate_up)
        made = shape.blob_bytes(layer.gate_up, layer.down)
        types = f"types {layer.gate_up.name}/{layer.down.name}"
        _require(where, f"blob_bytes for {types}", layer.blob_bytes, made)
        _require(where, "offset", layer.offset, offset)
        if file == PackFile.EXPERTS.file_name:
            _require(where, "gate_off", layer.gate_off, offset)
            _require(where, "up_off", layer.up_off, offset + part)
            _require(where, "down_off", layer.down_off, offset + 2 * part)
        offset += num_experts * layer.blob_bytes
        layers.append(layer)
    _require(EXPERTS_FILE, "total", total_bytes, offset)
    return ExpertTable(
        num_experts=num_experts, total_bytes=total_bytes, file=file, layers=tuple(layers)
    )


def _header(lines: list[str]) -> tuple[int, int, str]:
    first = _FIRST_LINE.fullmatch(lines[0]) if lines else None
    if first is None:
        found = lines[0][:60] if lines else "nothing"
        raise WeightMismatch(
            f"{EXPERTS_FILE}, row 1: found {found!r}, required '# strata native experts v{VERSION}: ...'"
        )
    _require(f"{EXPERTS_FILE}, row 1", "version", int(first[1]), VERSION)
    sizes = [m for line in lines if (m := _SIZES.fullmatch(line))]
    if len(sizes) != 1:
        raise WeightMismatch(
            f"{EXPERTS_FILE}: found {len(sizes)} lines '# (n_expert N, total T; absolute offsets in FILE)', required 1"
        )
    return int(sizes[0][1]), int(sizes[0][2]), sizes[0][3]


def _row(where: str, line: str) -> ExpertLayer:
    words = line.split(" ")
    if len(words) not in _NUM_FIELDS:
        raise WeightMismatch(
            f"{where}: found {len(words)} fields, required {_NUM_FIELDS[0]} or {_NUM_FIELDS[1]} with single spaces: "
            f"{_COLUMNS}"
        )
    for word in words[:8]:
        if not _NUMBER.fullmatch(word):
            raise WeightMismatch(f"{where}: found {word!r}, required a whole number")
    layer, gate_up, down, offset, blob_bytes, gate_off, up_off, down_off = map(int, words[:8])
    return ExpertLayer(
        layer=layer,
        gate_up=ggml_type(gate_up, f"{where} gu_type"),
        down=ggml_type(down, f"{where} d_type"),
        offset=offset,
        blob_bytes=blob_bytes,
        gate_off=gate_off,
        up_off=up_off,
        down_off=down_off,
        shard=words[8] if len(words) > 8 else None,
    )


def _require(where: str, field: str, found: int, required: int) -> None:
    if found != required:
        raise WeightMismatch(f"{where}: found {field} {found}, required {required}")
