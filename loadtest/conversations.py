"""`python -m loadtest.conversations`: what parking and fair scheduling are worth, on servers it starts itself.

Four parts, each with its rows for docs/benchmarks.md: time to first token of turn k with and without the store; what a
restore takes and holds, by length; four chatting clients while a long prompt is read, against a server that reads it in
one piece; and the hit rate of real chats over few places. Use an idle machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from loadtest import scrape
from loadtest.client import Outcome, RequestPlan, RequestRecord, send
from loadtest.config import Target
from loadtest.driver import chat_body, http_client
from loadtest.server_process import ServerProcess, free_port, running
from loadtest.stats import percentile
from loadtest.workload import Conversation, from_sharegpt, random_text

if TYPE_CHECKING:
    import httpx

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TIMEOUT_S = 600.0
_WHOLE_PROMPT = "4096"
"""--prefill so large that a prompt of these is read in one piece: first come, first served."""
_NO_STORE = ("--conversation-cache-slots", "0")
_CHATTERS = 4
_GREEDY: dict[str, object] = {"temperature": 0, "ignore_eos": True}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    model: str
    options: tuple[str, ...]
    """Of every server."""
    repeats: int
    turns: int
    turn_words: int
    answer_tokens: int
    lengths: tuple[int, ...]
    """Words of the prompts to restore."""
    chat_words: int
    """Of a chatting client's prompt; the long one has ten times as many."""
    conversations: int
    places: int


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows as docs/benchmarks.md has them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(row)} |" for row in lines)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server and a client to it."""

    process: ServerProcess
    http: httpx.AsyncClient

    async def ask(self, messages: list[Message], max_tokens: int) -> RequestRecord:
        """One streamed answer, of exactly so many tokens. Raises RuntimeError when there is none."""
        plan = RequestPlan(body=chat_body("default", messages, max_tokens, _GREEDY))
        now_s = asyncio.get_running_loop().time()
        record = await send(self.http, plan, intended_start_s=now_s, timeout_s=_TIMEOUT_S)
        if record.outcome is not Outcome.OK:
            raise RuntimeError(f"{record.label}: {record.error}")
        return record

    async def sample(self) -> scrape.Sample:
        found = await scrape.fetch(self.http, self.process.root_url)
        if found is None:
            raise RuntimeError("the server has no /metrics")
        return found


@contextlib.contextmanager
def serving(sizes: Sizes, *options: str) -> Generator[ServerProcess]:
    """A server with these options."""
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--port", str(port)]
    command += ["--model", sizes.model, "--served-model-name", "default", *sizes.options, *options]
    with (
        tempfile.TemporaryDirectory() as directory,
        running(
            command, port=port, ready_path="/ready", log=Path(directory) / "log", timeout_s=600.0
        ) as process,
    ):
        yield process


@contextlib.asynccontextmanager
async def client_of(process: ServerProcess) -> AsyncGenerator[Server]:
    target = Target(
        base_url=f"{process.root_url}/v1", model="default", api_key=None, timeout_s=_TIMEOUT_S
    )
    async with http_client(target) as http:
        yield Server(process=process, http=http)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ttft_s(record: RequestRecord) -> float:
    found = record.ttft_s
    if found is None:
        raise RuntimeError("an answer without a chunk")
    return found


def ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}"


# Turn k


def first_tokens_by_turn(sizes: Sizes) -> Table:
    """The same conversations on a server with the store, and on one without."""
    found: list[list[list[RequestRecord]]] = []
    for options in ((), _NO_STORE):
        with serving(sizes, *options) as process:
            found.append(asyncio.run(_talk(sizes, process)))
    table = Table(
        title="Time to first token of turn k",
        columns=("turn", "prompt tokens", "cached", "with the store, ms", "without, ms"),
    )
    for turn in range(sizes.turns):
        kept, plain = ([talk[turn] for talk in talks] for talks in found)
        table.rows.append(
            (
                str(turn + 1),
                f"{statistics.median(r.prompt_tokens or 0 for r in kept):,.0f}",
                f"{statistics.median(r.cached_tokens or 0 for r in kept):,.0f}",
                ms(statistics.median(map(ttft_s, kept))),
                ms(statistics.median(map(ttft_s, plain))),
            )
        )
    return table


async def _talk(sizes: Sizes, process: ServerProcess) -> list[list[RequestRecord]]:
    """`repeats` conversations, one after the other, the same on every server."""
    talks: list[list[RequestRecord]] = []
    async with client_of(process) as server:
        await server.ask([user("Warm up.")], 4)
        for number in range(sizes.repeats):
            rng = Random(number)
            messages: list[Message] = []
            talk: list[RequestRecord] = []
            for _ in range(sizes.turns):
                messages.append(user(random_text(rng, sizes.turn_words)))
                talk.append(await server.ask(messages, sizes.answer_tokens))
                messages.append({"role": "assistant", "content": talk[-1].text})
            talks.append(talk)
    return talks


