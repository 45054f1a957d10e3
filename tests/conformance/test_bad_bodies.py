"""Every wrong body gets a 4xx that names the field, and the server goes on."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from gateway.json_input import SHORT_BYTES, load_json
from tests.conformance.live import MODEL, chat_body

if TYPE_CHECKING:
    from tests.conformance.live import Live

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "Hello"}


def chat(**fields: object) -> dict[str, object]:
    return chat_body(**fields)


def message(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [fields]}


def assistant(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [USER, {"role": "assistant", **fields}, USER]}


def call(**fields: object) -> dict[str, object]:
    return assistant(tool_calls=[{"id": "1", "type": "function", **fields}])


def completion(prompt: object = "Hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, **fields}


def tool(**function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **function}}


def arguments(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties}


def json_format(schema: object, **others: object) -> dict[str, object]:
    json_schema = {"name": "answer", "schema": schema, **others}
    return chat(response_format={"type": "json_schema", "json_schema": json_schema})


def structured(tools: object = None, **outputs: object) -> dict[str, object]:
    return chat(structured_outputs=outputs, tools=tools)


TOOL = tool()
deep: object = 1
for _ in range(100):
    deep = [deep]

CHAT: list[tuple[object, str | None]] = [
    # The body as a whole.
    ([], None),
    ("text", None),
    (None, None),
    ({}, "model"),
    ({"model": MODEL}, "messages"),
    ({"messages": [USER]}, "model"),
    ({"model": 3, "messages": [USER]}, "model"),
    ({"model": "", "messages": [USER]}, "model"),
    ({"model": None, "messages": [USER]}, "model"),
    # Messages.
    (chat(messages=[]), "messages"),
    (chat(messages=None), "messages"),
    (chat(messages="Hello"), "messages"),
    (chat(messages={"role": "user"}), "messages"),
    (chat(messages=["Hello"]), "messages[0]"),
    (chat(messages=[None]), "messages[0]"),
    (chat(messages=[USER, 3]), "messages[1]"),
    (message(content="x"), "messages[0].role"),
    (message(role="wizard", content="x"), "messages[0].role"),
    (message(role=3, content="x"), "messages[0].role"),
    (message(role="function", content="x", name="f"), "messages[0].role"),
    (message(role="user"), "messages[0].content"),
    (message(role="user", content=None), "messages[0].content"),
    (message(role="user", content=3), "messages[0].content"),
    (message(role="user", content={"text": "x"}), "messages[0].content"),
    (message(role="user", content=["x"]), "messages[0].content[0]"),
    (message(role="user", content=[{"text": "x"}]), "messages[0].content[0].type"),
    (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(role="user", content=[{"type": "text", "text": 1}]), "messages[0].content[0].text"),
    (
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "data:,"}}]),
        "messages[0].content[0].type",
    ),
    (message(role="user", content=[{"type": "input_audio"}]), "messages[0].content[0].type"),
    (message(role="user", content="x", name=3), "messages[0].name"),
    (message(role="user", content="x", tool_calls=[]), "messages[0].tool_calls"),
    (message(role="user", content="x", reasoning_content="y"), "messages[0].reasoning_content"),
    (message(role="user", content="x", tool_call_id="1"), "messages[0].tool_call_id"),
    (message(role="tool", content="x", tool_call_id=1), "messages[0].tool_call_id"),
    (assistant(), "messages[1].content"),
    (assistant(content=None), "messages[1].content"),
    (assistant(content="x", reasoning_content=1), "messages[1].reasoning_content"),
    (assistant(content="x", function_call={"name": "f"}), "messages[1].function_call"),
    (assistant(tool_calls="f"), "messages[1].tool_calls"),
    (assistant(tool_calls=[1]), "messages[1].tool_calls[0]"),
    (call(), "messages[1].tool_calls[0].function"),
    (call(function={}), "messages[1].tool_calls[0].function.name"),
    (call(type="custom", function={"name": "f"}), "messages[1].tool_calls[0].type"),
    (
        call(function={"name": "f", "arguments": "{"}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        call(function={"name": "f", "arguments": "[1]"}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        call(function={"name": "f", "arguments": json.dumps({"a": deep})}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (chat(messages=[USER, {"role": "system", "content": "x"}]), "messages"),
    # Numbers.
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(max_tokens=1e9), "max_tokens"),
    (chat(max_tokens="10"), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_tokens=10**30), "max_tokens"),
    (chat(max_tokens=100_000), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(max_tokens=3, max_completion_tokens=4), "max_completion_tokens"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(temperature=[1]), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.1), "top_p"),
    (chat(top_p=False), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(min_p=-0.1), "min_p"),
    (chat(min_p=2), "min_p"),
    (chat(seed=1.5), "seed"),
    (chat(seed="1"), "seed"),
    (chat(seed=-(2**63) - 1), "seed"),
    (chat(presence_penalty=2.5), "presence_penalty"),
    (chat(frequency_penalty=-2.5), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(repetition_penalty=11), "repetition_penalty"),
    (chat(n=0), "n"),
    (chat(n=17), "n"),
    (chat(n="1"), "n"),
    (chat(min_tokens=-1), "min_tokens"),
    (chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (chat(min_tokens=5000), "min_tokens"),
    (chat(ignore_eos=1), "ignore_eos"),
    (chat(spec=5), "spec"),
    (chat(spec=-1), "spec"),
    (chat(spec=True), "spec"),
    (chat(spec_min_p=1.5), "spec_min_p"),
    # Stops, biases, logprobs.
    (chat(stop=""), "stop"),
    (chat(stop=3), "stop"),
    (chat(stop=[""]), "stop[0]"),
    (chat(stop=["a", None]), "stop[1]"),
    (chat(stop=["a"] * 5), "stop"),
    (chat(stop=["a" * 2000]), "stop[0]"),
    (chat(stop_token_ids=3), "stop_token_ids"),
    (chat(stop_token_ids=["3"]), "stop_token_ids[0]"),
    (chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (chat(stop_token_ids=[8192]), "stop_token_ids"),
    (chat(stop_token_ids=[1] * 65), "stop_token_ids"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(logit_bias={"a": 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"1": 101}), "logit_bias.1"),
    (chat(logit_bias={"1": True}), "logit_bias.1"),
    (chat(logit_bias={"1": 1, "01": 2}), "logit_bias"),
    (chat(logit_bias={"9000": 1}), "logit_bias"),
    (chat(logit_bias={str(index): 1 for index in range(2000)}), "logit_bias"),
    (chat(logprobs=1), "logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=False, top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    # Delivery.
    (chat(stream="yes"), "stream"),
    (chat(stream=1), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options=[]), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(user=3), "user"),
    (chat(prompt_cache_key="x" * 600), "prompt_cache_key"),
    # Template options.
    (chat(enable_thinking="false"), "enable_thinking"),
    (chat(reasoning_effort="huge"), "reasoning_effort"),
    (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a b": 1}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": deep}), "chat_template_kwargs"),
    (
        chat(chat_template_kwargs={"enable_thinking": "false"}),
        "chat_template_kwargs.enable_thinking",
    ),
    (chat(continue_final_message=True), "continue_final_message"),
    # Known, and not honoured.
    (chat(tools={"type": "function"}), "tools"),
    (chat(tools=["f"]), "tools[0]"),
    (chat(tools=[{"function": {"name": "f"}}]), "tools[0].type"),
    (chat(tools=[{"type": "web_search"}]), "tools[0].type"),
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(tools=[TOOL, {"type": "function", "function": {}}]), "tools[1].function.name"),
    (chat(tools=[tool(name="a b")]), "tools[0].function.name"),
    (chat(tools=[tool(description=3)]), "tools[0].function.description"),
    (chat(tools=[tool(parameters=[])]), "tools[0].function.parameters"),
    (chat(tools=[tool(parameters={"a": deep})]), "tools[0].function"),
    (chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
    (chat(tools=[tool(name=f"f{index}") for index in range(129)]), "tools"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice="any"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice=3), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "custom"}), "tool_choice.type"),
    (chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function.name"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice.function.name",
    ),
    (chat(tools=[TOOL], parallel_tool_calls=1), "parallel_tool_calls"),
    (chat(tools=[tool(strict="yes")]), "tools[0].function.strict"),
    (
        chat(tools=[tool(strict=True, parameters={"type": "array"})]),
        "tools[0].function.parameters.type",
    ),
    (
        chat(tools=[tool(strict=True, parameters={"type": "object", "oneOf": []})]),
        "tools[0].function.parameters",
    ),
    (
        chat(tools=[tool(strict=True, parameters=arguments(a={"type": "string", "pattern": "x"}))]),
        "tools[0].function.parameters.properties.a",
    ),
    (
        chat(tools=[tool(strict=True, parameters=arguments(a={"type": "integer", "not": {}}))]),
        "tools[0].function.parameters.properties.a",
    ),
    (
        chat(tools=[tool(parameters=arguments(**{"a>b": {}}))], tool_choice="required"),
        "tools[0].function.parameters.properties",
    ),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(response_format={"type": "xml"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (json_format(None, name=""), "response_format.json_schema.name"),
    (json_format(None), "response_format.json_schema.schema"),
    (json_format([]), "response_format.json_schema.schema"),
    (json_format({}, strict=1), "response_format.json_schema.strict"),
    (json_format({"type": "strange"}), "response_format.json_schema.schema"),
    (json_format({"not": {"type": "null"}}), "response_format.json_schema.schema"),
    (json_format({"$ref": "#"}), "response_format.json_schema.schema"),
    (json_format({"$ref": "https://example.org"}), "response_format.json_schema.schema"),
    (json_format({"enum": ["x" * 70_000]}), "response_format.json_schema.schema"),
    (json_format({"a": deep}), "response_format.json_schema.schema"),
    (chat(response_format={"type": "json_object"}, ignore_eos=True), "ignore_eos"),
    (structured(), "structured_outputs"),
    (structured(regex="a", choice=["b"]), "structured_outputs"),
    (structured(regex=3), "structured_outputs.regex"),
    (structured(regex=""), "structured_outputs.regex"),
    (structured(regex="(a"), "structured_outputs.regex"),
    (structured(regex="a" * 70_000), "structured_outputs.regex"),
    (structured(choice=[]), "structured_outputs.choice"),
    (structured(choice=["a", 3]), "structured_outputs.choice[1]"),
    (structured(grammar="root ::= other"), "structured_outputs.grammar"),
    (structured(json="{"), "structured_outputs.json"),
    (structured(json={"type": 3}), "structured_outputs.json"),
    (structured(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
    (
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "structured_outputs",
    ),
    (structured(grammar='root ::= "a"', tools=[TOOL]), "structured_outputs.grammar"),
    (chat(thinking_token_budget=-1), "thinking_token_budget"),
    (chat(thinking_token_budget=1.5), "thinking_token_budget"),
    (chat(thinking_token_budget=1, thinking_budget=2), "thinking_budget"),
    (chat(response_format={}), "response_format.type"),
    (chat(response_format="json"), "response_format"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(audio={"voice": "x"}), "audio"),
    (chat(store=True), "store"),
    (chat(service_tier="priority"), "service_tier"),
    (chat(verbosity="high"), "verbosity"),
    (chat(web_search_options={}), "web_search_options"),
    (chat(guided_json={}), "guided_json"),
    (chat(best_of=1.0), "best_of"),
    (chat(echo=True), "echo"),
    (chat(priority=1.5), "priority"),
    (chat(priority=101), "priority"),
    (chat(deadline_s=0), "deadline_s"),
    (chat(deadline_s="1"), "deadline_s"),
    (chat(allowed_token_ids=[5]), "allowed_token_ids"),
    (chat(bad_words=["a"]), "bad_words"),
    (chat(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    (chat(skip_special_tokens=False), "skip_special_tokens"),
    (chat(length_penalty=2), "length_penalty"),
    (chat(typical_p=0.5), "typical_p"),
    (chat(mirostat=2), "mirostat"),
    (chat(dry_multiplier=1), "dry_multiplier"),
    (chat(n_predict=3), "n_predict"),
    (chat(add_generation_prompt=False), "add_generation_prompt"),
    (chat(moderation={}), "moderation"),
    (chat(chat_template="{{ messages }}"), "chat_template"),
    (chat(documents=[{"text": "x"}]), "documents"),
    (chat(include_reasoning=False), "include_reasoning"),
    (chat(include_stop_str_in_output=True), "include_stop_str_in_output"),
    (chat(return_token_ids=True), "return_token_ids"),
    (chat(cache_salt="x"), "cache_salt"),
    (chat(regex="x"), "regex"),
    (chat(repeat_penalty=1.1), "repeat_penalty"),
    (chat(samplers=["top_k"]), "samplers"),
    (chat(top_n_sigma=1), "top_n_sigma"),
    (chat(timings_per_token=True), "timings_per_token"),
    # Known, and of no consequence here.
    (chat(metadata="x"), "metadata"),
    (chat(prediction="x"), "prediction"),
    (chat(safety_identifier=1), "safety_identifier"),
    # Fields that contradict each other.
    (chat(reasoning_effort="none", enable_thinking=True), "reasoning_effort"),
    (
        chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}),
        "enable_thinking",
    ),
    (
        chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}),
        "reasoning_effort",
    ),
]

COMPLETIONS: list[tuple[object, str | None]] = [
    ({"model": MODEL}, "prompt"),
    (completion(thinking_token_budget=3), "thinking_token_budget"),
    (completion(tool_choice="required"), "tool_choice"),
    (completion(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (completion(None), "prompt"),
    (completion(""), "prompt"),
    (completion([]), "prompt"),
    (completion(3), "prompt"),
    (completion({"text": "x"}), "prompt"),
    (completion([""]), "prompt[0]"),
    (completion(["a", 1]), "prompt[1]"),
    (completion([1, "a"]), "prompt[1]"),
    (completion([1, True]), "prompt[1]"),
    (completion([-1]), "prompt[0]"),
    (completion([8192]), "prompt"),
    (completion([[1], []]), "prompt[1]"),
    (completion(["a"] * 65), "prompt"),
    (completion(max_tokens=0), "max_tokens"),
    (completion(max_tokens=5000), "max_tokens"),
    (completion([1] * 5000), "prompt"),
    (completion(suffix="x"), "suffix"),
    (completion(tools=[TOOL]), "tools"),
    (completion(best_of=2), "best_of"),
    (completion(best_of=True), "best_of"),
    (completion(logprobs=True), "logprobs"),
    (completion(logprobs=21), "logprobs"),
    (completion(echo=True, logprobs=1), "logprobs"),
    (completion(echo="yes"), "echo"),
    (completion(parse_special=1), "parse_special"),
]

RAW: list[bytes] = [
    b"",
    b"{",
    b"nonsense",
    b'{"model": NaN}',
    b'{"model": Infinity}',
    b'{"model": "\\ud800"}',
    b"\xff\xfe",
    b"[" * 3000,
    b'{"temperature": 1e999}',
]


async def check(live: Live, path: str, body: bytes, status: int, param: str | None) -> str:
    headers = {"content-type": "application/json"}
    response = await live.client.post(path, content=body, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert len(error["message"]) < 400
    return error["message"]


@pytest.mark.parametrize(("body", "param"), CHAT)
async def test_chat(live: Live, body: object, param: str | None) -> None:
    message = await check(live, "/v1/chat/completions", json.dumps(body).encode(), 400, param)
    if param is not None:
        assert param in message or "token" in message or "template" in message


@pytest.mark.parametrize(("body", "param"), COMPLETIONS)
async def test_completions(live: Live, body: object, param: str | None) -> None:
    await check(live, "/v1/completions", json.dumps(body).encode(), 400, param)


@pytest.mark.parametrize("body", RAW)
async def test_bytes_that_are_no_json(live: Live, body: bytes) -> None:
    await check(live, "/v1/chat/completions", body, 400, None)


@pytest.mark.parametrize("name", ["tool_choice", "stop", "temperature", "messages"])
async def test_a_megabyte_of_wrong_value_is_not_sent_back(live: Live, name: str) -> None:
    body = chat_body(**{name: {"x": "y" * 2**20} if name == "temperature" else "y" * 2**20})
    response = await live.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert len(response.content) < 1000


async def test_both_numbers_are_in_the_error_about_length(live: Live) -> None:
    response = await live.client.post("/v1/chat/completions", json=chat_body(max_tokens=4090))
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    assert "4090" in error["message"]
    response = await live.client.post("/v1/chat/completions", json=chat_body("word " * 6000))
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "param"), [("chat/completions", "messages"), ("completions", "prompt")]
)
async def test_a_hopeless_text_is_refused_before_it_is_tokenised(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, param: str
) -> None:
    def tokenised(*_: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr("gateway.tokenizer.FileTokenizer.encode_text", tokenised)
    text = "a b" * 1_000_000
    body = chat_body(text) if param == "messages" else {"model": MODEL, "prompt": text}
    response = await live.client.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "3000000 characters" in error["message"]
    assert "4096" in error["message"]


async def test_the_server_is_healthy_after_all_of_it(live: Live) -> None:
    response = await live.client.post("/v1/chat/completions", json=chat_body(max_tokens=3))
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 3
    assert (await live.client.get("/health")).status_code == 200
    await live.wait_idle()


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
CROWDED = b"[" + b"[]," * 100_000 + b"0]"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ],
)
async def test_a_crowded_body_is_refused_and_never_read(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: object) -> object:
        raise AssertionError("read")

    monkeypatch.setattr("gateway.json_input.orjson.loads", read)
    headers = {"content-type": "application/json"}
    response = await live.client.post(path, content=b'{"x":' + CROWDED + b"}", headers=headers)
    monkeypatch.undo()
    assert response.status_code == 400
    assert "more than 65536 arrays and objects" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (call(function={"name": "f", "arguments": CROWDED.decode()}), ARGUMENTS),
        (structured(json=CROWDED.decode()), "structured_outputs.json"),
    ],
)
async def test_json_in_a_string_is_bounded_as_the_body_is(
    live: Live, fields: dict[str, object], param: str
) -> None:
    response = await live.client.post("/v1/chat/completions", json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "65536 arrays and objects" in error["message"]


@pytest.mark.parametrize("num_bytes", [10, SHORT_BYTES + 1])
async def test_a_long_body_is_read_beside_the_event_loop(
    live: Live, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def read(text: bytes | str) -> object:
        threads.append(threading.current_thread())
        return load_json(text)

    monkeypatch.setattr("gateway.wire.load_json", read)
    body = chat_body(max_tokens=1, metadata={"filler": "x" * num_bytes})
    response = await live.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    (thread,) = threads
    assert (thread is threading.current_thread()) == (num_bytes == 10)
