"""Text to token ids and token ids to bytes, over a `tokenizer.json`; loaded once and shared.

Knows which ids are control tokens and keeps them apart from text: `encode_text` never yields one, whatever the
text says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import orjson
from tokenizers import Tokenizer as HfTokenizer

from gateway.errors import TokenizerError

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.fields import JsonObject

_PARSED_TAGS = frozenset(
    {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
)
"""Control tokens that the output parser reads as text, so they are never dropped from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """A token that only the chat template may put into a prompt."""

    id: int
    text: str
    is_hidden: bool
    """Never part of delivered text (`special` in the file), as end-of-turn marks are."""
    strips_left: bool = False
    """Takes the white space before it."""
    strips_right: bool = False


class Tokenizer(Protocol):
    """What the gateway needs of a tokenizer."""

    @property
    def control_tokens(self) -> tuple[ControlToken, ...]:
        """Every added token."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """A text's first space belongs to the encoding (sentencepiece), not to the text."""
        ...

    @property
    def most_chars_per_token(self) -> int:
        """No token stands for more characters of a text."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token. May take long; does not hold the interpreter."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What an output id adds to the text; empty for hidden tokens and ids that have no text."""
        ...

    def token_text(self, token_id: int) -> str:
        """A readable name of any id, hidden ones included."""
        ...


class FileTokenizer:
    """A Tokenizer over a `tokenizer.json` of a byte-level BPE or a sentencepiece-like model."""

    def __init__(self, path: Path) -> None:
        """Raises TokenizerError for a file that is missing, unreadable or of a kind unknown here."""
        try:
            text = path.read_text(encoding="utf-8")
            document = cast("JsonObject", orjson.loads(text))
            full = HfTokenizer.from_str(text)
            self._plain = _without_control_tokens(document)
        except OSError as error:
            raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not a usable tokenizer: {error}") from error
        to_bytes, self._strips_first_space = _byte_reader(document, path)
        self._control_tokens = tuple(
            ControlToken(
                id=token_id,
                text=token.content,
                is_hidden=token.special and token.content not in _PARSED_TAGS,
                strips_left=token.lstrip,
                strips_right=token.rstrip,
            )
            for token_id, token in sorted(full.get_added_tokens_decoder().items())
        )
        control = {token.id: token for token in self._control_tokens}
        size = max(full.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._names = [full.id_to_token(token_id) or "" for token_id in range(size)]
        self._bytes = [
            to_bytes(name) if token_id not in control else _control_bytes(control[token_id])
            for token_id, name in enumerate(self._names)
        ]
        # A character has a byte or more, so a token has no more characters than bytes.
        self._most_chars = max(1, *map(len, self._bytes))

    @property
    def control_tokens(self) -> tuple[ControlToken, ...]:
        return self._control_tokens

    @property
    def strips_first_space(self) -> bool:
        return self._strips_first_space

    @property
    def most_chars_per_token(self) -> int:
        return self._most_chars

    def encode_text(self, text: str) -> list[int]:
        # Of the library's two ways to encode, only the batch lets other threads run meanwhile.
        return self._plain.encode_batch([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        if token_id >= len(self._names):
            return ""
        data = self._bytes[token_id]
        return data.decode("utf-8", errors="replace") if data else self._names[token_id]


def _control_bytes(token: ControlToken) -> bytes:
    return b"" if token.is_hidden else token.text.encode()


def _without_control_tokens(document: JsonObject) -> HfTokenizer:
    """The same tokenizer, with every added token unknown to it."""
    added = cast("list[dict[str, object]]", document.get("added_tokens") or [])
    names = {token["content"] for token in added}
    model = cast("JsonObject", document["model"])
    vocab = model.get("vocab")
    if model.get("type") == "BPE" and isinstance(vocab, dict):
        items = cast("dict[str, int]", vocab).items()
        model = {**model, "vocab": {name: index for name, index in items if name not in names}}
    plain: JsonObject = {
        **document,
        "model": model,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return HfTokenizer.from_str(orjson.dumps(plain).decode())


def _byte_reader(document: JsonObject, path: Path) -> tuple[_ByteReader, bool]:
    """How vocabulary entries spell bytes, read from the file's decoder."""
    decoder = cast("JsonObject", document.get("decoder") or {})
    steps = cast("list[JsonObject]", decoder.get("decoders") or [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelReader(), False
    if "Metaspace" in kinds or ("ByteFallback" in kinds and "Replace" in kinds):
        strips = "Strip" in kinds or any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never"
            for step in steps
        )
        return _MetaspaceReader(), strips
    raise TokenizerError(
        f"{path}: the decoder {kinds} is not supported; ByteLevel and Metaspace are"
    )


class _ByteReader(Protocol):
    def __call__(self, name: str) -> bytes: ...


class _ByteLevelReader:
    """Each character of an entry stands for one byte (GPT-2's table)."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(256 + index): byte for index, byte in enumerate(others)}

    def __call__(self, name: str) -> bytes:
        try:
            return bytes([self._bytes[char] for char in name])
        except KeyError:
            return name.encode()


class _MetaspaceReader:
    """Entries are text in which U+2581 is a space; `<0xNN>` is one byte."""

    def __call__(self, name: str) -> bytes:
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()
