"""The page at `/` and the files it is made of, each read once; a content policy lets nothing else run in it.

The policy allows scripts and styles of these files only, no inline ones, and forbids scripts to turn strings into
markup: what a model writes can reach the page as text alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

_FOLDER = Path(__file__).parent
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """`/`, and one route for every file under `/page/`."""
    names = sorted(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)
    return [_route("/", "index.html"), *(_route(f"/page/{name}", name) for name in names)]


def _route(path: str, name: str) -> Route:
    file = _FOLDER / name
    content = file.read_bytes()
    media_type = _MEDIA_TYPES[file.suffix]

    async def show(request: Request) -> Response:
        del request
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, show, methods=["GET"])
