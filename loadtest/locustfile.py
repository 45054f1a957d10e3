"""Users for locust, with what matters of a stream as locust events.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080 --headless -u 8 -r 2 -t 1m --csv results

Beside locust's own row for each request (its whole time), these rows appear under type SSE: TTFT, ITL (gap between
chunks), TPOT (time per output token after the first chunk), all in ms, and `tokens/s`, whose "ms" are tokens per
second of one stream. Choose users with --class-picker in the web UI or by naming them on the command line.

Needs the extra `loadtest`. Runs under gevent, so nothing of the asyncio driver is used here.
"""

# locust's own annotations are partial: what its events, options and responses are, pyright cannot know.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from locust import HttpUser, between, events, task

from loadtest.workload import AGENT_TOOLS, random_text

if TYPE_CHECKING:
    from locust.argument_parser import LocustArgumentParser

_MS = 1000


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:  # pyright: ignore[reportUnusedFunction]
    """Options of ours, also as environment variables LOCUST_MODEL and so on."""
    parser.add_argument("--model", env_var="LOCUST_MODEL", default="default")
    parser.add_argument("--max-tokens", type=int, env_var="LOCUST_MAX_TOKENS", default=64)
    parser.add_argument("--document-words", type=int, env_var="LOCUST_DOCUMENT_WORDS", default=1500)


@dataclass(slots=True)
class Stream:
    """What one streamed answer gave."""

    chunk_times_s: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    completion_tokens: int = 0
    finished: bool = False


class StreamingUser(HttpUser):
    """Base of all users: sends a chat request and reports its stream."""

    abstract = True
    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            self.client.headers["authorization"] = f"Bearer {key}"

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        name: str,
        leave_after_chunks: int | None = None,
        **fields: Any,
    ) -> str | None:
        """Send, read, report. Returns the text, or None when the request failed or we left."""
        body = {
            "model": self.options.model,
            "messages": messages,
            "max_tokens": self.options.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        start_s = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, name=name, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}: {response.text[:200]}")
                return None
            stream = Stream()
            try:
                for payload in _events(response.iter_lines()):
                    _take(payload, stream)
                    if len(stream.chunk_times_s) == leave_after_chunks:
                        response.close()
                        response.success()
                        return None
            except (ValueError, OSError) as error:
                response.failure(f"stream: {error}")
                return None
            if not stream.finished:
                response.failure("the stream ended without a finish_reason")
                return None
            # locust stopped its clock at the answer's head.
            meta = cast("dict[str, Any]", response.request_meta)
            meta["response_time"] = (time.perf_counter() - start_s) * _MS
            response.success()
        self._report(name, start_s, stream)
        return "".join(stream.text)

    def _report(self, name: str, start_s: float, stream: Stream) -> None:
        times = stream.chunk_times_s
        if not times:
            return
        self._fire(f"{name} TTFT", (times[0] - start_s) * _MS, stream.completion_tokens)
        for earlier, later in zip(times, times[1:], strict=False):
            self._fire(f"{name} ITL", (later - earlier) * _MS)
        if stream.completion_tokens > 1 and len(times) > 1:
            self._fire(
                f"{name} TPOT", (times[-1] - times[0]) * _MS / (stream.completion_tokens - 1)
            )
            self._fire(f"{name} tokens/s", stream.completion_tokens / (times[-1] - start_s))

    def _fire(self, name: str, value: float, length: int = 0) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=value,
            response_length=length,
            exception=None,
            context={},
        )


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Payloads up to [DONE]; raises ValueError without it, for JSON that is none and for an error event.

    Reads on to the end of the body, so that the connection can carry the next request.
    """
    done = False
    for line in lines:
        if done or not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        payload: dict[str, Any] = json.loads(data)
        if payload.get("error"):
            raise ValueError(payload["error"])
        yield payload
    if not done:
        raise ValueError("ended without [DONE]")


def _take(payload: dict[str, Any], stream: Stream) -> None:
    stream.completion_tokens = (payload.get("usage") or {}).get(
        "completion_tokens", stream.completion_tokens
    )
    for choice in payload["choices"]:
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            stream.chunk_times_s.append(time.perf_counter())
            stream.text.append(delta.get("content") or "")
        stream.finished = stream.finished or bool(choice.get("finish_reason"))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class ChatUser(StreamingUser):
    """One question, one answer."""

    weight = 4

    @task
    def ask(self) -> None:
        rng = random.Random()
        self.chat([_user(random_text(rng, rng.randint(5, 120)))], name="chat")


class MultiTurnUser(StreamingUser):
    """A conversation of up to six turns; each request carries all that was said before."""

    weight = 3

    @task
    def converse(self) -> None:
        rng = random.Random()
        messages: list[dict[str, Any]] = []
        for _ in range(rng.randint(2, 6)):
            messages.append(_user(random_text(rng, rng.randint(5, 60))))
            answer = self.chat(messages, name="multi-turn")
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})
            self.wait()


class AgentUser(StreamingUser):
    """An agent: all of them share one long system prompt and the same tools; tool results come back at once."""

    weight = 2
    system_prompt = random_text(random.Random(7), 700)

    @task
    def work(self) -> None:
        rng = random.Random()
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.system_prompt},
            _user(random_text(rng, 30)),
        ]
        for step in range(rng.randint(2, 5)):
            answer = self.chat(messages, name="agent", tools=AGENT_TOOLS, temperature=0.2)
            if answer is None:
                return
            call = {
                "id": f"call_{step}",
                "type": "function",
                "function": {"name": "read_file", "arguments": json.dumps({"path": "a.txt"})},
            }
            messages += [
                {"role": "assistant", "content": answer, "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": random_text(rng, rng.randint(20, 150)),
                },
            ]


class LongDocumentUser(StreamingUser):
    """A long document and a short question about it."""

    weight = 1

    @task
    def summarise(self) -> None:
        text = random_text(random.Random(), self.options.document_words)
        self.chat([_user(f"{text}\n\nWhat is this about?")], name="document")


class ImpatientUser(StreamingUser):
    """Leaves in the middle of the answer."""

    weight = 1

    @task
    def leave(self) -> None:
        rng = random.Random()
        self.chat(
            [_user(random_text(rng, 40))], name="impatient", leave_after_chunks=rng.randint(1, 10)
        )
