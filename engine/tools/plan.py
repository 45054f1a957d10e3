"""`stratagate plan`: the memory plan of a start, on this machine or another, without loading anything."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from engine.config import DEFAULT_MODEL, KERNELS, EngineConfig, ModelParts, model_path
from engine.cuda.support import why_unsupported_choice
from engine.errors import PlanRefused, WeightMismatch
from engine.interface import MAX_SLOTS, MAX_SPEC
from engine.kernels import why_not_compiled
from engine.loading import machine_of
from engine.memory_plan import (
    EXPERTS_4_BITS,
    MIB,
    TABLE,
    Place,
    PlanLine,
    Step,
    experts_are_dense,
    num_pairs,
)
from engine.native.step import planned_lines, uses_tiles
from engine.sources.opening import has_weights, open_source, read_spec
from engine.stages import check_stages, split_layers
from engine.startup import USUAL_LIBRARY_BYTES, free_host_bytes
from engine.startup_plan import (
    Machine,
    StartPlan,
    default_threads,
    device_of,
    dtype_of,
    limits_of,
    plan_start,
)
from engine.tools.options import (
    AUTO,
    MAX_MIB,
    MODEL_HELP,
    MtpOption,
    NativeOption,
    PleGgufOption,
    number_option,
    word_option,
)
from engine.tools.tables import table

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

_MAX_CONTEXT = 2**20


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    native: NativeOption = None,
    ple_gguf: PleGgufOption = None,
    mtp: MtpOption = None,
    vram_mib: Annotated[
        int | None, number_option("--vram-mib", "Free memory of a GPU; 0: none.", 0, MAX_MIB)
    ] = None,
    ram_mib: Annotated[
        int | None, number_option("--ram-mib", "Free memory of the host.", 1, MAX_MIB)
    ] = None,
    ssd: Annotated[
        bool | None,
        typer.Option(
            "--ssd/--no-ssd", help="The table may stay on an SSD if it does not fit in RAM."
        ),
    ] = None,
    device: Annotated[
        str, word_option("--device", "Of this machine.", ("auto", "cpu", "cuda"))
    ] = "auto",
    dtype: Annotated[
        str, word_option("--dtype", "Of weights.", ("auto", "float32", "bfloat16"))
    ] = "auto",
    kernels: Annotated[str, word_option("--kernels", "Which layers run.", KERNELS)] = "auto",
    kv: Annotated[
        str, word_option("--kv", "Of keys and values.", ("auto", "fp32", "bf16", "int8"))
    ] = "auto",
    batch: Annotated[int, number_option("--batch", "Batch slots.", 1, MAX_SLOTS)] = MAX_SLOTS,
    max_context: Annotated[
        int | None, number_option("--max-context", "Tokens a slot holds.", 16, _MAX_CONTEXT)
    ] = None,
    prefill: Annotated[
        int, number_option("--prefill", "Prompt tokens at a time.", 1, 65_536, auto=True)
    ] = AUTO,
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Without the draft layer.")] = False,
    expert_cache: Annotated[
        int, number_option("--expert-cache", "Experts on the device.", 0, 2**32, auto=True)
    ] = AUTO,
    expert_profile: Annotated[
        Path | None, typer.Option("--expert-profile", help="Ranking of the experts.")
    ] = None,
    vram_reserve_mib: Annotated[
        int | None, number_option("--vram-reserve-mib", "Device memory left free.", 0, MAX_MIB)
    ] = None,
    pool_workers: Annotated[
        int,
        number_option("--pool-workers", "Threads for experts in host memory.", 0, 1024, auto=True),
    ] = AUTO,
    batch_groups: Annotated[
        int, number_option("--batch-groups", "GPUs that share the layers.", 1, MAX_SLOTS)
    ] = 1,
    conversation_cache_mib: Annotated[
        int, number_option("--conversation-cache-mib", "Of parked conversations.", 0, MAX_MIB)
    ] = 8192,
    ple_io: Annotated[
        str | None,
        word_option("--ple-io", "Where the n-gram table is read from.", ("ram", "mmap", "direct")),
    ] = None,
) -> None:
    """Print what a start would take, line by line, and whether it fits; nothing is loaded."""
    parts = ModelParts(native=native, ple_gguf=ple_gguf, mtp=mtp)
    spec = read_spec(model_path(model), parts)
    machine = _machine(device, vram_mib, ram_mib)
    config = EngineConfig(
        model=model,
        parts=parts,
        device=device,
        dtype=dtype,
        kernels=kernels,
        kv=kv,
        num_slots=batch,
        max_context=max_context,
        chunk_tokens=None if prefill == AUTO else prefill,
        max_draft=0 if no_mtp or not spec.num_draft_layers else MAX_SPEC,
        expert_cache=None if expert_cache == AUTO else expert_cache,
        expert_profile=None if expert_profile is None else str(expert_profile),
        pool_workers=None if pool_workers == AUTO else pool_workers,
        num_groups=batch_groups,
        vram_reserve_mib=vram_reserve_mib,
        ple_io=ple_io or "ram",
    )
    is_here = vram_mib is None
    for part in _parts(config, spec, is_here=is_here):
        if batch_groups > 1:
            last = part.layers.stop - 1
            typer.echo(f"stage of layers {part.first_layer} to {last}, on a device of its own:\n")
        own = config if part.is_last else replace(config, max_draft=0)
        try:
            found, why_torch = _planned(own, part, machine, is_here=is_here)
        except PlanRefused:
            if ple_io is not None or not ssd or part.ple is None:
                raise
            own = replace(own, ple_io="direct")
            found, why_torch = _planned(own, part, machine, is_here=is_here)
        typer.echo(report(found, machine, conversation_cache_mib, why_torch))


def _parts(config: EngineConfig, spec: ModelSpec, *, is_here: bool) -> list[ModelSpec]:
    """What each device holds. Another machine's GPUs are taken to be there."""
    if config.num_groups == 1:
        return [spec]
    check_stages(config, spec, device_of(config.device) if is_here else torch.device("cpu"))
    return [spec.part(run) for run in split_layers(spec.num_layers, config.num_groups)]


