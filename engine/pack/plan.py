"""What a pack of a model will hold, byte for byte, before anything is written.

Tensors go to their files in a fixed order, so a plan made again from the same source is the same plan: that is what
lets an unfinished pack be continued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.geometry import DRAFT, DRAFT_PREFIX, model_tensors
from engine.pack import draft
from engine.pack.experts import ExpertShape, ExpertTable, make_table
from engine.pack.index import ALIGN, PLANE_TYPES, IndexRow, Kind, PackFile, PackIndex, aligned
from engine.sources import ggml_types as types
from engine.sources.ggml_export import Encoded, GgmlExport, code_bytes, value_bytes
from engine.sources.ggml_names import EMBEDDING_NAME, TABLE_NAME, is_expert_stack
from engine.sources.ggml_source import GgmlSource

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.sources.base import TensorSource
    from engine.sources.mapped import BlockTensor

_CHUNK_BYTES = 32 << 20
_FLOAT_KINDS = {types.F32: Kind.F32, types.BF16: Kind.BF16, types.F16: Kind.F16}
_PROMOTED = {types.BF16: Kind.BF16_IN_F32, types.F16: Kind.F16_IN_F32}
_PLANES = {kind: planes for planes, kind in PLANE_TYPES.items()}
_KINDS = {"F32": types.F32, "BF16": types.BF16, "F16": types.F16}
_PARTS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes to be written in one go at a place in a file."""

    name: str
    offset: int
    num_bytes: int
    make: Callable[[], Tensor]
    """uint8 in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """A file and its pieces in order; bytes between them are zero."""

    path: Path
    """Within the pack."""
    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """A whole pack."""

    files: tuple[FilePlan, ...]
    texts: dict[str, str]
    """Tables by file name, index.txt last."""
    origin: str
    """What identifies the source: another one is not continued."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all binary files."""
        return sum(file.num_bytes for file in self.files)


def plan_pack(
    source: TensorSource, spec: ModelSpec, *, comment: str, origin: str, promote: bool = False
) -> PackPlan:
    """Lay a model out.

    comment: goes into the index. origin: see PackPlan. promote: hold 16-bit floats in 32 bits, as canonical packs of
    the reference engine do.
    Raises WeightMismatch if the source lacks a tensor or has one too many.
    """
    trunk = list(_trunk_tensors(source, spec))
    stacks = {t.name: t for t in trunk if is_expert_stack(t.name)}
    rows, files = _index(tuple(t for t in trunk if t.name not in stacks), promote=promote)
    table, expert_file = _experts(spec, stacks)
    texts = {"native_experts.txt": table.text()}
    files = [*files, expert_file]
    if spec.num_draft_layers:
        draft_files, draft_texts = _draft(source, spec)
        files += draft_files
        texts |= draft_texts
    pool = sum(aligned(row.dst_bytes, ALIGN) for row in rows)
    index = PackIndex(align=ALIGN, pool_bytes=pool, rows=tuple(rows))
    texts["index.txt"] = index.text(comment)
    return PackPlan(files=tuple(files), texts=texts, origin=origin)


def _trunk_tensors(source: TensorSource, spec: ModelSpec) -> Iterator[Encoded]:
    """The trunk in a file's names: GGUF blocks as they are, anything else through the export."""
    trunk = dataclasses.replace(spec, num_draft_layers=0)
    if isinstance(source, GgmlSource):
        draft_block = f"blk.{spec.num_layers}."
        for tensor in source.block_tensors():
            if not (spec.num_draft_layers and tensor.name.startswith(draft_block)):
                yield _as_stored(tensor)
        return
    yield from GgmlExport(source, trunk, ignore=(DRAFT_PREFIX,)).tensors(for_gguf=False)


def _as_stored(tensor: BlockTensor) -> Encoded:
    step = tensor.kind.num_bytes((1, *tensor.shape[1:]))

    def data(start: int, stop: int) -> Tensor:
        return tensor.raw()[start * step : stop * step]

    return Encoded(name=tensor.name, kind=tensor.kind, shape=tensor.shape, data=data)


# index.txt and its files


def _index(tensors: tuple[Encoded, ...], *, promote: bool) -> tuple[list[IndexRow], list[FilePlan]]:
    rows: list[IndexRow] = []
    ends = dict.fromkeys(PackFile, 0)
    pieces: dict[PackFile, list[Piece]] = {file: [] for file in PackFile}
    arena = 0
    for tensor in tensors:
        row = _row(tensor, promote=promote)
        row = dataclasses.replace(row, src_off=ends[row.file], dst_off=arena)
        ends[row.file] = aligned(row.src_off + row.src_bytes, ALIGN)
        arena = aligned(arena + row.dst_bytes, ALIGN)
        pieces[row.file] += _pieces(tensor, row)
        rows.append(row)
    files = [
        FilePlan(path=Path(file.file_name), num_bytes=ends[file], pieces=tuple(pieces[file]))
        for file in PackFile
        if pieces[file]
    ]
    return rows, files


