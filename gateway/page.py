"""The page at `/`: one file, no external fetches, and a content policy that holds it to that.

The policy names the file's own style and script by their hashes, so nothing else that gets into the page runs.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request


def page() -> Route:
    """The route of the page; its file is read once."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def show(request: Request) -> Response:
        del request
        return Response(text, headers=headers, media_type="text/html")

    return Route("/", show, methods=["GET"])


def _policy(text: str) -> str:
    return (
        f"default-src 'none'; script-src {_hash_of(text, 'script')}; "
        f"style-src {_hash_of(text, 'style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(text: str, tag: str) -> str:
    """The source expression of the one element with this tag."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
