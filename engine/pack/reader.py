"""A pack as a tensor source: every table checked first, then files mapped and read where they are touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import WeightMismatch
from engine.geometry import DRAFT, DRAFT_PREFIX, TRUNK_PREFIX, model_tensors
from engine.pack import draft, experts
from engine.pack.index import INDEX_FILE, PackFile, PackIndex, parse_index
from engine.pack.stored import ExpertPart, GateUpPart, stored_tensor
from engine.sources import ggml_types as types
from engine.sources.ggml_names import Form, NameMap, Place
from engine.sources.ggml_source import GgmlSource
from engine.sources.mapped import BlockTensor, MappedFile, StoredTensor

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.sources.ggml_types import GgmlType
    from engine.sources.gguf_files import GgufFiles

_PARTS = ("gate", "up", "down")
_GATE_UP, _DOWN = "experts.gate_up", "experts.down"
_DRAFT_EXPERTS = f"{DRAFT_PREFIX}layers.0.mlp.experts."


def is_pack(path: Path) -> bool:
    """Whether a directory holds a pack."""
    return (path / INDEX_FILE).is_file()


def open_pack(
    directory: Path, spec: ModelSpec, native: GgufFiles | None = None, *, with_draft: bool = True
) -> GgmlSource:
    """Weights of a pack.

    native: the GGUF file in which the pack has left tensors. with_draft: False leaves `mtp/` alone. A pack without
    that folder has no draft layer.
    Raises WeightMismatch with file, row, found and required.
    """
    index = read_index(directory)
    table = read_experts(directory, spec)
    is_whole = table.is_in_pack and not any(row.is_shape_only for row in index.rows)
    if native is not None and is_whole:
        raise WeightMismatch(
            f"{directory}: found a pack that holds every tensor itself, required no --native beside it"
        )
    tensors: dict[str, StoredTensor] = dict(_dense(directory, index, native))
    trunk = dataclasses.replace(spec, num_draft_layers=0)
    places = NameMap(trunk).places()
    if table.is_in_pack:
        tensors |= _experts(directory, spec, table)
        for row in table.layers:
            if is_fused((row.gate_up, row.down)):
                prefix = f"{TRUNK_PREFIX}layers.{row.layer}.mlp.experts."
                places |= _fused_places(spec, prefix, f"blk.{row.layer}.")
    else:
        tensors |= _native_experts(table, native)
    folder = directory / draft.DRAFT_DIRECTORY
    if with_draft and spec.num_draft_layers and folder.is_dir():
        drafted = _Draft(folder, spec)
        tensors |= drafted.tensors
        places |= drafted.places
    return GgmlSource(places, tensors, where=str(directory))


def open_draft(folder: Path, spec: ModelSpec) -> GgmlSource:
    """The draft layer in files of its own. Raises WeightMismatch with file, row, found and required."""
    drafted = _Draft(folder, spec)
    return GgmlSource(drafted.places, drafted.tensors, where=str(folder))


def read_index(directory: Path) -> PackIndex:
    """The index, checked against itself and the sizes of the files."""
    index = parse_index(_text(directory / INDEX_FILE))
    for file in (PackFile.DENSE, PackFile.EMBEDDING, PackFile.EXTRA):
        required = index.file_bytes(file)
        if required:
            _check_size(directory / file.file_name, required)
    return index


def read_experts(directory: Path, spec: ModelSpec) -> experts.ExpertTable:
    """The expert table, checked against itself, the geometry and the size of experts.bin, if the experts are there."""
    shape = experts.ExpertShape(hidden=spec.hidden, width=spec.moe.expert_dim)
    table = experts.parse_experts(_text(directory / experts.EXPERTS_FILE), shape)
    for what, found, required in (
        ("n_expert", table.num_experts, spec.moe.num_experts),
        ("layers", len(table.layers), spec.num_layers),
    ):
        if found != required:
            raise WeightMismatch(
                f"{experts.EXPERTS_FILE}: found {what} {found}, required {required} by config.json"
            )
    if table.is_in_pack:
        _check_size(directory / PackFile.EXPERTS.file_name, table.total_bytes)
    return table


def read_draft(
    folder: Path,
) -> tuple[tuple[draft.DraftRow, ...], tuple[GgmlType, GgmlType]]:
    """Rows of the draft layer's tensors, and the types of its experts, checked against themselves."""
    rows = draft.parse_dense(_text(folder / draft.DENSE_TABLE))
    last = rows[-1] if rows else None
    _check_size(folder / draft.DENSE_FILE, last.offset + last.num_bytes if last else 0)
    return rows, draft.parse_format(_text(folder / draft.FORMAT_FILE))


