from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.output_parser import OutputParser
from gateway.tools import Tool, merged_calls

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

WEATHER = Tool(
    name="get_weather",
    declaration={
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object"},
                    "note": {"type": ["string", "null"]},
                    "any": {},
                },
            },
        },
    },
)
BARE = Tool(name="now", declaration={"type": "function", "function": {"name": "now"}})


def call(name: str, *pairs: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parse(
    parts: list[str], *, in_thought: bool = False
) -> tuple[str, str, list[tuple[str | None, str]]]:
    parser = OutputParser(in_thought=in_thought, tools=(WEATHER, BARE))
    deltas = [parser.push(part) for part in parts]
    deltas.append(parser.finish())
    calls = merged_calls(call for delta in deltas for call in delta.calls)
    assert [call.index for call in calls] == list(range(len(calls)))
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [(call.name, call.arguments) for call in calls],
    )


@pytest.mark.parametrize(
    ("pairs", "arguments"),
    [
        ([], {}),
        ([("city", "Oslo")], {"city": "Oslo"}),
        ([("city", "12"), ("days", "3")], {"city": "12", "days": 3}),
        ([("city", ' a "b"\n</x> ü')], {"city": ' a "b"\n</x> ü'}),
        ([("city", "")], {"city": ""}),
        ([("where", '{"lat": 1.5, "l": [1, null]}')], {"where": {"lat": 1.5, "l": [1, None]}}),
        ([("days", "many")], {"days": "many"}),
        ([("note", "null")], {"note": None}),
        ([("any", "true"), ("other", "text")], {"any": True, "other": "text"}),
    ],
)
def test_arguments(pairs: list[tuple[str, str]], arguments: dict[str, object]) -> None:
    text = "Let me look.\n\n" + call("get_weather", *pairs)
    for parts in ([text], list(text)):
        reasoning, content, calls = parse(parts)
        assert (reasoning, content) == ("", "Let me look.")
        assert len(calls) == 1
        assert calls[0][0] == "get_weather"
        assert json.loads(calls[0][1]) == arguments


@pytest.mark.parametrize(
    "value",
    [
        {"html": "a</parameter>b"},
        {"a": "</parameter>", "b": "\\", "c": '"</parameter>'},
        {"a": "</parameter>\n</function>\n</tool_call>\n<tool_call>"},
        ["</parameter></function></tool_call>"],
        "x</parameter>",
    ],
)
@pytest.mark.parametrize("key", ["where", "any"])
def test_a_closing_tag_in_a_json_string_is_part_of_it(key: str, value: object) -> None:
    text = call("get_weather", (key, json.dumps(value)), ("city", "Oslo")) + "\nDone."
    for parts in ([text], list(text), [text.replace("\n</parameter>", "</parameter>")]):
        _, content, calls = parse(parts)
        assert content == "Done."
        assert [json.loads(arguments) for _, arguments in calls] == [{key: value, "city": "Oslo"}]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        # Not JSON, or text by its schema: the first closing tag counts.
        ('{"a": "x', '{"a": "x'),
        ('5" pipe', '5" pipe'),
        ('a "b" c</parameter>"d"', 'a "b" c'),
        ('say "a</parameter>b"', 'say "a'),
        ('{"a": "x\\', '{"a": "x\\'),
    ],
)
@pytest.mark.parametrize("form", [str, lambda text: text.replace("\n", "")])
def test_where_it_is_no_json_the_first_closing_tag_counts(
    value: str, found: str, form: Callable[[str], str]
) -> None:
    text = form(call("get_weather", ("any", value), ("days", "2")))
    for parts in ([text], list(text)):
        _, _, calls = parse(parts)
        assert [json.loads(arguments) for _, arguments in calls] == [{"any": found, "days": 2}]
    raw = call("get_weather", ("city", '"a</parameter>"'))
    assert parse([raw])[2] == [("get_weather", '{"city":"\\"a"}')]


def test_several_calls_behind_a_thought() -> None:
    text = f"Hm.\n</think>\n\n{call('now')}\n{call('get_weather', ('city', 'Oslo'))}\n"
    assert parse([text], in_thought=True) == (
        "Hm.",
        "",
        [("now", "{}"), ("get_weather", '{"city":"Oslo"}')],
    )


def test_a_call_ends_a_thought_that_was_not_closed() -> None:
    assert parse([f"Hm.\n{call('now')}"], in_thought=True) == ("Hm.", "", [("now", "{}")])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        # Not closed: at the end, by the next call, without its function's end.
        ("<tool_call>\n<function=now>\n", "", [("now", "{}")]),
        ("<tool_call><function=get_weather><parameter=city>\nOs", "", [("get_weather", "{}")]),
        (
            "<tool_call><function=get_weather><parameter=city>a</parameter><parameter=da",
            "",
            [("get_weather", '{"city":"a"}')],
        ),
        (f"<tool_call><function=now></function>{call('now')}", "", [("now", "{}")] * 2),
        ("<tool_call><function=now>\n</tool_call>\nend", "end", [("now", "{}")]),
        # No calls.
        ("Use <tool_call> tags", "Use <tool_call> tags", []),
        ("<tool_call>", "<tool_call>", []),
        ("<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>", []),
        ("<tool_call><function=>x", "<tool_call><function=>x", []),
        ("<tool_call><function=a\nb>", "<tool_call><function=a\nb>", []),
        ("a <tool_cal", "a <tool_cal", []),
        # A function nobody offered is for the client to refuse.
        (call("unknown", ("x", "1")), "", [("unknown", '{"x":1}')]),
    ],
)
def test_odd_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for parts in ([text], list(text)):
        _, found, found_calls = parse(parts)
        assert found_calls == calls
        assert found == content


def test_without_tools_tags_are_text() -> None:
    parser = OutputParser(in_thought=False)
    text = call("now")
    assert parser.push(text).content + parser.finish().content == text


PIECES = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<function=now>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            '"',
            "\\",
            "{",
            "</think>",
            "<think>",
            "<",
            "\n",
            " ",
            "x",
            "1",
            call("now"),
        ]
    ),
    max_size=12,
).map("".join)


@QUICK
@given(text=PIECES, cuts=st.sets(st.integers(0, 200)), in_thought=st.booleans())
def test_any_split_gives_the_same_calls(text: str, cuts: set[int], in_thought: bool) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    whole = parse([text], in_thought=in_thought)
    assert parse(parts, in_thought=in_thought) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)
