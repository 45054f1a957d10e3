"""A start: plan, check that the plan fits, load what the device runs, and put the engine together (product.md D7)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from engine.config import EngineConfig, model_path
from engine.engine import TorchEngine
from engine.fingerprint import model_fingerprint
from engine.grammar import GrammarCompiler
from engine.interface import EngineInfo, PlanItem
from engine.kernels import why_not_compiled
from engine.loader import ModelLoader
from engine.memory_plan import SESSION, TIER_ONE, TIER_TWO, Step
from engine.native.abi import why_unavailable
from engine.native.pick import NativePicker
from engine.native.step import (
    PORTABLE,
    NativeChain,
    NativeDraft,
    NativeStep,
    NativeTrunk,
    planned_lines,
    uses_tiles,
)
from engine.native.window import NativeWindow
from engine.parked import ParkedStates
from engine.parked_files import FileLayout, FilesDirectory, ParkedFiles
from engine.sampling import Picker
from engine.sources.opening import open_source, read_spec
from engine.stages import StagedParked, StagedTrunk, Stages
from engine.startup import StartupMarks, free_bytes, free_host_bytes, library_bytes
from engine.startup_budget import low_memory_line
from engine.startup_plan import (
    Machine,
    StartPlan,
    default_pool_workers,
    default_threads,
    device_of,
    dtype_of,
    limits_of,
    plan_start,
)
from engine.state import SlotState
from engine.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engine.cuda.pool import FarPool
    from engine.cuda.random_model import RandomTensors
    from engine.cuda.weights import TensorSource
    from engine.experts import ExpertStore
    from engine.model_spec import ModelSpec
    from engine.sampling import RowPicker
    from engine.steps import DraftChain, DraftSteps, PartSteps, TrunkSteps, WholeWindow

_log = logging.getLogger("engine.startup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What computes, the slots' state, and what they were planned to take and take."""

    trunk: TrunkSteps
    draft: DraftSteps | None
    chain: DraftChain | None = None
    whole: WholeWindow | None = None
    picker: RowPicker
    experts: ExpertStore | None = None
    state: SlotState
    kernels: str
    reads_as_decodes: bool = False
    plan: StartPlan
    marks: StartupMarks
    part_bytes: Mapping[str, int]

    def plan_items(self) -> tuple[PlanItem, ...]:
        """Planned against actual, by line."""
        memory, actual = self.plan.memory, dict(self.part_bytes)
        for name in memory.session_names():
            tensor: Tensor = getattr(self.state, name)
            actual[f"{SESSION}{name}"] = tensor.numel() * tensor.element_size()
        return tuple(
            PlanItem(name=x.name, planned_bytes=x.num_bytes, actual_bytes=actual.get(x.name))
            for x in memory.lines
        )


def load_engine(
    config: EngineConfig,
    *,
    rehearse: bool = False,
    on_lost: Callable[[str], None] | None = None,
) -> TorchEngine:
    """Plan, check that the plan fits, load, and compare what is taken with the plan at each checkpoint.

    rehearse: also read a prompt piece and run a window, to compare what they take; on_lost: see Stages.join. Raises
    ModelLoadError, PlanRefused, PlanMismatch or FilesUnusable.
    """
    began = time.perf_counter()
    spec = read_spec(model_path(config.model), config.parts)
    device = device_of(config.device)
    if config.num_groups == 1:
        loaded, engine = _load_whole(config, spec, device, began)
    else:
        loaded, engine = _load_stages(config, spec, device, began, on_lost)
    try:
        if rehearse:
            engine.rehearse(loaded.marks)
    except BaseException:
        engine.close()
        raise
    if (line := low_memory_line(free_bytes(loaded.state.device), loaded.plan.cache)) is not None:
        _log.warning("%s", line)
    return engine


def _load_whole(
    config: EngineConfig, spec: ModelSpec, device: torch.device, began: float
) -> tuple[Loaded, TorchEngine]:
    """All layers on one device. A directory that cannot be used is refused before anything is loaded."""
    directory = None if config.parked_dir is None else FilesDirectory(Path(config.parked_dir))
    try:
        loaded = load_part(config, spec, device)
        return loaded, assemble(config, spec, loaded, began, directory=directory)
    except BaseException:
        if directory is not None:
            directory.close()
        raise


