"""`stratagate profile`: which experts a file of conversations is routed to, as a ranking for the expert cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.config import DEFAULT_MODEL, EngineConfig, ModelParts, model_path, text_path
from engine.errors import ConversationsMismatch
from engine.expert_profile import ExpertProfile, profile_of_counts, write_profile
from engine.loading import load_engine
from engine.sources.gguf_text import extract_text
from engine.sources.opening import GGUF_SUFFIX, read_spec
from engine.startup_budget import slots_per_layer
from engine.steps import CountingSteps
from engine.tools.options import (
    MODEL_HELP,
    MtpOption,
    NativeOption,
    PleGgufOption,
    number_option,
    word_option,
)
from engine.tools.tables import table

if TYPE_CHECKING:
    from engine.engine import TorchEngine

_DEFAULT_CONTEXT = 4096
_SHARES = (0.1, 0.25, 0.5, 0.75)


def profile(
    conversations: Annotated[
        Path,
        typer.Argument(
            help='JSON lines: {"messages": [{"role", "content"}]}, {"text": ...} or {"ids": [...]}.'
        ),
    ],
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    native: NativeOption = None,
    ple_gguf: PleGgufOption = None,
    mtp: MtpOption = None,
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("expert-profile.bin"),
    max_context: Annotated[
        int | None,
        number_option("--max-context", "Longer texts are read in parts of this.", 16, 2**20),
    ] = None,
    device: Annotated[
        str, word_option("--device", "Where to run.", ("auto", "cpu", "cuda"))
    ] = "auto",
    dtype: Annotated[
        str, word_option("--dtype", "Of weights.", ("auto", "float32", "bfloat16"))
    ] = "auto",
    threads: Annotated[int | None, number_option("--threads", "CPU threads.", 1, 1024)] = None,
) -> None:
    """Read conversations, count which experts every layer routes them to, and write the ranking."""
    if out.is_dir() or not out.parent.is_dir():
        raise typer.BadParameter(f"--out: found {out}, required a file in a directory that exists")
    parts = ModelParts(native=native, ple_gguf=ple_gguf, mtp=mtp)
    spec = read_spec(model_path(model), parts)
    with TemporaryDirectory() as made:
        directory = _text_files(model, parts, Path(made))
        texts = list(read_conversations(conversations, directory, spec.vocab_size))
    engine = load_engine(
        EngineConfig(
            model=model,
            parts=parts,
            device=device,
            dtype=dtype,
            threads=threads,
            num_slots=1,
            max_draft=0,
            max_context=max_context or min(spec.max_position, _DEFAULT_CONTEXT),
        )
    )
    counts = count_routes(engine, texts)
    engine.close()
    ranking = profile_of_counts(counts)
    write_profile(out, ranking)
    typer.echo(report(ranking, counts, sum(map(len, texts))))
    typer.echo(f"\nwritten: {out}")


@torch.inference_mode()
def count_routes(engine: TorchEngine, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows routed to each expert of each layer, [layers][experts], over all ids of all texts."""
    steps = engine.steps
    if isinstance(steps, CountingSteps):
        return steps.count_routes(lambda: _read_all(engine, texts))
    layers = [layer.moe for layer in engine.trunk.layers]
    for layer in layers:
        layer.routed = torch.zeros(layer.num_experts, dtype=torch.int64, device=engine.state.device)
    _read_all(engine, texts)
    counts = [layer.routed.tolist() for layer in layers if layer.routed is not None]
    for layer in layers:
        layer.routed = None
    return counts


def _read_all(engine: TorchEngine, texts: Sequence[Sequence[int]]) -> None:
    """Every text from its start, in parts of the context, each in prompt pieces."""
    limit, piece = engine.info.max_context, engine.info.chunk_tokens
    for ids in texts:
        for begin in range(0, len(ids), limit):
            part = ids[begin : begin + limit]
            for start in range(0, len(part), piece):
                engine.read(0, part[start : start + piece], start)


def hit_rate(ranking: ExpertProfile, counts: Sequence[Sequence[int]], num_slots: int) -> float:
    """Share of these routes that a cache of so many slots would have served."""
    slots = slots_per_layer(num_slots, ranking.ranked_per_layer())
    hits = sum(counts[layer][expert] for layer, expert in ranking.chosen(slots))
    return hits / max(1, sum(map(sum, counts)))


def report(ranking: ExpertProfile, counts: Sequence[Sequence[int]], num_ids: int) -> str:
    """What a cache of some sizes would have served of the text that the ranking is made from."""
    total = len(ranking.pairs)
    rows = [
        (
            f"{share:.0%}",
            f"{int(total * share)}",
            f"{hit_rate(ranking, counts, int(total * share)):.1%}",
        )
        for share in _SHARES
    ]
    head = f"{num_ids:,} ids, {total:,} pairs of layer and expert ranked"
    return f"{head}\n\n" + table(("of all experts", "slots", "routes served"), rows)


def _text_files(model: str, parts: ModelParts, made: Path) -> Path:
    """Where tokenizer and template lie; written to `made` out of a GGUF file's metadata if none are beside it."""
    beside = text_path(model)
    file = model if model.endswith(GGUF_SUFFIX) else parts.native
    if file is None or (beside / "tokenizer.json").is_file():
        return beside
    extract_text(Path(file), made)
    return made


def read_conversations(file: Path, text_files: Path, vocab_size: int) -> Iterator[list[int]]:
    """Ids of every line. Raises ConversationsMismatch naming file and line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConversationsMismatch(f"{file}: cannot be read: {error}") from error
    encode = _Encoder(text_files)
    found = num_ids = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found += 1
        try:
            ids = _ids(json.loads(line), encode, vocab_size)
        except (ValueError, TemplateError) as error:
            raise ConversationsMismatch(f"{file}, line {number}: {error}") from error
        num_ids += len(ids)
        yield ids
    if not found:
        raise ConversationsMismatch(f"{file}: has no conversation")
    if not num_ids:
        raise ConversationsMismatch(
            f"{file}: its conversations have no token, required at least one"
        )


def _ids(line: Any, encode: _Encoder, vocab_size: int) -> list[int]:
    match line:
        case {"ids": list(found)}:
            ids = cast("list[object]", found)
            if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise ValueError(f"ids: required whole numbers from 0 to {vocab_size - 1}")
            return cast("list[int]", ids)
        case {"text": str(text)}:
            return encode.text(text)
        case {"messages": list(messages)}:
            return encode.chat(cast("list[object]", messages))
        case _:
            raise ValueError("required an object with messages (a list), text (a string) or ids")


class _Encoder:
    """The model's tokenizer and chat template, read when they are first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer: Any = None

    def text(self, text: str) -> list[int]:
        file = self._directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file} is missing, required to read text; give ids instead")
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(file))
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, messages: list[object]) -> list[int]:
        file = self._directory / "chat_template.jinja"
        if not file.is_file():
            raise ValueError(f"{file} is missing, required to read messages; give text instead")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(file.read_text(encoding="utf-8"), globals=_GLOBALS)
        return self.text(template.render(messages=messages, add_generation_prompt=False))


def _refuse(message: str) -> None:
    raise TemplateError(message)


_GLOBALS: dict[str, Any] = {"raise_exception": _refuse}
