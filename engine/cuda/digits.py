"""Rows as fixed-point numbers of two int8 digits, and their products with 4-bit weights: whole numbers, so exact.

A run of columns shares a power of two: a value is (256 * high + low) of its units, at most 2^14 of them, so that a bf16
value within a factor of 64 of the run's largest loses nothing. Sums over a run are whole numbers; what is rounded, and
in which order, is written out, so that a processor can repeat it to the bit.

Columns of a group lie in the order in which the nibbles of its words are read as bytes: all low ones, all high ones.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.language import tl, triton
from engine.cuda.primitives import INTERPRETED
from engine.cuda.quant import GROUP

_ON_CPU = tl.constexpr(INTERPRETED)
_GROUP = tl.constexpr(GROUP)
_HALF = tl.constexpr(GROUP // 2)
_QUARTER = tl.constexpr(GROUP // 4)


@dataclass(frozen=True, slots=True)
class Digits:
    """Rows [R, K], padded to whole groups: digits int8 [R, 2, K], high ones first; units fp32 [R, runs of columns],
    divided by the 16 that weights are multiplied with, and no number where the run has one that is not finite."""

    digits: Tensor
    units: Tensor

    @staticmethod
    def make(rows: int, columns: int, runs_per_group: int, device: torch.device) -> Digits:
        """Room for rows of that many columns."""
        groups = -(-columns // GROUP)
        return Digits(
            digits=torch.empty(rows, 2, groups * GROUP, dtype=torch.int8, device=device),
            units=torch.empty(rows, groups * runs_per_group, device=device),
        )


@triton.jit
def place_of(column):
    """Where a column's digits lie."""
    c = column % _GROUP
    return column - c + (c // _QUARTER % 2) * _HALF + c % _QUARTER * 2 + c // _HALF


@triton.jit
def first_of_run(run):
    """The first column of those whose digits lie in half a group: run 2*g + h is half h of group g."""
    return run // 2 * _GROUP + run % 2 * _QUARTER


@triton.jit
def column_of_run(run, j):
    """The j-th column, rising, of a run: a quarter of a group, and another half a group on."""
    return first_of_run(run) + j // _QUARTER * _HALF + j % _QUARTER


@triton.jit
def to_digits(x, axis: tl.constexpr):
    """fp32 x, a run along `axis` -> high and low digits int8, and the unit of each run over 16."""
    # As whole numbers, what is not finite is larger than all that is.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    exponent = tl.maximum(largest >> 23, 18)
    unit = ((exponent - 17) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)
    factor = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 rounds to a whole number, halves to even, and leaves it in the low bits.
    shifted = x * tl.expand_dims(factor, axis) + 12582912.0
    whole = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    low = ((whole + 128) & 255) - 128
    return ((whole - low) >> 8).to(tl.int8), low.to(tl.int8), unit


@triton.jit
def split_groups(x, digits, units, row, g, K: tl.constexpr, GROUPS: tl.constexpr):
    """Digits of groups g [BG] of one row, one unit a group."""
    k = g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    value = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    high, low, unit = to_digits(value, 1)
    to = digits + row * (2 * GROUPS * _GROUP) + place_of(k)
    inside = (g < GROUPS)[:, None]
    tl.store(to, high, mask=inside)
    tl.store(to + GROUPS * _GROUP, low, mask=inside)
    tl.store(units + row * GROUPS + g, unit, mask=g < GROUPS)


@triton.jit
def _nibbles(packed):
    """int8 of two signed nibbles -> 16 times the low ones and 16 times the high ones."""
    if _ON_CPU:
        wide = packed.to(tl.int32)
        low = (wide << 4).to(tl.int8)
        high = (wide & 0xF0).to(tl.int8)
    else:
        # Four bytes a register, so three steps unpack eight weights.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            shl.b32 t, $2, 4;
            and.b32 $0, t, 0xF0F0F0F0;
            and.b32 $1, $2, 0xF0F0F0F0;
            }
            """,
            "=r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _add_run(acc, sums, scale, unit, BN: tl.constexpr, BM: tl.constexpr):
    """acc [BN, BM] + what sums int32 [BN, 2*BM], digits side by side, stand for."""
    high, low = tl.split(sums.reshape(BN, BM, 2))
    return tl.fma((high * 256 + low).to(tl.float32), scale[:, None] * unit[None, :], acc)


@triton.jit
def _factors(
    scales,
    line,
    units,
    row,
    live,
    g,
    GROUPS: tl.constexpr,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the two runs from group g on: scales bf16 [BN, their groups] and units fp32 [BM, 2]."""
    at = tl.minimum(g + tl.arange(0, 2 // RUNS), GROUPS - 1)
    scale = tl.load(scales + line[:, None] + at[None, :] * TILE)
    run = g * RUNS + tl.arange(0, 2)
    # A group beyond the last counts nothing.
    inside = live[:, None] & (run < GROUPS * RUNS)[None, :]
    unit = tl.load(units + row[:, None] * (GROUPS * RUNS) + run[None, :], mask=inside, other=0.0)
    return scale, unit


@triton.jit
def multiply_digits(
    words,
    scales,
    n,
    digits,
    units,
    row,
    live,
    GROUPS: tl.constexpr,
    RUNS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BEYOND: tl.constexpr,
):
    """fp32 [BN, BM] of output rows n of one expert, the runs added up in their order.

    digits, units: a Digits with RUNS (1 or 2) runs a group; row int [BM], zeros stand for those that are not live.
    BEYOND: n may reach beyond the padded rows.
    """
    q = tl.arange(0, _HALF)
    if BEYOND:
        n = tl.minimum(n, TILES * TILE - 1)
    line = (n // TILE) * (GROUPS * TILE) + n % TILE
    own = words.to(tl.pointer_type(tl.int8), bitcast=True) + line[:, None] * _HALF + q[None, :]
    # Multiplied by the row's size last, so that the compiler sees how the addresses are aligned.
    both = tl.join(2 * row, 2 * row + 1).reshape(1, 2 * BM) * (GROUPS * _GROUP)
    x = digits + both + q[:, None]
    in_x = tl.join(live, live).reshape(1, 2 * BM)
    acc = tl.zeros([BN, BM], tl.float32)
    # Two runs a turn: two groups, or the halves of one. Their factors come a turn before they are needed, as only loads
    # that feed a product are put ahead by the compiler.
    scale, unit = _factors(scales, line, units, row, live, 0, GROUPS, RUNS, TILE)
    for g in range(0, GROUPS, 2 // RUNS):
        next_scale, next_unit = _factors(
            scales, line, units, row, live, g + 2 // RUNS, GROUPS, RUNS, TILE
        )
        low, high = _nibbles(tl.load(own + g * (TILE * _HALF)))
        x_low = tl.load(x + g * _GROUP, mask=in_x, other=0)
        x_high = tl.load(x + g * _GROUP + _HALF, mask=in_x, other=0)
        first = tl.dot(low, x_low, out_dtype=tl.int32)
        if RUNS == 1:
            first = tl.dot(high, x_high, first, out_dtype=tl.int32)
            at = tl.minimum(g + 1, GROUPS - 1)
            low, high = _nibbles(tl.load(own + at * (TILE * _HALF)))
            x_low = tl.load(x + at * _GROUP, mask=in_x, other=0)
            x_high = tl.load(x + at * _GROUP + _HALF, mask=in_x, other=0)
            second = tl.dot(low, x_low, out_dtype=tl.int32)
            second = tl.dot(high, x_high, second, out_dtype=tl.int32)
            first_scale, second_scale = tl.split(scale.to(tl.float32))
        else:
            second = tl.dot(high, x_high, out_dtype=tl.int32)
            first_scale = scale.to(tl.float32).reshape(BN)
            second_scale = first_scale
        first_unit, second_unit = tl.split(unit)
        acc = _add_run(acc, first, first_scale, first_unit, BN, BM)
        acc = _add_run(acc, second, second_scale, second_unit, BN, BM)
        scale, unit = next_scale, next_unit
    return acc


@triton.jit
def fetch(address, num_bytes):
    """Ask for memory that is about to be read; num_bytes is a multiple of 16, as is the address."""
    if not _ON_CPU:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [address.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def exp_plain(x):
    """e^x of fp32 x within 2 ulp, as engine/native/src/simd.h computes it."""
    x = tl.where(x < -87.33654, -87.33654, x)
    x = tl.where(x > 88.3, 88.3, x)
    shifted = tl.fma(x, 1.44269504, 12582912.0)
    whole = shifted - 12582912.0
    r = tl.fma(whole, -0.693359375, x)
    r = tl.fma(whole, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691e-4, 1.3981999e-3)
    p = tl.fma(p, r, 8.3334519e-3)
    p = tl.fma(p, r, 4.1665795e-2)
    p = tl.fma(p, r, 1.6666666e-1)
    p = tl.fma(p, r, 5.0000000e-1)
    p = tl.fma(p, r * r, r + 1.0)
    power = (shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 127)) << 23
    return p * power.to(tl.float32, bitcast=True)


@triton.jit
def silu_plain(x):
    """x / (1 + e^-x), rounded as engine/native/src/simd.h rounds it."""
    return x * tl.div_rn(1.0, 1.0 + exp_plain(-x))
