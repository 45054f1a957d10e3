"""`stratagate convert`: a model as a GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from engine.config import model_path, text_path
from engine.sources.gguf_text import TEXT_FILES
from engine.sources.gguf_writer import write_gguf
from engine.sources.opening import GGUF_SUFFIX, open_source, read_spec
from engine.tools.progress import byte_bar


def convert(
    source: Annotated[
        str, typer.Argument(help="Checkpoint directory, pack directory, or `default`.")
    ],
    file: Annotated[Path, typer.Argument(help="GGUF file to write; must not exist.")],
    q8: Annotated[
        bool,
        typer.Option(
            "--q8",
            help="For llama.cpp: int8 rows as Q8_0 or fp16, a narrow n-gram embedding filled up with zeros.",
        ),
    ] = False,
) -> None:
    """Write a model as a GGUF file: floats as they are, int8 and fp8 as fp32; nothing is rounded without --q8."""
    if file.suffix != GGUF_SUFFIX:
        raise typer.BadParameter(f"found {file}, required a name that ends in {GGUF_SUFFIX}")
    if file.exists():
        raise typer.BadParameter(f"{file} exists")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{file.parent} is not a directory")
    path = model_path(source)
    spec = read_spec(path)
    opened = open_source(path, spec)
    # Nobody should find half a model under the name of a whole one.
    partial = file.with_name(f"{file.stem}.part{GGUF_SUFFIX}")
    with byte_bar() as advance:
        write_gguf(opened, spec, text_path(source), partial, q8=q8, progress=advance)
    opened.close()
    partial.rename(file)
    copied = [
        name for name in TEXT_FILES if _copy_new(text_path(source) / name, file.parent / name)
    ]
    typer.echo(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    if copied:
        typer.echo(f"beside it, for `serve --native`: {', '.join(copied)}")


def _copy_new(source: Path, target: Path) -> bool:
    """Copy a file that is not there yet; whether it was copied."""
    if not source.is_file() or target.exists():
        return False
    shutil.copyfile(source, target)
    return True
