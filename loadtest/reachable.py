"""Before any load: is there such a server at the address, does it take the key, does it have the model?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import orjson

if TYPE_CHECKING:
    from loadtest.config import Target


class UnreachableError(Exception):
    """The address, the key or the model is not what the server has."""


async def check(http: httpx.AsyncClient, target: Target) -> None:
    """Ask for the list of models. Raises UnreachableError; a server without such a list is taken as it is."""
    try:
        response = await http.get("models")
    except httpx.HTTPError as error:
        raise UnreachableError(f"no server at {target.base_url}: {error!r}") from error
    match response.status_code:
        case 401 | 403:
            raise UnreachableError(
                f"{target.base_url} answers {response.status_code}: it wants another API key (--api-key-env)"
            )
        case 404 if not target.base_url.rstrip("/").endswith("/v1"):
            raise UnreachableError(
                f"{target.base_url}/models is not found: give the address with /v1, as OpenAI clients take it"
            )
        case 200:
            names = _names(response.content)
            if names and target.model not in names:
                raise UnreachableError(f"--model {target.model}: the server has {', '.join(names)}")
        case _:
            return


def _names(body: bytes) -> list[str]:
    """Ids of the models; empty for a list of another shape."""
    try:
        return [str(model["id"]) for model in orjson.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []
