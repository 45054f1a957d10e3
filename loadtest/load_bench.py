"""Load time and peak memory of one model as a checkpoint, a pack and a GGUF file, each in a process of its own.

    python -m loadtest.load_bench [MODEL] [--runs 3] [--cold] [--expert-cache N]

The forms are made in a temporary folder first. --cold drops a form's files from the page cache before each run, so
that they come from the disk; without it they come from memory. --expert-cache: as of `serve`; 0 holds every expert in
tier two. The forms take turns, and the best of the runs is given: anything else on the machine can only make it slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_TOOLS = "engine.tools"
_DEFAULT = Path(__file__).resolve().parents[1] / "engine" / "default_model"


@dataclass(frozen=True, slots=True)
class Measured:
    """Best of the runs of one form."""

    form: str
    file_bytes: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Peak memory beyond that of the process before it loads, pages of mapped files included."""
    own_bytes: int
    """What of it is left when the model is loaded and lies in no file."""

    def line(self) -> str:
        """A row of the table."""
        mib = 2**20
        return (
            f"| {self.form} | {self.file_bytes / mib:.0f} | {self.wall_s:.2f} | {self.cpu_s:.2f} "
            f"| {self.peak_bytes / mib:.0f} | {self.own_bytes / mib:.0f} |"
        )


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")] = _DEFAULT,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each form.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    cold: Annotated[bool, typer.Option("--cold", help="Read from the disk.")] = False,
    expert_cache: Annotated[int | None, typer.Option(min=0, help="Slots of tier one.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the forms are made.")] = None,
) -> None:
    """Print a table of load times."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        forms = {
            "safetensors": model,
            "pack": Path(work) / "pack",
            "GGUF": Path(work) / "model.gguf",
        }
        _run(_TOOLS, "pack", str(model), str(forms["pack"]))
        _run(_TOOLS, "convert", str(model), str(forms["GGUF"]))
        options = ["--dtype", dtype]
        if expert_cache is not None:
            options += ["--expert-cache", str(expert_cache)]
        results: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
        for _ in range(runs):
            for form, path in forms.items():
                if cold:
                    _forget(path)
                text = _run(f"{_TOOLS}.load_time", str(path), *options)
                results[form].append(json.loads(text))
        typer.echo("| form | MiB on disk | s | CPU s | peak MiB | own MiB |")
        typer.echo("|---|---|---|---|---|---|")
        for form, path in forms.items():
            typer.echo(_best(form, path, results[form]).line())


def _best(form: str, path: Path, results: list[dict[str, float]]) -> Measured:
    return Measured(
        form=form,
        file_bytes=sum(file.stat().st_size for file in _files(path)),
        wall_s=min(result["wall_s"] for result in results),
        cpu_s=min(result["cpu_s"] for result in results),
        peak_bytes=int(min(result["peak_bytes"] for result in results)),
        own_bytes=int(min(result["own_bytes"] for result in results)),
    )


def _files(path: Path) -> Iterator[Path]:
    """The weight files of a form."""
    if path.is_file():
        yield path
        return
    yield from (f for f in path.rglob("*") if f.suffix in (".safetensors", ".bin"))


def _forget(path: Path) -> None:
    """Drop clean pages of the files from the page cache."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _run(module: str, *arguments: str) -> str:
    command = (sys.executable, "-m", module, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise typer.BadParameter(done.stderr.strip() or f"{' '.join(command)}: {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    typer.run(main)
