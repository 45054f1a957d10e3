"""Formats, forced calls and thinking budgets from the request to the assembled message, over a random model.

The text is the same whatever the drafts, and so is the message, however many tokens land at once.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, replace

import pytest

from engine.engine import TorchEngine
from engine.fake import FakeEngine, FakeScript
from gateway.errors import InvalidRequest
from gateway.generation import Choice
from gateway.output_parser import OutputParser
from gateway.preparation import PreparedChoice, Preparer
from gateway.replies import ChoiceText
from gateway.wire import parse_chat, parse_completion
from scheduler.messages import Finished, FinishReason, Tokens, Usage
from tests.conformance.live import chat_body, default_files
from tests.oracle.driver import Job, generate
from tests.oracle.words import words_engine

ROOM = 200
SHORT = {"type": "string", "maxLength": 5}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return words_engine(tmp_path_factory.mktemp("words"))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client gets."""

    message: dict[str, object]
    finish: str | None
    windows: int

    @property
    def content(self) -> str:
        content = self.message["content"]
        assert isinstance(content, str)
        return content

    @property
    def calls(self) -> list[tuple[str, dict[str, object]]]:
        calls = self.message.get("tool_calls", [])
        assert isinstance(calls, list)
        found = [call["function"] for call in calls]
        return [(call["name"], json.loads(call["arguments"])) for call in found]


def ask(engine: TorchEngine, **fields: object) -> Answer:
    """The answer at every depth of drafts, which must be one."""
    body = {"temperature": 1, "top_k": 0, "top_p": 1, "max_tokens": ROOM, **fields}
    request = parse_chat(json.dumps(chat_body("Go", **body)).encode())
    preparer = Preparer(default_files(), engine.info)
    (prepared,) = asyncio.run(preparer.chat(request, request_id="r", owner=""))
    answers: list[Answer] = []
    for depth in (0, 4):
        parser = OutputParser(in_thought=prepared.in_thought, tools=request.tools)
        choice = Choice(prepared, default_files(), request.options.stop, parser)
        answers.append(_run(engine, prepared, choice, depth))
    first = answers[0]
    for answer in answers[1:]:
        assert without_ids(answer.message) == without_ids(first.message)
        assert answer.finish == first.finish
    return answers[-1]


def without_ids(message: dict[str, object]) -> object:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return {**message, "tool_calls": [call["function"] for call in calls]}


def _run(engine: TorchEngine, prepared: PreparedChoice, choice: Choice, depth: int) -> Answer:
    request = prepared.request
    job = Job(
        prompt=request.prompt_ids,
        num_tokens=request.max_tokens,
        sampling=request.sampling,
        max_draft=depth,
    )
    progress = generate(engine, job)[0]
    windows = [step.token_ids for step in progress.steps]
    first = len(progress.token_ids) - sum(map(len, windows))
    text = ChoiceText()
    for ids in [tuple(progress.token_ids[:first]), *windows]:
        if not choice.ended:
            text.add(choice.accept(Tokens(token_ids=ids)))
    if not choice.ended:
        stopped = progress.token_ids[-1] in request.sampling.stop_token_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        usage = Usage(
            prompt_tokens=1,
            completion_tokens=1,
            cached_tokens=0,
            drafted_tokens=0,
            accepted_tokens=0,
            windows=0,
        )
        text.add(choice.finish(Finished(reason=reason, stop_token_id=None, usage=usage)))
    return Answer(message=text.message(), finish=text.finish_name, windows=len(windows))


