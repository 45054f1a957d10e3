"""Options that several commands have: strict numbers, and the engine's choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

MODEL_HELP = "Checkpoint directory, GGUF file, pack directory, or `default`."
MAX_MIB = 2**24
NativeOption = Annotated[
    str | None,
    typer.Option("--native", help="GGUF file that a pack leaves tensors in.", metavar="FILE"),
]
PleGgufOption = Annotated[
    str | None,
    typer.Option("--ple-gguf", help="GGUF file to take the n-gram table from.", metavar="FILE"),
]
MtpOption = Annotated[
    str | None,
    typer.Option("--mtp", help="Directory to take the draft layer from.", metavar="DIR"),
]


def count(low: int, high: int) -> Callable[[str | int], int]:
    """A parser for whole numbers in [low, high]: digits and nothing else."""

    def parse(text: str | int) -> int:
        if isinstance(text, int):  # defaults come through here as well, already parsed
            return text
        plain = text.isascii() and text.isdigit() and len(text) < 20
        if not plain or not low <= int(text) <= high:
            raise typer.BadParameter(
                f"must be a whole number from {low} to {high}; found {text[:40]!r}"
            )
        return int(text)

    return parse


def count_or_auto(low: int, high: int) -> Callable[[str | int], int]:
    """The same; `auto` is -1, since a parser cannot give None."""
    parse_count = count(low, high)
    return lambda text: AUTO if text == "auto" else parse_count(text)


AUTO = -1


def number_option(name: str, text: str, low: int, high: int, *, auto: bool = False) -> Any:
    """An option with a whole number, or `auto`."""
    parse = count_or_auto(low, high) if auto else count(low, high)
    return typer.Option(name, help=text, parser=parse, metavar="auto|N" if auto else "N")


def word_option(name: str, text: str, allowed: tuple[str, ...]) -> Any:
    """An option with one of a few words."""

    def parse(value: str) -> str:
        if value not in allowed:
            raise typer.BadParameter(f"must be one of {', '.join(allowed)}; found {value[:40]!r}")
        return value

    return typer.Option(name, help=text, parser=parse, metavar="|".join(allowed))
