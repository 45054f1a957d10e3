"""One thread, NaN in fresh memory, and models that are built once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen4ExpForCausalLM

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.interface import MAX_SPEC
from engine.loading import load_engine
from engine.reference.model import ReferenceModel
from tests.oracle import tiny


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    """torch.empty and its kin give NaN (integers: the largest), so that whoever reads unwritten memory shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Models:
    """Checkpoints of the tiny grid, and what others say about them, each computed once."""

    directory: Path
    kv: str = "auto"
    """What the engines hold K and V in."""
    kernels: str = "auto"
    """See EngineConfig."""
    _references: dict[str, ReferenceModel] = field(default_factory=dict[str, ReferenceModel])
    _engines: dict[str, TorchEngine] = field(default_factory=dict[str, TorchEngine])
    _hf: dict[str, Qwen4ExpForCausalLM] = field(default_factory=dict[str, Qwen4ExpForCausalLM])
    _logits: dict[tuple[str, tuple[int, ...]], Tensor] = field(
        default_factory=dict[tuple[str, tuple[int, ...]], Tensor]
    )

    def checkpoint(self, name: str, with_mtp: bool = True) -> Path:
        return tiny.make_checkpoint(self.directory, name, with_mtp)

    def reference(self, name: str) -> ReferenceModel:
        if name not in self._references:
            path = self.checkpoint(name)
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            tensors = load_file(path / "model.safetensors")
            self._references[name] = ReferenceModel(config, tensors)
        return self._references[name]

    def engine(self, name: str) -> TorchEngine:
        """One engine per model for the whole run: tests seat slots anew, and what others left there must not show."""
        if name not in self._engines:
            self._engines[name] = load_engine(self.config(name))
        return self._engines[name]

    def config(
        self, name: str, *, with_mtp: bool = True, max_draft: int = MAX_SPEC
    ) -> EngineConfig:
        """What `engine` loads."""
        config = engine_config(self.checkpoint(name, with_mtp), max_draft=max_draft)
        return replace(config, kernels=self.kernels, kv=self.kv)

    def hf_logits(self, name: str, ids: list[int]) -> Tensor:
        """fp32 [T, V]. The model is causal: a part of one of the grid's texts gets its rows of the whole text."""
        texts = [tiny.text(name, seed) for seed in range(4)]
        whole = next((text for text in texts if text[: len(ids)] == ids), ids)
        key = (name, tuple(whole))
        if key not in self._logits:
            if name not in self._hf:
                self._hf[name] = tiny.load_hf(self.checkpoint(name))
            with torch.inference_mode():
                self._logits[key] = self._hf[name](torch.tensor([whole])).logits[0].clone()
        return self._logits[key][: len(ids)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", params=["compiled", "torch"])
def models(checkpoints: Models, request: pytest.FixtureRequest) -> Models:
    """The same models under each implementation of the layers."""
    return replace(checkpoints, kernels=request.param, _engines={})


def engine_config(
    checkpoint: Path, max_draft: int = MAX_SPEC, max_context: int = 256
) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype="float32",
        threads=1,
        num_slots=4,
        max_context=max_context,
        chunk_tokens=32,
        max_draft=max_draft,
    )
