"""`stratagate pack`: a model in files that load by being mapped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.config import model_path, text_path
from engine.errors import WeightMismatch
from engine.pack.plan import plan_pack
from engine.pack.reader import is_pack
from engine.pack.writer import write_pack
from engine.sources.gguf_files import GgufFiles
from engine.sources.gguf_text import TEXT_FILES, has_text, write_text_files
from engine.sources.opening import GGUF_SUFFIX, gguf_config, open_source, read_spec
from engine.tools.progress import byte_bar


def pack(
    source: Annotated[
        str, typer.Argument(help="Checkpoint directory, GGUF file (any shard), or `default`.")
    ],
    directory: Annotated[
        Path, typer.Argument(help="New directory, or that of an unfinished pack.")
    ],
    promote: Annotated[
        bool,
        typer.Option(
            "--promote",
            help="Hold 16-bit floats in 32 bits, as canonical packs do; they shrink back exactly.",
        ),
    ] = False,
) -> None:
    """Write a model as a pack. An interrupted run goes on where it stopped when it is started again."""
    path = model_path(source)
    if is_pack(path):
        raise typer.BadParameter(f"{path} is a pack already")
    spec = read_spec(path)
    opened = open_source(path, spec)
    plan = plan_pack(
        opened, spec, comment=f"from {path.name}", origin=_origin(path), promote=promote
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightMismatch(
            f"{directory}: cannot be made a directory: {error.strerror}"
        ) from error
    _write_texts(path, text_path(source), directory)
    with byte_bar() as advance:
        kept = write_pack(plan, directory, advance)
    opened.close()
    more = f", {kept / 2**20:.1f} MiB of them from an earlier run" if kept else ""
    typer.echo(f"{directory}: {plan.num_bytes / 2**20:.1f} MiB{more}")


def _origin(path: Path) -> str:
    """Names, sizes and times of the weight files."""
    files = path.parent.glob(f"*{GGUF_SUFFIX}") if path.is_file() else path.glob("*.safetensors")
    stats = [(file.name, file.stat()) for file in sorted(files)]
    return "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats)


def _write_texts(path: Path, texts: Path, directory: Path) -> None:
    """config.json, tokenizer and template: the checkpoint's own, or out of a GGUF file."""
    if path.suffix == GGUF_SUFFIX:
        files = GgufFiles(path, with_text=True)
        _write_config(gguf_config(files), directory)
        if not (texts / "tokenizer.json").is_file():
            if has_text(files.metadata):
                write_text_files(files.metadata, directory)
            return
    else:
        _write_config(json.loads((path / "config.json").read_text(encoding="utf-8")), directory)
    for name in TEXT_FILES:
        if (texts / name).is_file():
            shutil.copyfile(texts / name, directory / name)


def _write_config(config: dict[str, Any], directory: Path) -> None:
    """Without what it says of quantisation: a pack's tables say how its tensors are stored."""
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    text = json.dumps(kept, indent=1) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
