"""What a start over two stages plans is what they take, whatever kinds of layers each has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.loading import load_engine
from engine.startup import allowed_bytes
from tests.oracle.conftest import engine_config
from tests.random_weights import SMALL, write_checkpoint


def test_long_pieces_on_their_way_are_planned_and_rehearsed(tmp_path: Path) -> None:
    """Their streams take more than a start may be off, and only the second stage has attention."""
    checkpoint = write_checkpoint(tmp_path / "long", {**SMALL, "max_position_embeddings": 4096})
    config = replace(engine_config(checkpoint), kernels="torch")
    engine = load_engine(
        replace(config, max_context=4096, chunk_tokens=4096, num_groups=2), rehearse=True
    )
    engine.close()
    names = {item.name.rpartition(": ")[2]: item.planned_bytes for item in engine.info.memory_plan}
    assert names["streams between stages"] > 2 * allowed_bytes(0)
