"""Commands on models, `python -m engine.tools COMMAND`; `stratagate COMMAND` hands over to this process.

They live beside the engine because they read tensors. Each command is a function of its own module.
"""

from __future__ import annotations

import sys

import typer

from engine.errors import EngineError
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


def main() -> None:
    """Run a command; a model that cannot be used ends it with status 1 and one line."""
    try:
        app(prog_name="stratagate")
    except EngineError as error:
        typer.echo(f"stratagate: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
