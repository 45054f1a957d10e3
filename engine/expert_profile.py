"""`expert-profile.bin`: pairs of layer and expert by how often prompts were routed to them, hottest first. No torch.

Format: `STRP`; five little-endian u32: version 1, layers, experts, slots, n; n pairs of u16 (layer, expert), hottest
first; layers * experts int32, each the pair's rank or -1. The table repeats the list, so one proves the other.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ProfileMismatch

_MAGIC = b"STRP"
_VERSION = 1
_HEADER = struct.Struct("<4s5I")
_PAIR = struct.Struct("<HH")
_RANK = struct.Struct("<i")
_MAX_COUNT = 1 << 16
"""Layers and experts are u16 in a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProfile:
    """A ranking. `slots`: the cache size it was made for, 0 if for none in particular; nothing depends on it."""

    num_layers: int
    num_experts: int
    pairs: tuple[tuple[int, int], ...]
    """(layer, expert), each at most once, hottest first."""
    slots: int = 0

    def require(self, num_layers: int, num_experts: int, where: str) -> None:
        """Raise ProfileMismatch if it was made for another geometry."""
        found, required = (self.num_layers, self.num_experts), (num_layers, num_experts)
        if found != required:
            raise ProfileMismatch(
                f"{where}: found a profile of {found[0]} layers x {found[1]} experts, "
                f"required {required[0]} x {required[1]}"
            )

    def ranked_per_layer(self) -> tuple[int, ...]:
        """How many pairs of each layer are ranked."""
        counts = [0] * self.num_layers
        for layer, _ in self.pairs:
            counts[layer] += 1
        return tuple(counts)

    def chosen(self, slots: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The pairs that get a slot, in rank order; a full layer skips only its own. slots: free ones by layer."""
        left = list(slots)
        chosen: list[tuple[int, int]] = []
        for layer, expert in self.pairs:
            if left[layer]:
                left[layer] -= 1
                chosen.append((layer, expert))
        return tuple(chosen)


def profile_of_counts(counts: Sequence[Sequence[int]]) -> ExpertProfile:
    """Rank every pair by its count [layers][experts]; ties go by layer, then expert."""
    num_experts = len(counts[0])
    pairs = [(layer, expert) for layer in range(len(counts)) for expert in range(num_experts)]
    pairs.sort(key=lambda pair: -counts[pair[0]][pair[1]])
    return ExpertProfile(num_layers=len(counts), num_experts=num_experts, pairs=tuple(pairs))


def write_profile(path: Path, profile: ExpertProfile) -> None:
    """Write the file whole: a reader never sees half of one."""
    ranks = array("i", [-1]) * (profile.num_layers * profile.num_experts)
    body = bytearray()
    for rank, (layer, expert) in enumerate(profile.pairs):
        body += _PAIR.pack(layer, expert)
        ranks[layer * profile.num_experts + expert] = rank
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        profile.num_layers,
        profile.num_experts,
        profile.slots,
        len(profile.pairs),
    )
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(header + bytes(body) + b"".join(_RANK.pack(rank) for rank in ranks))
    partial.replace(path)


def read_profile(path: Path) -> ExpertProfile:
    """Read and check a file. Raises ProfileMismatch with what was found and required."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProfileMismatch(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) < _HEADER.size:
        raise ProfileMismatch(f"{path}: found {len(data)} bytes, required at least {_HEADER.size}")
    magic, version, layers, experts, slots, count = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProfileMismatch(f"{path}: found magic {magic!r}, required {_MAGIC!r}")
    if version != _VERSION:
        raise ProfileMismatch(f"{path}: found version {version}, required {_VERSION}")
    for name, value in (("layers", layers), ("experts", experts)):
        if not 0 < value <= _MAX_COUNT:
            raise ProfileMismatch(f"{path}: found {value} {name}, required 1 to {_MAX_COUNT}")
    if count > layers * experts:
        raise ProfileMismatch(
            f"{path}: found {count} pairs, required at most {layers} x {experts} = {layers * experts}"
        )
    size = _HEADER.size + count * _PAIR.size + layers * experts * _RANK.size
    if len(data) != size:
        raise ProfileMismatch(f"{path}: found {len(data)} bytes, required {size}")
    table_at = _HEADER.size + count * _PAIR.size
    pairs = tuple(_PAIR.iter_unpack(data[_HEADER.size : table_at]))
    ranks = [rank for (rank,) in _RANK.iter_unpack(data[table_at:])]
    _check_pairs(path, pairs, ranks, layers, experts)
    return ExpertProfile(num_layers=layers, num_experts=experts, pairs=pairs, slots=slots)


def _check_pairs(
    path: Path, pairs: Sequence[tuple[int, int]], ranks: Sequence[int], layers: int, experts: int
) -> None:
    for rank, (layer, expert) in enumerate(pairs):
        if layer >= layers or expert >= experts:
            raise ProfileMismatch(
                f"{path}: pair {rank}: found layer {layer}, expert {expert}, required below {layers} and {experts}"
            )
        found = ranks[layer * experts + expert]
        if found != rank:
            raise ProfileMismatch(
                f"{path}: rank of layer {layer}, expert {expert}: found {found}, required {rank}"
            )
    ranked = sum(rank != -1 for rank in ranks)
    if ranked != len(pairs):
        raise ProfileMismatch(f"{path}: found {ranked} ranks, required {len(pairs)}")