def _load_stages(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    began: float,
    on_lost: Callable[[str], None] | None,
) -> tuple[Loaded, TorchEngine]:
    """The engine's own run of layers, while the other stages load theirs in processes of their own."""
    why_not_compiled(config, spec, device)  # raises before any process is started
    stages = Stages(config, spec, device)
    try:
        if stages.device.type == "cpu":
            _log.info("on a CPU --batch-groups only shows that it works")
        loaded = load_part(config, stages.part, stages.device)
        return loaded, join_stages(config, spec, loaded, stages, began, on_lost)
    except BaseException:
        stages.close()
        raise


def join_stages(
    config: EngineConfig,
    spec: ModelSpec,
    loaded: Loaded,
    stages: Stages,
    began: float,
    on_lost: Callable[[str], None] | None = None,
) -> TorchEngine:
    """The engine around its own run of layers and the other stages, once they are loaded; see assemble, Stages.join."""
    stages.join(loaded.plan.dtype, on_lost)
    context = spec.ple.ngram_size - 1 if spec.ple else 0
    staged = replace(
        loaded,
        trunk=StagedTrunk(cast("PartSteps", loaded.trunk), stages, context),
        kernels=stages.describe(loaded.kernels),
    )
    return assemble(config, spec, staged, began, stages)


