"""A bar for long commands: on a terminal alone, so that logs stay short."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def byte_bar() -> Generator[Callable[[str, int, int], None]]:
    """Gives a function to call with what is being done, bytes done and bytes in all."""
    columns = (TextColumn("{task.description:<40.40}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        yield advance
