"""Choices of the scheduler; the engine's are contained, not repeated."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.config import CacheConfig
from engine.config import DEFAULT_MODEL, KERNELS, EngineConfig, ModelParts, model_path
from engine.fake import FakeScript

__all__ = [
    "DEFAULT_MODEL",
    "KERNELS",
    "CacheConfig",
    "EngineConfig",
    "FakeScript",
    "ModelParts",
    "SchedulerConfig",
    "SupervisionConfig",
    "model_path",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """When the engine process is given up, and how it is brought back."""

    load_timeout_s: float = 1800.0
    """A load that takes longer is killed."""
    window_timeout_s: float = 120.0
    """A window that takes longer is taken for a hang and the process is killed."""
    close_timeout_s: float = 5.0
    """How long a closing process may finish its window before it is killed."""
    first_backoff_s: float = 0.2
    """Pause before the first restart; doubled at each further death within `death_window_s`."""
    max_backoff_s: float = 10.0
    max_deaths: int = 5
    """So many deaths within `death_window_s` are fatal: the server exits for its own supervisor."""
    death_window_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the engine. Values are already checked by whoever parsed them."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Also says how many slots there are and how long a draft chain may be."""
    scripted: FakeScript | None = None
    """Run the scripted engine instead of a model."""
    max_queue: int = 64
    """Requests that may wait for a slot; more get Overloaded."""
    spec_min_p: float = 0.5
    """Draft gate of requests that name none."""
    turn_token_id: int | None = None
    """The id that begins a chat turn: prompts are cut before it (product.md D3)."""
    decode_share: float = 0.5
    """Seconds of decoding owed to the running slots for each second of prompt reading; 0 reads at full speed."""
    max_passes: int = 4
    """A prompt that others overtook at so many chunk boundaries goes next."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    owner_identities: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(owner, one-way digest of its keys): on disk, conversations belong to keys, since names can change hands."""
    preempt_wait_s: float = 10.0
    """A request that waited so long for a slot may get that of a decoding one, which is kept and goes on later."""
    preempt_run_s: float = 10.0
    """... that has had it for so long."""
    max_preemptions: int = 2
    """So often a request gives way, at most; 0: never."""
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
