"""Everything around the generations: completions, models, health, metrics, keys, limits, CORS."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import httpx
import pytest

from engine.fake import FakeScript
from gateway.config import ApiKey, GatewayConfig
from tests.conformance.live import MODEL, chat_body, default_files, ids_of, live_server, says

if TYPE_CHECKING:
    from tests.conformance.live import Live

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def complete(live: Live, **fields: object) -> httpx.Response:
    return await live.client.post(COMPLETIONS, json={"model": MODEL, **fields})


async def test_completions_take_text_texts_and_ids() -> None:
    async with live_server(says("x y")) as live:
        ids = list(ids_of("Hello", end=False))
        for prompt, count in (("Hello", 1), (["Hello", "Hello"], 2), (ids, 1), ([ids, ids], 2)):
            answer = (await complete(live, prompt=prompt)).json()
            assert answer["object"] == "text_completion"
            assert answer["id"].startswith("cmpl-")
            assert [choice["text"] for choice in answer["choices"]] == ["x y"] * count
            assert answer["usage"]["prompt_tokens"] == count * len(ids)


async def test_completions_are_raw_and_sixteen_tokens_by_default() -> None:
    async with live_server(says("<think>a</think> " + "b " * 40)) as live:
        answer = (await complete(live, prompt="x")).json()
    assert answer["choices"][0]["text"].startswith("<think>a</think> b")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


async def test_echo_gives_the_prompt_back() -> None:
    async with live_server(says(" end")) as live:
        ids = list(ids_of("Go to the", end=False))
        answer = (await complete(live, prompt=ids, echo=True)).json()
        assert answer["choices"][0]["text"] == "Go to the end"
        raw = (await complete(live, prompt="Go", echo=True, stream=True)).text
        assert '"text":"Go"' in raw.split("\n\n")[0]


async def test_completion_logprobs_have_offsets_into_the_text() -> None:
    async with live_server(says("wörld is round")) as live:
        choice = (await complete(live, prompt="x", logprobs=1)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids_of("wörld is round")) - 1
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in name:
            assert choice["text"][offset:].startswith(name)


async def test_control_tokens_in_raw_prompts_are_text_unless_asked_for() -> None:
    async with live_server(says("x")) as live:
        text = "<|im_start|>"
        plain = (await complete(live, prompt=text)).json()["usage"]["prompt_tokens"]
        special = (await complete(live, prompt=text, parse_special=True)).json()
        assert plain > 1
        assert special["usage"]["prompt_tokens"] == 1


async def test_models() -> None:
    config = GatewayConfig(port=0, served_model_name="my/model")
    async with live_server(config=config) as live:
        listed = (await live.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["my/model"]
        assert (await live.client.get("/v1/models/my/model")).json() == listed["data"][0]
        missing = await live.client.get("/v1/models/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        answer = await live.client.post(CHAT, json={**chat_body(max_tokens=1), "model": "my/model"})
        assert answer.json()["model"] == "my/model"


async def test_unknown_paths_and_methods() -> None:
    async with live_server() as live:
        for method, path, status in (("GET", "/v2", 404), ("GET", CHAT, 405), ("PUT", "/", 405)):
            response = await live.client.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.headers["allow"]


async def test_keys_are_asked_for_under_v1_only() -> None:
    keys = (ApiKey(name="ann", secret="a-1"), ApiKey(name="bob", secret="b-2"))
    async with live_server(says("hi"), config=GatewayConfig(port=0, api_keys=keys)) as live:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic a-1"}):
            response = await live.client.post(CHAT, json=chat_body(), headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for headers in ({"authorization": "bearer b-2"}, {"x-api-key": "a-1"}):
            response = await live.client.post(CHAT, json=chat_body(), headers=headers)
            assert response.status_code == 200
        for path in ("/", "/health", "/ready", "/metrics"):
            assert (await live.client.get(path)).status_code == 200


async def test_bodies_beyond_the_limit_are_left_unread() -> None:
    async with live_server(config=GatewayConfig(port=0, max_body_bytes=1000)) as live:
        announced = await live.client.post(CHAT, json=chat_body("x" * 2000))
        assert announced.status_code == 413
        assert announced.json()["error"]["code"] == "body_too_large"

        async def parts():
            for _ in range(3):
                yield b" " * 500

        chunked = await live.client.post(
            CHAT, content=parts(), headers={"content-type": "application/json"}
        )
        assert chunked.status_code == 413
        assert (await live.client.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_must_say_that_it_is_json(kind: str | None) -> None:
    async with live_server() as live:
        headers = {} if kind is None else {"content-type": kind}
        response = await live.client.post(CHAT, content=b"{}", headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_a_compressed_body_is_refused_by_its_header() -> None:
    async with live_server() as live:
        for encoding, status in (("gzip", 415), ("identity", 200)):
            headers = {"content-encoding": encoding}
            response = await live.client.post(CHAT, json=chat_body(max_tokens=1), headers=headers)
            assert response.status_code == status
            assert ("Content-Encoding" in response.text) == (status == 415)


async def test_request_ids_go_in_and_out() -> None:
    async with live_server() as live:
        response = await live.client.get("/health", headers={"x-request-id": "my-id:1"})
        assert response.headers["x-request-id"] == "my-id:1"
        for bad in ("x" * 200, "a b", ""):
            response = await live.client.get("/health", headers={"x-request-id": bad})
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


async def test_other_origins_are_let_in_only_by_option() -> None:
    origin = "https://chat.example"
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    async with live_server() as live:
        response = await live.client.get("/health", headers={"origin": origin})
        assert "access-control-allow-origin" not in response.headers
    async with live_server(config=GatewayConfig(port=0, cors_origins=(origin,))) as live:
        response = await live.client.options(CHAT, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        response = await live.client.options(
            CHAT, headers={**preflight, "origin": "https://bad.example"}
        )
        assert "access-control-allow-origin" not in response.headers


async def test_a_page_of_an_allowed_origin_can_read_why_it_was_refused() -> None:
    origin = "https://chat.example"
    key = ApiKey(name="ann", secret="key")
    config = GatewayConfig(port=0, cors_origins=(origin,), api_keys=(key,), max_body_bytes=1000)
    asked = {"origin": origin, "authorization": "Bearer key", "content-type": "application/json"}
    async with live_server(FakeScript(), config=config) as live:
        for status, headers, body in (
            (401, {"origin": origin}, b"{}"),
            (400, asked, b"{}"),
            (413, asked, b" " * 2000),
            (415, {**asked, "content-type": "text/plain"}, b"{}"),
            (200, asked, json.dumps(chat_body(max_tokens=1)).encode()),
            (200, asked, json.dumps(chat_body(max_tokens=1, stream=True)).encode()),
        ):
            response = await live.client.post(CHAT, content=body, headers=headers)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == origin
            assert response.headers["x-request-id"]
            exposed = response.headers["access-control-expose-headers"].lower()
            assert "retry-after" in exposed and "x-request-id" in exposed


async def test_metrics_count_requests_tokens_and_drafts() -> None:
    async with live_server(says("one two three four five")) as live:
        await live.client.post(CHAT, json=chat_body())
        await live.client.post(CHAT, json=chat_body(stream=True))
        await live.client.post(CHAT, json=chat_body(max_tokens=0))
        await complete(live, prompt="x", max_tokens=1)
        text = (await live.client.get("/metrics")).text
    values = dict(re.findall(r"^(stratagate_[^ ]+) ([0-9.e+-]+)$", text, re.MULTILINE))
    count = 2 * len(ids_of("one two three four five")) + 1
    assert float(values["stratagate_completion_tokens_total"]) == count
    assert values['stratagate_requests_total{endpoint="chat",outcome="stop"}'] == "2.0"
    assert values['stratagate_requests_total{endpoint="chat",outcome="invalid_value"}'] == "1.0"
    assert values['stratagate_requests_total{endpoint="completions",outcome="length"}'] == "1.0"
    tokens = 'stratagate_request_tokens_total{kind="completion",outcome="%s"}'
    assert float(values[tokens % "stop"]) == count - 1
    assert float(values[tokens % "length"]) == 1
    assert float(values[tokens % "invalid_value"]) == 0
    prompts = re.findall(r'request_tokens_total{kind="prompt".*} (.*)', text)
    assert sum(map(float, prompts)) == float(values["stratagate_prompt_tokens_total"]) > 0
    assert values["stratagate_time_to_first_token_seconds_count"] == "3.0"
    assert float(values["stratagate_inter_token_seconds_count"]) > 0
    assert float(values['stratagate_drafts_offered_total{depth="1"}']) > 0
    assert values["stratagate_engine_up"] == "1.0"
    assert values["stratagate_slots"] == "4.0"
    assert values["stratagate_queue_length"] == "0.0"


async def test_an_idle_connection_is_the_clients_to_close() -> None:
    """A client that sends just as the server closes gets a reset instead of an answer."""
    async with live_server() as live:
        kept_by_go_s = 90
        assert live.server.config.timeout_keep_alive > kept_by_go_s


async def test_the_page_fetches_nothing_from_elsewhere() -> None:
    async with live_server() as live:
        response = await live.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", response.text)


async def test_defaults_of_the_model_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_server(says("x")) as live:
        seen = []
        submit = live.scheduler.submit
        monkeypatch.setattr(
            live.scheduler,
            "submit",
            lambda request, leader: (seen.append(request), submit(request, leader))[1],
        )
        defaults = default_files().defaults
        await complete(live, prompt="x")
        await complete(live, prompt="x", temperature=0, top_p=0.5, top_k=-1, seed=-1, spec=0)
        await complete(live, prompt="x", temperature=1e-9, user="u", ignore_eos=True, max_tokens=1)
    first, second, third = (request.sampling for request in seen)
    assert (first.temperature, first.top_p, first.top_k) == (
        defaults.temperature,
        defaults.top_p,
        defaults.top_k,
    )
    assert first.stop_token_ids == defaults.stop_token_ids
    assert (second.temperature, second.top_p, second.top_k) == (0.0, 0.5, 0)
    assert second.seed == 2**64 - 1
    assert seen[1].max_draft == 0
    assert third.temperature == 0.0
    assert third.stop_token_ids == ()
    assert seen[2].conversation_key == "u"


async def test_the_queue_is_bounded() -> None:
    from dataclasses import replace

    from scheduler.config import SchedulerConfig
    from tests.factories import FAST_SUPERVISION

    chosen = replace(SchedulerConfig(supervision=FAST_SUPERVISION), max_queue=1)
    script = FakeScript(decode_s=0.05, num_slots=1)
    async with live_server(script, scheduler_config=chosen) as live:
        both = chat_body(n=2, max_tokens=1000, stream=True)
        async with live.client.stream("POST", CHAT, json=both) as running:
            assert running.status_code == 200
            response = await live.client.post(CHAT, json=chat_body(max_tokens=1))
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        await live.wait_idle()
