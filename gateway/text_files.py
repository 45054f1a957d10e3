"""Where a model's text files lie: beside its weights, or written out of a GGUF file's metadata while we run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING

from gateway.engine_commands import engine_command
from gateway.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Generator

    from scheduler.config import EngineConfig

_GGUF_SUFFIX = ".gguf"
_PREFIX = "stratagate-text-"


@contextmanager
def text_directory(config: EngineConfig) -> Generator[Path]:
    """The directory of tokenizer and template, there until the context ends.

    Raises TokenizerError if a GGUF file has no tokenizer that can be written out.
    """
    beside = config.text_path
    file = next(
        (f for f in (config.model, config.parts.native) if f and f.endswith(_GGUF_SUFFIX)), None
    )
    if file is None or (beside / "tokenizer.json").is_file():
        yield beside
        return
    remove_left()
    # The number says whose it is, the lock whether that one lives: the system frees it however the process ends.
    with TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as made, _locked(made):
        _write_out(file, made)
        yield Path(made)


def remove_left() -> None:
    """Remove directories that servers of this user left behind when they were killed."""
    if sys.platform == "win32":
        return
    for path in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another server that starts may be quicker, or it was never ours
            if _is_left(path):
                shutil.rmtree(path)


def _is_left(path: Path) -> bool:
    """A directory of our user whose process is gone. Raises OSError when it cannot be looked at, or is in use."""
    assert sys.platform != "win32"
    number = path.name.removeprefix(_PREFIX).partition("-")[0]
    if not number.isdecimal() or path.is_symlink() or not path.is_dir():
        return False
    if path.stat().st_uid != os.getuid():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        # It may live where process numbers are others: in a container that shares the directory.
        with _locked(str(path)):
            return True
    return False


@contextmanager
def _locked(directory: str) -> Generator[None]:
    """Raises OSError when another process holds it."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


def _write_out(file: str, directory: str) -> None:
    """In a process of its own: the library that reads GGUF files stays out of this one."""
    command, environment = engine_command("engine.sources.gguf_text", file, directory)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TokenizerError(done.stderr.strip())
