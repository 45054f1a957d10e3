"""A model whose n-gram embedding is narrower than its residual, as the same model with one as wide.

llama.cpp takes the two widths as one. Zeros behind each hash head's columns, in the table and in the projections that
read it, change no value of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.nn.functional import pad

from engine.errors import ConfigMismatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.model_spec import ModelSpec
    from engine.sources.base import RowCodes, StoredForm, StoredRows, TensorSource

_TABLE = ".ngram_embedding."
_PROJECTIONS = (".ple.key_proj.weight", ".ple.value_proj.weight")


def widened(source: TensorSource, spec: ModelSpec) -> tuple[TensorSource, ModelSpec]:
    """Both as they are if the widths agree. Raises ConfigMismatch if zeros cannot make them agree."""
    if spec.ple is None or spec.ple.embed_dim == spec.hidden:
        return source, spec
    heads = spec.ple.num_heads
    if spec.ple.embed_dim > spec.hidden or spec.hidden % heads:
        raise ConfigMismatch(
            f"ple_embed_dim: found {spec.ple.embed_dim}, required at most hidden_size {spec.hidden}, "
            f"and that a multiple of {heads} hash heads"
        )
    zeros = spec.hidden // heads - spec.ple.head_dim
    ple = replace(spec.ple, embed_dim=spec.hidden)
    return _Widened(source, heads, zeros), replace(spec, ple=ple)


class _Widened:
    """A source whose n-gram tensors have `zeros` more columns for each of `heads`."""

    def __init__(self, source: TensorSource, heads: int, zeros: int) -> None:
        self._source, self._heads, self._zeros = source, heads, zeros

    @property
    def where(self) -> str:
        return self._source.where

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        heads = self._heads_in(name)
        return (*shape[:-1], shape[-1] + heads * self._zeros) if heads else shape

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def get(self, name: str) -> Tensor:
        return self._pad(name, self._source.get(name))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._pad(name, self._source.rows(name, start, stop))

    def codes(self, name: str) -> RowCodes | None:
        held = self._source.codes(name)
        return None if held is None else replace(held, codes=self._pad(name, held.codes))

    def stored_rows(self, name: str) -> StoredRows | None:
        return None if self._heads_in(name) else self._source.stored_rows(name)

    def stored(self, name: str) -> StoredForm:
        return self._source.stored(name)

    def close(self) -> None:
        self._source.close()

    def _heads_in(self, name: str) -> int:
        """Hash heads side by side in a row of this tensor; 0 for one that is not widened."""
        if _TABLE in name:
            return 1
        return self._heads if name.endswith(_PROJECTIONS) else 0

    def _pad(self, name: str, values: Tensor) -> Tensor:
        heads = self._heads_in(name)
        if not heads:
            return values
        return pad(values.unflatten(-1, (heads, -1)), (0, self._zeros)).flatten(-2)
