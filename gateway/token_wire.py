"""POST /tokenize and /detokenize in vLLM's shapes: body bytes to checked requests, ids to replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.fields import Fields, check_integer, refuse
from gateway.wire import MAX_TOKENS, parse_body, read_chat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.replies import JsonReply
    from gateway.tokenizer import Tokenizer
    from gateway.wire import ChatRequest

MAX_TEXT_CHARS = 2**22
MAX_IDS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A checked POST /tokenize."""

    model: str
    prompt: str | ChatRequest
    """A raw text, or a chat as the chat endpoint would read it."""
    parse_special: bool
    wants_strings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """A checked POST /detokenize."""

    model: str
    token_ids: tuple[int, ...]


def parse_tokenize(body: bytes, default_model: str) -> TokenizeRequest:
    """Body bytes to a TokenizeRequest. Raises InvalidRequest."""
    fields = parse_body(body)
    model = fields.string("model") or default_model
    # Nothing is ever put before a raw prompt here, so either value gives the same ids.
    fields.boolean("add_special_tokens")
    if fields.get("prompt") is not None and fields.get("messages") is not None:
        refuse("prompt", "and messages contradict each other; send one of them")
    return TokenizeRequest(
        model=model,
        prompt=_text(fields) if fields.get("messages") is None else _chat(fields, model),
        parse_special=fields.boolean("parse_special") or False,
        wants_strings=fields.boolean("return_token_strs") or False,
    )


def _text(fields: Fields) -> str:
    prompt = fields.string("prompt")
    if prompt is None:
        refuse("prompt", "or messages is required")
    if len(prompt) > MAX_TEXT_CHARS:
        refuse("prompt", f"must have at most {MAX_TEXT_CHARS} characters; found {len(prompt)}")
    return prompt


def _chat(fields: Fields, model: str) -> ChatRequest:
    opens_answer = fields.boolean("add_generation_prompt")
    if opens_answer is not None and opens_answer is bool(fields.boolean("continue_final_message")):
        refuse("add_generation_prompt", "must be the opposite of continue_final_message")
    if fields.get("chat_template") is not None:
        refuse("chat_template", "is not supported: the model's own is used")
    return read_chat(Fields({**fields.values, "model": model}))


def parse_detokenize(body: bytes, default_model: str) -> DetokenizeRequest:
    """Body bytes to a DetokenizeRequest. Raises InvalidRequest."""
    fields = parse_body(body)
    items = fields.array("tokens")
    if items is None:
        refuse("tokens", "is required")
    if len(items) > MAX_IDS:
        refuse("tokens", f"must have at most {MAX_IDS} ids; found {len(items)}")
    return DetokenizeRequest(
        model=fields.string("model") or default_model,
        token_ids=tuple(
            check_integer(f"tokens[{index}]", item, 0, MAX_TOKENS)
            for index, item in enumerate(items)
        ),
    )


def tokenize_reply(
    token_ids: Sequence[int], max_context: int, tokenizer: Tokenizer | None
) -> JsonReply:
    """tokenizer: names the ids; None when they were not asked for."""
    names = None if tokenizer is None else [tokenizer.token_text(item) for item in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": max_context,
        "tokens": list(token_ids),
        "token_strs": names,
    }
