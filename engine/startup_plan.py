"""What a start will do, settled before anything is allocated: device, types, limits, and where every expert goes.

`stratagate plan` prints it for any machine, `load_engine` follows it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigMismatch
from engine.expert_profile import ExpertProfile, read_profile
from engine.interface import MAX_SLOTS, MAX_SPEC
from engine.linear import MAX_WINDOW_ROWS
from engine.memory_plan import (
    LIBRARY,
    MIB,
    POOL,
    ExpertPlan,
    MemoryPlan,
    Place,
    PlanLine,
    Step,
    blob_bytes,
    experts_are_dense,
    make_plan,
    make_step_plan,
    num_pairs,
    packed_blob_bytes,
    packs_experts,
    with_tiers,
)
from engine.startup_budget import (
    DEFAULT_RESERVE_MIB,
    CacheRequest,
    CacheRoom,
    CacheSize,
    size_cache,
    slots_per_layer,
)
from engine.state import key_capacity, state_dtype, state_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.config import EngineConfig
    from engine.model_spec import ModelSpec

_CPU_CHUNK_TOKENS = 256
_GPU_CHUNK_TOKENS = 2048
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Free memory to plan with. Without a GPU, device_bytes is the same memory as host_bytes.

    library_bytes: what torch's product library takes on the device for itself.
    """

    has_gpu: bool
    device_bytes: int
    host_bytes: int
    library_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Choices that follow from options, model and device."""

    max_context: int
    num_slots: int
    chunk_tokens: int
    max_draft: int
    num_groups: int = 1

    @property
    def piece_tokens(self) -> int:
        """Tokens of the longest prompt piece: no piece is longer than the context."""
        return min(self.chunk_tokens, self.max_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSplit:
    """Where the trunk's experts go. slots: of tier one by layer; in_slots: pairs that are put there at the start."""

    slots: tuple[int, ...]
    in_slots: frozenset[tuple[int, int]]
    num_pairs: int
    is_tiered: bool
    """False: every expert has a slot."""
    is_first_come: bool = False
    """Whether 4-bit experts in slots make room for those that come first."""

    @property
    def plan(self) -> ExpertPlan | None:
        """What the memory plan needs of it."""
        if not self.is_tiered:
            return None
        return ExpertPlan(
            num_slots=sum(self.slots),
            num_in_host=self.num_in_host,
            is_first_come=self.is_first_come,
        )

    def near(self, layer: int) -> frozenset[int]:
        """Experts of a layer that are put in a slot at the start."""
        return frozenset(expert for of, expert in self.in_slots if of == layer)

    @property
    def num_in_host(self) -> int:
        """Experts of tier two."""
        return self.num_pairs - len(self.in_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Everything that a start does, but for the tensors."""

    spec: ModelSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    limits: Limits
    request: CacheRequest
    profile: ExpertProfile | None
    table_in_ram: bool
    experts: ExpertSplit
    cache: CacheSize
    memory: MemoryPlan
    library_bytes: int
    step_lines: tuple[PlanLine, ...] | None
    """What a compiled step with all experts takes beside the slots' state; None when the torch layers run."""

    @property
    def with_draft(self) -> bool:
        """Whether the draft layer is loaded."""
        return self.limits.max_draft > 0

    @property
    def blob_bytes(self) -> int:
        """One expert as it is held by itself."""
        if self.step_lines is None:
            return blob_bytes(self.spec, self.dtype.itemsize)
        return packed_blob_bytes(self.step_lines, self.spec)

    def resized(self, free_bytes: int) -> StartPlan:
        """The same with the expert cache sized by what is measured to be free once all before it is allocated."""
        if not self.experts.is_tiered:
            return self
        cache = size_cache(self.request, _room(self, free_bytes))
        return _with_cache(self, cache)


def plan_start(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    dtype: torch.dtype,
    *,
    step_lines: tuple[PlanLine, ...] | None = None,
) -> StartPlan:
    """Settle a start on a machine; step_lines: see StartPlan.

    Raises ConfigMismatch, ProfileMismatch or PlanRefused.
    """
    limits = limits_of(config, spec, has_gpu=machine.has_gpu)
    profile = _profile(config, spec)
    everything = _split_all(spec)
    plan = StartPlan(
        spec=spec,
        dtype=dtype,
        kv_dtype=_kv_dtype(config.kv, dtype),
        limits=limits,
        request=CacheRequest(
            num_slots=config.expert_cache,
            reserve_mib=config.vram_reserve_mib,
            num_ranked=None if profile is None else len(profile.pairs),
        ),
        profile=profile,
        table_in_ram=config.ple_io == "ram",
        experts=everything,
        cache=_uncached(config),
        memory=MemoryPlan(lines=()),
        library_bytes=machine.library_bytes,
        step_lines=step_lines,
    )
    plan = replace(plan, memory=_memory(plan))
    if config.expert_cache is not None or _has_store(plan):
        empty = _without_experts(plan)
        before = empty.memory.until(Step.HEAD, Place.DEVICE if machine.has_gpu else None)
        cache = size_cache(plan.request, _room(empty, machine.device_bytes - before))
        if config.expert_cache is not None or cache.num_slots < num_pairs(spec):
            plan = _with_cache(plan, cache)
        else:
            plan = replace(plan, cache=cache)
    _require(plan, machine)
    return plan


def _has_store(plan: StartPlan) -> bool:
    """Whether experts are held one by one, or can be."""
    if plan.step_lines is None:
        return not experts_are_dense(plan.spec, plan.dtype.itemsize)
    return packs_experts(plan.step_lines)


def _without_experts(plan: StartPlan) -> StartPlan:
    """A plan in which what comes before the expert cache has none of the experts that it may hold."""
    if plan.step_lines is None:
        return plan
    # What trades take comes later, and must be left for.
    empty = replace(_split(plan, 0), is_first_come=plan.profile is None)
    plan = replace(plan, experts=empty)
    return replace(plan, memory=_memory(plan))


def limits_of(config: EngineConfig, spec: ModelSpec, *, has_gpu: bool) -> Limits:
    """Check the options that depend on the model. Raises ConfigMismatch with found and required."""
    if not 1 <= config.num_slots <= MAX_SLOTS:
        raise ConfigMismatch(f"--batch: found {config.num_slots}, required 1 to {MAX_SLOTS}")
    max_context = config.max_context or spec.max_position
    if max_context > spec.max_position:
        raise ConfigMismatch(
            f"--max-context: found {max_context}, required at most the model's {spec.max_position}"
        )
    max_draft = config.max_draft
    if max_draft and not spec.num_draft_layers:
        raise ConfigMismatch(
            f"{spec.name} has no draft layer (mtp_num_hidden_layers 0), required for drafts: use --no-mtp"
        )
    if not 0 <= max_draft <= MAX_SPEC:
        raise ConfigMismatch(f"--spec: found {max_draft}, required 0 to {MAX_SPEC}")
    return Limits(
        max_context=max_context,
        num_slots=config.num_slots,
        chunk_tokens=config.chunk_tokens or (_GPU_CHUNK_TOKENS if has_gpu else _CPU_CHUNK_TOKENS),
        max_draft=max_draft,
        num_groups=config.num_groups,
    )


def state_bytes_of(plan: StartPlan) -> dict[str, int]:
    """Bytes of every tensor of SlotState."""
    shapes = state_shapes(
        plan.spec,
        num_slots=plan.limits.num_slots,
        max_context=plan.limits.max_context,
        kv_dtype=plan.kv_dtype,
    )
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = state_dtype(name, dtype=plan.dtype, kv_dtype=plan.kv_dtype)
        sizes[name] = torch.Size(shape).numel() * kind.itemsize
    return sizes


def _profile(config: EngineConfig, spec: ModelSpec) -> ExpertProfile | None:
    if config.expert_profile is None:
        return None
    profile = read_profile(Path(config.expert_profile))
    profile.require(spec.num_layers, spec.moe.num_experts, config.expert_profile)
    return profile


def _memory(plan: StartPlan) -> MemoryPlan:
    memory, limits = _own_memory(plan), plan.limits
    if plan.library_bytes:
        workspace = PlanLine(name=LIBRARY, num_bytes=plan.library_bytes, step=Step.WEIGHTS)
        memory = MemoryPlan(lines=(workspace, *memory.lines))
    if limits.num_groups == 1:
        return memory
    # As many pieces as may be on their way at once.
    num_bytes = limits.piece_tokens * plan.spec.stream_width * plan.dtype.itemsize
    streams = PlanLine(
        name="streams between stages",
        num_bytes=limits.num_groups * num_bytes,
        step=Step.PROMPT,
    )
    return MemoryPlan(lines=(*memory.lines, streams))


def _own_memory(plan: StartPlan) -> MemoryPlan:
    spec, limits, dtype = plan.spec, plan.limits, plan.dtype
    if plan.step_lines is not None:
        lines, split = plan.step_lines, plan.experts.plan
        if split is not None:
            lines = with_tiers(lines, spec, split)
        else:
            lines = tuple(line for line in lines if line.name != POOL)
        return make_step_plan(lines, state_bytes_of(plan))
    return make_plan(
        spec,
        state_bytes=state_bytes_of(plan),
        element_bytes=dtype.itemsize,
        converts_kv=plan.kv_dtype != dtype,
        num_positions=key_capacity(limits.max_context),
        max_context=limits.max_context,
        chunk_tokens=limits.piece_tokens,
        window_rows=MAX_WINDOW_ROWS,
        with_draft=plan.with_draft,
        experts=plan.experts.plan,
        table_in_ram=plan.table_in_ram,
    )


def _room(plan: StartPlan, free_bytes: int) -> CacheRoom:
    spec, memory = plan.spec, plan.memory
    sessions = state_bytes_of(plan)
    return CacheRoom(
        free_bytes=free_bytes,
        blob_bytes=plan.blob_bytes,
        num_pairs=num_pairs(spec),
        min_slots=spec.num_layers * spec.moe.num_active,
        prompt_bytes=memory.of(Step.PROMPT),
        draft_bytes=memory.of(Step.VERIFIER) + memory.of(Step.HITS),
        session_bytes=sum(sessions.values()),
    )


def _with_cache(plan: StartPlan, cache: CacheSize) -> StartPlan:
    plan = replace(plan, cache=cache, experts=_split(plan, cache.num_slots))
    return replace(plan, memory=_memory(plan))


def _split(plan: StartPlan, num_slots: int) -> ExpertSplit:
    """With a profile every slot is filled once, at the start; without one the first that are asked for take them.

    In the torch layers slots are empty until then, in a compiled step they hold the first experts by number.
    """
    spec, profile = plan.spec, plan.profile
    each = spec.moe.num_experts
    useful = (each,) * spec.num_layers if profile is None else profile.ranked_per_layer()
    slots = slots_per_layer(num_slots, useful)
    chosen: Iterable[tuple[int, int]] = ()
    if profile is not None:
        chosen = profile.chosen(slots)
    elif plan.step_lines is not None:
        chosen = ((layer, expert) for layer, n in enumerate(slots) for expert in range(n))
    return ExpertSplit(
        slots=slots,
        in_slots=frozenset(chosen),
        is_tiered=True,
        is_first_come=profile is None
        and plan.step_lines is not None
        and 0 < sum(slots) < num_pairs(spec),
        num_pairs=num_pairs(spec),
    )


def _split_all(spec: ModelSpec) -> ExpertSplit:
    layers, experts = range(spec.num_layers), range(spec.moe.num_experts)
    return ExpertSplit(
        slots=(spec.moe.num_experts,) * spec.num_layers,
        in_slots=frozenset((layer, expert) for layer in layers for expert in experts),
        is_tiered=False,
        num_pairs=num_pairs(spec),
    )


def _uncached(config: EngineConfig) -> CacheSize:
    reserve = config.vram_reserve_mib
    return CacheSize(
        num_slots=0,
        reserve_mib=DEFAULT_RESERVE_MIB if reserve is None else reserve,
        was_lowered=False,
        lines=(),
    )


def _require(plan: StartPlan, machine: Machine) -> None:
    """A reserve given by hand is kept free; the default one only limits the expert cache."""
    kept = (plan.request.reserve_mib or 0) * MIB
    where = f" beside the reserve of {kept // MIB} MiB" if kept else ""
    if not machine.has_gpu:
        plan.memory.require(machine.host_bytes - kept, f"RAM{where}")
        return
    plan.memory.require(machine.device_bytes - kept, f"GPU memory{where}", Place.DEVICE)
    plan.memory.require(machine.host_bytes, "RAM", Place.HOST)


def device_of(name: str) -> torch.device:
    """The device of --device. Raises ConfigMismatch if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigMismatch(
            f"--device: found {name}, required cpu (this torch sees no CUDA device)"
        )
    return device


def dtype_of(name: str, *, has_gpu: bool) -> torch.dtype:
    """The type of --dtype; auto takes what the processor multiplies itself."""
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if has_gpu or _cpu_has_bf16() else torch.float32


def _kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return dtype
    if name not in _KV_DTYPES:
        raise ConfigMismatch(f"--kv: found {name}, required auto, {', '.join(_KV_DTYPES)}")
    return _KV_DTYPES[name]


def default_pool_workers(num_groups: int) -> int:
    """Physical cores but one, which the gateway and the engine's own thread keep; shared by stages on one host.

    Two threads of one core would share the units that multiply and the path to memory.
    """
    return max(1, (_num_physical_cores() - 1) // num_groups)


def _num_physical_cores() -> int:
    """Of the logical ones this process may use; each by itself where the system does not say who shares."""
    logical = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if logical is None:
        return os.cpu_count() or 1
    siblings = Path("/sys/devices/system/cpu")
    cores: set[str] = set()
    for number in logical:
        try:
            file = siblings / f"cpu{number}" / "topology" / "thread_siblings_list"
            cores.add(file.read_text(encoding="ascii"))
        except OSError:
            cores.add(str(number))
    return len(cores)


def default_threads(*, compiled: bool) -> int:
    """One core is left to the gateway: a thread that waits for a core holds up every other at each product.

    The compiled step's threads take small tasks as they come, so of two cores it uses both.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    return cores if compiled and cores <= 2 else max(1, cores - 1)


def _cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 itself; emulated, bf16 is slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
