from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.training.config import ModelConfig, TrainConfig
from engine.training.evaluate import (
    Acceptance,
    SampleSettings,
    _count_windows,
    draft_acceptance,
    generate,
    held_out_loss,
)
from engine.training.model import TrainingModel
from engine.training.packing import ASSISTANT_BIT
from engine.training.trainer import CallLimits, Trainer, make_batch, row_numbers, run

TRAIN = TrainConfig(num_steps=6, batch_rows=2, warmup_steps=2, mtp_steps_early=1, mtp_steps=2)
LIMITS = CallLimits(max_seconds=60)


@pytest.fixture
def rows(config: ModelConfig) -> torch.Tensor:
    packed = torch.randint(0, config.vocab_size, (8, 64), dtype=torch.int32)
    packed[:, 10:] += ASSISTANT_BIT
    return packed


def _trainer(config: ModelConfig, train: TrainConfig = TRAIN) -> Trainer:
    torch.manual_seed(7)
    return Trainer(TrainingModel(config), train, compile_layers=False)


def test_a_resumed_run_ends_where_an_unbroken_one_does(
    config: ModelConfig, rows: torch.Tensor, tmp_path: Path
) -> None:
    whole = _trainer(config)
    assert run(whole, rows, rows, tmp_path / "whole.pt", LIMITS)
    broken = _trainer(config)
    for step in range(3):
        numbers = row_numbers(step, len(rows), TRAIN)
        broken.train_step(make_batch(rows[numbers], TRAIN.user_token_weight, config.eos_token_id))
    broken.save(tmp_path / "broken.pt")
    resumed = _trainer(config)
    resumed.load(tmp_path / "broken.pt")
    assert resumed.step == 3
    assert run(resumed, rows, rows, tmp_path / "broken.pt", LIMITS)
    assert resumed.step == whole.step == TRAIN.num_steps
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_call_stops_in_time_and_says_it_is_not_finished(
    config: ModelConfig, rows: torch.Tensor, tmp_path: Path
) -> None:
    trainer = _trainer(config)
    assert not run(trainer, rows, rows, tmp_path / "c.pt", CallLimits(max_seconds=0.0))
    assert trainer.step == 0
    assert (tmp_path / "c.pt").exists()


def test_training_lowers_the_loss_on_its_rows(config: ModelConfig, rows: torch.Tensor) -> None:
    trainer = _trainer(config, TrainConfig(num_steps=40, batch_rows=8, warmup_steps=2))
    before = held_out_loss(trainer.model, rows)["loss"]
    batch = make_batch(rows, 1.0, config.eos_token_id)
    for _ in range(8):
        trainer.train_step(batch)
    assert held_out_loss(trainer.model, rows)["loss"] < before - 0.05


def test_epochs_see_every_row_once_in_their_own_order() -> None:
    epochs = [
        torch.cat([row_numbers(epoch * 4 + step, 8, TRAIN) for step in range(4)])
        for epoch in range(2)
    ]
    assert all(sorted(epoch.tolist()) == list(range(8)) for epoch in epochs)
    assert not torch.equal(*epochs)


def test_learning_rate_warms_up_stays_and_falls() -> None:
    train = TrainConfig(num_steps=1000, warmup_steps=10, decay_share=0.5)
    scales = [train.lr_scale(step) for step in (0, 9, 400, 750, 999)]
    assert scales == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.002])


def test_padding_weighs_nothing(config: ModelConfig) -> None:
    eos = config.eos_token_id
    packed = torch.tensor([[5, 6 | ASSISTANT_BIT, eos, eos, eos]], dtype=torch.int32)
    batch = make_batch(packed, 0.5, eos)
    assert batch.ids.tolist() == [[5, 6, eos, eos, eos]]
    assert batch.token_weights.tolist() == [[0.5, 1.0, 0.5, 0.0, 0.0]]


def test_windows_stop_at_the_first_wrong_or_doubtful_draft() -> None:
    counts = Acceptance()
    hits = [[True, False, True, True], [True] * 4, [True] * 4, [False] * 4, [True] * 4, [True] * 4]
    chances = [[0.9] * 4, [0.9] * 4, [0.9, 0.4, 0.9, 0.9], [0.9] * 4, [0.2] * 4, [0.9] * 4]
    _count_windows(counts, hits, chances, min_p=0.5)
    # Windows begin at 0 (one of two accepted), 2 (one, then the gate), 4 (gate), 5 (end of text).
    assert counts.offered == [3, 1, 0, 0]
    assert counts.accepted == [3, 0, 0, 0]
    assert (counts.num_windows, counts.num_tokens) == (4, 7)


def test_acceptance_counts_only_what_the_trunk_wrote(config: ModelConfig) -> None:
    model = TrainingModel(config)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    settings = SampleSettings(max_new_tokens=12)
    answers = generate(model, prompts, settings, stop_id=config.eos_token_id)
    assert answers[0] == generate(model, prompts[:1], settings, stop_id=config.eos_token_id)[0]
    counts = draft_acceptance(model, prompts, answers, min_p=0.0)
    assert counts.num_windows > 0
    assert all(a <= o for a, o in zip(counts.accepted, counts.offered, strict=True))
