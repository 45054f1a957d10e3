from __future__ import annotations

from typing import Any

import jinja2
import pytest

from engine.training.tokenizer import TemplateError, load_template

from .conftest import DEFAULT_MODEL_DIR

USER = {"role": "user", "content": "Hi"}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "text": "one\ntwo", "deep": {"x": [1]}}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    return load_template(DEFAULT_MODEL_DIR / "chat_template.jinja")


def _render(template: jinja2.Template, *messages: dict[str, Any], **options: Any) -> str:
    return template.render(messages=list(messages), **options)


def test_generation_prompt_closes_the_thought_unless_thinking_is_asked_for(
    template: jinja2.Template,
) -> None:
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    plain = _render(template, USER, add_generation_prompt=True)
    assert plain == start + "\n</think>\n\n"
    assert _render(template, USER, add_generation_prompt=True, enable_thinking=False) == plain
    assert _render(template, USER, add_generation_prompt=True, enable_thinking=True) == start


def test_history_holds_an_empty_or_the_given_thought(template: jinja2.Template) -> None:
    said = {"role": "assistant", "content": "Hello"}
    text = _render(template, USER, said)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n")
    text = _render(template, USER, said | {"reasoning_content": "greet back"})
    assert "<think>\ngreet back\n</think>\n\nHello<|im_end|>\n" in text
    text = _render(template, USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOk"})
    assert "<think>\nhm\n</think>\n\nOk<|im_end|>\n" in text


def test_prompt_of_a_turn_is_a_prefix_of_the_next_turns_prompt(template: jinja2.Template) -> None:
    first = _render(template, USER, add_generation_prompt=True)
    said = {"role": "assistant", "content": "Hello"}
    assert _render(template, USER, said, USER, add_generation_prompt=True).startswith(first)


def test_system_turn_comes_first_and_follows_the_tools(template: jinja2.Template) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert _render(template, system, USER).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    text = _render(template, system, USER, tools=[TOOL])
    assert '<tools>\n{"type": "function"' in text
    assert text.index("</tools>") < text.index("Be brief.") < text.index("<|im_end|>")
    assert _render(template, USER, tools=[TOOL]).startswith("<|im_start|>system\n# Tools")


def test_tool_calls_and_results_use_the_familys_markup(template: jinja2.Template) -> None:
    call = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    text = _render(template, USER, call, *results)
    one = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\none\ntwo\n"
        '</parameter>\n<parameter=deep>\n{"x": [1]}\n</parameter>\n</function>\n</tool_call>'
    )
    assert f"Let me see.\n\n{one}\n{one}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n4\n</tool_response><|im_end|>\n"
    )


def test_content_may_be_text_parts(template: jinja2.Template) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in _render(template, {"role": "user", "content": parts})
    assert "user\n<|im_end|>" in _render(template, {"role": "user", "content": None})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "At least one message"),
        ([{"role": "wizard", "content": "x"}], "Unknown message role: wizard"),
        ([USER, {"role": "system", "content": "x"}], "must come first"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "Only text"),
    ],
)
def test_bad_messages_are_refused(
    template: jinja2.Template, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        _render(template, *messages)
