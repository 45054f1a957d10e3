"""Errors of the engine.

EngineError
 +-- ModelLoadError        the checkpoint cannot be used
 |    +-- WeightMismatch   a tensor is missing, left over, or of the wrong shape or dtype
 |    +-- ConfigMismatch   a config value is missing or out of range
 |    +-- ProfileMismatch  an expert profile is damaged or made for another model
 +-- FilesUnusable         the directory of conversation files cannot be used
 +-- ConversationsMismatch a file of conversations cannot be read
 +-- PlanRefused           the memory plan does not fit
 +-- PlanMismatch          what was allocated is not what was planned
 +-- InstrumentRefused     an instrument could only give plausible zeros
 +-- ExpertsNotReady       the expert store is half set up
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


class ProfileMismatch(ModelLoadError):
    """An expert profile is damaged or of another geometry: the message gives file, found, required."""


class FilesUnusable(EngineError):
    """The directory of conversation files cannot be used: the message gives directory and reason."""


class ConversationsMismatch(EngineError):
    """A file of conversations cannot be read: the message gives file, line and what is required."""


class PlanRefused(EngineError):
    """The memory plan does not fit: the message gives needed and available bytes and the option to change."""


class PlanMismatch(EngineError):
    """What was allocated is not what was planned: the message gives checkpoint, planned and actual."""


class InstrumentRefused(EngineError):
    """An instrument would give numbers that look right and are not."""


class ExpertsNotReady(EngineError):
    """The expert store is half set up: computing with it would give wrong tokens."""


class PlanError(EngineError):
    """A WindowPlan contradicts the slots' state; nothing was run."""


class KernelFailure(EngineError):
    """The device failed in a way that leaves no usable state."""