def _row(tensor: Encoded, *, promote: bool) -> IndexRow:
    """The row of a tensor, offsets still open."""
    if len(tensor.shape) > 2:
        raise WeightMismatch(
            f"{tensor.name}: found shape {list(tensor.shape)}, required one or two axes in a pack"
        )
    file = PackFile.DENSE
    if tensor.name == EMBEDDING_NAME:
        file = PackFile.EMBEDDING
    elif tensor.name == TABLE_NAME:
        file = PackFile.EXTRA
    ne1, ne0 = (0, *tensor.shape)[-2:]
    base = IndexRow(
        name=tensor.name, file=file, kind=Kind.F32, src_off=0, dst_off=0,
        src_bytes=tensor.num_bytes, dst_bytes=tensor.num_bytes, ne0=ne0, ne1=ne1,
    )  # fmt: skip
    if tensor.kind in _FLOAT_KINDS:
        # A table of rows that are gathered stays as it is: nothing is gained by holding it wider.
        if promote and tensor.kind in _PROMOTED and file is not PackFile.EXTRA:
            return dataclasses.replace(
                base, kind=_PROMOTED[tensor.kind], src_bytes=2 * tensor.num_bytes
            )
        return dataclasses.replace(base, kind=_FLOAT_KINDS[tensor.kind])
    values = base.num_values
    if tensor.kind is types.I8_ROW:
        return dataclasses.replace(
            base,
            kind=Kind.PLANES,
            code_bits=8,
            group_elems=base.ne0,
            codes_bytes=values,
            scales_bytes=tensor.num_bytes - values,
        )
    planes = _PLANES.get(tensor.kind)
    if planes is None or file is PackFile.EXTRA:
        return dataclasses.replace(base, kind=Kind.BLOCKS, codebook=tensor.kind.number)
    scales = values // planes.group_elems
    return dataclasses.replace(
        base,
        kind=Kind.PLANES,
        dst_bytes=tensor.num_bytes + 2 * scales,
        code_bits=planes.code_bits,
        code_bias=planes.code_bias,
        group_elems=planes.group_elems,
        codebook=planes.codebook,
        codes_bytes=tensor.num_bytes - 2 * scales,
        scales_bytes=2 * scales,
        scales_fp16=1,
    )


