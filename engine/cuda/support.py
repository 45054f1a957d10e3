"""Whether the kernels of this package can serve a model on a device. Imports none of them: Triton may be missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.model_spec import ModelSpec

_CAPABILITY = (9, 0)
"""Kernels start before their predecessors end, which came with this compute capability."""


def why_unsupported(config: EngineConfig, spec: ModelSpec, device: torch.device) -> str | None:
    """Why the kernels cannot run; None when they can: they take every model that the torch layers take."""
    del spec
    if find_spec("triton") is None:
        return "its kernels need Triton, which is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        needed = ".".join(map(str, _CAPABILITY))
        return f"its kernels need compute capability {needed}, not {found[0]}.{found[1]}"
    return why_unsupported_choice(config)


def why_unsupported_choice(config: EngineConfig) -> str | None:
    """Of the options alone."""
    if config.dtype not in ("auto", "bfloat16"):
        return f"it computes in bfloat16, not in {config.dtype}"
    if config.kv not in ("auto", "bf16", "int8"):
        return f"it holds keys and values in bf16 or int8, not in {config.kv}"
    return None
