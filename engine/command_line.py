"""How a command ends: what is wrong with its line is said in one line, so that a supervisor's log shows it whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_USAGE, EXIT_ABORTED = 2, 130


def exit_status(run: Callable[[], int | None]) -> int:
    """Run a typer application that is not standalone. A command line that it refuses is said and has EXIT_USAGE."""
    try:
        return run() or 0
    except typer.Abort:
        return EXIT_ABORTED
    except Exception as error:
        # What a wrong command line raises has no public class in common, but this method.
        format_message: Callable[[], str] | None = getattr(error, "format_message", None)
        if format_message is None:
            raise
        # Without a command the help was shown instead, and there is nothing to say.
        if message := " ".join(format_message().split()):
            say(message)
        return EXIT_USAGE


def say(message: str) -> None:
    """Why the command ends, on standard error."""
    sys.stderr.write(f"stratagate: {message}\n")
