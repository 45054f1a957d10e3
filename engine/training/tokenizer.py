"""The tokenizer of the default model: training, its files, and the chat template around text.

Owns the special tokens and their ids (the end of the id range, so that the byte-level part keeps
ids 0 ..). Refuses to know about models or batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

if TYPE_CHECKING:
    import jinja2

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Added but not special, as in the family: decoding with "skip special tokens" keeps them.
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
NUM_ADDED_TOKENS = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)

_PRE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TemplateError(ValueError):
    """The chat template refused a message list."""


def _bare_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` ids, the added tokens being the last of them.

    Raises: ValueError if the texts are too few to fill the vocabulary.
    """
    tokenizer = _bare_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_ADDED_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} ids, asked {vocab_size}")
    return tokenizer


def tokenizer_config(max_tokens: int) -> dict[str, Any]:
    """What transformers' AutoTokenizer needs beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": max_tokens,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; the template lies in the folder already."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    text = json.dumps(tokenizer_config(max_tokens), indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist.

    Raises: KeyError if it does not.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def load_template(path: Path) -> jinja2.Template:
    """Compile a chat template in a sandbox, with `raise_exception` and an unescaped `tojson`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    source = path.read_text(encoding="utf-8")
    return environment.from_string(source, globals={"raise_exception": _refuse})
