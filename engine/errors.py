"""Errors of the engine.

EngineError
 +-- ModelLoadError        the checkpoint cannot be used
 |    +-- WeightMismatch   a tensor is missing, left over, or of the wrong shape or dtype
 |    +-- ConfigMismatch   a config value is missing or out of range
 +-- PlanRefused           the memory plan does not fit
 +-- PlanError             a WindowPlan contradicts the slots' state
 +-- KernelFailure         the device failed; the process must be restarted
"""


class EngineError(Exception):
    """Anything that goes wrong in engine/."""


class ModelLoadError(EngineError):
    """The checkpoint cannot be used."""


class WeightMismatch(ModelLoadError):
    """A tensor is missing, left over, or of the wrong shape or dtype: the message gives tensor, found, required."""


class ConfigMismatch(ModelLoadError):
    """A config value is missing or out of range: the message gives key, found, required."""


class PlanRefused(EngineError):
    """The memory plan does not fit: the message gives needed and available bytes and the option to change."""


class PlanError(EngineError):
    """A WindowPlan contradicts the slots' state; nothing was run."""


class KernelFailure(EngineError):
    """The device failed in a way that leaves no usable state."""
