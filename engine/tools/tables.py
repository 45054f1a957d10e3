"""Plain text tables: columns as wide as their longest cell, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A header, a rule and one line a row; the first column to the left, the others to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [_line(row, widths) for row in (header, *rows)]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *rest)).rstrip()
