"""OpenAI request shapes: body bytes to frozen requests, every field checked once.

A known field that cannot be honoured here is refused by name unless its value asks for nothing (`unsupported.py`); a
field that nobody knows is ignored. Sampling fields that are absent stay None: the model's
own defaults are filled in later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

import orjson

from gateway.chat_messages import Message, Role, parse_messages
from gateway.errors import InvalidRequest
from gateway.fields import (
    Fields,
    JsonObject,
    as_array,
    check_depth,
    check_integer,
    check_number,
    describe,
    refuse,
)
from gateway.json_input import CrowdedJson, load_json
from gateway.structured import Structure, ToolChoice, parse_structure, parse_tool_choice
from gateway.tools import Tool
from gateway.unsupported import OFF_IN_CHAT, OFF_IN_COMPLETION, refuse_unsupported
from scheduler.messages import MAX_SPEC, MAX_TOP_LOGPROBS

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_TOOLS = 128
MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
MAX_KEY_CHARS = 512
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TOOL_NAME = r"[A-Za-z0-9_.-]{1,64}"
MAX_PRIORITY = 100
MIN_DEADLINE_S, MAX_DEADLINE_S = 1, 86_400
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1

TEMPLATE_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue a prompt, as the client said it; None means the client said nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """None: no logprobs; n: the picked token's and the n best alternatives'."""
    num_choices: int = 1
    spec: int | None = None
    spec_min_p: float | None = None
    conversation_key: str = ""
    priority: int = 0
    """Smaller goes first, as in vLLM."""
    deadline_s: float | None = None
    structure: Structure | None = None
    """What the answer must look like."""
    thinking_budget: int | None = None
    """Tokens after which a thought is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How to deliver."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked POST /v1/chat/completions."""

    model: str
    messages: tuple[Message, ...]
    options: GenerationOptions
    delivery: StreamOptions
    template_kwargs: JsonObject
    tools: tuple[Tool, ...]
    """Functions that the model is told of and may call; empty when tool_choice is none."""
    tool_choice: ToolChoice
    continue_final: bool
    """Go on with the last assistant message instead of opening a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked POST /v1/completions."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions
    delivery: StreamOptions
    echo: bool
    parse_special: bool
    """Control tokens written in a prompt string become control tokens."""


def parse_body(body: bytes) -> Fields:
    """JSON bytes to an object."""
    try:
        value = load_json(body)
    except CrowdedJson as error:
        raise InvalidRequest(f"the body has {error}", param=None) from None
    except orjson.JSONDecodeError as error:
        if (position := _first_stray_byte(body)) is not None:
            raise InvalidRequest(f"body: not valid UTF-8 at byte {position}", param=None) from None
        # The decoder's message has a position and never the text.
        raise InvalidRequest(f"the body is not valid JSON: {error.msg}", param=None) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be an object; found {describe(value)}", param=None)
    return Fields(cast("JsonObject", value))


def _first_stray_byte(body: bytes) -> int | None:
    """Where a body stops being UTF-8, counted from 0."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def parse_chat(body: bytes) -> ChatRequest:
    """Body bytes to a ChatRequest. Raises InvalidRequest."""
    return read_chat(parse_body(body))


def read_chat(fields: Fields) -> ChatRequest:
    """A chat completion's fields to a ChatRequest; requests of other APIs are put into them. Raises InvalidRequest."""
    model = _model(fields)
    messages = parse_messages(fields)
    refuse_unsupported(fields, OFF_IN_CHAT)
    _check_hints(fields)
    continue_final = fields.boolean("continue_final_message") or False
    if continue_final and (messages[-1].role is not Role.ASSISTANT or not messages[-1].content):
        refuse("continue_final_message", "needs an assistant message with text at the end")
    tools = _tools(fields)
    return ChatRequest(
        model=model,
        messages=messages,
        options=_options(fields, _chat_max_tokens(fields), _chat_logprobs(fields)),
        delivery=_delivery(fields),
        template_kwargs=_template_kwargs(fields),
        tools=tools,
        tool_choice=parse_tool_choice(fields, tools),
        continue_final=continue_final,
    )


