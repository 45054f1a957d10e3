"""A checkpoint as the tensors of a GGUF file: the way back from ggml_source, value for value.

A float type stays what it is and int8 rows stay codes where the target can hold them; anything else becomes fp32.
Nothing is rounded, except for a GGUF file that asks for Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.geometry import TRUNK_PREFIX
from engine.sources import ggml_types as types
from engine.sources.ggml_names import FileTensor, Form, NameMap

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.sources.base import RowCodes, TensorSource

_KINDS = {"F32": types.F32, "F16": types.F16, "BF16": types.BF16, "I8": types.I8_ROW}
_TORCH_KINDS = {torch.float32: types.F32, torch.float16: types.F16, torch.bfloat16: types.BF16}
_IGNORED = ("model.visual.",)
_HASH_CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_TABLE = ".ngram_embedding.weight"
_STACKS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A tensor ready to be written."""

    name: str
    kind: types.GgmlType
    shape: tuple[int, ...]
    data: Callable[[int, int], Tensor]
    """Bytes, uint8 in one piece, of rows [start, stop) of the first axis, as a tensor of their own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.kind.num_bytes(self.shape)


class GgmlExport:
    """All tensors of a source, in a file's names. Raises WeightMismatch if it lacks one or has one too many."""

    def __init__(
        self, source: TensorSource, spec: ModelSpec, *, ignore: tuple[str, ...] = ()
    ) -> None:
        """ignore: beginnings of names that are left alone."""
        self._source = source
        self._ignored = (*_IGNORED, *ignore)
        self._names = frozenset(source.names())
        prefix = f"{TRUNK_PREFIX}language_model."
        self._trunk = prefix if any(n.startswith(prefix) for n in self._names) else TRUNK_PREFIX
        self._tensors = tuple(NameMap(spec).file_tensors())
        self._check_names()

    def tensors(self, *, for_gguf: bool, q8: bool = False) -> Iterator[Encoded]:
        """Every tensor of the file.

        for_gguf: int8 rows, which GGUF lacks, and vectors and convolutions, which its readers want so, become fp32.
        q8, for GGUF: int8 rows become Q8_0 with the codes they have, each block under the row's scale in fp16; or fp16,
        where a row is no whole number of blocks.
        """
        for tensor in self._tensors:
            kind = self._kind(tensor)
            if for_gguf and (kind is types.I8_ROW or _is_small(tensor)):
                kind = _q8_kind(tensor) if q8 and not _is_small(tensor) else types.F32
            yield self._encoded(tensor, kind)

    def _encoded(self, tensor: FileTensor, kind: types.GgmlType) -> Encoded:
        def data(start: int, stop: int) -> Tensor:
            if kind is types.I8_ROW:
                return code_bytes(self._codes(tensor, start, stop))
            if kind is types.Q8_0:
                return q8_bytes(self._codes(tensor, start, stop))
            return value_bytes(self._values(tensor, start, stop), kind)

        return Encoded(name=tensor.name, kind=kind, shape=tensor.shape, data=data)

    def _kind(self, tensor: FileTensor) -> types.GgmlType:
        """The type that holds every value exactly."""
        parts = [part for name in tensor.sources for part in self._stored_names(name)]
        kinds = {_KINDS.get(self._source.stored(part).type_name, types.F32) for part in parts}
        kind = kinds.pop()
        if kinds or tensor.form is not Form.PLAIN:
            return types.F32
        # Two halves side by side have two scales a row.
        return types.F32 if kind is types.I8_ROW and len(tensor.sources) > 1 else kind

    def _values(self, tensor: FileTensor, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as the file holds them."""
        name = tensor.sources[0]
        if name.endswith(_STACKS):
            return torch.stack([self._expert(name, tensor.rows, e) for e in range(start, stop)])
        if _is_row_for_row(tensor):
            return self._rows(name, start, stop)
        values = self._source.get(self._stored(name))
        if len(tensor.sources) > 1:
            values = torch.cat([self._source.get(self._stored(n)) for n in tensor.sources], dim=1)
        if tensor.rows is not None:
            values = values[slice(*tensor.rows)]
        values = values.reshape(tensor.shape)
        if tensor.heads is not None:
            values = values.index_select(tensor.heads.axis, torch.tensor(tensor.heads.to_file()))
        return _as_in_file(values, tensor.form)[start:stop]

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of one tensor, or of the shards that make it up."""
        parts: list[Tensor] = []
        first = 0
        for part in self._stored_names(name):
            count = self._source.shape(part)[0]
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                parts.append(self._source.rows(part, low - first, high - first))
            first += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expert(self, name: str, rows: tuple[int, int] | None, expert: int) -> Tensor:
        """One expert's matrix, out of a fused tensor or of its own."""
        assert rows is not None
        fused = self._stored(name)
        if fused in self._names:
            return self._source.rows(fused, expert, expert + 1)[0, slice(*rows)]
        return self._source.get(self._expert_name(name, rows, expert))

    def _codes(self, tensor: FileTensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows [start, stop) as the file holds them."""
        name = tensor.sources[0]
        if name.endswith(_STACKS):
            parts = [self._expert_codes(name, tensor.rows, e) for e in range(start, stop)]
            return torch.stack([c for c, _ in parts]), torch.stack([s for _, s in parts])
        held = [self._held(part) for part in self._stored_names(name)]
        codes = torch.cat([h.codes for h in held])
        scales = torch.cat([h.scales for h in held])
        if tensor.rows is not None:
            codes, scales = codes[slice(*tensor.rows)], scales[slice(*tensor.rows)]
        codes, scales = codes.reshape(tensor.shape), scales.reshape(tensor.shape[:-1])
        if tensor.heads is not None:
            order = torch.tensor(tensor.heads.to_file())
            codes = codes.index_select(tensor.heads.axis, order)
            scales = scales[order] if tensor.heads.axis == 0 else scales
        return codes[start:stop], scales[start:stop]

    def _expert_codes(
        self, name: str, rows: tuple[int, int] | None, expert: int
    ) -> tuple[Tensor, Tensor]:
        assert rows is not None
        fused = self._stored(name)
        if fused in self._names:
            held = self._held(fused)
            return held.codes[expert, slice(*rows)], held.scales[expert, slice(*rows)]
        held = self._held(self._expert_name(name, rows, expert))
        return held.codes, held.scales

    def _held(self, name: str) -> RowCodes:
        codes = self._source.codes(name)
        assert codes is not None, name
        return codes

    def _stored(self, name: str) -> str:
        """The name as this checkpoint spells it."""
        if name.startswith(TRUNK_PREFIX):
            return self._trunk + name.removeprefix(TRUNK_PREFIX)
        return name

    def _expert_name(self, name: str, rows: tuple[int, int], expert: int) -> str:
        kind = "down" if name.endswith("down_proj") else ("up" if rows[0] else "gate")
        return f"{self._stored(name).rpartition('.')[0]}.{expert}.{kind}_proj.weight"

    def _stored_names(self, name: str) -> list[str]:
        """The stored tensors that make up one of the model's: itself, its shards, or its experts."""
        stored = self._stored(name)
        if stored in self._names:
            return [stored]
        stem = stored.rpartition(".")[0]
        if stored.endswith(_TABLE):
            shards = [n for n in self._names if n.startswith(f"{stem}.shard_")]
            return sorted(shards, key=lambda n: int(n.removeprefix(f"{stem}.shard_").split(".")[0]))
        if stored.endswith(_STACKS):
            kinds = ("down",) if stored.endswith("down_proj") else ("gate", "up")
            experts = [n for n in self._names if n.startswith(f"{stem}.")]
            return sorted(
                n for n in experts if n.endswith(tuple(f"{k}_proj.weight" for k in kinds))
            )
        return []

    def _check_names(self) -> None:
        used: set[str] = set()
        for tensor in self._tensors:
            for name in tensor.sources:
                parts = self._stored_names(name)
                if not parts:
                    raise WeightMismatch(
                        f"{self._stored(name)}: found no such tensor, required by the model's config"
                    )
                used.update(parts)
        left = sorted(
            n
            for n in self._names - used
            if not n.startswith(self._ignored) and not n.endswith(_HASH_CONSTANTS)
        )
        if left:
            raise WeightMismatch(
                f"{len(left)} tensors left over: found {', '.join(left[:5])}, required none beyond the model's own"
            )


def _is_small(tensor: FileTensor) -> bool:
    return len(tensor.shape) == 1 or tensor.name.endswith("conv1d.weight")


def _q8_kind(tensor: FileTensor) -> types.GgmlType:
    return types.F16 if tensor.shape[-1] % types.Q8_0.block_values else types.Q8_0


def _is_row_for_row(tensor: FileTensor) -> bool:
    """Whether rows of the file are rows of the checkpoint, so that a part can be read alone."""
    return (
        len(tensor.sources) == 1
        and tensor.rows is None
        and tensor.heads is None
        and tensor.form is Form.PLAIN
        and not _is_small(tensor)
    )


def _as_in_file(values: Tensor, form: Form) -> Tensor:
    if form is Form.NORM:
        return values.to(torch.float32) + 1.0
    return -values.to(torch.float32).exp() if form is Form.DECAY else values


def value_bytes(values: Tensor, kind: types.GgmlType) -> Tensor:
    """Floats as the bytes of a type that holds them; int8 rows times their scales may become fp16 as well."""
    if kind is types.F32:
        values = values.to(torch.float32)
    if kind is types.F16:
        values = _as_half(values)
    assert _TORCH_KINDS[values.dtype] is kind
    return values.contiguous().view(-1).view(torch.uint8)


def code_bytes(held: tuple[Tensor, Tensor]) -> Tensor:
    """Codes and scales as an I8_ROW tensor."""
    codes, scales = held
    return torch.cat(
        (
            codes.contiguous().view(-1).view(torch.uint8),
            scales.to(torch.float32).contiguous().view(-1).view(torch.uint8),
        )
    )


def q8_bytes(held: tuple[Tensor, Tensor]) -> Tensor:
    """Codes [*, C] and scales [*] as Q8_0 blocks: the codes stay, a row's scale is rounded to fp16 for its blocks.

    Raises WeightMismatch for a scale that fp16 cannot hold.
    """
    codes, scales = held
    blocks = codes.reshape(-1, types.Q8_0.block_values)
    half = _as_half(scales).reshape(-1, 1)
    half = half.repeat_interleave(codes.shape[-1] // types.Q8_0.block_values, dim=0)
    return torch.cat((half.view(torch.uint8), blocks.view(torch.uint8)), dim=1).view(-1)


def _as_half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not torch.isfinite(half).all():
        largest = values.abs().max().item()
        raise WeightMismatch(
            f"found a value or scale of {largest:g}, required at most 65504 in fp16"
        )
    return half
