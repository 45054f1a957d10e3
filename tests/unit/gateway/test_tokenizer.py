from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gateway.errors import TokenizerError
from gateway.model_files import SamplingDefaults, load_defaults, load_model_files
from gateway.tokenizer import FileTokenizer
from scheduler.config import model_path
from tests.conformance.live import default_files

if TYPE_CHECKING:
    from pathlib import Path

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def write_tokenizer(path: Path, decoder: object, **fields: object) -> Path:
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 5,
                "content": "</s>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": METASPACE,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "vocab": {"▁a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4, "</s>": 5, "a": 6},
            "merges": [["▁", "a"]],
            "byte_fallback": True,
        },
        **fields,
    }
    path.write_text(json.dumps(document))
    return path


def test_every_id_of_the_default_model_has_the_bytes_the_library_decodes() -> None:
    from tokenizers import Tokenizer as HfTokenizer

    full = HfTokenizer.from_file(str(model_path("default") / "tokenizer.json"))
    tokenizer = default_files().tokenizer
    hidden = {token.id for token in tokenizer.control_tokens if token.is_hidden}
    for token_id in range(0, full.get_vocab_size(), 7):
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        assert text == ("" if token_id in hidden else full.decode([token_id]))
    assert {tokenizer.token_text(token_id) for token_id in hidden} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }


def test_encoding_never_gives_a_control_token() -> None:
    tokenizer = default_files().tokenizer
    for token in tokenizer.control_tokens:
        ids = tokenizer.encode_text(f"a{token.text}b")
        assert token.id not in ids
        assert default_files().decode(ids) == f"a{token.text}b"


def test_ids_without_text_are_empty() -> None:
    tokenizer = default_files().tokenizer
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_text(10**9) == ""


@pytest.mark.parametrize("decoder", [METASPACE, SENTENCEPIECE])
def test_sentencepiece_vocabularies(tmp_path: Path, decoder: object) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "tokenizer.json", decoder))
    assert tokenizer.strips_first_space
    data = b"".join(map(tokenizer.token_bytes, [0, 1, 2, 3, 0, 5]))
    assert data.decode() == " abé a"
    assert 5 not in tokenizer.encode_text("a</s>")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read"),
        ("{", "not a usable tokenizer"),
        ("{}", "not a usable tokenizer"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=reason):
        FileTokenizer(path)


def test_unknown_decoders_are_refused(tmp_path: Path) -> None:
    path = write_tokenizer(
        tmp_path / "tokenizer.json", {"type": "WordPiece", "prefix": "##", "cleanup": True}
    )
    with pytest.raises(TokenizerError, match="WordPiece"):
        FileTokenizer(path)


def test_model_files_of_the_default_model() -> None:
    files = default_files()
    assert files.turn_token_id is not None
    assert files.think_ids is not None
    assert len(files.defaults.stop_token_ids) == 2
    assert files.decode([files.turn_token_id]) == ""
    with pytest.raises(TokenizerError, match="no such file or directory"):
        load_model_files(model_path("default") / "nowhere")


def test_defaults_are_read_and_checked(tmp_path: Path) -> None:
    assert load_defaults(tmp_path) == SamplingDefaults()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_defaults(tmp_path).stop_token_ids == (7,)
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.5, "top_k": 20, "eos_token_id": [1, 2]}')
    assert load_defaults(tmp_path) == SamplingDefaults(
        temperature=0.5, top_k=20, stop_token_ids=(1, 2)
    )
    file.write_text('{"do_sample": false, "temperature": 0.5}')
    assert load_defaults(tmp_path).temperature == 0.0
    for bad in ('{"top_p": 2}', '{"temperature": "hot"}', '{"top_k": true}', "[]", "{"):
        file.write_text(bad)
        with pytest.raises(TokenizerError, match=r"generation_config\.json"):
            load_defaults(tmp_path)


def test_no_token_stands_for_more_characters_than_said() -> None:
    default_tokenizer = default_files().tokenizer
    most = default_tokenizer.most_chars_per_token
    texts = ("a" * 5000, " " * 3000, "\n" * 500, "Once upon a time, " * 100, "é" * 400, "—=" * 300)
    for text in texts:
        assert len(default_tokenizer.encode_text(text)) * most >= len(text)