def _dense(
    directory: Path, index: PackIndex, native: GgufFiles | None
) -> Iterator[tuple[str, StoredTensor]]:
    files: dict[PackFile, MappedFile] = {}
    for row in index.rows:
        if row.is_shape_only:
            yield row.name, _left_in(native, f"{INDEX_FILE} ({row.name})", row.name, row.shape)
            continue
        if row.file not in files:
            files[row.file] = MappedFile(directory / row.file.file_name)
        yield row.name, stored_tensor(row, files[row.file])


def _experts(
    directory: Path, spec: ModelSpec, table: experts.ExpertTable
) -> dict[str, StoredTensor]:
    file = MappedFile(directory / PackFile.EXPERTS.file_name)
    tensors: dict[str, StoredTensor] = {}
    for row in table.layers:
        block = f"blk.{row.layer}."
        tensors |= _blob_parts(spec, file, block, (row.gate_up, row.down), row.offset)
    return tensors


def _native_experts(
    table: experts.ExpertTable, native: GgufFiles | None
) -> dict[str, StoredTensor]:
    """Experts in the GGUF file, where the table must find them: file, offset and type agree."""
    tensors: dict[str, StoredTensor] = {}
    for row in table.layers:
        where = f"{experts.EXPERTS_FILE}, layer {row.layer} in {row.shard or table.file}"
        for part, kind, offset in row.parts():
            name = f"blk.{row.layer}.ffn_{part}_exps.weight"
            tensor = tensors[name] = _left_in(native, where, name, None)
            found = (kind.name, row.shard or table.file, offset)
            required = (tensor.kind.name, tensor.file.path.name, tensor.offset)
            if found != required:
                raise WeightMismatch(
                    f"{where}: found {part} as {found[0]} in {found[1]} at {found[2]}, "
                    f"required {required[0]} in {required[1]} at {required[2]}"
                )
    return tensors


def _left_in(
    native: GgufFiles | None, where: str, name: str, shape: tuple[int, ...] | None
) -> BlockTensor:
    """A tensor that a pack has left in the model's GGUF file; shape: what the pack says of it, if it says."""
    if native is None:
        raise WeightMismatch(
            f"{where}: found {name} left in a GGUF file, required that file beside the pack: --native FILE"
        )
    tensor = native.tensors.get(name)
    if tensor is None:
        raise WeightMismatch(f"{where}: found no {name} in the GGUF file, required there")
    if shape is not None and tensor.shape != shape:
        raise WeightMismatch(
            f"{where}: found shape {list(shape)}, required {list(tensor.shape)} by the GGUF file"
        )
    return tensor


def _blob_parts(
    spec: ModelSpec, file: MappedFile, block: str, kinds: tuple[GgmlType, GgmlType], offset: int
) -> dict[str, StoredTensor]:
    """Gate, up and down of a layer whose blobs begin at `offset`."""
    gate_up, down = kinds
    count, width, hidden = spec.moe.num_experts, spec.moe.expert_dim, spec.hidden
    shape = experts.ExpertShape(hidden=hidden, width=width)
    part, stride = shape.gate_bytes(gate_up), shape.blob_bytes(gate_up, down)

    def matrix(name: str, kind: GgmlType, at: int, rows: int, columns: int) -> ExpertPart:
        return ExpertPart(
            name=block + name,
            kind=kind,
            shape=(count, rows, columns),
            file=file,
            offset=offset + at,
            stride=stride,
        )

    gate = matrix("ffn_gate_exps.weight", gate_up, 0, width, hidden)
    up = matrix("ffn_up_exps.weight", gate_up, part, width, hidden)
    last = matrix("ffn_down_exps.weight", down, 2 * part, hidden, width)
    if not is_fused(kinds):
        return {one.name: one for one in (gate, up, last)}
    if gate_up is types.I8_ROW:
        return {block + _GATE_UP: GateUpPart(gate=gate, up=up), block + _DOWN: last}
    # Rows of floats: those of up follow those of gate, so both are one matrix where they lie.
    both = matrix(_GATE_UP, gate_up, 0, 2 * width, hidden)
    return {both.name: both, block + _DOWN: last}


