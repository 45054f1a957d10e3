"""Which kind of weights a path holds: tells by what is there, and opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.model_spec import ModelSpec
from engine.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from engine.sources.base import TensorSource


def read_spec(path: Path) -> ModelSpec:
    """Geometry of the model at a path. Raises ConfigMismatch with key, found and required."""
    return ModelSpec.from_dir(path)


def open_source(path: Path, spec: ModelSpec) -> TensorSource:
    """Weights of the model at a path. Raises WeightMismatch for a file that cannot be read."""
    del spec  # safetensors carry their own shapes
    return SafetensorsSource(path)