def parse_completion(body: bytes) -> CompletionRequest:
    """Body bytes to a CompletionRequest. Raises InvalidRequest."""
    fields = parse_body(body)
    model = _model(fields)
    prompts = _prompts(fields)
    refuse_unsupported(fields, OFF_IN_COMPLETION)
    max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS)
    echo = fields.boolean("echo") or False
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    if echo and logprobs is not None:
        refuse("logprobs", "cannot be combined with echo: prompt tokens have no logprobs here")
    return CompletionRequest(
        model=model,
        prompts=prompts,
        options=_options(fields, max_tokens or DEFAULT_COMPLETION_TOKENS, logprobs),
        delivery=_delivery(fields),
        echo=echo,
        parse_special=fields.boolean("parse_special") or False,
    )


def _model(fields: Fields) -> str:
    model = fields.string("model")
    if not model:
        refuse("model", "is required")
    return model


def _check_hints(fields: Fields) -> None:
    """Known fields that change nothing here are at least of their type."""
    fields.object("metadata")
    fields.object("prediction")
    fields.string("safety_identifier")


def _chat_max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, MAX_TOKENS)
    new = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    if old is not None and new is not None and old != new:
        refuse("max_completion_tokens", f"is {new} but max_tokens is {old}; send one of them")
    return old if new is None else new


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not wanted and top:
        refuse("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def _options(fields: Fields, max_tokens: int | None, top_logprobs: int | None) -> GenerationOptions:
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"is {min_tokens}, above max_tokens: {max_tokens}")
    return GenerationOptions(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1, open_low=True),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0, 1),
        seed=fields.integer("seed", MIN_SEED, MAX_SEED),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 0, 10, open_low=True),
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos") or False,
        logit_bias=_logit_bias(fields),
        top_logprobs=top_logprobs,
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        spec=fields.integer("spec", 0, MAX_SPEC),
        spec_min_p=fields.number("spec_min_p", 0, 1),
        conversation_key=_conversation_key(fields),
        priority=fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        deadline_s=fields.number("deadline_s", MIN_DEADLINE_S, MAX_DEADLINE_S),
        structure=parse_structure(fields),
        thinking_budget=_thinking_budget(fields),
    )


def _thinking_budget(fields: Fields) -> int | None:
    """vLLM's name, and Qwen's."""
    first, second = (
        fields.integer(name, 0, MAX_TOKENS) for name in ("thinking_token_budget", "thinking_budget")
    )
    if first is not None and second is not None and first != second:
        refuse("thinking_budget", f"is {second} but thinking_token_budget is {first}")
    return second if first is None else first


def _conversation_key(fields: Fields) -> str:
    """Any stable name that the client gives the conversation."""
    key = fields.string("prompt_cache_key") or fields.string("user") or ""
    if len(key) > MAX_KEY_CHARS:
        refuse(
            "prompt_cache_key", f"must have at most {MAX_KEY_CHARS} characters; found {len(key)}"
        )
    return key


def _top_k(fields: Fields) -> int | None:
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    # -1 is how vLLM's clients say "all".
    return 0 if top_k == -1 else top_k


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (_stop_string("stop", value),)
    items = as_array("stop", value)
    if len(items) > MAX_STOP_STRINGS:
        refuse("stop", f"must have at most {MAX_STOP_STRINGS} strings; found {len(items)}")
    return tuple(_stop_string(f"stop[{index}]", item) for index, item in enumerate(items))


