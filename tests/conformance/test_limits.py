"""What one key, one host name or one request may take."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.fake import FakeScript
from gateway.config import ApiKey, GatewayConfig, read_api_keys
from gateway.errors import ConfigError, RateLimited
from gateway.h11_protocol import PlainHttpProtocol
from gateway.http_protocol import MAX_HEADER_BYTES
from gateway.json_log import JsonFormatter
from gateway.limits import Allowance, KeyLimits
from scheduler.config import SchedulerConfig
from tests.conformance.live import Live, chat_body, live_server, says, until

CHAT = "/v1/chat/completions"
HEADERS = {"authorization": "Bearer key"}


def limited(**limits: int) -> GatewayConfig:
    key = ApiKey(name="ann", secret="key", limits=KeyLimits(**limits))
    return GatewayConfig(port=0, api_keys=(key, ApiKey(name="bob", secret="other")))


async def refused(live: Live) -> dict[str, str]:
    response = await live.client.post(CHAT, json=chat_body(max_tokens=1))
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    other = await live.client.post(
        CHAT, json=chat_body(max_tokens=1), headers={"authorization": "Bearer other"}
    )
    assert other.status_code == 200
    return {"message": error["message"], "after": response.headers["retry-after"]}


def test_the_key_file_says_what_each_key_may_use(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nann: one\nbob:two  rpm=60 concurrent=4\n\nthree tpm=1000\n")
    ann, bob, third = read_api_keys(path)
    assert (ann.name, ann.secret, ann.limits) == ("ann", "one", KeyLimits())
    assert bob.limits == KeyLimits(requests_per_min=60, max_concurrent=4)
    assert (third.name, third.secret) == ("key5", "three")
    assert third.limits == KeyLimits(tokens_per_min=1000)


@pytest.mark.parametrize(
    "line", ["a:b c", "a:b rpm", "a:b rpm=", "a:b rpm=0", "a:b tpm=1e3", "a:b rpm=1 rpm=2", "a:"]
)
def test_a_line_that_cannot_be_read_stops_the_start(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ann:secret\n{line}\n")
    with pytest.raises(ConfigError, match=r"keys, line 2: ") as error:
        read_api_keys(path)
    assert "secret" not in str(error.value)


async def test_requests_a_minute() -> None:
    async with live_server(config=limited(requests_per_min=2), headers=HEADERS) as live:
        for _ in range(2):
            response = await live.client.post(CHAT, json=chat_body(max_tokens=1))
            assert response.status_code == 200
        error = await refused(live)
        assert "2 requests a minute" in error["message"]
        assert 20 <= int(error["after"]) <= 30
        # Reading what is served is free.
        for _ in range(3):
            assert (await live.client.get("/v1/models")).status_code == 200


async def test_tokens_a_minute_count_prompt_and_output() -> None:
    async with live_server(config=limited(tokens_per_min=60), headers=HEADERS) as live:
        fields = chat_body(stream=True, max_tokens=90, ignore_eos=True)
        # A request is never broken off for its key's sake.
        assert '"finish_reason":"length"' in (await live.client.post(CHAT, json=fields)).text
        assert "60 tokens a minute" in (await refused(live))["message"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_requests_at_once(streamed: bool) -> None:
    script = FakeScript(decode_s=0.01)
    async with live_server(script, config=limited(max_concurrent=1), headers=HEADERS) as live:
        body = chat_body(stream=streamed, max_tokens=4000, ignore_eos=True)
        running = asyncio.create_task(live.client.post(CHAT, json=body))
        await live.wait_busy()
        assert "1 may" in (await refused(live))["message"]
        running.cancel()
        await live.wait_idle()
        response = await live.client.post(CHAT, json=chat_body(max_tokens=1))
        assert response.status_code == 200


async def test_anthropics_paths_tell_it_in_their_own_shape() -> None:
    async with live_server(config=limited(requests_per_min=1), headers=HEADERS) as live:
        body = chat_body(max_tokens=1)
        assert (await live.client.post("/v1/messages", json=body)).status_code == 200
        response = await live.client.post("/v1/messages", json=body)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert response.json()["error"]["type"] == "rate_limit_error"


async def test_the_tokenizer_needs_a_key_too() -> None:
    async with live_server(config=limited()) as live:
        for path in ("/tokenize", "/detokenize"):
            assert (await live.client.post(path, json={})).status_code == 401


async def test_foreign_host_names_are_refused_on_the_loopback() -> None:
    config = GatewayConfig(port=0, allowed_hosts=("Box.lan",))
    async with live_server(config=config) as live:
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "a:b"):
            for path in ("/", "/health", "/v1/models"):
                response = await live.client.get(path, headers={"host": host})
                assert response.status_code == 403
                assert response.json()["error"]["code"] == "host_not_allowed"
        for host in (
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:1",
            "[::1]:1",
            "box.lan:80",
            "10.0.0.1",
        ):
            response = await live.client.get("/health", headers={"host": host})
            assert response.status_code == 200


async def test_a_server_for_others_answers_to_any_name_unless_some_are_listed() -> None:
    foreign = {"host": "evil.example"}
    for hosts, status in (((), 200), (("box.lan",), 403)):
        config = GatewayConfig(host="0.0.0.0", port=0, allowed_hosts=hosts)
        async with live_server(config=config) as live:
            url = live.url.replace("0.0.0.0", "127.0.0.1")
            response = await live.client.get(f"{url}/health", headers=foreign)
            assert response.status_code == status


async def status_line(live: Live, data: bytes) -> bytes:
    """The first line of an answer, whose connection may stay open."""
    return await answer_to(live, data, asyncio.StreamReader.readline)


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "0.0.0.0"])
async def test_a_request_must_name_one_host(bound_to: str) -> None:
    asked = (
        (b"1.1", b"", 400),
        (b"1.1", b"Host:\r\n", 400),
        (b"1.1", b"Host: localhost\r\nHost: evil.example\r\n", 400),
        (b"1.0", b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"1.1", b"Host: localhost\r\n", 200),
        # What probes send; a browser does not.
        (b"1.0", b"", 200),
    )
    async with live_server(config=GatewayConfig(host=bound_to, port=0)) as live:
        for version, headers, status in asked:
            request = b"GET /health HTTP/%b\r\n%b\r\n" % (version, headers)
            line = await status_line(live, request)
            assert line.startswith(b"HTTP/1.1 %d" % status), request


async def test_headers_are_bounded() -> None:
    async with live_server() as live:
        many = b"".join(b"X-A%d: b\r\n" % number for number in range(MAX_HEADER_BYTES // 8))
        for headers in (b"X-A: " + b"b" * (MAX_HEADER_BYTES + 10), many):
            answer = await raw_answer(live, b"GET /health HTTP/1.1\r\n" + headers)
            assert refusal_in(answer, 431)["code"] == "headers_too_large"
        good = {"x-filler": "b" * (MAX_HEADER_BYTES // 2)}
        # Bodies do not count, and every request of a connection has the whole bound.
        for _ in range(3):
            response = await live.client.post(CHAT, json=chat_body("x" * 100_000), headers=good)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"


async def raw_answer(live: Live, data: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    return await answer_to(live, data, asyncio.StreamReader.read)


async def answer_to(
    live: Live, data: bytes, read: Callable[[asyncio.StreamReader], Awaitable[bytes]]
) -> bytes:
    reader, writer = await asyncio.open_connection(*live.address)
    try:
        writer.write(data)
        return await asyncio.wait_for(read(reader), 5.0)
    finally:
        writer.close()


def refusal_in(answer: bytes, status: int) -> dict[str, str | None]:
    """The error of an answer that ends its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *headers = head.lower().split(b"\r\n")
    assert line.startswith(b"http/1.1 %d " % status)
    assert b"connection: close" in headers
    assert b"content-type: application/json" in headers
    assert b"content-length: %d" % len(body) in headers
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "data",
    [
        b"no HTTP\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
@pytest.mark.parametrize("has_httptools", [True, False])
async def test_what_is_no_http_gets_an_error_object(
    data: bytes, has_httptools: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_httptools:
        monkeypatch.setattr("gateway.server._http_protocol", lambda: PlainHttpProtocol)
    async with live_server() as live:
        assert refusal_in(await raw_answer(live, data), 400)["code"] == "bad_request"
        assert (await live.client.get("/health")).status_code == 200


@pytest.fixture(params=[True, False], ids=["httptools", "h11"])
def either_protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr("gateway.server._http_protocol", lambda: PlainHttpProtocol)


BEGUN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
"""A head without its end."""


@pytest.mark.usefixtures("either_protocol")
async def test_a_head_that_does_not_end_is_refused_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.heads.HEAD_TIMEOUT_S", 0.3)
    async with live_server() as live:
        reader, writer = await asyncio.open_connection(*live.address)
        for _ in range(2):  # behind a request that was answered as well
            writer.write(BEGUN + b"\r\n")
            assert b'"ok"' in await reader.readuntil(b"}")
        writer.write(BEGUN)

        async def trickle() -> None:
            for _ in range(100):
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert refusal_in(await reader.read(), 408)["code"] == "headers_timeout"
        trickling.cancel()
        writer.close()
        assert (await live.client.get("/health")).status_code == 200


@pytest.mark.usefixtures("either_protocol")
async def test_a_connection_that_sends_nothing_is_closed_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.heads.KEEP_ALIVE_S", 0.2)
    async with live_server() as live:
        reader, writer = await asyncio.open_connection(*live.address)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("either_protocol")
async def test_a_head_may_wait_for_the_answer_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.heads.HEAD_TIMEOUT_S", 0.1)
    async with live_server(says("word " * 40, decode_s=0.02)) as live:
        body = json.dumps(chat_body()).encode()
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await live.wait_busy()
        writer.write(BEGUN)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"word word" in await reader.readuntil(b"}}}")
        writer.write(b"\r\n")
        assert b'"ok"' in await reader.readuntil(b"}")
        writer.close()


@pytest.mark.usefixtures("either_protocol")
async def test_beyond_a_number_of_unfinished_heads_the_oldest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.heads.MAX_PENDING", 3)
    monkeypatch.setattr("gateway.heads.GRACE_S", 0.2)
    async with live_server() as live:
        opened = [await asyncio.open_connection(*live.address) for _ in range(5)]
        for _, writer in opened:
            writer.write(BEGUN)
        await asyncio.sleep(0.3)
        assert (await live.client.get("/health")).status_code == 200
        for reader, _ in opened[:3]:
            assert refusal_in(await reader.read(), 408)["code"] == "headers_timeout"
        for reader, writer in opened[3:]:
            writer.write(b"\r\n")
            assert b'"ok"' in await reader.readuntil(b"}")
        for _, writer in opened:
            writer.close()


async def test_what_is_no_http_is_not_answered_inside_another_answer() -> None:
    async with live_server(says("word " * 200, decode_s=0.02)) as live:
        body = json.dumps(chat_body(stream=True)).encode()
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        begun = await reader.readuntil(b"data: ")
        writer.write(b"no HTTP\r\n\r\n")
        rest = await asyncio.wait_for(reader.read(), 5.0)
        assert (begun + rest).count(b"HTTP/1.1 ") == 1
        assert b"bad_request" not in rest
        writer.close()


def test_one_is_not_many() -> None:
    key = Allowance(KeyLimits(requests_per_min=1), lambda: 0.0)
    key.begin()
    with pytest.raises(RateLimited, match="may send 1 request a minute"):
        key.begin()
    key = Allowance(KeyLimits(max_concurrent=1), lambda: 0.0)
    key.begin()
    with pytest.raises(RateLimited, match="has 1 running request, and 1 may run"):
        key.begin()


@pytest.mark.parametrize("has_httptools", [True, False], ids=["httptools", "h11"])
async def test_the_connection_of_a_stalled_reader_is_dropped(
    has_httptools: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not has_httptools:
        monkeypatch.setattr("gateway.server._http_protocol", lambda: PlainHttpProtocol)
    caplog.set_level(logging.INFO)
    config = GatewayConfig(port=0, send_timeout_s=0.3, keepalive_s=60.0)
    async with live_server(FakeScript(), config=config) as live:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(live.address)
        fields = chat_body(
            stream=True, max_tokens=4000, ignore_eos=True, logprobs=True, top_logprobs=20, n=4
        )
        body = json.dumps(fields).encode()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await live.wait_busy()
        assert live.server.server_state.connections
        await until(lambda: not live.server.server_state.connections, 15.0)
        await until(lambda: not live.server.server_state.tasks)
        connection.close()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    (line,) = [record for record in caplog.records if record.name == "stratagate.access"]
    assert line.getMessage().startswith(f"POST {CHAT} 200 ")
    assert line.getMessage().endswith(" cut: the reader took nothing for 0.3 s")


async def test_logs_as_json_have_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with live_server(says("secret answer")) as live:
        await live.client.post(CHAT, json=chat_body("secret prompt"), headers={"x-request-id": "a"})
    lines = [JsonFormatter().format(record) for record in caplog.records]
    (line,) = [json.loads(line) for line in lines if '"stratagate.access"' in line]
    assert line["path"] == CHAT
    assert (line["status"], line["request_id"], line["key"]) == (200, "a", None)
    assert line["level"] == "info"
    assert not any("secret" in line for line in lines)


def test_failures_in_json_logs_have_their_traceback() -> None:
    try:
        raise ValueError("bad")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "m %d", (1,), None)
        record.exc_info = (type(error), error, error.__traceback__)
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "m 1"
    assert "ValueError: bad" in line["exception"]


async def test_a_request_is_given_up_at_its_deadline() -> None:
    async with live_server(FakeScript(decode_s=0.05)) as live:
        body = chat_body(max_tokens=4000, ignore_eos=True, deadline_s=1)
        response = await live.client.post(CHAT, json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await live.wait_idle()


async def test_a_request_of_higher_priority_overtakes_those_that_wait() -> None:
    async with live_server(FakeScript(decode_s=0.01, num_slots=1)) as live:
        ended: list[str] = []

        async def ask(name: str, **fields: int) -> None:
            await live.client.post(CHAT, json=chat_body(max_tokens=40, ignore_eos=True, **fields))
            ended.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("first"))
            await live.wait_busy()
            tasks.create_task(ask("later", priority=3))
            await asyncio.sleep(0.05)
            tasks.create_task(ask("sooner", priority=-3))
        assert ended.index("sooner") < ended.index("later")


async def test_more_choices_than_can_ever_be_admitted_are_not_told_to_come_again() -> None:
    async with live_server(scheduler_config=SchedulerConfig(max_queue=2)) as live:
        body = {"model": "default", "prompt": ["a", "b", "c"], "max_tokens": 1}
        allowed = await live.client.post("/v1/completions", json={**body, "n": 2})
        assert allowed.status_code == 200
        for path, extra, param in (
            ("/v1/completions", {**body, "n": 3}, "n"),
            ("/v1/completions", {**body, "prompt": ["a"] * 7}, "prompt"),
            (CHAT, chat_body(max_tokens=1, n=7), "n"),
        ):
            response = await live.client.post(path, json=extra)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param
            assert "slots and queue hold 6" in error["message"]
        assert live.scheduler.stats().totals.submitted == 6
