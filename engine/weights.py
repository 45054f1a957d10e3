"""Checkpoint tensors by name: shapes and dtypes checked, nothing missing and nothing left over (D6).

Knows names and shapes, not layers and not files: values come from a TensorSource.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

import engine.tensor_names as names
from engine.errors import WeightMismatch
from engine.geometry import DRAFT_PREFIX

if TYPE_CHECKING:
    from types import TracebackType

    from engine.model_spec import ModelSpec
    from engine.sources.base import RowCodes, StoredRows, TensorSource

_PREFIXES = ("model.language_model.", "model.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IGNORED_PREFIXES = ("model.visual.",)
_ROWS_VALUES = 1 << 22
"""Values that `take_into` reads at once: 16 MiB of fp32."""


class Checkpoint:
    """The tensors of a source, each to be taken once. A context manager; `finish()` proves that all was used."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._names = frozenset(source.names())
        self._used: set[str] = set()
        self._has_draft = any(name.startswith(DRAFT_PREFIX) for name in self._names)
        try:
            self.trunk = self._find_prefix()
        except BaseException:
            source.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.source.close()

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._names:
                return prefix
        wanted = " or ".join(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
        raise WeightMismatch(f"{self.source.where}: found no embedding, required {wanted}")

    def has(self, name: str) -> bool:
        """Whether a tensor of this name exists."""
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor. Raises WeightMismatch if there is none."""
        self._require_draft(name)
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """int8 when `take_codes` has an answer, else the dtype of `take`. Raises WeightMismatch if there is none."""
        self._require_draft(name)
        return self.source.dtype(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float tensor (fp32, bf16 or fp16 as stored; anything quantised gives fp32), marked as used.

        Raises WeightMismatch with tensor, found and required.
        """
        self._check_shape(name, shape)
        self._used.add(name)
        tensor = self.source.get(name)
        if tensor.dtype not in _FLOATS:
            raise WeightMismatch(
                f"{name}: found {tensor.dtype}, required float32, bfloat16, float16, or int8 with {name}_scale"
            )
        return _finite(name, tensor)

    def take_each(self, name: str, shape: tuple[int, ...]) -> Callable[[int], Tensor]:
        """A float tensor that is read index by index on the first axis, marked as used; else as `take`.

        What is stored as floats is given where it lies.
        """
        self._check_floats(name, shape)
        return lambda index: _finite(name, self.source.rows(name, index, index + 1)[0])

    def take_into(self, name: str, target: Tensor) -> None:
        """As `take`, copied to a tensor of the required shape, some rows at a time: what is quantised is never whole in
        fp32 beside it.
        """
        self._check_floats(name, tuple(target.shape))
        step = max(1, _ROWS_VALUES // max(1, target[0].numel()))
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            part.copy_(_finite(name, self.source.rows(name, first, first + part.shape[0])))

    def take_codes(self, name: str, shape: tuple[int, ...]) -> RowCodes | None:
        """Codes and row scales of an int8 tensor, marked as used; None, and not marked, if it is stored otherwise.

        Raises WeightMismatch with tensor, found and required.
        """
        self._check_shape(name, shape)
        codes = self.source.codes(name)
        if codes is not None:
            self._used.add(name)
            _finite(name, codes.scales)
        return codes

    def take_rows(self, name: str, shape: tuple[int, ...]) -> StoredRows | None:
        """Where the rows of a tensor lie, marked as used; None, and not marked, if they are not stored by themselves.

        The values are not read, so nothing is checked but the shape.
        """
        self._check_shape(name, shape)
        rows = self.source.stored_rows(name)
        if rows is not None:
            self._used.add(name)
        return rows

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An int64 tensor, marked as used."""
        self._check_shape(name, shape)
        self._used.add(name)
        tensor = self.source.get(name)
        if tensor.dtype != torch.int64:
            raise WeightMismatch(f"{name}: found {tensor.dtype}, required int64")
        return tensor

    def finish(self, *, ignore: tuple[str, ...] = ()) -> None:
        """Raise WeightMismatch if a tensor was never taken, unless its name starts with one of `ignore`."""
        skipped = ignore + _IGNORED_PREFIXES
        left = [n for n in self._names - self._used if not n.startswith(skipped)]
        if left:
            shown = ", ".join(sorted(left)[:5])
            raise WeightMismatch(
                f"{len(left)} tensors left over: found {shown}{' ...' if len(left) > 5 else ''}, "
                "required none beyond the model's own"
            )

    def _check_floats(self, name: str, shape: tuple[int, ...]) -> None:
        """Of a tensor that is read in parts; marks it as used."""
        self._check_shape(name, shape)
        self._used.add(name)
        if self.dtype(name) not in (*_FLOATS, torch.int8):
            raise WeightMismatch(f"{name}: found {self.dtype(name)}, required floats")

    def _require_draft(self, name: str) -> None:
        """Instead of naming one of its many tensors, say what a draft layer that is not there leaves to do."""
        if name.startswith(DRAFT_PREFIX) and not self._has_draft:
            raise WeightMismatch(
                f"{self.source.where}: found no draft layer ({name}), required by the model's config: "
                "name one with --mtp DIR, or serve without drafts with --no-mtp"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.shape(name)
        if found != shape:
            raise WeightMismatch(f"{name}: found shape {list(found)}, required {list(shape)}")


class ExpertTensors(Protocol):
    """What a reader of experts asks of a checkpoint; see Checkpoint."""

    def has(self, name: str) -> bool: ...
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def take_each(self, name: str, shape: tuple[int, ...]) -> Callable[[int], Tensor]: ...


ReadExpert = Callable[[int], tuple[Tensor, Tensor]]
"""An expert's number -> gate_up [2*I, H] and down [H, I] as stored."""


def expert_reader(source: ExpertTensors, prefix: str, spec: ModelSpec) -> ReadExpert:
    """Reads the experts whose names begin with `prefix` one by one, from fused or per-expert tensors."""
    fused = names.fused_experts(prefix, spec)
    if source.has(fused[0][0]):
        fused_gate_up, fused_down = (source.take_each(*part) for part in fused)
        return lambda expert: (fused_gate_up(expert), fused_down(expert))
    gate_ups, downs = names.expert_parts(prefix, spec)

    def read(expert: int) -> tuple[Tensor, Tensor]:
        gate, up = (source.take(*part) for part in gate_ups[2 * expert : 2 * expert + 2])
        return torch.cat((gate, up)), source.take(*downs[expert])

    return read


def _finite(name: str, tensor: Tensor) -> Tensor:
    """One value that is not a number spoils every logit, and shows only once somebody asks."""
    # NaN becomes both bounds. Nothing of the tensor's size is made for it, and it runs at the speed of memory.
    if tensor.numel() and not all(map(math.isfinite, map(float, tensor.aminmax()))):
        raise WeightMismatch(f"{name}: found values that are not finite, required finite ones")
    return tensor
