"""Where prompts are rendered, and what is refused before it costs anything."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.fake import FakeEngine, FakeScript
from gateway.errors import InvalidRequest
from gateway.preparation import Preparer
from gateway.wire import parse_chat, parse_completion
from tests.conformance.live import default_files

if TYPE_CHECKING:
    from gateway.chat_messages import Message

USER = {"role": "user", "content": "Hello"}
INFO = FakeEngine(FakeScript()).info


def call(arguments: object) -> dict[str, object]:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("fields", "on_the_loop"),
    [
        ({"messages": [USER]}, True),
        ({"messages": [{**USER, "content": "word " * 1000}]}, False),
        ({"messages": [USER, call({"text": "word " * 1000}), USER]}, False),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}, False),
    ],
    ids=["short", "long", "calls", "tools"],
)
async def test_only_short_prompts_are_rendered_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], on_the_loop: bool
) -> None:
    files = default_files()
    render, threads = files.template.render, list[int]()

    def noted(messages: tuple[Message, ...], *rest: object, **options: object) -> object:
        threads.append(threading.get_ident())
        return render(messages, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(files.template, "render", noted)
    body = {"model": "m", **fields}
    await Preparer(files, replace(INFO, max_context=8192)).rendered(
        parse_chat(json.dumps(body).encode())
    )
    assert [thread == threading.get_ident() for thread in threads] == [on_the_loop]


async def refused(preparer: Preparer, *, messages: object = None, prompt: object = None) -> None:
    body = json.dumps({"model": "m", "messages": messages, "prompt": prompt, "max_tokens": 1})
    with pytest.raises(InvalidRequest) as caught:
        if prompt is None:
            await preparer.chat(parse_chat(body.encode()), request_id="r", owner="")
        else:
            await preparer.completion(parse_completion(body.encode()), request_id="r", owner="")
    assert caught.value.code == "context_length_exceeded"
    assert "the context holds 64" in str(caught.value)


async def test_what_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    files, prompts = default_files(), list[str]()
    preparer = Preparer(files, replace(INFO, max_context=64))
    encode = files.encoder.encode_plain

    def noted(text: str, *, parse_special: bool) -> tuple[int, ...]:
        prompts.append(text)
        return encode(text, parse_special=parse_special)

    with monkeypatch.context() as patched:
        patched.setattr(files.template, "render", None)
        await refused(preparer, messages=[{"role": "user", "content": ""}] * 65)
    monkeypatch.setattr(files.encoder, "encode_plain", noted)
    await refused(preparer, prompt=[[5] * 65])
    assert prompts == []
    too_long = "a b c d " * 100
    await refused(preparer, prompt=["short", too_long, too_long])
    assert prompts == ["short", too_long]
