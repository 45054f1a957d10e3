"""Complaints about translated fields, told in the names that the client used."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Within it, an InvalidRequest that names a field of the chat names what the field came from.

    names: first part of the chat's field to the client's.
    """
    try:
        yield
    except InvalidRequest as error:
        param = error.param
        if param is None:
            raise
        end = next((at for at, char in enumerate(param) if char in ".["), len(param))
        own = names.get(param[:end], param[:end]) + param[end:]
        # Tools are flat where they come from.
        own = _FUNCTION.sub(r"\1", own)
        if own == param:
            raise
        message = str(error)
        if message.startswith(param):
            message = own + message[len(param) :]
        raise InvalidRequest(message, param=own, code=error.code) from None
