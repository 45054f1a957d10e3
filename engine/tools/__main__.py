"""Commands on models, `python -m engine.tools COMMAND`; `stratagate COMMAND` hands over to this process.

They live beside the engine because they read tensors.
"""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import TYPE_CHECKING

from engine.command_line import exit_status, say
from engine.config import model_path
from engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_FAILED = 1
MODEL_PLACES = {
    "inspect": 0,
    "convert": 0,
    "pack": 0,
    "pack-budget": 0,
    "plan": 0,
    "profile": 1,
    "floor": 0,
}
"""By command: which of its arguments names a model that must be there."""


def main() -> None:
    """Run a command. A model that cannot be used ends it with status 1, a bad command line with 2; one line each."""
    if (absent := absent_model(sys.argv[1:])) is not None:
        say(f"{absent}: no such file or directory")
        sys.exit(_EXIT_FAILED)
    try:
        status = exit_status(_run)
    except EngineError as error:
        say(str(error))
        status = _EXIT_FAILED
    sys.exit(status)


def absent_model(arguments: Sequence[str]) -> str | None:
    """The model of a command line, if there is no such path: seen before what reads models is imported.

    Only arguments before the first option are looked at; behind it one may be an option's value.
    """
    command, *others = arguments or [""]
    given = list(takewhile(lambda argument: not argument.startswith("-"), others))
    place = MODEL_PLACES.get(command)
    if place is None or place >= len(given) or model_path(given[place]).exists():
        return None
    return given[place]


def _run() -> int | None:
    from engine.tools.app import app

    return app(prog_name="stratagate", standalone_mode=False)


if __name__ == "__main__":
    main()
