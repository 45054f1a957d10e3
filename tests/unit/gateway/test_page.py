"""What the page is served with, and what its files may not have. How it works in a browser: tests/browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from gateway.page import files
from gateway.page.files import page_routes
from tests.unit.gateway.asgi import asgi_client

FOLDER = Path(files.__file__).parent
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js"))
ROUTES = page_routes()


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_every_file_comes_with_the_policy(route: Route) -> None:
    async with asgi_client(Starlette(routes=ROUTES)) as client:
        response = await client.get(route.path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


async def test_types_and_unknown_files() -> None:
    async with asgi_client(Starlette(routes=ROUTES)) as client:
        types = {
            path: (await client.get(path)).headers["content-type"].partition(";")[0]
            for path in ("/", "/page/style.css", "/page/main.js")
        }
        missing = await client.get("/page/files.py")
    assert types == {
        "/": "text/html",
        "/page/style.css": "text/css",
        "/page/main.js": "text/javascript",
    }
    assert missing.status_code == 404


def test_what_the_files_name_is_served() -> None:
    served = {route.path for route in ROUTES}
    named = {
        f"/{path}" for path in re.findall(r'(?:src|href)="(page/[^"]+)"', text_of("index.html"))
    }
    for path in FILES:
        names = re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8"))
        named |= {f"/page/{name}" for name in names}
    assert named <= served
    assert served - named == {"/", "/page/index.html"}


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        outside = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not any(re.fullmatch(r"https?://[\w.-]+.*", url) for url in outside), path.name
    page = text_of("index.html")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", page)


def test_no_script_turns_text_into_markup_or_code() -> None:
    pattern = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
    )
    for path in FILES:
        assert not re.search(pattern, path.read_text(encoding="utf-8")), path.name


def test_scripts_find_the_elements_they_look_for() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', text_of("index.html")))
    for path in FILES:
        wanted = set(re.findall(r'byId\("([\w-]+)"\)', path.read_text(encoding="utf-8")))
        assert wanted <= ids, path.name