def is_fused(kinds: tuple[GgmlType, GgmlType]) -> bool:
    """Whether gate and up of these types, and down, are given as two tensors a layer instead of three an expert.

    Floats and int8 rows, which can be used as they lie: of GGML blocks a whole layer would be dequantised at once.
    """
    is_float = all(kind in (types.F32, types.F16, types.BF16) for kind in kinds)
    return is_float or all(kind is types.I8_ROW for kind in kinds)


def _fused_places(spec: ModelSpec, prefix: str, block: str) -> dict[str, Place]:
    """The checkpoint's two tensors of all experts of a layer."""
    count, width, hidden = spec.moe.num_experts, spec.moe.expert_dim, spec.hidden
    return {
        f"{prefix}gate_up_proj": Place(name=block + _GATE_UP, shape=(count, 2 * width, hidden)),
        f"{prefix}down_proj": Place(name=block + _DOWN, shape=(count, hidden, width)),
    }


class _Draft:
    """Tensors of a draft layer's folder and where checkpoint names find them."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        block = f"{draft.DRAFT_DIRECTORY}/"
        rows, kinds = read_draft(folder)
        dense = MappedFile(folder / draft.DENSE_FILE)
        self.tensors: dict[str, StoredTensor] = {}
        for row in rows:
            is_vector = row.rows == 1 and _is_norm(row.name)
            self.tensors[block + row.name] = BlockTensor(
                name=block + row.name,
                kind=row.kind,
                shape=(row.columns,) if is_vector else (row.rows, row.columns),
                file=dense,
                offset=row.offset,
            )
        shape = experts.ExpertShape(hidden=spec.hidden, width=spec.moe.expert_dim)
        total = spec.moe.num_experts * shape.blob_bytes(*kinds)
        _check_size(folder / draft.EXPERTS_FILE, total)
        file = MappedFile(folder / draft.EXPERTS_FILE)
        self.tensors |= _blob_parts(spec, file, block, kinds, 0)
        self.places = dict(self._places(spec, block))
        if is_fused(kinds):
            self.places |= _fused_places(spec, _DRAFT_EXPERTS, block)
        else:
            self.places |= self._expert_places(spec, block)

    def _places(self, spec: ModelSpec, block: str) -> Iterator[tuple[str, Place]]:
        for fact in model_tensors(spec):
            if fact.part == DRAFT and ".experts." not in fact.name:
                short = draft.short_name(fact.name)
                form = Form.NORM if _is_norm(short) else Form.PLAIN
                yield fact.name, Place(name=block + short, shape=fact.shape, form=form)

    def _expert_places(self, spec: ModelSpec, block: str) -> dict[str, Place]:
        names = {part: f"{block}ffn_{part}_exps.weight" for part in _PARTS}
        return {
            f"{_DRAFT_EXPERTS}{expert}.{part}_proj.weight": Place(
                name=name, shape=self.tensors[name].shape[1:], expert=expert
            )
            for expert in range(spec.moe.num_experts)
            for part, name in names.items()
        }


def _is_norm(name: str) -> bool:
    """By the module that the tensor belongs to; a name without one is nobody's, as comparing names finds."""
    module = name.rpartition(".")[0]
    return "norm" in module.rpartition(".")[2]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise WeightMismatch(f"{file}: cannot be read: {reason}") from error


def _check_size(file: Path, required: int) -> None:
    found = file.stat().st_size if file.is_file() else 0
    if found != required:
        raise WeightMismatch(f"{file}: found {found} bytes, required {required}")
