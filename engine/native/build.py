"""Compiles the CPU step: C files -> one shared library beside them. Standard library only.

Run by the package build, and by hand with `python -m engine.native.build`. A machine without a compiler can install
`ziglang`, which brings one; without either the torch layers run instead, and start-up says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "libstep.so"
_COMPILERS = ("cc", "gcc", "clang")
_X86 = ("x86_64", "AMD64")
# No contraction: every fused multiply-add is written out, so that a row's rounding never depends on its company.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)


def compiler() -> list[str] | None:
    """The command that compiles C: $CC, one on the PATH, or ziglang's; None without any."""
    named = os.environ.get("CC")
    if named:
        return named.split()
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is not None:
        return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def sources_hash() -> str:
    """What tells these sources from others; the library carries it."""
    found = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def is_current() -> bool:
    """Whether the library is there and was compiled from these sources."""
    return LIBRARY.is_file() and sources_hash().encode() in LIBRARY.read_bytes()


def _target(command: list[str]) -> tuple[str, ...]:
    """x86-64 with AVX2 and FMA: not more, since the library may move to another machine."""
    # Zig compiles for this very processor unless told, and spells the name its own way.
    return ("-mcpu=x86_64_v3",) if "ziglang" in command else ("-march=x86-64-v3",)


def compile_library(command: list[str]) -> None:
    """Compile into a new file and rename it, so that a running server keeps the one it has mapped.

    Raises RuntimeError with what the compiler said.
    """
    target = _target(command) if platform.machine() in _X86 else ()
    handle, name = tempfile.mkstemp(suffix=".so", dir=LIBRARY.parent)
    os.close(handle)
    sources = sorted(str(file) for file in SOURCES.glob("*.c"))
    done = subprocess.run(
        [
            *command,
            *_FLAGS,
            *target,
            f'-DSTRATAGATE_SOURCES="{sources_hash()}"',
            *sources,
            "-o",
            name,
            "-lm",
            "-lpthread",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        Path(name).unlink()
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    Path(name).chmod(0o755)
    Path(name).replace(LIBRARY)


def main() -> int:
    """Build if needed; exit code 1 without a compiler or when it fails."""
    if is_current():
        return 0
    command = compiler()
    if command is None:
        sys.stderr.write(f"no C compiler found (tried $CC, {', '.join(_COMPILERS)}, ziglang)\n")
        return 1
    try:
        compile_library(command)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
