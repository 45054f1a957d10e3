"""A client of an ASGI application in this process, without sockets."""

from __future__ import annotations

import httpx
from starlette.applications import Starlette


def asgi_client(app: Starlette, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """To be used as a context manager."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)
