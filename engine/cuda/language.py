"""Triton's names for the modules of this package; on a machine without it, what counting their bytes needs of them.

A plan for a GPU is made anywhere (`stratagate plan --vram-mib`); kernels are only defined there, never run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

HAS_TRITON = find_spec("triton") is not None

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
else:

    class _Names:
        """Decorators that leave a kernel alone, constants that are themselves, and the sizes that buffers follow."""

        __version__ = "none"

        @staticmethod
        def jit(kernel: Any = None, **_: object) -> Any:
            return (lambda late: late) if kernel is None else kernel

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def cdiv(value: int, by: int) -> int:
            return -(-value // by)

        @staticmethod
        def next_power_of_2(value: int) -> int:
            return 1 << max(0, value - 1).bit_length()

    triton = tl = _Names()

__all__ = ["HAS_TRITON", "tl", "triton"]
