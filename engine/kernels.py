"""Which layers run: a compiled step (C on a CPU, Triton kernels on a GPU) or torch operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import engine.cuda.support as cuda
import engine.native.step as native
from engine.errors import ConfigMismatch

if TYPE_CHECKING:
    import torch

    from engine.config import EngineConfig
    from engine.model_spec import ModelSpec


def why_not_compiled(config: EngineConfig, spec: ModelSpec, device: torch.device) -> str | None:
    """Why the torch layers run instead; None for the device's compiled step.

    Raises ConfigMismatch if it was asked for in vain.
    """
    if config.kernels == "torch":
        return "--kernels torch"
    asked = config.kernels in ("compiled", native.PORTABLE)
    step = cuda if device.type == "cuda" and config.kernels != native.PORTABLE else native
    reason = step.why_unsupported(config, spec, device)
    if asked and reason is not None:
        raise ConfigMismatch(f"--kernels {config.kernels}: {reason}")
    return reason
