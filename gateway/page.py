"""The page at `/`: one file, no external fetches, a content policy that holds it to that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page() -> Route:
    """The route of the page; its file is read once."""
    body = (Path(__file__).parent / "page.html").read_bytes()

    async def show(request: Request) -> Response:
        del request
        return Response(body, headers=_HEADERS, media_type="text/html; charset=utf-8")

    return Route("/", show, methods=["GET"])
