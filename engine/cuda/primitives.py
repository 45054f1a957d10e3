"""What the kernels share: overlapped starts, unpacking of 4-bit weights, and what a launch needs.

Kernels of a window form one chain. Each starts while its predecessor still runs (programmatic dependent launch), may
load weights, and waits for its inputs only then. On the CPU, under Triton's interpreter, that is left out.
"""

# Kernels are another language in Python's clothes.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.cuda.language import tl, triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run as numpy on the CPU: slow, for checking their arithmetic without a GPU."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How kernels are launched on this machine."""

    overlap: bool = not INTERPRETED
    """Start a kernel before its predecessor ends."""

    def options(self, num_warps: int, num_stages: int = 3) -> dict[str, int | bool]:
        """Keyword arguments of every launch."""
        chosen: dict[str, int | bool] = {"num_warps": num_warps, "num_stages": num_stages}
        if self.overlap:
            chosen["launch_pdl"] = True
        return chosen


LAUNCH = Launch()


def row_tile(num_rows: int) -> int:
    """Rows padded to what the matrix units take."""
    return max(16, triton.next_power_of_2(num_rows))


def two_parts(width: int) -> tuple[int, int]:
    """Powers of two that cover a width: the largest that fits, and what covers the rest (0 if nothing is left)."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


@triton.jit
def start(OVERLAP: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have: called first, in short kernels.

    Their successors' weights come one kernel earlier. In all kernels it would fill the chip with waiting programs. Of
    two kernels in a row at most one calls it: `wait` says what a successor may read early.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until all earlier kernels have finished and their writes are visible; then let the next one start.

    Every program of every kernel calls it, and stores nothing before. It waits for the kernel before only; but that one
    has waited for its own, so a finished kernel has none unfinished behind it, and nobody writes what an older kernel
    may still read.

    Before it, a kernel may read:
    - weights, which nobody writes;
    - by `early`, what no kernel wrote that may still run. It starts when all programs of its predecessor wait no
      longer, so all that is older than the predecessor has finished. If the predecessor calls `start`, its programs
      have only begun, and they began when all programs of the kernel before it waited no longer: then all but the last
      two have finished. Library operations wait for all before them and let nothing overlap them, but count as
      kernels here: they may end before their writes are visible.

    Slots' state, and the tables of where rows belong, are written between windows: by copies, by library operations and
    by other graphs, none of which the kernels of a window overlap. Within one, a layer's part of the state is read
    early by that layer alone, before its own kernels write to it.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def early(at, inside, other):
    """Load before `wait` what some kernel, copy or library operation has written: `wait` says what that may be.

    Past the L1 cache, as only waiting makes sure that it holds nothing older.
    """
    return tl.load(at, mask=inside, other=other, cache_modifier=".cg")


_ON_CPU = tl.constexpr(INTERPRETED)


@triton.jit
def mma(a, b, acc):
    """acc + a b on the matrix units, fp32 sums. numpy has no bf16, so the interpreter widens first."""
    if _ON_CPU:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def held(x):
    """bf16 x, not used before here: loads that come before `wait` stay in flight over it, all of them at once.

    Without it the compiler moves a product's operand to shared memory as it arrives, and waits for it there.
    """
    if _ON_CPU:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
    )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def rounded(x, like):
    """fp32 x rounded as storing it in the pointer's dtype would."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def quantized(x):
    """fp32 [P], 0 beyond the vector -> int8 codes and their scale: engine.kv_cells.quantize of one vector."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), 127.0), 1.1754943508222875e-38)
    # Maxima pass over what is no number. Not `>=`: that is false for it as well.
    strange = tl.sum((~(tl.abs(x) < float("inf"))).to(tl.int32), 0)
    scale = tl.where(strange > 0, float("nan"), scale)
    # To the nearest whole number, halves to even: beyond 2^23 there is nothing between these.
    whole = (tl.div_rn(x, scale) + 12582912.0) - 12582912.0
    return whole.to(tl.int8), scale


@triton.jit
def unpack(words):
    """int16 words of four signed nibbles -> four bf16 tensors, lowest first. bf16 0x4300 | n is 128 + n."""
    if _ON_CPU:
        # numpy converts no integer to bf16; `mma` takes fp32 there.
        wide = words.to(tl.int32) & 0xFFFF
        a = (((wide & 15) ^ 8) - 8).to(tl.float32)
        b = ((((wide >> 4) & 15) ^ 8) - 8).to(tl.float32)
        c = ((((wide >> 8) & 15) ^ 8) - 8).to(tl.float32)
        d = ((((wide >> 12) & 15) ^ 8) - 8).to(tl.float32)
    else:
        # Two words a register, so each step unpacks two weights: with bit 3 turned over they are 8 more, (n & 15) ^ 8.
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, bias;
            mov.b32 bias, 0x43084308;
            lop3.b32 $0, $4, 0x000F000F, bias, 0x6A;
            shr.b32 t, $4, 4;
            lop3.b32 $1, t, 0x000F000F, bias, 0x6A;
            shr.b32 t, $4, 8;
            lop3.b32 $2, t, 0x000F000F, bias, 0x6A;
            shr.b32 t, $4, 12;
            lop3.b32 $3, t, 0x000F000F, bias, 0x6A;
            sub.bf16x2 $0, $0, bias;
            sub.bf16x2 $1, $1, bias;
            sub.bf16x2 $2, $2, bias;
            sub.bf16x2 $3, $3, bias;
            }
            """,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d
