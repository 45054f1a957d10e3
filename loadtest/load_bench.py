"""Load time and peak memory of one model as a checkpoint, a pack and a GGUF file, each in a process of its own.

    python -m loadtest.load_bench [MODEL] [--runs 3] [--cold]

The forms are made in a temporary folder first. --cold drops a form's files from the page cache before each run, so
that they come from the disk; without it they come from memory. Best of the runs is given: anything else on the machine
can only make it slower.
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
    loading_bytes: int
    """Peak memory beyond that of the process before it loads."""

    def line(self) -> str:
        """A row of the table."""
        mib = 2**20
        return (
            f"| {self.form} | {self.file_bytes / mib:.0f} | {self.wall_s:.2f} | {self.cpu_s:.2f} "
            f"| {self.file_bytes / mib / self.wall_s:.0f} | {self.loading_bytes / mib:.0f} |"
        )


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")] = _DEFAULT,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each form.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    cold: Annotated[bool, typer.Option("--cold", help="Read from the disk.")] = False,
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
        typer.echo("| form | MiB on disk | s | CPU s | MiB/s | peak MiB |")
        typer.echo("|---|---|---|---|---|---|")
        for form, path in forms.items():
            typer.echo(_measure(form, path, runs, dtype, cold=cold).line())


def _measure(form: str, path: Path, runs: int, dtype: str, *, cold: bool) -> Measured:
    results: list[dict[str, float]] = []
    for _ in range(runs):
        if cold:
            _forget(path)
        text = _run(f"{_TOOLS}.load_time", str(path), "--dtype", dtype)
        results.append(json.loads(text))
    best = min(results, key=lambda result: result["wall_s"])
    return Measured(
        form=form,
        file_bytes=sum(file.stat().st_size for file in _files(path)),
        wall_s=best["wall_s"],
        cpu_s=best["cpu_s"],
        loading_bytes=int(best["peak_rss_bytes"] - best["rss_before_bytes"]),
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
