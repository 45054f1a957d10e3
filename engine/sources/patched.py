"""A model whose tensors come from two sources: a draft layer or an n-gram table from files of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from engine.sources.base import RowCodes, StoredForm, StoredRows, TensorSource


class PatchedSource:
    """See TensorSource. Names that begin with one of `prefixes` are the patch's, whatever the source has of them."""

    def __init__(
        self, source: TensorSource, patch: TensorSource, prefixes: tuple[str, ...]
    ) -> None:
        self._source = source
        self._patch = patch
        self._prefixes = prefixes
        own = (name for name in source.names() if not name.startswith(prefixes))
        theirs = (name for name in patch.names() if name.startswith(prefixes))
        self._names = (*own, *theirs)

    @property
    def where(self) -> str:
        return self._source.where

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def get(self, name: str) -> Tensor:
        return self._of(name).get(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._of(name).rows(name, start, stop)

    def codes(self, name: str) -> RowCodes | None:
        return self._of(name).codes(name)

    def stored_rows(self, name: str) -> StoredRows | None:
        return self._of(name).stored_rows(name)

    def stored(self, name: str) -> StoredForm:
        return self._of(name).stored(name)

    def close(self) -> None:
        self._patch.close()
        self._source.close()

    def _of(self, name: str) -> TensorSource:
        return self._patch if name.startswith(self._prefixes) else self._source