def _planned(
    config: EngineConfig, spec: ModelSpec, machine: Machine, *, is_here: bool
) -> tuple[StartPlan, str | None]:
    """The plan, and why the torch layers are to run if they are.

    is_here: the GPU is this machine's, so that what it can run is known; any other is taken to run the kernels.
    """
    lines = None
    if not machine.has_gpu:
        lines, why_torch = _cpu_lines(config, spec)
    elif (why_torch := _why_no_kernels(config, spec, is_here=is_here)) is None:
        # Only here: half a second of imports that other plans do not need.
        from engine.cuda.backend import planned_cuda_lines

        lines = planned_cuda_lines(
            spec,
            limits_of(config, spec, has_gpu=True),
            config.ple_io,
            pooled=config.pool_workers != 0,
        )
    dtype = dtype_of(config.dtype, has_gpu=machine.has_gpu)
    if lines is not None:
        dtype = torch.bfloat16 if machine.has_gpu else torch.float32
    return plan_start(config, spec, machine, dtype, step_lines=lines), why_torch


def _why_no_kernels(config: EngineConfig, spec: ModelSpec, *, is_here: bool) -> str | None:
    if is_here:
        return why_not_compiled(config, spec, device_of(config.device))
    return "--kernels torch" if config.kernels == "torch" else why_unsupported_choice(config)


def _cpu_lines(
    config: EngineConfig, spec: ModelSpec
) -> tuple[tuple[PlanLine, ...], None] | tuple[None, str]:
    """What the compiled step takes, or why the torch layers would run."""
    if (reason := why_not_compiled(config, spec, torch.device("cpu"))) is not None:
        return None, reason
    try:
        source = open_source(model_path(config.model), spec, config.parts)
    except WeightMismatch:
        if has_weights(model_path(config.model)):
            raise
        return None, "what the compiled step holds hangs on how weights are stored; there are none"
    with closing(source):
        limits = limits_of(config, spec, has_gpu=False)
        threads = default_threads(compiled=True)
        tiles = uses_tiles(config)
        lines = planned_lines(source, spec, limits, threads, config.ple_io, tiles=tiles)
        return lines, None


