"""What a pack takes on disk against what an engine holds of it, by part: both counted from the tables, none measured.

An engine that computes on codes takes fp32 scales, so fp16 scales are widened; 16-bit floats held in 32 bits shrink
back. Counting a scale as four bytes where it has two makes both sums wrong at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.geometry import DRAFT, EXPERTS, model_tensors
from engine.pack import draft
from engine.pack.index import PLANE_TYPES
from engine.pack.reader import read_draft, read_experts, read_index
from engine.sources.ggml_names import NameMap

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.sources.ggml_types import GgmlType


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One part. Bytes."""

    part: str
    num_tensors: int = 0
    pack: int = 0
    shrunk: int = 0
    """16-bit floats that were held in 32 bits."""
    widened: int = 0
    """fp16 scales that become fp32."""

    @property
    def engine(self) -> int:
        """What the engine holds."""
        return self.pack - self.shrunk + self.widened

    def __add__(self, other: BudgetLine) -> BudgetLine:
        return BudgetLine(
            part=self.part,
            num_tensors=self.num_tensors + other.num_tensors,
            pack=self.pack + other.pack,
            shrunk=self.shrunk + other.shrunk,
            widened=self.widened + other.widened,
        )


def pack_budget(directory: Path, spec: ModelSpec) -> tuple[BudgetLine, ...]:
    """A line for each part, in the order of the parameter table; padding between tensors is not counted."""
    lines: dict[str, BudgetLine] = {}
    for line in (*_dense(directory, spec), *_experts(directory, spec), *_draft(directory, spec)):
        lines[line.part] = lines[line.part] + line if line.part in lines else line
    return tuple(sorted(lines.values(), key=lambda line: -line.pack))


def _dense(directory: Path, spec: ModelSpec) -> Iterator[BudgetLine]:
    part_of = {fact.name: fact.part for fact in model_tensors(spec)}
    parts = {t.name: part_of[t.sources[0]] for t in NameMap(spec).file_tensors()}
    for row in read_index(directory).rows:
        widened = row.widened_bytes
        yield BudgetLine(
            part=parts.get(row.name, "other"),
            num_tensors=1,
            pack=row.src_bytes,
            shrunk=row.src_bytes + widened - row.dst_bytes,
            widened=widened,
        )


def _experts(directory: Path, spec: ModelSpec) -> Iterator[BudgetLine]:
    table = read_experts(directory, spec)
    values = spec.hidden * spec.moe.expert_dim
    for row in table.layers:
        widened = 2 * _widened(row.gate_up, values) + _widened(row.down, values)
        yield BudgetLine(
            part=EXPERTS,
            num_tensors=3,
            pack=table.num_experts * row.blob_bytes,
            widened=table.num_experts * widened,
        )


def _draft(directory: Path, spec: ModelSpec) -> Iterator[BudgetLine]:
    if not spec.num_draft_layers or not (directory / draft.DRAFT_DIRECTORY).is_dir():
        return
    rows, (gate_up, down) = read_draft(directory / draft.DRAFT_DIRECTORY)
    for row in rows:
        widened = _widened(row.kind, row.rows * row.columns)
        yield BudgetLine(part=DRAFT, num_tensors=1, pack=row.num_bytes, widened=widened)
    size = (directory / draft.DRAFT_DIRECTORY / draft.EXPERTS_FILE).stat().st_size
    values = spec.hidden * spec.moe.expert_dim
    widened = 2 * _widened(gate_up, values) + _widened(down, values)
    yield BudgetLine(part=DRAFT, num_tensors=3, pack=size, widened=spec.moe.num_experts * widened)


def _widened(kind: GgmlType, num_values: int) -> int:
    """Bytes that the fp16 scales of a simple block type gain."""
    groups = {k: p.group_elems for p, k in PLANE_TYPES.items()}
    return 2 * (num_values // groups[kind]) if kind in groups else 0


def total(lines: tuple[BudgetLine, ...]) -> BudgetLine:
    """The sum of all parts."""
    summed = lines[0]
    for line in lines[1:]:
        summed = summed + line
    return dataclasses.replace(summed, part="all")
