"""Commands on models, `python -m engine.tools COMMAND`; `stratagate COMMAND` hands over to this process.

They live beside the engine because they read tensors. Each command is a function of its own module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from engine.errors import EngineError
from engine.tools.convert import convert
from engine.tools.floor import floor
from engine.tools.inspect import inspect
from engine.tools.pack import pack
from engine.tools.pack_budget import budget
from engine.tools.plan import plan
from engine.tools.profile import profile

if TYPE_CHECKING:
    from collections.abc import Callable

_EXIT_FAILED, _EXIT_USAGE, _EXIT_ABORTED = 1, 2, 130

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
    """Run a command. A model that cannot be used ends it with status 1, a bad command line with 2; one line each."""
    try:
        status = app(prog_name="stratagate", standalone_mode=False)
    except EngineError as error:
        status = _say(str(error), _EXIT_FAILED)
    except typer.Abort:
        status = _EXIT_ABORTED
    except Exception as error:
        # What a wrong command line raises has no public class in common, but this method.
        format_message: Callable[[], str] | None = getattr(error, "format_message", None)
        if format_message is None:
            raise
        status = _say(" ".join(format_message().split()), _EXIT_USAGE)
    sys.exit(status or 0)


def _say(message: str, status: int) -> int:
    if message:  # without a command the help was shown instead
        sys.stderr.write(f"stratagate: {message}\n")
    return status


if __name__ == "__main__":
    main()