def schema_of(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def json_format(schema: object) -> dict[str, object]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


def tool(name: str, *, strict: bool = False, **properties: object) -> dict[str, object]:
    function = {"name": name, "strict": strict, "parameters": schema_of(**properties)}
    return {"type": "function", "function": function}


WEATHER = tool(
    "sky",
    strict=True,
    city=SHORT,
    unit={"type": "string", "enum": ["C", "F"]},
    days={"type": "integer", "minimum": 1, "maximum": 14},
)
NOTE = tool(
    "note", text={"type": "string", "minLength": 3, "maxLength": 20}, pin={"type": "boolean"}
)


def check_weather(arguments: dict[str, object]) -> None:
    assert list(arguments) == ["city", "unit", "days"]
    city, days = arguments["city"], arguments["days"]
    assert isinstance(city, str) and len(city) <= 5
    assert isinstance(days, int) and 1 <= days <= 14
    assert arguments["unit"] in ("C", "F")


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(engine: TorchEngine, seed: int) -> None:
    schema = schema_of(
        name=SHORT,
        count={"type": "integer"},
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    )
    answer = ask(engine, response_format=json_format(schema), seed=seed)
    assert answer.finish == "stop"
    value = json.loads(answer.content)
    assert list(value) == ["name", "count", "tags"]
    assert isinstance(value["count"], int) and set(value["tags"]) <= {"a", "b"}


def test_a_json_object_that_is_cut_says_so(engine: TorchEngine) -> None:
    answer = ask(engine, response_format={"type": "json_object"}, max_tokens=12, seed=1)
    assert answer.content.startswith("{")
    if answer.finish == "stop":
        assert isinstance(json.loads(answer.content), dict)
    else:
        assert answer.finish == "length"


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{2,4}"}, r"[0-9]{3}-[a-f]{2,4}"),
        ({"choice": ["yes", 'no "never"', "\x7fé🙂"]}, 'yes|no "never"|\x7fé🙂'),
        ({"grammar": 'root ::= "x" [0-9]{2} "."'}, r"x[0-9]{2}\."),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"type": "null"}'}, "null"),
    ],
)
def test_structured_outputs(engine: TorchEngine, outputs: object, pattern: str) -> None:
    answer = ask(engine, structured_outputs=outputs, seed=2)
    assert answer.finish == "stop"
    assert re.fullmatch(pattern, answer.content)


def test_the_thought_is_free_and_the_answer_is_not(engine: TorchEngine) -> None:
    answer = ask(
        engine,
        enable_thinking=True,
        thinking_token_budget=7,
        response_format=json_format(schema_of(ok={"type": "boolean"})),
        seed=3,
    )
    assert answer.message["reasoning_content"]
    assert set(json.loads(answer.content)) == {"ok"}
    assert answer.finish == "stop"


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_a_thinking_budget(engine: TorchEngine, name: str) -> None:
    answer = ask(engine, enable_thinking=True, max_tokens=30, seed=3, **{name: 5})
    assert answer.message["reasoning_content"]
    assert answer.content
    assert "think>" not in answer.content


def test_a_budget_without_a_thought_changes_nothing(engine: TorchEngine) -> None:
    with_budget = ask(engine, thinking_token_budget=2, max_tokens=12, seed=3)
    assert with_budget.message == ask(engine, max_tokens=12, seed=3).message


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call(engine: TorchEngine, seed: int) -> None:
    answer = ask(
        engine,
        tools=[WEATHER, NOTE],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=seed,
    )
    assert answer.finish == "tool_calls"
    assert not answer.message["content"]
    ((name, arguments),) = answer.calls
    if name == "sky":
        check_weather(arguments)
    else:
        assert name == "note" and list(arguments) == ["text", "pin"]


def test_a_named_call_behind_a_thought(engine: TorchEngine) -> None:
    answer = ask(
        engine,
        tools=[NOTE, WEATHER],
        tool_choice={"type": "function", "function": {"name": "sky"}},
        parallel_tool_calls=False,
        enable_thinking=True,
        thinking_budget=4,
        seed=8,
    )
    assert answer.message["reasoning_content"]
    ((name, arguments),) = answer.calls
    assert name == "sky"
    check_weather(arguments)
    assert answer.finish == "tool_calls"


def test_several_required_calls(engine: TorchEngine) -> None:
    """The end is made unlikely; arguments come once each although many tokens land at once, also when cut short."""
    ping = tool("ping", strict=True, n={"type": "integer", "minimum": 0, "maximum": 9})
    bias = {"8183": -90, "8185": -90}
    answer = ask(engine, tools=[ping], tool_choice="required", logit_bias=bias, max_tokens=90)
    assert answer.finish == "length"
    *whole, last = answer.calls
    assert whole
    assert all(name == "ping" and set(a) == {"n"} for name, a in whole)
    assert last[0] == "ping" and set(last[1]) <= {"n"}