def _pieces(tensor: Encoded, row: IndexRow) -> Iterator[Piece]:
    if row.kind is Kind.PLANES:

        def planes() -> Tensor:
            data = tensor.data(0, tensor.shape[0])
            return data if tensor.kind is types.I8_ROW else _split_planes(tensor, data)

        yield Piece(name=row.name, offset=row.src_off, num_bytes=row.src_bytes, make=planes)
        return
    step = row.src_bytes // tensor.shape[0]
    rows_each = max(1, _CHUNK_BYTES // step)
    for start in range(0, tensor.shape[0], rows_each):
        stop = min(start + rows_each, tensor.shape[0])
        yield Piece(
            name=row.name,
            offset=row.src_off + start * step,
            num_bytes=(stop - start) * step,
            make=_part(tensor, row.kind, start, stop),
        )


def _part(tensor: Encoded, kind: Kind, start: int, stop: int) -> Callable[[], Tensor]:
    def make() -> Tensor:
        data = tensor.data(start, stop)
        if kind is Kind.BF16_IN_F32:
            return value_bytes(data.clone().view(torch.bfloat16), types.F32)
        if kind is Kind.F16_IN_F32:
            return value_bytes(data.clone().view(torch.float16), types.F32)
        return data

    return make


def _split_planes(tensor: Encoded, data: Tensor) -> Tensor:
    """Blocks of one fp16 scale and codes: all codes, then all scales."""
    blocks = data.view(-1, tensor.kind.block_bytes)
    return torch.cat((blocks[:, 2:].reshape(-1), blocks[:, :2].reshape(-1)))


# Experts


def _experts(spec: ModelSpec, stacks: dict[str, Encoded]) -> tuple[ExpertTable, FilePlan]:
    layers = [
        [_stack(stacks, f"blk.{layer}.ffn_{part}_exps.weight") for part in _PARTS]
        for layer in range(spec.num_layers)
    ]
    for gate, up, _ in layers:
        if gate.kind is not up.kind:
            raise WeightMismatch(
                f"{up.name}: found {up.kind.name}, required {gate.kind.name} as {gate.name}"
            )
    table = make_table(spec, [(gate.kind, down.kind) for gate, _, down in layers])
    pieces = [
        Piece(
            name=f"experts of layer {row.layer}",
            offset=row.offset + expert * row.blob_bytes,
            num_bytes=row.blob_bytes,
            make=_blob(parts, expert),
        )
        for row, parts in zip(table.layers, layers, strict=True)
        for expert in range(table.num_experts)
    ]
    path = Path(PackFile.EXPERTS.file_name)
    return table, FilePlan(path=path, num_bytes=table.total_bytes, pieces=tuple(pieces))


def _stack(stacks: dict[str, Encoded], name: str) -> Encoded:
    if name not in stacks:
        raise WeightMismatch(f"{name}: found no such tensor, required by the model's config")
    return stacks[name]


def _blob(parts: list[Encoded], expert: int) -> Callable[[], Tensor]:
    return lambda: torch.cat([part.data(expert, expert + 1) for part in parts])


# The draft layer


def _draft(source: TensorSource, spec: ModelSpec) -> tuple[list[FilePlan], dict[str, str]]:
    rows: list[draft.DraftRow] = []
    pieces: list[Piece] = []
    at = 0
    for fact in model_tensors(spec):
        if fact.part != DRAFT or ".experts." in fact.name:
            continue
        kind, make = _draft_tensor(source, fact.name)
        name = draft.short_name(fact.name)
        count, columns = (1, *fact.shape)[-2:]
        row = draft.DraftRow(name=name, kind=kind, rows=count, columns=columns, offset=at)
        pieces.append(Piece(name=fact.name, offset=at, num_bytes=row.num_bytes, make=make))
        at = aligned(at + row.num_bytes, draft.DENSE_ALIGN)
        rows.append(row)
    folder = Path(draft.DRAFT_DIRECTORY)
    # The last row is not padded.
    end = pieces[-1].offset + pieces[-1].num_bytes
    dense = FilePlan(path=folder / draft.DENSE_FILE, num_bytes=end, pieces=tuple(pieces))
    kinds, experts = _draft_experts(source, spec, folder / draft.EXPERTS_FILE)
    texts = {
        f"{folder}/{draft.DENSE_TABLE}": "".join(row.line() + "\n" for row in rows),
        f"{folder}/{draft.FORMAT_FILE}": draft.format_line(*kinds),
    }
    return [dense, experts], texts


def _draft_tensor(source: TensorSource, name: str) -> tuple[types.GgmlType, Callable[[], Tensor]]:
    """Type and bytes of a tensor: as stored where it can be, norms in fp32 with 1 added."""
    if "norm" in name.rsplit(".", 2)[-2]:
        return types.F32, lambda: value_bytes(source.get(name).to(torch.float32) + 1.0, types.F32)
    return _stored_bytes(source, name)


def _stored_bytes(source: TensorSource, name: str) -> tuple[types.GgmlType, Callable[[], Tensor]]:
    raw = source.raw(name) if isinstance(source, GgmlSource) else None
    if raw is not None:
        kind, make = raw
        return kind, make
    if source.stored(name).type_name == "I8":

        def codes() -> Tensor:
            held = source.codes(name)
            assert held is not None
            return code_bytes((held.codes, held.scales))

        return types.I8_ROW, codes
    kind = _KINDS.get(source.stored(name).type_name, types.F32)
    return kind, lambda: value_bytes(source.get(name), kind)


def _draft_experts(
    source: TensorSource, spec: ModelSpec, path: Path
) -> tuple[tuple[types.GgmlType, types.GgmlType], FilePlan]:
    experts = [_draft_expert(source, spec, e) for e in range(spec.moe.num_experts)]
    kinds = [kind for kind, _ in experts[0]]
    if kinds[0] is not kinds[1] or any([k for k, _ in parts] != kinds for parts in experts):
        raise WeightMismatch("mtp.layers.0.mlp.experts: found several types, required one")
    shape = ExpertShape(hidden=spec.hidden, width=spec.moe.expert_dim)
    blob = shape.blob_bytes(kinds[0], kinds[2])
    pieces = [
        Piece(
            name="experts of the draft layer",
            offset=number * blob,
            num_bytes=blob,
            make=_joined([make for _, make in parts]),
        )
        for number, parts in enumerate(experts)
    ]
    num_bytes = len(experts) * blob
    return (kinds[0], kinds[2]), FilePlan(path=path, num_bytes=num_bytes, pieces=tuple(pieces))


def _joined(makes: list[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    return lambda: torch.cat([make() for make in makes])


def _draft_expert(
    source: TensorSource, spec: ModelSpec, expert: int
) -> list[tuple[types.GgmlType, Callable[[], Tensor]]]:
    """Gate, up and down, out of the fused tensors or of the expert's own."""
    prefix = f"{DRAFT_PREFIX}layers.0.mlp.experts."
    fused = f"{prefix}gate_up_proj"
    if fused not in source.names():
        names = [f"{prefix}{expert}.{part}_proj.weight" for part in _PARTS]
        return [_stored_bytes(source, name) for name in names]
    width = spec.moe.expert_dim
    return [
        _fused_part(source, fused, expert, slice(0, width)),
        _fused_part(source, fused, expert, slice(width, 2 * width)),
        _fused_part(source, f"{prefix}down_proj", expert, slice(None)),
    ]


def _fused_part(
    source: TensorSource, name: str, expert: int, rows: slice
) -> tuple[types.GgmlType, Callable[[], Tensor]]:
    if source.stored(name).type_name == "I8":

        def codes() -> Tensor:
            held = source.codes(name)
            assert held is not None
            return code_bytes((held.codes[expert, rows], held.scales[expert, rows]))

        return types.I8_ROW, codes
    kind = _KINDS.get(source.stored(name).type_name, types.F32)
    return kind, lambda: value_bytes(source.rows(name, expert, expert + 1)[0, rows], kind)
