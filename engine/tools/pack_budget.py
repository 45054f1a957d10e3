"""`stratagate pack-budget`: a pack's bytes against the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.geometry import parameters_by_part
from engine.pack.budget import pack_budget, total
from engine.pack.reader import is_pack
from engine.sources.opening import read_spec
from engine.tools.tables import table


def budget(directory: Annotated[Path, typer.Argument(help="Pack directory.")]) -> None:
    """Compare what a pack takes on disk with what an engine holds of it, part by part."""
    if not is_pack(directory):
        raise typer.BadParameter(f"{directory} is no pack: it has no index.txt")
    spec = read_spec(directory)
    parameters = parameters_by_part(spec)
    lines = pack_budget(directory, spec)
    rows = [
        (
            line.part,
            str(line.num_tensors),
            f"{line.pack:,}",
            f"{-line.shrunk:,}",
            f"{line.widened:+,}",
            f"{line.engine:,}",
            f"{line.engine / 2**30:.3f}",
            f"{2 * parameters.get(line.part, sum(parameters.values())) / 2**30:.3f}",
        )
        for line in (*lines, total(lines))
    ]
    header = (
        *("part", "tensors", "pack B", "16-bit floats", "fp16 scales"),
        *("engine B", "engine GiB", "all bf16 GiB"),
    )
    typer.echo(table(header, rows))
