"""Tokenizer and chat template of a model, between a checkpoint's text files and GGUF metadata.

Byte-level BPE with NFC normalisation only, which is what the architecture's models have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigMismatch, EngineError
from engine.sources.gguf_shards import read_gguf, shard_paths

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before pairs are merged, by the name that GGUF has for it.
_PATTERNS = {
    "qwen2": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
}
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def text_metadata(directory: Path, vocab_size: int) -> dict[str, Any]:
    """Metadata, keys in full, out of a checkpoint's text files; empty if it has no tokenizer.json.

    Raises ConfigMismatch for a tokenizer that GGUF has no name for.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return {}
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for text, token_id in tokenizer["model"]["vocab"].items():
        tokens[token_id], kinds[token_id] = text, _NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    metadata: dict[str, Any] = {
        f"{_PREFIX}model": "gpt2",
        f"{_PREFIX}pre": _pattern_name(tokenizer),
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}token_type": kinds,
        f"{_PREFIX}merges": merges,
    }
    ids = [e for e in _end_ids(directory) if e < vocab_size]
    if ids:
        # The first end mark ends a turn; the last, where there are two, ends a text.
        metadata |= {f"{_PREFIX}eos_token_id": ids[0], f"{_PREFIX}padding_token_id": ids[-1]}
    template = directory / "chat_template.jinja"
    if template.is_file():
        metadata[_TEMPLATE] = template.read_text(encoding="utf-8")
    return metadata


def has_text(metadata: Mapping[str, Any]) -> bool:
    """Whether a file has a tokenizer at all."""
    return f"{_PREFIX}model" in metadata


def write_text_files(metadata: Mapping[str, Any], directory: Path) -> None:
    """The text files of a checkpoint out of a GGUF file's metadata.

    Raises ConfigMismatch, naming the key, for a tokenizer of another kind.
    """
    _require(metadata, f"{_PREFIX}model", ("gpt2",))
    _require(metadata, f"{_PREFIX}pre", tuple(_PATTERNS))
    tokens, kinds = metadata[f"{_PREFIX}tokens"], metadata[f"{_PREFIX}token_type"]
    known = [i for i, kind in enumerate(kinds) if kind == _NORMAL]
    added = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    pattern = {"Regex": _PATTERNS[metadata[f"{_PREFIX}pre"]]}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i], kinds[i]) for i in added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {tokens[i]: i for i in known},
            "merges": [merge.split(" ") for merge in metadata[f"{_PREFIX}merges"]],
        },
    }
    ends = [metadata.get(f"{_PREFIX}{key}_token_id") for key in ("eos", "padding")]
    ids = list(dict.fromkeys(int(i) for i in ends if i is not None))
    _write(directory / "tokenizer.json", tokenizer)
    end_token = tokens[ids[0]] if ids else None
    _write(directory / "tokenizer_config.json", {"eos_token": end_token})
    _write(directory / "generation_config.json", {"eos_token_id": ids})
    if _TEMPLATE in metadata:
        text = metadata[_TEMPLATE]
        (directory / "chat_template.jinja").write_text(text, encoding="utf-8")


def extract_text(file: Path, directory: Path) -> None:
    """Write the text files of a GGUF model, any shard of it, to a directory.

    Raises ConfigMismatch if its metadata has no tokenizer, or one of another kind.
    """
    first = shard_paths(file)[0]
    fields = read_gguf(first).fields
    if not has_text(fields):
        raise ConfigMismatch(
            f"{first.name}: found no tokenizer in its metadata, required one, or tokenizer.json beside the file"
        )
    kept = {name: field for name, field in fields.items() if name.startswith("tokenizer.")}
    write_text_files({name: field.contents() for name, field in kept.items()}, directory)


def _pattern_name(tokenizer: Mapping[str, Any]) -> str:
    before = tokenizer["pre_tokenizer"]
    parts = before.get("pretokenizers", [before])
    pattern = next((p["pattern"].get("Regex") for p in parts if p["type"] == "Split"), None)
    for name, known in _PATTERNS.items():
        if pattern == known:
            return name
    raise ConfigMismatch(
        f"tokenizer.json: found a pre-tokenizer that splits by {pattern!r}, "
        f"required that of {' or '.join(_PATTERNS)}"
    )


def _end_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if ends is not None:
                return list(ends) if isinstance(ends, list) else [ends]
    return []


def _require(metadata: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> None:
    if metadata.get(key) not in allowed:
        raise ConfigMismatch(
            f"{key}: found {metadata.get(key)!r}, required {' or '.join(map(repr, allowed))}; "
            "put the model's tokenizer.json beside the file instead"
        )


def _added_token(token_id: int, text: str, kind: int) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == _CONTROL,
    }


def _write(file: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    """`python -m engine.sources.gguf_text FILE DIR`: extract_text; status 1 and a line when it cannot."""
    try:
        extract_text(Path(sys.argv[1]), Path(sys.argv[2]))
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
