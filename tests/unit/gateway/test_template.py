from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.chat_messages import Message, Role, ToolCall
from gateway.errors import InvalidRequest, TokenizerError
from gateway.template import ChatTemplate, PromptEncoder, RenderedPrompt, load_template
from gateway.tokenizer import ControlToken
from gateway.tools import Tool
from scheduler.config import model_path
from tests.conformance.live import default_files

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.fields import JsonObject

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FILES = default_files()
CONTROL = {token.id: token.text for token in FILES.tokenizer.control_tokens}
MARKS = "\U0010fffe\U0010ffff"

NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *CONTROL.values(),
                "<|im_",
                "start|>",
                "|im_end|>",
                "<",
                "think>",
                "\U0010fffe",
                "\U0010ffff",
                "\U0010ffffm",
                " ",
                "\n",
                '"',
                "\\",
                "{{ messages }}",
                "{% raw %}",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=6,
).map("".join)


def render(*messages: Message, **kwargs: object) -> RenderedPrompt:
    return FILES.template.render(messages, dict(kwargs))


def controls(prompt: RenderedPrompt) -> list[int]:
    return [token_id for token_id in prompt.token_ids if token_id in CONTROL]


def text_of(prompt: RenderedPrompt) -> str:
    return b"".join(map(spell, prompt.token_ids)).decode()


def spell(token_id: int) -> bytes:
    text = CONTROL.get(token_id)
    return FILES.tokenizer.token_bytes(token_id) if text is None else text.encode()


def conversation(text: list[str], *, names: bool = True) -> tuple[Message, ...]:
    call = ToolCall(
        id=text[0],
        name=text[1] or "f",
        arguments={text[2]: text[3], "list": [text[4], {"k": text[0]}]},
    )
    return (
        Message(role=Role.SYSTEM, content=text[0]),
        Message(role=Role.USER, content=text[1], name=text[2] if names else None),
        Message(
            role=Role.ASSISTANT, content=text[2], reasoning_content=text[3], tool_calls=(call,)
        ),
        Message(role=Role.TOOL, content=text[4]),
        Message(role=Role.TOOL, content=text[0]),
        Message(role=Role.USER, content=text[3]),
    )


@QUICK
@given(text=st.lists(NASTY, min_size=5, max_size=5))
def test_client_text_never_becomes_a_control_token(text: list[str]) -> None:
    harmless = ["x" if part.strip() else part for part in text]
    assert controls(render(*conversation(text))) == controls(render(*conversation(harmless)))


@QUICK
@given(text=st.lists(NASTY, min_size=4, max_size=4))
def test_tools_bring_no_control_tokens_beyond_the_templates_own(text: list[str]) -> None:
    def prompt(parts: list[str]) -> RenderedPrompt:
        tool = Tool(
            name="f",
            declaration={
                "type": "function",
                "function": {
                    "name": "f",
                    "description": parts[0],
                    "parameters": {"properties": {parts[1]: {"enum": [parts[2]], parts[3]: 1}}},
                },
            },
        )
        message = Message(role=Role.USER, content="x")
        return FILES.template.render((message,), {}, tools=(tool,))

    found = prompt(text)
    assert controls(found) == controls(prompt(["x"] * 4))
    declared = json.dumps(text[0], ensure_ascii=False)
    assert FILES.decode(FILES.tokenizer.encode_text(declared)) in text_of(found)


@QUICK
@given(first=NASTY, second=NASTY)
def test_text_in_two_parts_of_a_turn_cannot_join_into_a_control_token(
    first: str, second: str
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.content }}{{ m.content }}>{% endfor %}", FILES.encoder, {}
    )
    messages = (Message(role=Role.USER, content=first), Message(role=Role.USER, content=second))
    prompt = template.render(messages, {}, continue_final=False)
    assert controls(prompt) == []


@QUICK
@given(text=NASTY)
def test_the_text_comes_out_of_the_prompt_again(text: str) -> None:
    normal = FILES.decode(FILES.tokenizer.encode_text(text))
    prompt = render(Message(role=Role.USER, content=text))
    assert text_of(prompt) == (
        f"<|im_start|>user\n{normal}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@QUICK
@given(value=st.recursive(NASTY, lambda inner: st.lists(inner, max_size=3)))
def test_tojson_stays_json(value: object) -> None:
    template = ChatTemplate(
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}", FILES.encoder, {}
    )
    call = ToolCall(id="", name="f", arguments={"a": value})
    prompt = template.render(
        (Message(role=Role.ASSISTANT, tool_calls=(call,)),), {}, continue_final=False
    )
    assert controls(prompt) == []
    expected = FILES.decode(
        FILES.tokenizer.encode_text(json.dumps({"a": value}, ensure_ascii=False))
    )
    assert text_of(prompt) == expected


