from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.output_parser import OutputParser

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "\n", " ", "a", "b", "</thi"]),
    max_size=14,
).map("".join)


def parse(parts: list[str], *, in_thought: bool) -> tuple[str, str]:
    parser = OutputParser(in_thought=in_thought)
    deltas = [parser.push(part) for part in parts]
    deltas.append(parser.finish())
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(
    ("text", "in_thought", "reasoning", "content"),
    [
        ("Hello", False, "", "Hello"),
        ("<think>\nhm\n</think>\n\nHello", False, "hm", "Hello"),
        ("\n <think>hm</think>Hello", False, "hm", "Hello"),
        ("hm\n</think>\n\nHello\n", True, "hm", "Hello\n"),
        ("hm, unfinished </thi", True, "hm, unfinished </thi", ""),
        ("hm  \n", True, "hm", ""),
        ("</think>\n\nHello", True, "", "Hello"),
        ("Use <think> tags", False, "", "Use <think> tags"),
        ("<thinking>x", False, "", "<thinking>x"),
        ("  indented", False, "", "  indented"),
        ("a</think>    code", True, "a", "    code"),
        ("x</think>y</think>z", True, "x", "y</think>z"),
        ("  \n", False, "", "  \n"),
        ("", True, "", ""),
    ],
)
def test_parts(text: str, in_thought: bool, reasoning: str, content: str) -> None:
    assert parse([text], in_thought=in_thought) == (reasoning, content)
    assert parse(list(text), in_thought=in_thought) == (reasoning, content)


@QUICK
@given(text=TEXTS, in_thought=st.booleans(), cuts=st.sets(st.integers(0, 60)))
def test_any_split_gives_the_same_parts(text: str, in_thought: bool, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert parse(parts, in_thought=in_thought) == parse([text], in_thought=in_thought)


@QUICK
@given(text=TEXTS)
def test_nothing_but_tags_and_white_space_is_lost(text: str) -> None:
    reasoning, content = parse([text], in_thought=True)
    kept = "".join((reasoning + content).split())
    everything = "".join(text.split()).replace("</think>", "", 1)
    assert kept == everything
