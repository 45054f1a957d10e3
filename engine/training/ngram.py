"""Which rows of the hashed n-gram table a token reads; integers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.training.config import ModelConfig

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes >= start."""
    found: list[int] = []
    while len(found) < count:
        if _is_prime(start):
            found.append(start)
        start += 1
    return tuple(found)


def hash_multipliers(vocab_size: int, ngram_size: int, seed: int) -> tuple[int, ...]:
    """Odd multipliers such that id * multiplier stays within a signed 64-bit integer."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    values = ((seed + _GAMMA * (index + 1)) & _MASK for index in range(ngram_size))
    return tuple(2 * (_splitmix64(value) % bound) + 1 for value in values)


@dataclass(frozen=True, slots=True)
class NGramHash:
    """The hash of the only PLE layer (index 0 among PLE layers)."""

    multipliers: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int
    heads_per_ngram: int
    eos_token_id: int

    @staticmethod
    def from_config(config: ModelConfig) -> NGramHash:
        sizes = primes_from(config.ngram_vocab_size_base, config.num_ngram_heads)
        divisor = config.make_ngram_vocab_size_divisible_by
        return NGramHash(
            multipliers=hash_multipliers(config.vocab_size, config.ngram_size, config.seed),
            vocab_sizes=sizes,
            offsets=tuple(sum(sizes[:head]) for head in range(len(sizes))),
            num_rows=-(-sum(sizes) // divisor) * divisor,
            heads_per_ngram=config.heads_per_ngram,
            eos_token_id=config.eos_token_id,
        )

    def buffers(self) -> dict[str, tuple[int, ...]]:
        """The integer buffers under the checkpoint's names."""
        return {
            "layer_multipliers": self.multipliers,
            "ngram_heads_vocab_sizes": self.vocab_sizes,
            "ngram_heads_offsets": self.offsets,
        }

    def rows(self, ids: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
        """Table rows [B, T, heads] of ids [B, T] (int64).

        Predecessors before the start of the row, or across an EOS (that of the token itself not
        counted), are EOS.
        """
        mixed = ids * multipliers[0]
        cut = torch.zeros_like(ids, dtype=torch.bool)
        blocks: list[Tensor] = []
        for distance in range(1, len(self.multipliers)):
            before = ids.new_full((ids.shape[0], distance), self.eos_token_id)
            previous = torch.cat([before, ids], dim=1)[:, : ids.shape[1]]
            cut = cut | (previous == self.eos_token_id)
            previous = previous.masked_fill(cut, self.eos_token_id)
            mixed = mixed ^ (previous * multipliers[distance])
            heads = slice((distance - 1) * self.heads_per_ngram, distance * self.heads_per_ngram)
            blocks.append(mixed[..., None] % sizes[heads] + offsets[heads])
        return torch.cat(blocks, dim=-1)
