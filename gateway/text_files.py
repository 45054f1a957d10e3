"""Where a model's text files lie: beside its weights, or written out of a GGUF file's metadata while we run."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gateway.engine_commands import engine_command
from gateway.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Generator

    from scheduler.config import EngineConfig

_GGUF_SUFFIX = ".gguf"


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
    with TemporaryDirectory(prefix="stratagate-text-") as made:
        _write_out(file, made)
        yield Path(made)


def _write_out(file: str, directory: str) -> None:
    """In a process of its own: the library that reads GGUF files stays out of this one."""
    command, environment = engine_command("engine.sources.gguf_text", file, directory)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TokenizerError(done.stderr.strip())
