"""Words for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 request`, `2 requests`: of a noun whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