def load_part(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Loaded:
    """A model, or a stage's run of its layers, on one device."""
    path = model_path(config.model)
    reason = why_not_compiled(config, spec, device)
    machine = machine_of(device)
    num_threads = config.threads or default_threads(compiled=reason is None)
    torch.set_num_threads(num_threads)
    # Denormals in decayed states cost a hundred times a normal multiply and carry no information.
    torch.set_flush_denormal(True)
    num_ids = min(spec.vocab_size, num_known_tokens(config.text_path) or spec.vocab_size)
    with Checkpoint(open_source(path, spec, config.parts)) as checkpoint:
        if reason is not None:
            level = logging.INFO if config.kernels == "torch" else logging.WARNING
            _log.log(level, "the torch layers run, several times slower: %s", reason)
            return _load_layers(checkpoint, config, spec, machine, device, num_threads, num_ids)
        if machine.has_gpu:
            return load_cuda_step(checkpoint, config, spec, machine, device, num_ids)
        return _load_native_step(checkpoint, config, spec, machine, num_threads, num_ids)


def machine_of(device: torch.device) -> Machine:
    """What a start on a device can plan with."""
    free = free_bytes(device)
    return Machine(
        has_gpu=device.type == "cuda",
        device_bytes=free,
        host_bytes=free_host_bytes(),
        library_bytes=library_bytes(device),
    )


def assemble(
    config: EngineConfig,
    spec: ModelSpec,
    loaded: Loaded,
    began: float,
    stages: Stages | None = None,
    directory: FilesDirectory | None = None,
) -> TorchEngine:
    """The engine around what was loaded since `began` (time.perf_counter). Raises FilesUnusable.

    spec: of the whole model; stages: the others, if this is one of several; directory: of conversation files.
    """
    plan = loaded.plan
    others = () if stages is None else stages.memory_plan()
    info = EngineInfo(
        model_name=spec.name,
        vocab_size=spec.vocab_size,
        max_context=plan.limits.max_context,
        num_slots=config.num_slots,
        chunk_tokens=plan.limits.chunk_tokens,
        max_draft=plan.limits.max_draft,
        device=str(loaded.state.device) if stages is None else ", ".join(stages.devices),
        dtype=str(plan.dtype).removeprefix("torch."),
        kernels=loaded.kernels,
        load_s=time.perf_counter() - began,
        memory_plan=(*others, *loaded.plan_items()),
        reads_as_decodes=loaded.reads_as_decodes,
        kv_dtype=str(plan.kv_dtype).removeprefix("torch."),
    )
    if stages is None:
        parked = ParkedStates(loaded.state, max_bytes=config.max_parked_bytes)
    else:
        parked = StagedParked(loaded.state, stages)
    return TorchEngine(
        spec=spec,
        trunk=loaded.trunk,
        draft=loaded.draft,
        chain=loaded.chain,
        whole=loaded.whole,
        experts=loaded.experts,
        state=loaded.state,
        picker=loaded.picker,
        grammars=GrammarCompiler(config.text_path, spec.vocab_size),
        info=info,
        parked=parked,
        stages=stages,
        files=None if directory is None else _open_files(directory, config, info, parked),
    )


def _open_files(
    directory: FilesDirectory, config: EngineConfig, info: EngineInfo, parked: ParkedStates
) -> ParkedFiles:
    """The conversation files of a directory. Raises FilesUnusable."""
    decisive = (
        *(torch.__version__, info.dtype, info.device.partition(":")[0], info.kernels),
        *(info.kv_dtype, config.exact, info.chunk_tokens, info.max_context),
        *(model_fingerprint(path, ()) for path in config.parts.paths()),
    )
    layout = FileLayout(
        fingerprint=model_fingerprint(model_path(config.model), decisive),
        block_bytes=parked.page_bytes,
        blocks_per_checkpoint=parked.blocks_per_checkpoint,
    )
    return ParkedFiles(directory, layout)


def _load_native_step(
    checkpoint: Checkpoint,
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    num_threads: int,
    num_token_ids: int,
) -> Loaded:
    """The compiled CPU step; all its weights are read at once, so the later checkpoints find nothing new."""
    limits = limits_of(config, spec, has_gpu=False)
    tiles, ple_io = uses_tiles(config), config.ple_io
    lines = planned_lines(checkpoint.source, spec, limits, num_threads, ple_io, tiles=tiles)
    plan = plan_start(config, spec, machine, torch.float32, step_lines=lines)
    marks = StartupMarks(plan.memory, taken_bytes=plan.library_bytes)
    state = _new_state(plan, torch.device("cpu"))
    wide = config.kernels != PORTABLE
    step = NativeStep(checkpoint, spec, state, limits, num_threads, ple_io, tiles=tiles, wide=wide)
    _reach_loaded(marks)
    picker = NativePicker(num_token_ids, spec.vocab_size)
    return Loaded(
        trunk=NativeTrunk(step),
        draft=NativeDraft(step) if plan.with_draft else None,
        chain=NativeChain(step, picker) if plan.with_draft else None,
        whole=NativeWindow(step, picker) if NativeWindow.why_not(step) is None else None,
        picker=picker,
        state=state,
        kernels="compiled step, int8 products in AMX tiles" if tiles else "compiled step",
        reads_as_decodes=True,
        plan=plan,
        marks=marks,
        part_bytes=step.part_bytes,
    )


def load_cuda_step(
    source: TensorSource,
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    device: torch.device,
    num_token_ids: int,
    random: RandomTensors | None = None,
) -> Loaded:
    """The Triton kernels with their graphs captured; experts are rounded to 4 bits as they are read.

    random: see engine.cuda.weights.CudaLoader.
    """
    # Only here: Triton is there beside a CUDA build of torch alone.
    from engine.cuda.backend import build_cuda_step, planned_cuda_lines
    from engine.cuda.pick_rows import CudaPicker
    from engine.cuda.tiers import hits_ready
    from engine.cuda.weights import CudaLoader

    limits = limits_of(config, spec, has_gpu=True)
    workers = pool_workers_of(config)
    lines = planned_cuda_lines(spec, limits, config.ple_io, pooled=workers > 0)
    plan = plan_start(config, spec, machine, torch.bfloat16, step_lines=lines)
    _log.info("the Triton kernels run, with experts rounded to 4 bits")
    marks = StartupMarks(plan.memory, taken_bytes=plan.library_bytes)
    loader = CudaLoader(
        source,
        spec,
        device=device,
        max_context=limits.max_context,
        ple_io=config.ple_io,
        random=random,
    )
    state = _new_state(plan, device)
    model = loader.load(with_draft=plan.with_draft)
    marks.reach(Step.WEIGHTS)
    marks.reach(Step.HEAD)
    if device.type == "cuda":
        # What packing has given back is free as well.
        torch.cuda.empty_cache()
    plan = plan.resized(free_bytes(device))
    marks.plan = plan.memory
    for line in plan.cache.lines:
        _log.info("%s", line)
    loader.open_experts(plan.experts)
    marks.reach(Step.CACHE)
    model = loader.load_experts(model)
    loader.finish(with_draft=plan.with_draft)
    marks.reach(Step.FILL)
    hits_ready((x.moe.gate_up, x.moe.down, x.moe.far) for x in model.layers)
    backend = build_cuda_step(
        model,
        state,
        num_token_ids=num_token_ids,
        graphs=device.type == "cuda",
        pool_workers=workers,
        first_come=plan.experts.is_first_come,
    )
    if plan.experts.num_in_host:
        _log.info("%s", _far_line(plan.experts.num_in_host, backend.step.pool))
    if (first_come := backend.step.first_come) is not None:
        _log.info(
            "no profile: %d slots go to the experts that come first",
            first_come.claims.num_unclaimed,
        )
    backend.prepare()
    marks.reach(Step.HITS)
    return Loaded(
        trunk=backend.trunk,
        draft=backend.draft,
        chain=backend.draft,
        picker=CudaPicker(backend.step),
        state=state,
        kernels=backend.name,
        plan=plan,
        marks=marks,
        part_bytes=backend.part_bytes,
    )


def pool_workers_of(config: EngineConfig) -> int:
    """Threads that compute experts in host memory beside the kernels; 0 where kernels read those over the bus."""
    if config.pool_workers == 0:
        return 0
    if (reason := why_unavailable()) is not None:
        _log.warning("no pool computes experts, kernels read those over the bus: %s", reason)
        return 0
    return config.pool_workers or default_pool_workers(config.num_groups)


def _far_line(num_in_host: int, pool: FarPool | None) -> str:
    """How experts in host memory are computed."""
    how = (
        "read over the bus by the kernels"
        if pool is None
        else f"computed there by {pool.num_workers} threads"
    )
    return f"{num_in_host} experts in host memory are {how}"


def _reach_loaded(marks: StartupMarks) -> None:
    """Of a step that reads its weights at once."""
    for reached in (Step.WEIGHTS, Step.HEAD, Step.CACHE, Step.FILL, Step.HITS):
        marks.reach(reached)


def _load_layers(
    checkpoint: Checkpoint,
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    device: torch.device,
    num_threads: int,
    num_token_ids: int,
) -> Loaded:
    """The torch layers, in the order of product.md D7."""
    dtype = dtype_of(config.dtype, has_gpu=machine.has_gpu)
    plan = plan_start(config, spec, machine, dtype)
    marks = StartupMarks(plan.memory, taken_bytes=plan.library_bytes)
    loader = ModelLoader(
        checkpoint,
        spec,
        dtype=dtype,
        device=device,
        exact=config.exact,
        max_context=plan.limits.max_context,
        num_workers=config.pool_workers or num_threads,
        tiered=plan.experts.is_tiered,
        ple_io=config.ple_io,
    )
    model = loader.load(with_draft=plan.with_draft)
    state = _new_state(plan, device)
    marks.reach(Step.WEIGHTS)
    loader.load_head(model.trunk)
    marks.reach(Step.HEAD)
    plan = plan.resized(free_bytes(device))
    marks.plan = plan.memory
    for line in plan.cache.lines:
        _log.info("%s", line)
    loader.load_experts(plan.experts, marks)
    loader.finish(with_draft=plan.with_draft)
    part_bytes = dict(model.part_bytes)
    if model.experts is not None:
        part_bytes[TIER_ONE] = model.experts.slot_bytes
        part_bytes[TIER_TWO] = model.experts.host_bytes
    return Loaded(
        trunk=model.trunk,
        draft=model.draft,
        picker=Picker(num_token_ids),
        experts=model.experts,
        state=state,
        kernels=f"torch layers, {model.report.line()}",
        plan=plan,
        marks=marks,
        part_bytes=part_bytes,
    )


def _new_state(plan: StartPlan, device: torch.device) -> SlotState:
    return SlotState(
        plan.spec,
        num_slots=plan.limits.num_slots,
        max_context=plan.limits.max_context,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        device=device,
    )


def num_known_tokens(directory: Path) -> int | None:
    """One more than the largest id that has text, from the checkpoint's tokenizer; None without one."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    vocab = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    return max(vocab.values()) + 1