def test_plain_prompts_are_tokenized_as_the_reference_library_does() -> None:
    from tokenizers import Tokenizer as HfTokenizer

    full = HfTokenizer.from_file(str(model_path("default") / "tokenizer.json"))
    messages = (
        Message(role=Role.SYSTEM, content="  Be brief. "),
        Message(role=Role.USER, content="Hello there!\n"),
        Message(role=Role.ASSISTANT, content="Hi.", reasoning_content="greet"),
        Message(role=Role.USER, content="1 < 2 and 3>2?"),
    )
    prompt = render(*messages)
    assert list(prompt.token_ids) == full.encode(text_of(prompt), add_special_tokens=False).ids
    assert not prompt.in_thought


def test_the_prompt_says_whether_it_opened_the_thought() -> None:
    message = Message(role=Role.USER, content="</think>")
    assert not render(message).in_thought
    assert render(message, enable_thinking=True).in_thought
    assert not render(message, enable_thinking=False).in_thought


def test_continue_final_ends_with_the_text_of_the_last_message() -> None:
    messages = (
        Message(role=Role.USER, content="Count."),
        Message(role=Role.ASSISTANT, content="One, two, <three"),
    )
    prompt = FILES.template.render(messages, {}, continue_final=True)
    assert text_of(prompt).endswith("</think>\n\nOne, two, <three")


def test_a_template_that_refuses_gives_its_words_without_marks() -> None:
    with pytest.raises(InvalidRequest, match="A system message must come first") as caught:
        render(Message(role=Role.USER, content="x"), Message(role=Role.SYSTEM, content="y"))
    assert caught.value.param == "messages"
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}", FILES.encoder, {})
    with pytest.raises(InvalidRequest) as caught:
        template.render((Message(role=Role.USER, content="a<b"),), {}, continue_final=False)
    assert "a<b" in str(caught.value)
    assert not set(MARKS) & set(str(caught.value))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    template = ChatTemplate(source, FILES.encoder, {})
    with pytest.raises(InvalidRequest):
        template.render((Message(role=Role.USER, content="x"),), {}, continue_final=False)


def test_output_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.template.MAX_RENDERED_CHARS", 1000)
    template = ChatTemplate("{% for i in range(999) %}{{ 'xx' }}{% endfor %}", FILES.encoder, {})
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template.render((Message(role=Role.USER, content="x"),), {}, continue_final=False)


def test_extras_of_published_templates_work() -> None:
    source = (
        "{% generation %}{{ bos_token }}{% endgeneration %}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}{{ 'y' if reasoning_effort == 'low' }}"
    )
    template = ChatTemplate(source, FILES.encoder, {"bos_token": "B"})
    prompt = template.render(
        (Message(role=Role.USER, content="x"),), {"reasoning_effort": "low"}, continue_final=False
    )
    assert text_of(prompt) == "B120y"


def test_options_cannot_bring_control_tokens_either() -> None:
    template = ChatTemplate("{{ persona }}{{ extra.a[0] }}", FILES.encoder, {})
    kwargs: JsonObject = {"persona": "<|im_end|>", "extra": {"a": ["<think>"]}}
    prompt = template.render((Message(role=Role.USER, content="x"),), kwargs, continue_final=False)
    assert controls(prompt) == []
    assert text_of(prompt) == "<|im_end|><think>"


def test_raw_prompts_have_control_tokens_only_on_demand() -> None:
    text = "<|im_start|>user\n\U0010fffe"
    plain = FILES.encoder.encode_plain(text, parse_special=False)
    special = FILES.encoder.encode_plain(text, parse_special=True)
    assert not set(plain) & set(CONTROL)
    assert CONTROL[special[0]] == "<|im_start|>"
    assert FILES.decode(plain) == text
    assert FILES.decode(special) == text.removeprefix("<|im_start|>")


def test_templates_are_found_in_both_places(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(TokenizerError, match="no chat_template"):
        load_template(tmp_path, FILES.encoder)
    config.write_text(
        json.dumps({"chat_template": "{{ eos_token }}", "eos_token": {"content": "E"}})
    )
    load_template(tmp_path, FILES.encoder)
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    load_template(tmp_path, FILES.encoder)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="does not compile"):
        load_template(tmp_path, FILES.encoder)
    (tmp_path / "chat_template.jinja").write_text("\U0010fffe")
    with pytest.raises(TokenizerError, match="U\\+10FFFE"):
        load_template(tmp_path, FILES.encoder)


class StrippingTokenizer:
    control_tokens = (
        ControlToken(id=1, text="<s>", is_hidden=True, strips_left=True, strips_right=True),
        ControlToken(id=2, text="<s>x", is_hidden=True),
    )
    strips_first_space = False

    @property
    def most_chars_per_token(self) -> int:
        return 100

    def encode_text(self, text: str) -> list[int]:
        return [100 + ord(char) for char in text]

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_text(self, token_id: int) -> str:
        return ""


def test_control_tokens_take_the_white_space_they_are_declared_to_take() -> None:
    encoder = PromptEncoder(StrippingTokenizer())
    assert encoder.encode("a <s> b") == (100 + ord("a"), 1, 100 + ord("b"))
    assert encoder.encode("<s>x") == (2,)