# Restores


def restores_by_length(sizes: Sizes) -> Table:
    """A follow-up to a prompt of each length, less what a fresh prompt as long as the unread part takes."""
    table = Table(
        title="Restoring a conversation",
        columns=("tokens restored", "first token, ms", "of it restore, ms", "parked, MiB"),
    )
    with serving(sizes) as process:
        for row in asyncio.run(_restore(sizes, process)):
            table.rows.append(row)
    return table


async def _restore(sizes: Sizes, process: ServerProcess) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    rng = Random(7)
    async with client_of(process) as server:
        await server.ask([user("Warm up.")], 4)
        fresh = [await server.ask([user(random_text(rng, 8))], 1) for _ in range(sizes.repeats)]
        for length in sizes.lengths:
            records: list[RequestRecord] = []
            held: list[float] = []
            for _ in range(sizes.repeats):
                before = (await server.sample()).parked_bytes
                messages = [user(random_text(rng, length))]
                first = await server.ask(messages, 1)
                await _settle(server)
                held.append((await server.sample()).parked_bytes - before)
                messages += [{"role": "assistant", "content": first.text}, user("Go on.")]
                records.append(await server.ask(messages, 1))
            seen_s = statistics.median(map(ttft_s, records))
            fresh_s = statistics.median(map(ttft_s, fresh))
            cached = statistics.median(r.cached_tokens or 0 for r in records)
            rows.append(
                (
                    f"{cached:,.0f}",
                    ms(seen_s),
                    f"{1000 * max(0.0, seen_s - fresh_s):,.1f}",
                    f"{max(held) / 2**20:,.1f}",
                )
            )
    return rows


async def _settle(server: Server) -> None:
    """Until the slots are empty and what they held is parked."""
    while not (await server.sample()).is_idle:  # noqa: ASYNC110 - asks over HTTP
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)


# A long prompt among chats


def chats_beside_a_long_prompt(sizes: Sizes) -> Table:
    """Four clients chat; then a prompt ten times as long comes in, cut into chunks or in one piece."""
    table = Table(
        title="Four chatting clients while a prompt ten times as long is read",
        columns=(
            "server",
            "TTFT p50, ms",
            "TTFT p99, ms",
            "between tokens p50, ms",
            "p99, ms",
            "longest, ms",
            "long prompt's TTFT, ms",
        ),
    )
    servers = (("chunks, decode share", ()), ("whole prompts, FIFO", ("--prefill", _WHOLE_PROMPT)))
    for name, options in servers:
        with serving(sizes, "--batch", "4", *options) as process:
            chats, longs = asyncio.run(_crowd(sizes, process))
        first = sorted(map(ttft_s, chats))
        gaps = sorted(gap for record in chats for gap in record.gaps_s)
        table.rows.append(
            (
                name,
                *(ms(percentile(first, percent)) for percent in (50, 99)),
                *(f"{1000 * percentile(gaps, percent):,.1f}" for percent in (50, 99)),
                ms(gaps[-1]),
                ms(statistics.median(map(ttft_s, longs))),
            )
        )
    return table


