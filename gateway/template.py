"""Messages to prompt ids through the checkpoint's chat template, with a wall between control tokens and text.

The template is code from the checkpoint and runs in Jinja's sandbox. Every string that came from a client is
*guarded* before it goes in: a MARK is put after each character that begins a control token, and at both ends. A
control token in the rendered text can then only be one that the template itself wrote: any that touches client
text has a MARK in it. The rendered text is cut at the control tokens, the marks are taken out, and the pieces are
encoded by a tokenizer that knows no control tokens. Both marks are Unicode noncharacters; where a client sends
one, it is escaped and comes out again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.chat_messages import Role
from gateway.errors import InvalidRequest, TokenizerError, shorten
from gateway.json_file import read_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jinja2.nodes import Node
    from jinja2.parser import Parser

    from gateway.chat_messages import Message
    from gateway.fields import JsonObject
    from gateway.tokenizer import ControlToken, Tokenizer
    from gateway.tools import Tool

MARK = "\U0010fffe"
_ESCAPE = "\U0010ffff"
_ESCAPED = {MARK: _ESCAPE + "m", _ESCAPE: _ESCAPE + "e"}
_UNESCAPED = {escaped: char for char, escaped in _ESCAPED.items()}
_NEEDS_ESCAPE = re.compile(f"[{MARK}{_ESCAPE}]")
_IS_ESCAPED = re.compile(f"{_ESCAPE}[me]")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.-]*")

MAX_RENDERED_CHARS = 64 * 2**20
"""A template that writes more than this is given up."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt ready for the model."""

    token_ids: tuple[int, ...]
    in_thought: bool
    """The prompt ends inside an open thought: the output starts with reasoning."""


class PromptEncoder:
    """Text with marks to ids: the only place where control tokens become ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        controls = [token for token in tokenizer.control_tokens if token.text.strip()]
        # Longest first, so that a token that begins with another wins, as in the tokenizer itself.
        controls.sort(key=lambda token: len(token.text), reverse=True)
        self._ids = {token.text: token.id for token in controls}
        self._splitter = _splitter(controls)
        self._first_chars = re.compile(_char_class({token.text[0] for token in controls}))

    def guard(self, text: str) -> str:
        """Client text made unable to be, begin, end or complete a control token.

        White space at the ends stays outside the marks, so that a template's trim works as before.
        """
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        end = start + len(core)
        return f"{text[:start]}{MARK}{self._guard_inside(core)}{MARK}{text[end:]}"

    def guard_word(self, text: str) -> str:
        """Like guard, but leaves a plain word as it is: templates compare options with words."""
        return text if _PLAIN_WORD.fullmatch(text) else self.guard(text)

    def _guard_inside(self, text: str) -> str:
        text = _NEEDS_ESCAPE.sub(lambda match: _ESCAPED[match[0]], text)
        return self._first_chars.sub(lambda match: match[0] + MARK, text)

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Ids of rendered text; what the template wrote as control tokens becomes such."""
        ids: list[int] = []
        position = 0
        for match in self._splitter.finditer(rendered):
            self._encode_piece(rendered[position : match.start()], ids)
            ids.append(self._ids[match[0].strip()])
            position = match.end()
        self._encode_piece(rendered[position:], ids)
        return tuple(ids)

    def _encode_piece(self, piece: str, ids: list[int]) -> None:
        text = _IS_ESCAPED.sub(lambda match: _UNESCAPED[match[0]], piece.replace(MARK, ""))
        if text:
            ids.extend(self._tokenizer.encode_text(text))

    def encode_plain(self, text: str, *, parse_special: bool) -> tuple[int, ...]:
        """Ids of a raw prompt; control tokens in it count only with `parse_special`."""
        if parse_special:
            return self.encode(_NEEDS_ESCAPE.sub(lambda match: _ESCAPED[match[0]], text))
        return tuple(self._tokenizer.encode_text(text))


def _char_class(chars: set[str]) -> str:
    # An empty class is not a pattern; this one never matches.
    return f"[{''.join(map(re.escape, sorted(chars)))}]" if chars else r"(?!)"