def _stop_string(param: str, value: object) -> str:
    if not isinstance(value, str):
        refuse(param, f"must be a string; found {describe(value)}")
    if not 0 < len(value) <= MAX_STOP_CHARS:
        refuse(param, f"must have 1 to {MAX_STOP_CHARS} characters; found {len(value)}")
    return value


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    items = fields.array("stop_token_ids") or []
    if len(items) > MAX_STOP_IDS:
        refuse("stop_token_ids", f"must have at most {MAX_STOP_IDS} ids; found {len(items)}")
    return tuple(
        check_integer(f"stop_token_ids[{index}]", item, 0, MAX_TOKENS)
        for index, item in enumerate(items)
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias")
    if biases is None:
        return ()
    if len(biases.values) > MAX_LOGIT_BIASES:
        found = len(biases.values)
        refuse("logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries; found {found}")
    found_ids: dict[int, float] = {}
    for key, value in biases.values.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            refuse("logit_bias", f"has the key {key!r:.60}; keys are token ids")
        if int(key) in found_ids:
            refuse("logit_bias", f"names token {int(key)} twice")
        found_ids[int(key)] = check_number(f"logit_bias.{key}", value, -100, 100)
    return tuple(found_ids.items())


def _delivery(fields: Fields) -> StreamOptions:
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions(stream=stream)
    if not stream:
        refuse("stream_options", "needs stream to be true")
    return StreamOptions(
        stream=True,
        include_usage=options.boolean("include_usage") or False,
        continuous_usage=options.boolean("continuous_usage_stats") or False,
    )


def _template_kwargs(fields: Fields) -> JsonObject:
    given = fields.object("chat_template_kwargs")
    kwargs = dict(given.values) if given is not None else {}
    for name in kwargs:
        if name in RESERVED_TEMPLATE_NAMES or not re.fullmatch(TEMPLATE_NAME, name):
            refuse("chat_template_kwargs", f"cannot set {name!r:.60}")
    check_depth("chat_template_kwargs", kwargs)
    _check_thinking(kwargs)
    _set_once(kwargs, "enable_thinking", fields.boolean("enable_thinking"), "enable_thinking")
    effort = fields.one_of("reasoning_effort", EFFORTS)
    if effort == "none":
        _set_once(kwargs, "enable_thinking", False, "reasoning_effort")
    else:
        _set_once(kwargs, "reasoning_effort", effort, "reasoning_effort")
    return kwargs


def _set_once(kwargs: JsonObject, name: str, value: object, param: str) -> None:
    """Set a variable of the template to what a field asks for, unless it has another value already."""
    if value is None:
        return
    before = kwargs.get(name)
    if before is not None and before != value:
        refuse(param, f"sets {name} to {describe(value)}, but elsewhere it is {describe(before)}")
    kwargs[name] = value


def _check_thinking(kwargs: JsonObject) -> None:
    # A template's `is true` would take the string "false" for something else.
    value = kwargs.get("enable_thinking")
    if value is not None and not isinstance(value, bool):
        found = describe(value)
        refuse("chat_template_kwargs.enable_thinking", f"must be a boolean; found {found}")


def _tools(fields: Fields) -> tuple[Tool, ...]:
    found = len(fields.array("tools") or ())
    if found > MAX_TOOLS:
        refuse("tools", f"must have at most {MAX_TOOLS} functions; found {found}")
    tools = tuple(_tool(item) for item in fields.objects("tools"))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            refuse(f"tools[{index}].function.name", f"names {name!r} a second time")
    return () if fields.get("tool_choice") == "none" else tools


def _tool(item: Fields) -> Tool:
    kind = item.string("type")
    if kind != "function":
        refuse(item.param("type"), f"must be 'function'; found {describe(kind)}")
    function = item.object("function")
    if function is None:
        refuse(item.param("function"), "is required")
    name = function.string("name")
    if name is None or not re.fullmatch(TOOL_NAME, name):
        refuse(
            function.param("name"), "must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    function.string("description")
    function.object("parameters")
    function.boolean("strict")
    check_depth(item.param("function"), function.values)
    return Tool(name=name, declaration=item.values)


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.get("prompt")
    if value is None:
        refuse("prompt", "is required")
    if isinstance(value, str):
        return (_text_prompt("prompt", value),)
    items = as_array("prompt", value)
    if not items:
        refuse("prompt", "must not be empty")
    if isinstance(items[0], int):
        return (_id_prompt("prompt", items),)
    if len(items) > MAX_PROMPTS:
        refuse("prompt", f"must have at most {MAX_PROMPTS} prompts; found {len(items)}")
    return tuple(_prompt(f"prompt[{index}]", item) for index, item in enumerate(items))


def _prompt(param: str, value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return _text_prompt(param, value)
    if isinstance(value, list):
        return _id_prompt(param, cast("list[object]", value))
    refuse(param, f"must be a string or an array of token ids; found {describe(value)}")


def _text_prompt(param: str, value: str) -> str:
    if not value:
        refuse(param, "must not be empty")
    return value


def _id_prompt(param: str, items: list[object]) -> tuple[int, ...]:
    if not items:
        refuse(param, "must not be empty")
    return tuple(
        check_integer(f"{param}[{index}]", item, 0, MAX_TOKENS) for index, item in enumerate(items)
    )
