"""The training loop: batches, steps, a checkpoint that the next call resumes from.

A run may be cut into calls of any length: which rows a step sees, its learning rate and its phase
depend on the step number alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.training.evaluate import held_out_loss
from engine.training.model import (
    LossWeights,
    TrainingModel,
    distillation_loss,
    next_token_loss,
    training_loss,
)
from engine.training.optimizer import Optimizer
from engine.training.packing import ASSISTANT_BIT, Ids

if TYPE_CHECKING:
    from engine.training.config import TrainConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """ids int64 [B, T] and the weight fp32 [B, T] of predicting each of them."""

    ids: Tensor
    token_weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What one call may do: stop after `max_seconds`, save every `save_seconds`, log and measure."""

    max_seconds: float
    save_seconds: float = 60.0
    log_steps: int = 50
    measure_steps: int = 500


def rows_to_device(rows: Ids, device: torch.device) -> Tensor:
    """Packed rows as int32 [rows, T] on the device."""
    return torch.from_numpy(rows.astype("int32")).to(device)


def make_batch(packed: Tensor, user_weight: float, eos_token_id: int) -> Batch:
    """Split packed values into ids and weights; padding after the last EOS weighs nothing."""
    ids = (packed & (ASSISTANT_BIT - 1)).long()
    weights = torch.where(packed >= ASSISTANT_BIT, 1.0, user_weight)
    is_padding = (ids[:, 1:] == eos_token_id) & (ids[:, :-1] == eos_token_id)
    weights[:, 1:] *= ~is_padding
    return Batch(ids, weights)


def row_numbers(step: int, num_rows: int, config: TrainConfig) -> Tensor:
    """Rows of a step, int64 [batch_rows]: each epoch goes through all rows in its own order."""
    steps_per_epoch = num_rows // config.batch_rows
    epoch, within = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(config.seed + epoch)
    order = torch.randperm(num_rows, generator=generator)
    return order[within * config.batch_rows : (within + 1) * config.batch_rows]


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU; plain fp32 on a CPU, where tests want exact arithmetic."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


class Trainer:
    """A model, its optimizer and the step counter."""

    def __init__(self, model: TrainingModel, config: TrainConfig, compile_layers: bool) -> None:
        self.model = model
        self.config = config
        self.optimizer = Optimizer(model, config)
        self.step = 0
        self.factors = LossWeights(config.mtp_weight, config.balance_weight, config.indexer_weight)
        self.loss_fns = (next_token_loss, distillation_loss)
        if compile_layers:
            torch._dynamo.config.recompile_limit = 64  # pyright: ignore[reportPrivateUsage]
            model.compile_layers()
            self.loss_fns = (
                torch.compile(next_token_loss, dynamic=False),
                torch.compile(distillation_loss, dynamic=False),
            )

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def train_step(self, batch: Batch) -> dict[str, Tensor]:
        """One update. Returns the parts of the loss, not yet read from the device."""
        with autocast(self.device):
            total, parts = training_loss(
                self.model,
                batch.ids,
                batch.token_weights,
                self.factors,
                self.config.mtp_steps_at(self.step),
                is_selecting=self.config.is_selecting(self.step),
                loss_fns=self.loss_fns,
            )
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.max_grad_norm, foreach=True
        )
        self.optimizer.step(self.config.lr_scale(self.step))
        self.step += 1
        return parts | {"grad_norm": norm}

    def save(self, path: Path) -> None:
        """Write step, weights and optimizer state; a cut-off write leaves the old file."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _steps_left(trainer: Trainer, deadline: float) -> Iterator[int]:
    while trainer.step < trainer.config.num_steps and time.monotonic() < deadline:
        yield trainer.step


def run(
    trainer: Trainer, rows: Tensor, held_out: Tensor, checkpoint: Path, limits: CallLimits
) -> bool:
    """Train until the steps or the seconds are used up, then save. Returns True when finished."""
    config = trainer.config
    started = last_save = last_log = time.monotonic()
    tokens = 0
    trainer.model.train()
    for step in _steps_left(trainer, started + limits.max_seconds):
        numbers = row_numbers(step, rows.shape[0], config).to(rows.device)
        batch = make_batch(
            rows[numbers], config.user_token_weight, trainer.model.config.eos_token_id
        )
        parts = trainer.train_step(batch)
        tokens += batch.ids.numel()
        if trainer.step % limits.log_steps == 0 or step < 2:
            values = {name: round(part.item(), 4) for name, part in parts.items()}
            if not math.isfinite(values["main"]):
                raise RuntimeError(f"loss is not finite at step {step}: {values}")
            now = time.monotonic()
            _log.info("step %d: %.0f tokens/s %s", trainer.step, tokens / (now - last_log), values)
            last_log, tokens = now, 0
        if trainer.step % limits.measure_steps == 0:
            loss = held_out_loss(trainer.model, held_out[:32])
            _log.info("step %d: held out %s", trainer.step, loss)
            last_log, tokens = time.monotonic(), 0
        if time.monotonic() - last_save > limits.save_seconds:
            trainer.save(checkpoint)
            last_save = time.monotonic()
    trainer.save(checkpoint)
    _log.info("stopped at step %d after %.0f s", trainer.step, time.monotonic() - started)
    return trainer.step >= config.num_steps
