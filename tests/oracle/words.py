"""A random model with the shipped model's vocabulary: nothing but a grammar keeps its texts in order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.config import model_path
from engine.engine import TorchEngine
from engine.loading import load_engine
from tests.oracle import tiny
from tests.oracle.conftest import engine_config

NAME = "words"
END = 8183
"""The first id that is no text."""


def words_engine(directory: Path) -> TorchEngine:
    """Made in a folder of its own."""
    changes = {
        "vocab_size": 8192,
        "eos_token_id": END,
        "bos_token_id": END,
        "max_position_embeddings": 1024,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.GRID, NAME, tiny.Tiny(seed=21, changes=changes))
        checkpoint = tiny.make_checkpoint(directory, NAME)
    shutil.copy(model_path("default") / "tokenizer.json", checkpoint)
    return load_engine(engine_config(checkpoint, max_context=1024))
