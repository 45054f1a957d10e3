"""Commands on models: each runs in a process of its own, `python -m engine.tools`, so that nothing here loads tensors.

Options and help belong to that process; here stand only the names and what the overview says of them.
"""

from __future__ import annotations

import subprocess

import typer

from gateway.engine_commands import engine_command

COMMANDS = {
    "inspect": "Print a model's geometry, its parameters and bytes by part, and the state of a sequence.",
    "convert": "Write a checkpoint as a GGUF file, every value as it is.",
    "pack": "Write a model as a pack: files that load by being mapped.",
    "plan": "Print what a start would take, on this machine or another, without loading anything.",
    "profile": "Rank experts by how often a file of conversations is routed to them.",
    "floor": "Time a window's layers and nothing else, and count what it allocates.",
    "pack-budget": "Compare what a pack takes on disk with what an engine holds, part by part.",
}


def add_model_commands(app: typer.Typer) -> None:
    """Give the command line every command of COMMANDS."""
    for name, text in COMMANDS.items():
        app.command(
            name,
            help=text,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_hand_over)


def _hand_over(context: typer.Context) -> None:
    command, environment = engine_command("engine.tools", str(context.info_name), *context.args)
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            # The terminal has sent it to both; the command decides how it ends.
            continue
