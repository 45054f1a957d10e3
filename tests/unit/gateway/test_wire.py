"""Any JSON value in any field is either taken or refused by name; nothing else comes out of parse and preparation."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.interface import EngineInfo
from gateway.errors import InvalidRequest
from gateway.messages_wire import parse_message
from gateway.preparation import Preparer
from gateway.responses_api_wire import parse_response
from gateway.unsupported import (
    OFF_IN_CHAT,
    OFF_IN_COMPLETION,
    OFF_IN_MESSAGE,
    OFF_IN_RESPONSE,
)
from gateway.wire import parse_body, parse_chat, parse_completion
from tests.conformance.live import default_files

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
INFO = EngineInfo(
    model_name="m",
    vocab_size=8192,
    max_context=512,
    num_slots=4,
    chunk_tokens=64,
    max_draft=4,
    device="none",
    dtype="none",
    kernels="none",
    load_s=0.0,
    memory_plan=(),
)
FIELDS = (
    "model messages max_tokens max_completion_tokens temperature top_p top_k min_p seed n stop "
    "presence_penalty frequency_penalty repetition_penalty stop_token_ids min_tokens ignore_eos "
    "logit_bias logprobs top_logprobs stream stream_options spec spec_min_p enable_thinking "
    "reasoning_effort chat_template_kwargs continue_final_message tools tool_choice "
    "parallel_tool_calls response_format prompt echo suffix best_of parse_special user "
    "prompt_cache_key store service_tier modalities functions function_call audio"
).split()
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "tool_calls", "function", "arguments", "id"),
        *("include_usage", "reasoning_content", "parameters", "properties", "1", "a"),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["user", "assistant", "system", "tool", "function", "text", "auto", "none", "<think>", ""]
    ),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": VALUES, "tool_calls": VALUES, "reasoning_content": SCALARS},
    ),
    max_size=3,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)


async def prepare(body: dict[str, object], *, is_chat: bool) -> None:
    """Raises InvalidRequest, or proves what a GenerateRequest promises."""
    data = json.dumps(body).encode()
    preparer = Preparer(default_files(), INFO)
    if is_chat:
        prepared = await preparer.chat(parse_chat(data), request_id="r", owner="")
    else:
        prepared = await preparer.completion(parse_completion(data), request_id="r", owner="")
    for choice in prepared:
        request, sampling = choice.request, choice.request.sampling
        assert 0 < len(request.prompt_ids)
        assert 1 <= request.max_tokens <= INFO.max_context - len(request.prompt_ids)
        assert all(0 <= token_id < INFO.vocab_size for token_id in request.prompt_ids)
        assert all(0 <= token_id < INFO.vocab_size for token_id in sampling.stop_token_ids)
        assert 0 <= sampling.seed < 2**64
        assert sampling.temperature >= 0
        assert 0 < sampling.top_p <= 1
        assert sampling.min_tokens <= request.max_tokens


@QUICK
@given(body=BODIES, messages=MESSAGES)
async def test_any_chat_body(body: dict[str, object], messages: list[object]) -> None:
    try:
        await prepare({"model": "m", "messages": messages, **body}, is_chat=True)
    except InvalidRequest as error:
        assert error.param
        assert len(str(error)) < 600


@QUICK
@given(body=BODIES, prompt=VALUES)
async def test_any_completion_body(body: dict[str, object], prompt: object) -> None:
    try:
        await prepare({"model": "m", "prompt": prompt, **body}, is_chat=False)
    except InvalidRequest as error:
        assert error.param
        assert len(str(error)) < 600


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None, "tools": None, "max_tokens": None, "temperature": None, "n": None},
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"store": False, "service_tier": "auto", "functions": [], "parallel_tool_calls": True},
        {"metadata": {"a": "b"}, "something_new": {"x": [1]}, "safety_identifier": "s"},
        {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 2**64 - 1},
        {"reasoning_effort": "low", "enable_thinking": True, "chat_template_kwargs": {"x": 1}},
        {"max_tokens": 5, "max_completion_tokens": 5, "logprobs": False, "top_logprobs": 0},
    ],
)
def test_fields_that_ask_for_nothing_unusual_are_taken(fields: dict[str, object]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    parse_chat(json.dumps(body).encode())


def test_thinking_off_by_effort() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    parsed = parse_chat(json.dumps({**body, "reasoning_effort": "none"}).encode())
    assert parsed.template_kwargs == {"enable_thinking": False}
    parsed = parse_chat(json.dumps({**body, "reasoning_effort": "high"}).encode())
    assert parsed.template_kwargs == {"reasoning_effort": "high"}


def test_a_refusal_is_what_the_assistant_said() -> None:
    said = {"role": "assistant", "content": None, "refusal": "No."}
    body = {"model": "m", "messages": [said, {"role": "user", "content": "Why?"}]}
    assert parse_chat(json.dumps(body).encode()).messages[0].content == "No."


def test_fields_of_other_servers_are_taken_with_the_values_that_ask_for_nothing() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for known, parse, own in (
        (OFF_IN_CHAT, parse_chat, chat),
        (OFF_IN_COMPLETION, parse_completion, {"prompt": "Hi"}),
        (OFF_IN_RESPONSE, parse_response, {"input": "Hi"}),
        (OFF_IN_MESSAGE, parse_message, chat),
    ):
        for name, values in known.items():
            for value in values:
                parse(json.dumps({"model": "m", **own, name: value}).encode())
            with pytest.raises(InvalidRequest) as refused:
                parse(json.dumps({"model": "m", **own, name: {"x": 1}}).encode())
            assert refused.value.param == name


@pytest.mark.parametrize(
    ("body", "position"),
    [
        (b'{"model": "\xff"}', 11),
        ('{"user": "caf\u00e9"}'.encode("latin-1"), 13),
        (b"\xff\xfe{\x00}\x00", 0),
        (b'{"a": "\xed\xa0\x80"}', 7),
        (b'{"a": "' + b"b" * 70_000 + b'\xc3"}', 70_007),
    ],
)
def test_a_body_that_is_not_text_is_told_where(body: bytes, position: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body)
    assert str(caught.value) == f"body: not valid UTF-8 at byte {position}"


def test_a_body_that_is_text_but_no_json_is_told_so() -> None:
    with pytest.raises(InvalidRequest, match="the body is not valid JSON: "):
        parse_body('{"a": "\u00e9"'.encode())
