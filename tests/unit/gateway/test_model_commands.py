"""Commands on models run beside the gateway: arguments and exit status go through, the overview lists them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.tools.__main__ import MODEL_PLACES, absent_model, main
from engine.tools.app import app as tools
from gateway.cli import app
from gateway.model_commands import COMMANDS


def test_the_overview_lists_every_command_that_there_is() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    assert all(name in text for name in COMMANDS)
    known = {c.name or c.callback.__name__ for c in tools.registered_commands if c.callback}
    assert known == set(COMMANDS) == set(MODEL_PLACES)


def test_arguments_and_status_go_through() -> None:
    command = (sys.executable, "-m", "gateway", "inspect", str(Path(__file__).parent))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(": no config.json; a checkpoint directory is required\n")


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("inspect /nowhere", "/nowhere"),
        ("plan nowhere --vram-mib 5", "nowhere"),
        ("pack /nowhere new", "/nowhere"),
        ("profile chats.jsonl /nowhere --out x", "/nowhere"),
        ("inspect default", None),
        ("inspect", None),
        ("convert default new.gguf", None),
        ("profile chats.jsonl", None),
        ("plan --native 5 /nowhere", None),
        ("plot /nowhere", None),
        ("", None),
    ],
)
def test_a_model_that_is_not_there_is_seen_by_its_place(line: str, absent: str | None) -> None:
    assert absent_model(line.split()) == absent


def test_a_model_that_is_not_there_is_seen_before_anything_is_imported_for_it() -> None:
    code = (
        "import sys; from engine.tools.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = (sys.executable, "-c", code, "inspect", "/nowhere")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "1 False False\n"
    assert done.stderr == "stratagate: /nowhere: no such file or directory\n"


def test_help_is_the_command_s_own() -> None:
    assert "[model]" in CliRunner().invoke(tools, ["inspect", "--help"]).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--vram-mib", "-5"], ["--vram-mib", "from 0 to 16777216", "'-5'"]),
        (["inspect", "--wrong"], ["--wrong"]),
        (["pack", "default"], ["directory"]),
        (["plot"], ["plot"]),
    ],
)
def test_a_bad_command_line_ends_with_one_line(
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["stratagate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("stratagate: ")
    assert err.count("\n") == 1
    assert all(word in err.lower() for word in words), err
