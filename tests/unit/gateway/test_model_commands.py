"""Commands on models run beside the gateway: arguments and exit status go through, the overview lists them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from engine.tools.__main__ import app as tools
from gateway.cli import app
from gateway.model_commands import COMMANDS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "gateway", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_overview_lists_every_command_that_there_is() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    assert all(name in text for name in COMMANDS)
    known = {c.name or c.callback.__name__ for c in tools.registered_commands if c.callback}
    assert known == set(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("inspect", "--help"), 0, "stratagate inspect"),
        (("inspect", "--wrong"), 2, "No such option"),
        (("inspect", "/nowhere"), 1, "stratagate: /nowhere: no config.json"),
    ],
)
def test_arguments_and_status_go_through(
    arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = run(*arguments)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
