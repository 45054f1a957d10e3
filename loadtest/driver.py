"""Runs a stage: starts conversations as a closed or an open loop says, plays their turns, collects records.

Bounded by Limits: past them nothing new starts, and what is in flight is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from loadtest.client import Outcome, RequestPlan, RequestRecord, send
from loadtest.pools import Pools

if TYPE_CHECKING:
    from loadtest.config import Limits, Target
    from loadtest.workload import Conversation

_RETRY_S = 1.0


@dataclass(slots=True, kw_only=True)
class Stage:
    """One run under constant conditions and what came of it."""

    name: str
    concurrency: int | None
    """Clients of a closed loop; None for an open loop."""
    start_s: float
    """On the event loop's clock, as the two below."""
    deadline_s: float
    """Nothing starts after this."""
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    end_s: float = 0.0
    """When the last request was over."""

    @property
    def measured_until_s(self) -> float:
        """The end of full load: after the deadline requests only run out."""
        return min(self.deadline_s, self.end_s)


@dataclass(slots=True, kw_only=True)
class Driver:
    """Plays conversations against one server."""

    http: httpx.AsyncClient
    target: Target
    limits: Limits
    source: Iterator[Conversation | RequestPlan]
    options: dict[str, object] = field(default_factory=dict[str, object])
    """Fields added to every request body."""
    also_expected: tuple[str, ...] = ()
    """Labels that are right for every request, whatever it is."""
    on_record: Callable[[RequestRecord], None] = lambda record: None
    _sent: int = 0

    async def closed_loop(self, concurrency: int) -> Stage:
        """`concurrency` clients, each sending its next conversation when its last one is over.

        A client that is told to come back later does so; one that gets no connection tries again after a second.
        """
        stage = self._begin(clients_name(concurrency), concurrency)

        async def client() -> None:
            while self._may_start(stage) and (item := self._next()) is not None:
                record = await self._play(item, stage, None)
                await asyncio.sleep(_hold_back_s(record, stage))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(client())
        return self._finish(stage)

    async def open_loop(self, name: str, starts_s: Iterable[float]) -> Stage:
        """Start conversations at the given times, whether or not earlier ones are answered."""
        stage = self._begin(name, None)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for offset_s in starts_s:
                intended_s = stage.start_s + offset_s
                if intended_s >= stage.deadline_s:
                    break
                await asyncio.sleep(max(0.0, intended_s - loop.time()))
                if self._sent >= self.limits.max_requests or (item := self._next()) is None:
                    break
                tasks.create_task(self._play(item, stage, intended_s))
                await asyncio.sleep(0)
        return self._finish(stage)

    def _begin(self, name: str, concurrency: int | None) -> Stage:
        self._sent = 0
        start_s = asyncio.get_running_loop().time()
        return Stage(
            name=name,
            concurrency=concurrency,
            start_s=start_s,
            deadline_s=start_s + self.limits.duration_s,
        )

    def _finish(self, stage: Stage) -> Stage:
        stage.end_s = asyncio.get_running_loop().time()
        return stage

    def _next(self) -> Conversation | RequestPlan | None:
        return next(self.source, None)

    def _may_start(self, stage: Stage) -> bool:
        before_deadline = asyncio.get_running_loop().time() < stage.deadline_s
        return self._sent < self.limits.max_requests and before_deadline

    async def _play(
        self, item: Conversation | RequestPlan, stage: Stage, intended_s: float | None
    ) -> RequestRecord:
        """Returns the last record. The first request is due at `intended_s`, or now; the others after the pause."""
        if isinstance(item, RequestPlan):
            return await self._send(item, stage, intended_s)
        messages: list[dict[str, Any]] = []
        if item.system is not None:
            messages.append({"role": "system", "content": item.system})
        messages.append({"role": "user", "content": item.turns[0]})
        record = await self._send(self._chat(item, messages), stage, intended_s)
        for turn in item.turns[1:]:
            if record.outcome is not Outcome.OK or not self._may_start(stage):
                break
            messages += _next_turn(item, record.text, turn, call_id=f"call_{len(messages)}")
            due_s = record.end_s + item.pause_s if item.pause_s else None
            await asyncio.sleep(item.pause_s)
            record = await self._send(self._chat(item, messages), stage, due_s)
        return record

    def _chat(self, item: Conversation, messages: list[dict[str, Any]]) -> RequestPlan:
        fields = {**self.options, "tools": item.tools} if item.tools else self.options
        return RequestPlan(
            body=chat_body(self.target.model, messages, item.max_tokens, fields),
            kind=item.kind,
            max_tokens=item.max_tokens,
        )

    async def _send(
        self, plan: RequestPlan, stage: Stage, intended_s: float | None
    ) -> RequestRecord:
        self._sent += 1
        if self.also_expected:
            plan = replace(plan, expected=(*plan.expected, *self.also_expected))
        record = await send(
            self.http, plan, intended_start_s=intended_s, timeout_s=self.target.timeout_s
        )
        stage.records.append(record)
        self.on_record(record)
        return record


def clients_name(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _next_turn(item: Conversation, answer: str, turn: str, *, call_id: str) -> list[dict[str, Any]]:
    """The answer and what follows it: the user's words, or a result for a call that we say the model made."""
    if not item.tools:
        return [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    function = {"name": item.tools[0]["function"]["name"], "arguments": "{}"}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": answer, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": turn},
    ]


def _hold_back_s(record: RequestRecord, stage: Stage) -> float:
    """As long as Retry-After says, if it says so in seconds; not past the stage's deadline."""
    if record.retry_after is None and record.outcome is not Outcome.CONNECTION:
        return 0.0
    text = record.retry_after or ""
    seconds = float(text) if text.isdecimal() else _RETRY_S
    return max(0.0, min(seconds, stage.deadline_s - record.end_s))


def chat_body(
    model: str, messages: list[dict[str, Any]], max_tokens: int, options: dict[str, object]
) -> bytes:
    """A streaming chat request that asks for usage."""
    return orjson.dumps(
        {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
    )


def http_client(target: Target) -> httpx.AsyncClient:
    """A client without a cap on connections, so that an open loop is never held back."""
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    tls = httpx.create_ssl_context(trust_env=False)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=target.base_url.rstrip("/") + "/",
        headers=headers,
        timeout=httpx.Timeout(target.timeout_s),
        transport=Pools(lambda: httpx.AsyncHTTPTransport(verify=tls, limits=limits)),
        trust_env=False,
    )
