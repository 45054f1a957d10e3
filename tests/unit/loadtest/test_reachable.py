"""A run against a wrong address, key or model ends before it begins."""

from __future__ import annotations

import httpx
import pytest

from loadtest.config import Target
from loadtest.reachable import UnreachableError, check

HAS_DEFAULT = httpx.Response(200, json={"data": [{"id": "default"}]})


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


async def ask(answer: httpx.Response | None, url: str = "http://server/v1") -> None:
    target = Target(base_url=url, model="default", api_key=None, timeout_s=1)
    transport = httpx.MockTransport(refuse if answer is None else lambda request: answer)
    async with httpx.AsyncClient(base_url=f"{url}/", transport=transport) as http:
        await check(http, target)


@pytest.mark.parametrize(
    ("answer", "url", "message"),
    [
        (None, "http://server/v1", "no server at http://server/v1"),
        (httpx.Response(404), "http://server", "with /v1"),
        (httpx.Response(401), "http://server/v1", "API key"),
        (httpx.Response(200, json={"data": [{"id": "a"}]}), "http://server/v1", "has a"),
    ],
)
async def test_what_cannot_work_is_told(
    answer: httpx.Response | None, url: str, message: str
) -> None:
    with pytest.raises(UnreachableError, match=message):
        await ask(answer, url)


@pytest.mark.parametrize("answer", [HAS_DEFAULT, httpx.Response(404), httpx.Response(200, text="")])
async def test_a_server_with_the_model_or_without_a_list_is_taken(answer: httpx.Response) -> None:
    await ask(answer)
