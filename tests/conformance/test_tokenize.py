"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.token_wire import MAX_IDS
from tests.conformance.live import MODEL, chat_body, default_files, ids_of

if TYPE_CHECKING:
    import httpx

    from tests.conformance.live import Live

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "Hello, wörld! <|im_end|>"


async def tokenize(live: Live, **fields: object) -> httpx.Response:
    return await live.client.post("/tokenize", json=fields)


async def test_a_text_there_and_back(live: Live) -> None:
    answer = (await tokenize(live, prompt=TEXT, model=MODEL)).json()
    assert answer["tokens"] == list(default_files().encoder.encode_plain(TEXT, parse_special=False))
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == live.scheduler.info.max_context
    assert answer["token_strs"] is None
    back = await live.client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": TEXT}


async def test_control_tokens_and_names(live: Live) -> None:
    answer = (await tokenize(live, prompt="a<|im_end|>", parse_special=True)).json()
    assert answer["tokens"] == list(ids_of("a"))
    answer = (await tokenize(live, prompt="Hello, you", return_token_strs=True)).json()
    assert "".join(answer["token_strs"]) == "Hello, you"
    assert (await tokenize(live, prompt="")).json()["count"] == 0
    empty = await live.client.post("/detokenize", json={"tokens": []})
    assert empty.json() == {"prompt": ""}


async def test_a_chat_has_as_many_tokens_as_its_answer_says(live: Live) -> None:
    messages = chat_body("How long am I?" * 500)["messages"]
    counted = (await tokenize(live, messages=messages)).json()["count"]
    asked = await live.client.post("/v1/chat/completions", json=chat_body(messages=messages))
    assert asked.json()["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 3}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [8192]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_IDS + 1)}, "tokens"),
    ],
)
async def test_wrong_bodies(live: Live, path: str, fields: dict[str, object], param: str) -> None:
    response = await live.client.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_another_model_is_not_found(live: Live) -> None:
    assert (await tokenize(live, prompt="x", model="other")).status_code == 404
