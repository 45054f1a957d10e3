"""The seam between stored weights and whoever builds layers from them: tensors by their Hugging Face names.

A source knows how tensors are stored (safetensors, GGUF, pack) and gives values; it does not know which tensors a
model needs. `engine.weights.Checkpoint` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowCodes:
    """A tensor held as whole numbers: value = codes * scales[..., None], rounded once in fp32."""

    codes: Tensor
    """int8 [..., columns]."""
    scales: Tensor
    """Float [...]: one for each row of the last axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Rows of equal size, one after the other in a file, for readers that go to the file themselves."""

    path: Path
    offset: int
    num_rows: int
    row_bytes: int
    decode: Callable[[Tensor, Tensor], Tensor]
    """Bytes uint8 [n, row_bytes] of rows int64 [n] -> their values [n, columns], those of TensorSource.rows."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Type and size of a tensor as stored."""

    type_name: str
    num_bytes: int


class TensorSource(Protocol):
    """Stored tensors by Hugging Face name. All methods raise WeightMismatch naming tensor, found and required."""

    @property
    def where(self) -> str:
        """What messages call the source: a directory or a file."""
        ...

    def names(self) -> Collection[str]:
        """Every tensor; scales that belong to one are part of it and have no name of their own."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the values. Reads no data."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """int8 when `codes` has an answer, else the dtype of `get`. Reads no data."""
        ...

    def get(self, name: str) -> Tensor:
        """The values, on the CPU: floats and ids as stored, anything quantised as fp32. May share mapped memory."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """get(name)[start:stop] on the first axis, without reading the rest."""
        ...

    def codes(self, name: str) -> RowCodes | None:
        """The stored codes and row scales of an int8 tensor; None for one that is stored otherwise."""
        ...

    def stored_rows(self, name: str) -> StoredRows | None:
        """The rows of a tensor [rows, columns] where they lie; None where rows are not stored by themselves."""
        ...

    def stored(self, name: str) -> StoredForm:
        """How the tensor lies in its file, scales included. Reads no data."""
        ...

    def close(self) -> None:
        """Let go of the files; tensors given out before stay valid."""
        ...