def _splitter(controls: list[ControlToken]) -> re.Pattern[str]:
    if not controls:
        return re.compile(r"(?!)")
    return re.compile(
        "|".join(
            (r"\s*" if token.strips_left else "")
            + re.escape(token.text)
            + (r"\s*" if token.strips_right else "")
            for token in controls
        )
    )


class ChatTemplate:
    """The compiled chat template of one checkpoint. Rendering is pure and may run in any thread."""

    def __init__(self, source: str, encoder: PromptEncoder, variables: Mapping[str, str]) -> None:
        """variables: names of special tokens that templates use, such as bos_token.

        Raises TokenizerError for a template that does not compile.
        """
        if MARK in source or _ESCAPE in source:
            raise TokenizerError("the chat template contains U+10FFFE or U+10FFFF")
        self._encoder = encoder
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: tuple[Message, ...],
        kwargs: JsonObject,
        *,
        tools: tuple[Tool, ...] = (),
        continue_final: bool = False,
    ) -> RenderedPrompt:
        """Render and tokenize. Raises InvalidRequest when the template refuses the messages."""
        variables: dict[str, object] = {
            **self._variables,
            **cast("JsonObject", self._guard_json(kwargs, is_option=True)),
            "messages": [self._message(message) for message in messages],
            "tools": [self._guard_json(tool.declaration, is_option=True) for tool in tools] or None,
            "add_generation_prompt": not continue_final,
        }
        rendered = self._run(variables)
        if continue_final:
            # The end mark of the last message's text is the last mark there is.
            rendered = rendered[: rendered.rfind(MARK) + 1]
        return RenderedPrompt(
            token_ids=self._encoder.encode(rendered),
            in_thought=rendered.rfind(_THINK_OPEN) > rendered.rfind(_THINK_CLOSE),
        )

    def _run(self, variables: dict[str, object]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateError(f"more than {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # a template may do anything, and fails only its own request
            text = shorten(_clean(str(error)), 300)
            raise InvalidRequest(
                f"the chat template refused the messages: {text}", param="messages"
            ) from error
        return "".join(pieces)

    def _message(self, message: Message) -> dict[str, object]:
        guard = self._encoder.guard
        result: dict[str, object] = {"role": str(message.role), "content": guard(message.content)}
        if message.reasoning_content is not None:
            result["reasoning_content"] = guard(message.reasoning_content)
        if message.name is not None:
            result["name"] = guard(message.name)
        if message.role is Role.TOOL and message.tool_call_id is not None:
            result["tool_call_id"] = guard(message.tool_call_id)
        if message.tool_calls:
            result["tool_calls"] = [
                {
                    "id": guard(call.id),
                    "type": "function",
                    "function": {
                        "name": guard(call.name),
                        "arguments": self._guard_json(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        return result

    def _guard_json(self, value: object, *, is_option: bool = False) -> object:
        guard = self._encoder.guard_word if is_option else self._encoder.guard
        if isinstance(value, str):
            return guard(value)
        if isinstance(value, list):
            items = cast("list[object]", value)
            return [self._guard_json(item, is_option=is_option) for item in items]
        if isinstance(value, dict):
            return {
                guard(key): self._guard_json(item, is_option=is_option)
                for key, item in cast("JsonObject", value).items()
            }
        return value


def _clean(text: str) -> str:
    return _IS_ESCAPED.sub(lambda match: _UNESCAPED[match[0]], text.replace(MARK, ""))


class _GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's part for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names = cast("dict[str, object]", environment.globals)
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Plain JSON: jinja's own filter escapes for HTML. Marks must stay characters, so ensure_ascii has no effect.
    del ensure_ascii
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def load_template(directory: Path, encoder: PromptEncoder) -> ChatTemplate:
    """The chat template of a checkpoint: chat_template.jinja, or the one in tokenizer_config.json.

    Raises TokenizerError when there is none.
    """
    config = read_object(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = cast("list[dict[str, str]]", source)
        source = next((item["template"] for item in named if item["name"] == "default"), None)
    if not isinstance(source, str):
        raise TokenizerError(f"{directory} has no chat_template.jinja and no chat_template")
    return ChatTemplate(source, encoder, _special_names(config))


def _special_names(config: JsonObject) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = cast("JsonObject", value).get("content")
        if isinstance(value, str):
            names[name] = value
    return names
