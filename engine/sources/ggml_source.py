"""GGML tensors, from a GGUF file or a pack, as a checkpoint: names, order and values turned back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import WeightMismatch
from engine.sources.base import RowCodes, StoredForm, StoredRows
from engine.sources.ggml_names import Form, Place
from engine.sources.ggml_types import BF16, F16, I8_ROW
from engine.sources.mapped import BlockTensor

if TYPE_CHECKING:
    from engine.sources.ggml_types import GgmlType
    from engine.sources.mapped import StoredTensor

_ULPS_TRIED = 8
_DTYPES = {F16.name: torch.float16, BF16.name: torch.bfloat16}
"""Types whose values are given as stored; all others come as fp32."""


class GgmlSource:
    """See engine.sources.base.TensorSource.

    places: where each checkpoint tensor lies. constants: int64 tensors that are no tensors of the file, by checkpoint
    name (hash constants of a GGUF).
    """

    def __init__(
        self,
        places: Mapping[str, Place],
        tensors: Mapping[str, StoredTensor],
        *,
        where: str,
        constants: Mapping[str, Tensor] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._tensors = tensors
        self._where = where
        self._constants = constants or {}
        self._close = close
        self._places = {name: place for name, place in places.items() if place.name in tensors}
        used = {name for p in self._places.values() for name in (p.name, p.then) if name}
        # What the model has no place for keeps its own name, so that it is found left over.
        unknown = [name for name in tensors if name not in used]
        self._names = (*self._places, *self._constants, *unknown)

    @property
    def where(self) -> str:
        return self._where

    def close(self) -> None:
        self._close()

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._constants:
            return tuple(self._constants[name].shape)
        return self._found_shape(self._place(name))

    def dtype(self, name: str) -> torch.dtype:
        if name in self._constants:
            return self._constants[name].dtype
        place = self._place(name)
        stored = [place.name] if place.then is None else [place.name, place.then]
        types = {self._tensors[one].form.type_name for one in stored}
        has_rows = place.expert is not None or (place.then is None and place.columns is None)
        if types == {I8_ROW.name} and has_rows:
            return torch.int8
        if len(types) > 1 or place.form is not Form.PLAIN:
            return torch.float32
        return _DTYPES.get(types.pop(), torch.float32)

    def get(self, name: str) -> Tensor:
        if name in self._constants:
            return self._constants[name]
        place = self._place(name)
        values = self._values(place)
        if place.columns is not None:
            values = values[:, slice(*place.columns)]
        if place.heads is not None:
            values = values.index_select(place.heads.axis, torch.tensor(place.heads.from_file()))
        return _as_in_checkpoint(values, place.form).reshape(self._found_shape(place))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        place = self._places.get(name)
        if place is None or not _is_plain(place):
            return self.get(name)[start:stop]
        return self._tensors[place.name].values(start, stop)

    def codes(self, name: str) -> RowCodes | None:
        place = self._place(name)
        stored = self._tensors[place.name]
        if place.expert is not None:
            one = stored.codes(place.expert, place.expert + 1)
            return one and RowCodes(one.codes[0], one.scales[0])
        held = stored.codes(0, stored.shape[0])
        if held is None or place.then is not None or place.columns is not None:
            return None
        codes, scales = held.codes, held.scales
        if place.heads is not None:
            order = torch.tensor(place.heads.from_file())
            codes = codes.index_select(place.heads.axis, order)
            scales = scales[order] if place.heads.axis == 0 else scales
        shape = self._found_shape(place)
        return RowCodes(codes.reshape(shape), scales.reshape(shape[:-1]))

    def stored_rows(self, name: str) -> StoredRows | None:
        place = self._places.get(name)
        return self._tensors[place.name].stored_rows() if place and _is_plain(place) else None

    def stored(self, name: str) -> StoredForm:
        if name in self._constants:
            return StoredForm("metadata", 0)
        place = self._place(name)
        form = self._tensors[place.name].form
        if place.expert is not None:
            return StoredForm(form.type_name, form.num_bytes // self._tensors[place.name].shape[0])
        if place.columns is not None:
            return StoredForm(form.type_name, form.num_bytes // 2)
        more = self._tensors[place.then].form.num_bytes if place.then else 0
        return StoredForm(form.type_name, form.num_bytes + more)

    def block_tensors(self) -> Iterator[BlockTensor]:
        """The file's own tensors, for whoever copies them as they are. Raises WeightMismatch for a pack's."""
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, BlockTensor):
                raise WeightMismatch(
                    f"{self.where} ({name}): found a pack's tensor, required a GGUF file's"
                )
            yield tensor

    def raw(self, name: str) -> tuple[GgmlType, Callable[[], Tensor]] | None:
        """Type and bytes of a tensor whose rows are rows of the file, or of one expert; None for any other."""
        place = self._places[name]
        parts = [self._tensors[n] for n in (place.name, place.then) if n]
        if not all(isinstance(part, BlockTensor) for part in parts):
            return None
        blocks = [part for part in parts if isinstance(part, BlockTensor)]
        if (
            place.form is not Form.PLAIN
            or place.columns
            or place.heads
            or len({b.kind for b in blocks}) > 1
        ):
            return None
        if place.expert is None:
            return blocks[0].kind, lambda: torch.cat([block.raw() for block in blocks])
        step = blocks[0].kind.num_bytes(blocks[0].shape[1:])
        start = place.expert * step
        return blocks[0].kind, lambda: blocks[0].raw()[start : start + step]

    def _place(self, name: str) -> Place:
        place = self._places.get(name)
        if place is None:
            if name in self._tensors:
                return Place(name=name, shape=self._tensors[name].shape)
            raise WeightMismatch(f"{name}: found no such tensor, required by the model's config")
        if place.then is not None and place.then not in self._tensors:
            raise WeightMismatch(
                f"{place.then}: found no such tensor, required by the model's config"
            )
        return place

    def _values(self, place: Place) -> Tensor:
        stored = self._tensors[place.name]
        if place.expert is not None:
            return stored.values(place.expert, place.expert + 1)[0]
        values = stored.values(0, stored.shape[0])
        if place.then is None:
            return values
        more = self._tensors[place.then]
        rest = more.values(0, more.shape[0])
        return (
            torch.cat((values, rest))
            if values.dtype == rest.dtype
            else torch.cat((values.to(torch.float32), rest.to(torch.float32)))
        )

    def _found_shape(self, place: Place) -> tuple[int, ...]:
        """Shape in the checkpoint that the stored tensor has: what a message calls found."""
        shape = self._tensors[place.name].shape
        if place.expert is not None:
            if place.expert >= shape[0]:
                raise WeightMismatch(
                    f"{place.name}: found {shape[0]} experts, required at least {place.expert + 1}"
                )
            return shape[1:]
        if place.then is not None:
            return (shape[0] + self._tensors[place.then].shape[0], *shape[1:])
        if place.columns is not None:
            return (*shape[:-1], shape[-1] // 2)
        if len(place.shape) == len(shape) + 1:
            axis = place.shape.index(1)
            return (*shape[:axis], 1, *shape[axis:])
        return shape


def _is_plain(place: Place) -> bool:
    """Whether rows of the checkpoint are rows of the file."""
    parts = (place.expert, place.columns, place.then, place.heads)
    return place.form is Form.PLAIN and all(part is None for part in parts)


def _as_in_checkpoint(values: Tensor, form: Form) -> Tensor:
    if form is Form.NORM:
        # 1 + (value - 1) is the stored value again, which is all that a norm uses.
        return values.to(torch.float32) - 1.0
    return log_decay(values) if form is Form.DECAY else values


def log_decay(decay: Tensor) -> Tensor:
    """A_log, fp32, of stored -exp(A_log): one whose exponential is the stored value again, bit for bit.

    log rounds, so its neighbours are tried too. A value that nothing near maps to (another exp made it) gets the
    nearest.
    """
    wanted = -decay.to(torch.float32)
    if not bool((wanted > 0).all()):
        raise WeightMismatch(
            "ssm_a: found values of 0 or above, required negative ones: -exp(A_log)"
        )
    nearest = wanted.to(torch.float64).log().to(torch.float32)
    found = nearest.clone()
    missing = found.exp() != wanted
    for step in range(1, _ULPS_TRIED + 1):
        for signed in (step, -step):
            candidate = (nearest.view(torch.int32) + signed).view(torch.float32)
            hit = missing & (candidate.exp() == wanted)
            found = torch.where(hit, candidate, found)
            missing &= ~hit
    return found
