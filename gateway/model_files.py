"""What the gateway reads of a checkpoint: tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from gateway.errors import TokenizerError
from gateway.json_file import read_object
from gateway.template import PromptEncoder, load_template
from gateway.tokenizer import FileTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gateway.fields import JsonObject
    from gateway.template import ChatTemplate
    from gateway.tokenizer import Tokenizer

_TURN_START = "<|im_start|>"
_THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for fields that a request leaves out; from generation_config.json, else neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """The model's own end marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Everything about text of one checkpoint."""

    tokenizer: Tokenizer
    encoder: PromptEncoder
    template: ChatTemplate
    defaults: SamplingDefaults
    directory: Path

    @property
    def turn_token_id(self) -> int | None:
        """The id that begins a chat turn, if the vocabulary has one."""
        return self._control_ids().get(_TURN_START)

    @property
    def think_ids(self) -> tuple[int, int] | None:
        """The ids of `<think>` and `</think>`, if the vocabulary has both."""
        ids = [self._control_ids().get(tag) for tag in _THINK_TAGS]
        return None if None in ids else cast("tuple[int, int]", tuple(ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of whole sequences, hidden tokens left out."""
        data = b"".join(map(self.tokenizer.token_bytes, token_ids))
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.tokenizer.strips_first_space else text

    def _control_ids(self) -> dict[str, int]:
        return {token.text: token.id for token in self.tokenizer.control_tokens}


def load_model_files(directory: Path) -> ModelFiles:
    """Read a checkpoint's text files. Raises TokenizerError naming the file."""
    if not directory.exists():
        raise TokenizerError(f"{directory}: no such file or directory")
    if not directory.is_dir():
        raise TokenizerError(f"{directory} is not a directory")
    if not any((directory / name).is_file() for name in ("config.json", "tokenizer.json")):
        raise TokenizerError(
            f"{directory} has no config.json and no tokenizer.json; required: a checkpoint directory, a pack, "
            "or a GGUF file with the model's tokenizer.json beside it"
        )
    tokenizer = FileTokenizer(directory / "tokenizer.json")
    encoder = PromptEncoder(tokenizer)
    return ModelFiles(
        tokenizer=tokenizer,
        encoder=encoder,
        template=load_template(directory, encoder),
        defaults=load_defaults(directory),
        directory=directory,
    )


def load_defaults(directory: Path) -> SamplingDefaults:
    """Sampling defaults and end marks of a checkpoint. Raises TokenizerError for a value out of range."""
    path = directory / "generation_config.json"
    config = read_object(path)
    eos = config.get("eos_token_id")
    if eos is None:
        eos = read_object(directory / "config.json").get("eos_token_id")
    eos_ids = cast("list[object]", eos) if isinstance(eos, list) else [eos]
    values = _Values(path, config)
    is_greedy = config.get("do_sample") is False
    return SamplingDefaults(
        temperature=0.0 if is_greedy else values.number("temperature", 1.0, 0, 2),
        top_p=values.number("top_p", 1.0, 0, 1),
        top_k=int(values.number("top_k", 0, 0, 2**31 - 1)),
        min_p=values.number("min_p", 0.0, 0, 1),
        repetition_penalty=values.number("repetition_penalty", 1.0, 0.01, 10),
        stop_token_ids=tuple(item for item in eos_ids if isinstance(item, int)),
    )


@dataclass(frozen=True, slots=True)
class _Values:
    path: Path
    config: JsonObject

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.config.get(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not low <= value <= high
        ):
            raise TokenizerError(
                f"{self.path}: {name} must be from {low:g} to {high:g}; found {value!r:.40}"
            )
        return float(value)
