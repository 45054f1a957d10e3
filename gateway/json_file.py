"""Reading the small JSON files of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import orjson

from gateway.errors import TokenizerError

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.fields import JsonObject


def read_object(path: Path) -> JsonObject:
    """A JSON object from a file; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold an object")
    return cast("JsonObject", value)
