"""The commands of engine.tools, each a function of its own module. They read tensors: importing them takes a while."""

from __future__ import annotations

import typer

from engine.tools.convert import convert
from engine.tools.floor import floor
from engine.tools.inspect import inspect
from engine.tools.pack import pack
from engine.tools.pack_budget import budget
from engine.tools.plan import plan
from engine.tools.profile import profile

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(inspect)
app.command()(convert)
app.command()(pack)
app.command("pack-budget")(budget)
app.command()(plan)
app.command()(profile)
app.command()(floor)


@app.callback()
def root() -> None:
    """Look at, convert and pack models."""