async def _crowd(
    sizes: Sizes, process: ServerProcess
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Records of the chats that overlapped a long prompt's reading, and of the long prompts."""
    chats: list[RequestRecord] = []
    longs: list[RequestRecord] = []
    stop = asyncio.Event()

    async def chat(server: Server, number: int) -> None:
        rng = Random(number)
        while not stop.is_set():
            words = random_text(rng, sizes.chat_words)
            chats.append(await server.ask([user(words)], sizes.answer_tokens))

    async with client_of(process) as server:
        await server.ask([user("Warm up.")], 4)
        async with asyncio.TaskGroup() as group:
            for number in range(_CHATTERS - 1):
                group.create_task(chat(server, number))
            await asyncio.sleep(1.0)
            # The fourth client's short chats and the long prompts take turns at the fourth slot.
            rng = Random(99)
            for _ in range(sizes.repeats):
                long_words = random_text(rng, 10 * sizes.chat_words)
                async with asyncio.TaskGroup() as pair:
                    long = pair.create_task(server.ask([user(long_words)], 1))
                    short = pair.create_task(
                        _after(server, 0.02, random_text(rng, sizes.chat_words), sizes)
                    )
                longs.append(long.result())
                chats.append(short.result())
            stop.set()
    began = [(r.start_s, r.start_s + ttft_s(r)) for r in longs]
    overlapping = [r for r in chats if any(r.start_s < b and r.end_s > a for a, b in began)]
    return overlapping, longs


async def _after(server: Server, pause_s: float, words: str, sizes: Sizes) -> RequestRecord:
    await asyncio.sleep(pause_s)
    return await server.ask([user(words)], sizes.answer_tokens)


# Real chats


def hits_of_real_chats(sizes: Sizes) -> Table:
    """Multi-turn chats that take turns over fewer places than there are chats."""
    chats = [
        chat
        for chat in from_sharegpt(
            max_conversations=50 * sizes.conversations,
            max_chars=1500,
            max_tokens=sizes.answer_tokens,
        )
        if len(chat.turns) > 1
    ][: sizes.conversations]
    table = Table(
        title=f"Replay of {len(chats)} multi-turn conversations over {sizes.places} parked places",
        columns=("follow-up turns", "that hit", "prompt tokens", "not read again", "TTFT p50, ms"),
    )
    with serving(sizes, "--conversation-cache-slots", str(sizes.places)) as process:
        records = asyncio.run(_replay(sizes, process, chats))
    hits = [record for record in records if record.cached_tokens]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in records)
    cached = sum(record.cached_tokens or 0 for record in records)
    table.rows.append(
        (
            str(len(records)),
            f"{len(hits)} ({len(hits) / len(records):.0%})",
            f"{prompt_tokens:,}",
            f"{cached:,} ({cached / prompt_tokens:.0%})",
            ms(statistics.median(map(ttft_s, records))),
        )
    )
    return table


async def _replay(
    sizes: Sizes, process: ServerProcess, chats: list[Conversation]
) -> list[RequestRecord]:
    """Follow-up turns, in an order in which a chat comes back after a random number of others, nearer ones likelier."""
    rng = Random(3)
    histories: dict[int, list[Message]] = {}
    records: list[RequestRecord] = []
    async with client_of(process) as server:
        while open_chats := [
            i for i, chat in enumerate(chats) if len(histories.get(i, ())) < 2 * _num_turns(chat)
        ]:
            index = open_chats[min(int(rng.expovariate(2 / sizes.places)), len(open_chats) - 1)]
            history = histories.setdefault(index, [])
            is_follow_up = bool(history)
            history.append(user(chats[index].turns[len(history) // 2]))
            try:
                record = await server.ask(history, sizes.answer_tokens)
            except RuntimeError:
                # Longer than the model's context: the chat ends here.
                del chats[index]
                histories = {i - (i > index): h for i, h in histories.items() if i != index}
                continue
            history.append({"role": "assistant", "content": record.text})
            if is_follow_up:
                records.append(record)
    return records


def _num_turns(chat: Conversation) -> int:
    return min(len(chat.turns), 8)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or default.")] = "default",
    out: Annotated[Path | None, typer.Option(help="JSON file for the tables.")] = None,
    parts: Annotated[
        str, typer.Option(help="Of turns, restores, crowd, replay: which, with commas.")
    ] = "turns,restores,crowd,replay",
    small: Annotated[bool, typer.Option(help="Little of everything: does it run?")] = False,
    option: Annotated[
        list[str] | None, typer.Option(help="More for every server, such as --option=--threads=1.")
    ] = None,
) -> None:
    """Prints one table per part, as docs/benchmarks.md has them."""
    sizes = Sizes(
        model=model,
        options=tuple(word for text in option or () for word in text.split("=", 1)),
        repeats=2 if small else 7,
        turns=3 if small else 8,
        turn_words=30 if small else 150,
        answer_tokens=8 if small else 48,
        lengths=(40, 120) if small else (200, 400, 800, 1600, 2400),
        chat_words=20 if small else 150,
        conversations=4 if small else 40,
        places=3 if small else 20,
    )
    measures = {
        "turns": first_tokens_by_turn,
        "restores": restores_by_length,
        "crowd": chats_beside_a_long_prompt,
        "replay": hits_of_real_chats,
    }
    chosen = [part.strip() for part in parts.split(",")]
    if unknown := set(chosen) - measures.keys():
        raise typer.BadParameter(
            f"--parts: {', '.join(sorted(unknown))}; known: {', '.join(measures)}"
        )
    load = os.getloadavg()[0]
    typer.echo(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"load before the start {load:.1f}; `{' '.join(['python -m loadtest.conversations', *sys.argv[1:]])}`"
    )
    tables: list[Table] = []
    for part in chosen:
        tables.append(measures[part](sizes))
        typer.echo(f"\n{tables[-1].markdown()}")
    if out is not None:
        found = [{"title": t.title, "columns": t.columns, "rows": t.rows} for t in tables]
        out.write_bytes(orjson.dumps({"load": load, "tables": found}, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    app()