def report(plan: StartPlan, machine: Machine, parking_mib: int, why_torch: str | None) -> str:
    """The plan in lines: parts, checkpoints, experts, and what is left; why_torch: why the torch layers are to run."""
    spec = plan.spec
    rows = [
        (
            line.name,
            f"{line.num_bytes:,}",
            f"{line.num_bytes / MIB:,.1f}",
            _where(line.place, machine),
        )
        for line in plan.memory.lines
    ]
    parts = table(("part", "bytes", "MiB", "memory"), rows)
    marks = table(
        ("checkpoint", "MiB taken"),
        [(step.value, f"{plan.memory.until(step) / MIB:,.1f}") for step in Step],
    )
    limits = plan.limits
    facts = [
        f"{spec.name}: {limits.num_slots} slots x {limits.max_context} tokens, prompts in chunks of "
        f"{limits.chunk_tokens}, weights in {str(plan.dtype).removeprefix('torch.')}, "
        f"K/V in {str(plan.kv_dtype).removeprefix('torch.')}, drafts {'on' if plan.with_draft else 'off'}",
        _layers(machine, why_torch),
        *plan.cache.lines,
        _experts(plan),
    ]
    facts.append(
        f"parked conversations: at most {parking_mib:,} MiB of RAM beside this, taken as they come"
    )
    if spec.ple and not plan.table_in_ram:
        facts.append(f"{TABLE}: stays on the disk, read row by row")
    return "\n\n".join((parts, marks, "\n".join(facts), "\n".join(_left(plan, machine))))


def _layers(machine: Machine, why_torch: str | None) -> str:
    if why_torch is not None:
        return f"layers: torch, several times slower: {why_torch}"
    if machine.has_gpu:
        return "layers: Triton kernels, which need compute capability 9.0; --kernels torch plans without them"
    return "layers: compiled step"


def _experts(plan: StartPlan) -> str:
    split, total = plan.experts, num_pairs(plan.spec)
    if any(line.name == EXPERTS_4_BITS for line in plan.memory.lines):
        return f"experts: all {total} on the device, in 4 bits"
    if plan.step_lines is not None and not split.is_tiered:
        return f"experts: all {total} in memory"
    if not split.is_tiered:
        dense = experts_are_dense(plan.spec, plan.dtype.itemsize)
        how = ", computed all together" if dense else ", each in a slot"
        return f"experts: all {total} on the device{how}"
    slots = split.slots
    form = "" if plan.step_lines is None else ", all in 4 bits"
    return (
        f"experts: {sum(slots)} of {total} have a slot, {min(slots)} to {max(slots)} a layer; "
        f"{split.num_in_host} lie in host memory{form}"
    )


def _left(plan: StartPlan, machine: Machine) -> list[str]:
    def line(where: str, needed: int, there: int) -> str:
        return (
            f"{where}: {needed / MIB:,.1f} MiB needed, {there / MIB:,.1f} MiB free, "
            f"{(there - needed) / MIB:,.1f} MiB left"
        )

    if not machine.has_gpu:
        return [line("RAM", plan.memory.total(), machine.host_bytes)]
    return [
        line("GPU memory", plan.memory.total(Place.DEVICE), machine.device_bytes),
        line("RAM", plan.memory.total(Place.HOST), machine.host_bytes),
    ]


def _where(place: Place, machine: Machine) -> str:
    if not machine.has_gpu:
        return "RAM"
    return "GPU" if place == Place.DEVICE else "RAM"


def _machine(device: str, vram_mib: int | None, ram_mib: int | None) -> Machine:
    """This machine, or what the options say of another."""
    host = free_host_bytes() if ram_mib is None else ram_mib * MIB
    if vram_mib is not None:
        return Machine(
            has_gpu=vram_mib > 0,
            device_bytes=vram_mib * MIB or host,
            host_bytes=host,
            library_bytes=USUAL_LIBRARY_BYTES if vram_mib else 0,
        )
    if ram_mib is not None:
        return Machine(has_gpu=False, device_bytes=host, host_bytes=host)
    return machine_of(device_of(device))
