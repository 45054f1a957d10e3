"""GGML blocks to fp32 values in torch, bit for bit what the gguf library computes.

Every function takes blocks uint8 [B, bytes of a block] and gives values fp32 [B, values of a block]. The formulas keep
the library's order of products, since each rounds. The codebooks are the library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from engine.errors import WeightMismatch
from engine.sources import ggml_types as types

_BLOCKS_AT_A_TIME = 1 << 15
"""Intermediates of the widest type stay near 100 MB."""


def dequantize(kind: types.GgmlType, data: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    """Stored bytes, uint8 in one piece, to values: fp32, or the float type as stored.

    Raises WeightMismatch, with `where` in front, if the bytes are not those of the shape or the type is known by size
    alone.
    """
    if data.numel() != kind.num_bytes(shape):
        raise WeightMismatch(
            f"{where}: found {data.numel()} bytes, required {kind.num_bytes(shape)} for {kind.name} {list(shape)}"
        )
    if kind in _FLOATS:
        return _aligned(data).view(_FLOATS[kind]).view(shape)
    if kind is types.I8_ROW:
        codes, scales = split_rows(data, shape)
        return codes.to(torch.float32) * scales.unsqueeze(-1)
    function = _FUNCTIONS.get(kind)
    if function is None:
        raise WeightMismatch(f"{where}: found {kind.name}, which the gguf library cannot read")
    blocks = data.view(-1, kind.block_bytes)
    values = torch.empty(len(blocks), kind.block_values)
    for start in range(0, len(blocks), _BLOCKS_AT_A_TIME):
        part = slice(start, start + _BLOCKS_AT_A_TIME)
        values[part] = function(blocks[part])
    return values.view(shape)


def split_rows(data: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes int8 [*shape] and scales fp32 [*shape[:-1]] of an I8_ROW tensor."""
    num_codes = data.numel() - 4 * (data.numel() // (shape[-1] + 4))
    codes = data[:num_codes].view(torch.int8).view(shape)
    return codes, _aligned(data[num_codes:]).view(torch.float32).view(shape[:-1])


def from_scaled(kind: types.GgmlType, scales: Tensor, bodies: Tensor) -> Tensor:
    """Blocks of the simple types, whose first two bytes are one fp16 scale, with scale and rest apart.

    scales: fp32 or fp16 [B]; bodies: uint8 [B, block bytes - 2]. Widening the scales changes no value.
    """
    return scales.to(torch.float32).unsqueeze(-1) * _BODIES[kind](bodies)


def _aligned(data: Tensor) -> Tensor:
    """Bytes that may be viewed as wider numbers: a copy where a file does not align them."""
    return data if data.data_ptr() % 4 == 0 and data.storage_offset() % 4 == 0 else data.clone()


def _half(data: Tensor) -> Tensor:
    """Two bytes as fp16, widened: uint8 [B, 2] -> fp32 [B, 1]."""
    return data.contiguous().view(torch.float16).to(torch.float32)


def _words(data: Tensor, size: int) -> Tensor:
    """Little-endian unsigned numbers of `size` bytes: uint8 [B, n * size] -> int64 [B, n]."""
    parts = data.reshape(len(data), -1, size).to(torch.int64)
    return sum((parts[..., i] << (8 * i) for i in range(size)), torch.zeros_like(parts[..., 0]))


def _fields(data: Tensor, width: int, count: int, *, group: int = 1) -> Tensor:
    """`count` fields of `width` bits out of each number, lowest first, kept apart for every `group` numbers.

    [B, n] -> int64 [B, n / group, count, group].
    """
    grouped = data.to(torch.int64).reshape(len(data), -1, 1, group)
    shifts = torch.arange(0, width * count, width).view(1, 1, count, 1)
    return (grouped >> shifts) & ((1 << width) - 1)


def _nibbles(data: Tensor, group: int) -> Tensor:
    """Low halves, then high halves, of every `group` bytes: uint8 [B, n] -> int64 [B, 2 * n]."""
    return _fields(data, 4, 2, group=group).reshape(len(data), -1)


def _split(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Consecutive bytes of each block; what is left comes last."""
    return torch.split(blocks, [*sizes, blocks.shape[1] - sum(sizes)], dim=1)


# Simple types: one fp16 scale, then the codes of 32 values.


def _q4_0(body: Tensor) -> Tensor:
    return (_nibbles(body, 16) - 8).to(torch.float32)


def _q5_0(body: Tensor) -> Tensor:
    high, low = _split(body, 4)
    fifth = _fields(_words(high, 4), 1, 32).reshape(len(body), 32)
    return ((_nibbles(low, 16) | (fifth << 4)) - 16).to(torch.float32)


def _q8_0(body: Tensor) -> Tensor:
    return body.contiguous().view(torch.int8).to(torch.float32)


def _iq4_nl(body: Tensor) -> Tensor:
    return _levels()[_nibbles(body, 16)]


_BODIES: dict[types.GgmlType, Callable[[Tensor], Tensor]] = {
    types.Q4_0: _q4_0,
    types.Q5_0: _q5_0,
    types.Q8_0: _q8_0,
    types.IQ4_NL: _iq4_nl,
}


def _simple(kind: types.GgmlType) -> Callable[[Tensor], Tensor]:
    def function(blocks: Tensor) -> Tensor:
        scale, body = _split(blocks, 2)
        return _half(scale) * _BODIES[kind](body)

    return function


# K types: 256 values in 8 groups of 32 (Q6_K: 16 of 16), scales of scales.


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes: fp32 [B, 8, 1] each."""
    first, second, third = (part.to(torch.int64) for part in _split(data, 4, 4))
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _k_values(scale: Tensor, minimum: Tensor, packed: Tensor, codes: Tensor) -> Tensor:
    scales, minima = _k_scales(packed)
    factor = (_half(scale) * scales).unsqueeze(-1)
    offset = (_half(minimum) * minima).unsqueeze(-1)
    return (factor * codes.view(len(codes), 8, 32).to(torch.float32) - offset).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum, packed, low = _split(blocks, 2, 2, 12)
    return _k_values(scale, minimum, packed, _nibbles(low, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum, packed, high, low = _split(blocks, 2, 2, 12, 32)
    fifth = _fields(high, 1, 8, group=32).reshape(len(blocks), -1)
    return _k_values(scale, minimum, packed, _nibbles(low, 32) | (fifth << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, packed, scale = _split(blocks, 128, 64, 16)
    factor = _half(scale) * packed.contiguous().view(torch.int8).to(torch.float32)
    upper = _fields(high, 2, 4, group=32).reshape(len(blocks), -1)
    codes = ((_nibbles(low, 64) | (upper << 4)) - 32).to(torch.float32)
    return (factor.unsqueeze(-1) * codes.view(len(blocks), 16, 16)).flatten(1)


# I types: values from a codebook of vectors, signs apart.


def _signed(scale: Tensor, values: Tensor, signs: Tensor) -> Tensor:
    """scale [B, groups] * codebook vectors * signs; the last two hold the same number of values for each group."""
    groups = scale.shape[1]
    negative = _fields(signs.reshape(len(signs), -1), 1, 8).reshape(len(signs), groups, -1)
    flipped = torch.where(negative == 0, 1.0, -1.0)
    return (scale.unsqueeze(-1) * values.reshape(len(values), groups, -1) * flipped).flatten(1)


def _half_steps(scale: Tensor, steps: Tensor, factor: float) -> Tensor:
    """d * (0.5 + n) * factor, in this order."""
    return _half(scale) * (0.5 + steps.reshape(len(steps), -1).to(torch.float32)) * factor


def _iq2_xxs(blocks: Tensor) -> Tensor:
    scale, rest = _split(blocks, 2)
    indices, packed = rest.reshape(len(blocks), 8, 2, 4).unbind(2)
    words = _words(packed.flatten(1), 4)
    signs = _sign_bytes()[_fields(words, 7, 4)]
    steps = _half_steps(scale, words >> 28, 0.25)
    return _signed(steps, _grid("IQ2_XXS")[indices.flatten(1).to(torch.int64)], signs)


def _iq2_xs(blocks: Tensor) -> Tensor:
    scale, codes, packed = _split(blocks, 2, 64)
    words = _words(codes, 2)
    steps = _half_steps(scale, _fields(packed, 4, 2), 0.25)
    return _signed(steps, _grid("IQ2_XS")[words & 511], _sign_bytes()[words >> 9])


def _iq2_s(blocks: Tensor) -> Tensor:
    scale, low, signs, high, packed = _split(blocks, 2, 32, 32, 8)
    indices = low.to(torch.int64) | (_fields(high, 2, 4).reshape(len(blocks), -1) << 8)
    steps = _half_steps(scale, _fields(packed, 4, 2), 0.25)
    return _signed(steps, _grid("IQ2_S")[indices], signs)


def _iq3_xxs(blocks: Tensor) -> Tensor:
    scale, indices, packed = _split(blocks, 2, 64)
    words = _words(packed, 4)
    signs = _sign_bytes()[_fields(words, 7, 4)]
    steps = _half_steps(scale, words >> 28, 0.5)
    return _signed(steps, _grid("IQ3_XXS")[indices.to(torch.int64)], signs)


def _iq3_s(blocks: Tensor) -> Tensor:
    scale, low, high, signs, packed = _split(blocks, 2, 64, 8, 32)
    indices = low.to(torch.int64) | (_fields(high, 1, 8).reshape(len(blocks), -1) << 8)
    odd = (1 + 2 * _fields(packed, 4, 2).reshape(len(blocks), -1)).to(torch.float32)
    return _signed(_half(scale) * odd, _grid("IQ3_S")[indices], signs)


def _iq4_xs(blocks: Tensor) -> Tensor:
    scale, high, low, codes = _split(blocks, 2, 2, 4)
    upper = _fields(_words(high, 2), 2, 8).reshape(len(blocks), 8)
    steps = ((_fields(low, 4, 2).reshape(len(blocks), 8) | (upper << 4)) - 32).to(torch.float32)
    values = _levels()[_nibbles(codes, 16)].view(len(blocks), 8, 32)
    return ((_half(scale) * steps).unsqueeze(-1) * values).flatten(1)


@cache
def _grid(name: str) -> Tensor:
    """Codebook fp32 [entries, values of a vector]."""
    quant = getattr(quants, name)
    quant.init_grid()
    return torch.from_numpy(quant.grid.reshape(quant.grid_shape).copy())


@cache
def _sign_bytes() -> Tensor:
    """int64 [128]: seven stored sign bits to eight, the last one making the number of minus signs even."""
    return torch.from_numpy(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8).astype(np.int64))


@cache
def _levels() -> Tensor:
    """fp32 [16]: the uneven levels of IQ4."""
    return torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.float32)


_FLOATS = {types.F32: torch.float32, types.F16: torch.float16, types.BF16: torch.bfloat16}
_FUNCTIONS: dict[types.GgmlType, Callable[[Tensor], Tensor]] = {
    **{kind: _simple(kind) for kind in _BODIES},
    types.Q4_K: _q4_k,
    types.Q5_K: _q5_k,
    types.Q6_K: _q6_k,
    types.IQ2_XXS: _iq2_xxs,
    types.IQ2_XS: _iq2_xs,
    types.IQ2_S: _iq2_s,
    types.IQ3_XXS: _iq3_xxs,
    types.IQ3_S: _iq3_s,
    types.IQ4_XS: _iq4_xs,
}
