"""Choices of the engine, as numbers and names; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.interface import MAX_SPEC

DEFAULT_MODEL = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Files beside the model that give a part of it, as paths."""

    native: str | None = None
    """GGUF file in which a pack has left tensors."""
    ple_gguf: str | None = None
    """GGUF file with the n-gram table; None: the model's own."""
    mtp: str | None = None
    """Directory with the draft layer; None: the model's own."""

    def paths(self) -> tuple[Path, ...]:
        """Those that are given."""
        given = (self.native, self.ple_gguf, self.mtp)
        return tuple(Path(path) for path in given if path is not None)


KERNELS = ("auto", "compiled", "portable", "torch")
"""What EngineConfig.kernels may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load and how to run it. Values are already checked by whoever parsed them."""

    model: str = DEFAULT_MODEL
    """Checkpoint directory, GGUF file or pack directory, or `default` for the shipped model."""
    parts: ModelParts = ModelParts()
    """What of the model comes from other files."""
    text_dir: str | None = None
    """Directory of tokenizer and template; None: where the model is."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the weights' and activations' type."""
    kv: str = "auto"
    """What keys and values are held in: fp32, bf16, int8 with a scale per cell and head, or auto: as dtype."""
    threads: int | None = None
    """CPU threads of the layers; None takes all cores but one."""
    num_slots: int = 4
    max_context: int | None = None
    """Tokens a slot holds; None takes what the model was made for."""
    chunk_tokens: int | None = None
    """Prompt chunk; None chooses by device."""
    max_draft: int = MAX_SPEC
    """0 runs without the draft layer."""
    max_parked_bytes: int | None = None
    """Most host memory of parked pages and checkpoints; None: as much as is ordered."""
    expert_cache: int | None = None
    """Experts of the trunk with a slot on the device; None chooses by what is free, and tiers nothing if all fit."""
    expert_profile: str | None = None
    """File that ranks the experts for the slots; without one the first that come take them."""
    pool_workers: int | None = None
    """Threads that compute experts in host memory; 0: the Triton kernels read those over the bus; None: physical cores
    but one. In the torch layers both are as many as `threads`."""
    vram_reserve_mib: int | None = None
    """Device memory that the expert cache leaves free; None: the default, lowered where no cache would fit."""
    ple_io: str = "ram"
    """Where the n-gram table is read from: ram, mmap (the page cache) or direct (the disk, past the page cache)."""
    parked_dir: str | None = None
    """Directory for conversation files; None keeps none."""
    kernels: str = "auto"
    """auto, compiled (C on a CPU, Triton kernels on a GPU), portable (the C step without AMX) or torch; compiled and
    portable are refused where they cannot run."""
    num_groups: int = 1
    """Slot groups whose windows pass through as many stages, each with a device of its own and a run of the layers."""
    exact: bool = True
    """Rows never depend on their company (product.md D3)."""

    @property
    def text_path(self) -> Path:
        """Where tokenizer and template lie."""
        return text_path(self.model) if self.text_dir is None else Path(self.text_dir)


def model_path(model: str) -> Path:
    """The directory, or the GGUF file, of a model given as a path or as `default`."""
    if model == DEFAULT_MODEL:
        return Path(__file__).parent / "default_model"
    return Path(model)


def text_path(model: str) -> Path:
    """Where a model's tokenizer and template lie: its directory, or the one that its file is in."""
    path = model_path(model)
    return path.parent if path.is_file() else path