def test_one_call_at_most_behind_a_free_text(engine: TorchEngine) -> None:
    """The call's mark is made likely: without the limit it would come again and again."""
    call_id = next(
        t.id for t in default_files().tokenizer.control_tokens if t.text == "<tool_call>"
    )
    answer = ask(
        engine, tools=[WEATHER], parallel_tool_calls=False, logit_bias={str(call_id): 14}, seed=1
    )
    ((_, arguments),) = answer.calls
    check_weather(arguments)


def test_a_format_leaves_room_for_calls(engine: TorchEngine) -> None:
    ping = tool("ping", strict=True, n={"type": "integer", "minimum": 0, "maximum": 9})
    for bias, finish in ((-100, "stop"), (30, "tool_calls")):
        answer = ask(
            engine,
            tools=[ping],
            parallel_tool_calls=False,
            response_format=json_format(schema_of(ok={"type": "boolean"})),
            logit_bias={"8186": bias},
            seed=1,
        )
        assert answer.finish == finish
        if finish == "stop":
            assert set(json.loads(answer.content)) == {"ok"}
        else:
            assert set(answer.calls[0][1]) == {"n"}


def test_a_function_without_parameters(engine: TorchEngine) -> None:
    ping = {"type": "function", "function": {"name": "ping"}}
    answer = ask(engine, tools=[ping], tool_choice="required", parallel_tool_calls=False)
    assert answer.calls == [("ping", {})]


def test_a_function_with_free_parameters(engine: TorchEngine) -> None:
    free = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = chat_body("Go", tools=[free], tool_choice="required", seed=1)
    request = parse_chat(json.dumps(body).encode())
    preparer = Preparer(default_files(), engine.info)
    (prepared,) = asyncio.run(preparer.chat(request, request_id="r", owner=""))
    assert prepared.request.sampling.grammar is not None


def test_raw_completions_take_formats(engine: TorchEngine) -> None:
    body = {"model": "m", "prompt": "Go", "structured_outputs": {"regex": "ab{3}"}}
    request = parse_completion(json.dumps(body).encode())
    preparer = Preparer(default_files(), engine.info)
    (prepared,) = asyncio.run(preparer.completion(request, request_id="r", owner=""))
    choice = Choice(prepared, default_files(), (), None)
    assert _run(engine, prepared, choice, 4).content == "abbb"


def test_stop_strings_end_a_format_too(engine: TorchEngine) -> None:
    answer = ask(engine, structured_outputs={"regex": "a{9}b{9}c{9}"}, stop="bb")
    assert (answer.content, answer.finish) == ("aaaaaaaaa", "stop")


def test_a_length_cap_at_the_stop(engine: TorchEngine) -> None:
    """With room for the text and its end mark the choice ends by stop; with one token less, by length."""
    fields = {"structured_outputs": {"choice": ["yes"]}}
    assert ask(engine, **fields, max_tokens=50).finish == "stop"
    request = parse_chat(json.dumps(chat_body("Go", **fields)).encode())
    preparer = Preparer(default_files(), engine.info)
    (prepared,) = asyncio.run(preparer.chat(request, request_id="r", owner=""))
    sampling = replace(prepared.request.sampling, seed=5)
    job = Job(prompt=prepared.request.prompt_ids, num_tokens=50, sampling=sampling)
    length = len(generate(engine, job)[0].token_ids)
    for depth in range(5):
        for room in (length - 1, length, length + 1):
            run = generate(engine, replace(job, num_tokens=room, max_draft=depth))[0]
            ended = run.token_ids[-1] in sampling.stop_token_ids
            assert ended == (room >= length)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"$ref": "#"}}, "no text leads from here to the grammar's end"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(a?){1000}a{1000}" * 60}, r"structured_outputs\.regex .*too many expressions"),
    ],
)
async def test_a_refused_format_says_why(wanted: dict[str, object], message: str) -> None:
    preparer = Preparer(default_files(), FakeEngine(FakeScript()).info)
    body = {"model": "m", "prompt": "Go", "structured_outputs": wanted}
    with pytest.raises(InvalidRequest, match=message):
        await preparer.completion(
            parse_completion(json.dumps(body).encode()), request_id="r", owner=""
        )
