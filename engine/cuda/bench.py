"""Measures the decode step and prompt reading at the real geometry with random weights. Run by loadtest.h200_bench.

    python -m engine.cuda.bench --out h200.json

Times are medians of graph replays, each with fresh random ids, taken with device events. Floors are bytes that must be
read once over the copy rate measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.cuda.backend import CudaTrunk
from engine.cuda.gdn import gdn_window
from engine.cuda.language import triton
from engine.cuda.layout import MAX_ROWS
from engine.cuda.moe import ExpertTiling, multiply_split, route
from engine.cuda.prefill import Prefill
from engine.cuda.products import product, product_into_streams
from engine.cuda.qsa import attend
from engine.cuda.random_model import REAL_CONFIG, RandomTensors, real_spec
from engine.instruments import count_allocations
from engine.interface import (
    PAGE_TOKENS,
    DecodeStep,
    PrefillChunk,
    Resume,
    SamplingParams,
    SavePage,
    SlotStart,
    Suspend,
    WindowPlan,
)
from engine.loading import assemble, load_cuda_step, machine_of
from engine.memory_plan import MIB
from engine.sampling import PickRow
from engine.state import KeptRows
from engine.tools.floor import measure_floor

if TYPE_CHECKING:
    from engine.cuda.moe import MoeWeights
    from engine.cuda.step import CudaStep
    from engine.cuda.weights import CudaModel
    from engine.engine import TorchEngine
    from engine.model_spec import MoeSpec
    from engine.startup import StartupMarks
    from engine.state import SlotState

_LAYOUTS = ((1,), (1, 1, 1, 1), (5,), (5, 5, 5, 5))
_CONTEXTS = (512, 8192)
_REPEATS = 20
_PARKED_TOKENS = 9000


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: one model over one state."""

    model: CudaModel
    state: SlotState
    step: CudaStep
    engine: TorchEngine
    marks: StartupMarks
    copy_rate: float
    """Bytes per second, read and written."""


def median_ms(work: Callable[[], object], before: Callable[[], None] = lambda: None) -> float:
    """Median milliseconds of `work` on the device; `before` runs untimed each time."""
    times: list[float] = []
    for _ in range(_REPEATS):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """`work` as a graph, run twice before."""
    work()
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_rate() -> float:
    """Bytes per second of a large copy on the device, reading and writing counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms(lambda: target.copy_(source)) * 1e-3)


def make(
    layers: int,
    max_context: int,
    num_slots: int,
    expert_cache: int | None = None,
    pool_workers: int | None = None,
) -> Bench:
    """A random model, its state full of random cells, and its graphs. expert_cache: slots; None: for all that fit."""
    device = torch.device("cuda")
    rate = copy_rate()
    torch.cuda.empty_cache()
    source = RandomTensors(device)
    spec = real_spec(num_hidden_layers=layers)
    config = EngineConfig(
        device="cuda",
        num_slots=num_slots,
        max_context=max_context,
        expert_cache=expert_cache,
        pool_workers=pool_workers,
    )
    began = time.perf_counter()
    loaded = load_cuda_step(
        source, config, spec, machine_of(device), device, spec.vocab_size, random=source
    )
    engine = assemble(config, spec, loaded, began)
    engine.rehearse(loaded.marks)
    trunk = engine.steps
    assert isinstance(trunk, CudaTrunk)
    for tensor in (engine.state.k, engine.state.v):
        tensor.normal_()
    for tensor in (engine.state.index_blocks, engine.state.index_ring):
        tensor.normal_()
    return Bench(trunk.step.model, engine.state, trunk.step, engine, loaded.marks, rate)


def start(bench: Bench) -> list[dict[str, Any]]:
    """What the start took at each checkpoint and what the device gave altogether, MiB."""
    marks = [
        {
            "checkpoint": str(mark.step),
            "planned_mib": mark.planned_bytes / MIB,
            "actual_mib": mark.actual_bytes / MIB,
        }
        for mark in bench.marks.marks
    ]
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return [
        *marks,
        {
            "seconds": bench.engine.info.load_s,
            "device_mib": (total - free) / MIB,
            "reserved_mib": reserved / MIB,
        },
        *({"line": x.name, "mib": x.planned_bytes / MIB} for x in bench.engine.info.memory_plan),
    ]


def random_ids(model: CudaModel, rows: int) -> torch.Tensor:
    """int64 [rows, context + 1]."""
    return torch.randint(4, model.spec.vocab_size, (rows, 3), device="cuda")


def window_bytes(model: CudaModel, counts: tuple[int, ...], context: int) -> float:
    """Bytes that a window must read, and S written back: dense weights once, each used expert once, S and keys."""
    spec = model.spec
    rows = sum(counts)
    moe = spec.moe
    used = moe.num_experts * _share_used(moe, rows)
    assert model.head is not None
    assert model.final is not None
    total = model.head.numel() * 2.0 + model.final.num_bytes
    for layer in model.layers:
        total += layer.mixer_residual.num_bytes + layer.moe_residual.num_bytes
        total += 2 * (layer.moe.head.numel() + layer.moe.shared_down.numel())
        experts = layer.moe.gate_up.num_bytes + layer.moe.down.num_bytes
        total += experts * used / moe.num_experts
        if layer.gdn is not None:
            total += (
                layer.gdn.num_bytes
                + len(counts) * 2 * spec.gdn.value_channels * spec.gdn.key_dim * 4
            )
        if layer.qsa is not None:
            cells = (
                min(context, spec.qsa.budget_tokens)
                * 2
                * spec.qsa.num_kv_heads
                * spec.qsa.head_dim
                * 2
            )
            total += layer.qsa.num_bytes + len(counts) * cells
        if layer.ple is not None:
            total += layer.ple.num_bytes
    return total


def _share_used(moe: MoeSpec, rows: int) -> float:
    """Of a layer's experts: rows choose independently here, as random rows do."""
    return 1 - (1 - moe.num_active / moe.num_experts) ** rows


def windows(bench: Bench) -> list[dict[str, Any]]:
    """Window times by rows and context, with logits."""
    found: list[dict[str, Any]] = []
    for context in _CONTEXTS:
        for counts in _LAYOUTS:
            rows, slots = sum(counts), list(range(len(counts)))

            def run(
                rows: int = rows,
                slots: list[int] = slots,
                counts: tuple[int, ...] = counts,
                at: int = context,
            ) -> None:
                bench.step.window(random_ids(bench.model, rows), slots, counts, [at] * len(slots))

            run()
            ms = median_ms(lambda n=rows: bench.step.replay_window(n), run)
            floor = window_bytes(bench.model, counts, context) / bench.copy_rate * 1e3
            found.append(
                {"rows": rows, "slots": len(slots), "context": context, "ms": ms, "floor_ms": floor}
            )
    return found


def parts(bench: Bench, rows: int) -> list[dict[str, Any]]:
    """Each part of the window over all layers by itself, as a graph: ms and the floor of its weights."""
    step, model, spec = bench.step, bench.model, bench.model.spec
    b = step.buffers
    counts = (rows,) if rows <= 5 else (5,) * (rows // 5)
    step.window(random_ids(model, rows), list(range(len(counts))), counts, [512] * len(counts))
    streams, mixed, inject = b.streams[:rows], b.mixed[:rows], b.inject[:rows]
    gdn = [layer for layer in model.layers if layer.gdn is not None]
    qsa = [layer.qsa for layer in model.layers if layer.qsa is not None]

    def projections() -> None:
        for layer in model.layers:
            weight = layer.gdn.in_proj if layer.gdn else layer.qsa.in_proj  # type: ignore[union-attr]
            product(mixed, weight, step.projected(rows, weight), b.products)

    def outputs() -> None:
        for layer in model.layers:
            weight = layer.gdn.out_proj if layer.gdn else layer.qsa.out_proj  # type: ignore[union-attr]
            product_into_streams(
                step.middle(rows, weight.shape[1]), weight, streams, inject, b.products
            )

    def recurrences() -> None:
        for layer in gdn:
            assert layer.gdn is not None
            projected = step.projected(rows, layer.gdn.in_proj)
            middle = step.middle(rows, spec.gdn.value_channels)
            gdn_window(
                projected,
                layer.gdn,
                b.gdn,
                step.layout,
                bench.state,
                layer.gdn_index,
                spec.gdn,
                spec.norm_eps,
                middle,
            )

    def attentions() -> None:
        for weights in qsa:
            projected = step.projected(rows, weights.in_proj)
            step.write_cells(projected, weights, step.layout, rows)
            middle = step.middle(rows, spec.qsa.num_heads * spec.qsa.head_dim)
            attend(
                projected,
                weights,
                b.qsa,
                step.layout.row_slots,
                step.layout.positions,
                bench.state,
                spec.qsa,
                middle,
            )

    def residuals() -> None:
        for layer in model.layers:
            step.read(streams, layer.mixer_residual)
            step.read(streams, layer.moe_residual)

    def routers() -> None:
        for layer in model.layers:
            route(mixed, layer.moe, b.moe, spec.moe)

    def experts() -> None:
        for layer in model.layers:
            multiply_split(rows, layer.moe, b.moe, spec.moe, ExpertTiling())

    output_head = model.head
    assert output_head is not None

    def head() -> None:
        product(mixed, output_head, b.logits[:rows], b.products)

    def weight_bytes(kind: str) -> float:
        weights = [getattr(layer.gdn or layer.qsa, kind) for layer in model.layers]
        return 2.0 * sum(w.numel() for w in weights)

    used = len(b.moe.ids[:rows].unique()) / spec.moe.num_experts
    state_bytes = 2.0 * len(counts) * len(gdn) * spec.gdn.value_channels * spec.gdn.key_dim * 4
    cells = len(counts) * len(qsa) * 512 * 4.0 * spec.qsa.num_kv_heads * spec.qsa.head_dim
    listed: list[tuple[str, Callable[[], None], float]] = [
        (
            "gated residual reads",
            residuals,
            sum(x.mixer_residual.num_bytes + x.moe_residual.num_bytes for x in model.layers),
        ),
        ("input projections", projections, weight_bytes("in_proj")),
        ("recurrence, convolution, gated norm", recurrences, state_bytes),
        ("cells and attention", attentions, cells),
        ("output projections into the streams", outputs, weight_bytes("out_proj")),
        ("router and top k", routers, sum(2.0 * x.moe.head.numel() for x in model.layers)),
        (
            "experts",
            experts,
            used * sum(x.moe.gate_up.num_bytes + x.moe.down.num_bytes for x in model.layers),
        ),
        ("head", head, 2.0 * output_head.numel()),
    ]
    return [
        {
            "rows": rows,
            "part": name,
            "ms": median_ms(captured(work)),
            "floor_ms": size / bench.copy_rate * 1e3,
        }
        for name, work, size in listed
    ]


def tiers(bench: Bench) -> list[dict[str, Any]]:
    """Windows and a prompt piece by the share of experts on the device; the others are computed by threads of the host,
    or their bytes are read over the bus.

    The first line is the rate of a copy from pinned memory.
    """
    layers, found = len(bench.model.layers), [{"what": "copy", "gb_per_s": _bus_rate() / 1e9}]
    pairs = layers * bench.model.spec.moe.num_experts
    cases = [(None, 0), (1.0, 0), (0.5, 0), (0.5, None), (0.25, 0), (0.25, None)]
    for share, workers in cases:
        one = bench
        if share is not None:
            one = make(layers, 33_000, 4, int(share * pairs), workers)
            if one.step.first_come is not None:
                one.step.first_come.end()  # what is measured stays where it is
        far_bytes = sum(_far_of(layer.moe) for layer in one.model.layers)
        for counts in ((1,), (5, 5, 5, 5)):
            rows, slots = sum(counts), list(range(len(counts)))

            def run(
                one: Bench = one,
                rows: int = rows,
                slots: list[int] = slots,
                counts: tuple[int, ...] = counts,
            ) -> None:
                one.step.window(random_ids(one.model, rows), slots, counts, [512] * len(slots))

            run()
            ms = median_ms(lambda one=one, n=rows: one.step.replay_window(n), run)
            bus = far_bytes * _share_used(one.model.spec.moe, rows)
            found.append(_tier_line(one, share, f"{rows} rows", ms, bus))
        ids = random_ids(one.model, 2048)
        trunk = one.engine.steps
        ms = median_ms(lambda t=trunk, i=ids, s=one.state: t.chunk(i, 0, 0, s))
        found.append(_tier_line(one, share, "piece of 2048", ms, far_bytes))
        del one, run, trunk
        torch.cuda.empty_cache()
    return found


def _tier_line(
    bench: Bench, share: float | None, what: str, ms: float, bus: float
) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    return {
        "layers": len(bench.model.layers),
        "near": "all, without tiers" if share is None else share,
        "what": what,
        "threads": bench.step.pool.num_workers if bench.step.pool else 0,
        "ms": ms,
        "far_mib": bus / MIB,
        "load_s": bench.engine.info.load_s,
        "outside_mib": (total - free - torch.cuda.memory_reserved()) / MIB,
    }


def _far_of(moe: MoeWeights) -> int:
    return 0 if moe.far is None else moe.far.gate_up.num_bytes + moe.far.down.num_bytes


def _bus_rate() -> float:
    """Bytes per second of a large copy from pinned memory."""
    source = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return source.numel() / (median_ms(lambda: target.copy_(source, non_blocking=True)) * 1e-3)


def drafts(bench: Bench) -> list[dict[str, Any]]:
    """Chains of four with the host's part, the commit, and picks of a window's rows."""
    step, spec = bench.step, bench.model.spec
    found: list[dict[str, Any]] = []
    for slots in (1, 4):
        ids = torch.randint(4, spec.vocab_size, (slots,), device="cuda")
        streams = torch.randn(slots, spec.stream_width, device="cuda", dtype=torch.bfloat16)
        picks = [[_pick_row(j + slot) for slot in range(slots)] for j in range(4)]
        args = (ids, streams, list(range(slots)), [1] * slots, [512] * slots, picks)
        step.chain(*args)
        found.append(
            {
                "what": "chain of 4, host included",
                "slots": slots,
                "ms": _host_ms(lambda a=args: step.chain(*a)),
            }
        )
        kept = {slot: KeptRows(5 * slot, 5) for slot in range(slots)}
        step.commit(kept)
        found.append(
            {
                "what": "commit of 5 rows a slot",
                "slots": slots,
                "ms": _host_ms(lambda k=kept: step.commit(k)),
            }
        )
    logits = step.logits(MAX_ROWS)
    logits.normal_()
    rows = [_pick_row(i) for i in range(MAX_ROWS)]
    few = [_pick_row(i, top_k=20, top_p=0.95) for i in range(MAX_ROWS)]
    for what, chosen in (("sampling 20 rows, all ids", rows), ("sampling 20 rows, top 20", few)):
        ms = _host_ms(lambda c=chosen: step.pick(logits, c))
        found.append({"what": f"{what}, host included", "slots": 4, "ms": ms})
    return found


def _pick_row(seed: int, **params: float) -> PickRow:
    chosen = SamplingParams(temperature=1.0, seed=seed, **params)  # type: ignore[arg-type]
    return PickRow(params=chosen, position=0, num_output=0, history=None)


def _host_ms(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def rates(
    found_windows: list[dict[str, Any]], found_drafts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Tokens per second computed from measured times: windows of 5 rows a slot, chains of 4, commits, sampling."""
    times = {
        (w["rows"], w["slots"]): w["ms"] for w in found_windows if w["context"] == _CONTEXTS[0]
    }
    other: dict[tuple[str, int], float] = {}
    for one in found_drafts:
        # Picks from all ids come before those from a few.
        other.setdefault((one["what"].split()[0], one["slots"]), one["ms"])
    found: list[dict[str, Any]] = []
    for slots in (1, 4):
        plain = times[slots, slots] + other["sampling", 4]
        found.append({"slots": slots, "acceptance": None, "tokens_per_s": slots / plain * 1e3})
        round_ms = (
            times[5 * slots, slots]
            + other["chain", slots]
            + other["commit", slots]
            + other["sampling", 4]
        )
        for acceptance in (0.0, 0.5, 0.8):
            tokens = sum(acceptance**i for i in range(5))
            found.append(
                {
                    "slots": slots,
                    "acceptance": acceptance,
                    "tokens_per_s": slots * tokens / round_ms * 1e3,
                }
            )
    return found


def prefills(bench: Bench) -> list[dict[str, Any]]:
    """Prompt reading, head for the last row only."""
    reader = Prefill(bench.model, bench.state)

    def read(tokens: int, chunk: int) -> None:
        bench.state.begin(0)
        streams = None
        for start in range(0, tokens, chunk):
            streams = reader.chunk(random_ids(bench.model, min(chunk, tokens - start)), 0, start)
        assert streams is not None
        if not bool(torch.isfinite(reader.logits(streams[-1:])).all()):
            raise SystemExit("prompt reading gave logits that are not finite")

    found: list[dict[str, Any]] = []
    for tokens, chunk in ((1024, 1024), (8192, 2048), (8192, 8192), (32768, 2048), (32768, 8192)):
        read(min(tokens, 2 * chunk), chunk)
        seconds: list[float] = []
        for _ in range(3 if tokens < 32768 else 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            read(tokens, chunk)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found.append(
            {"tokens": tokens, "chunk": chunk, "tokens_per_s": tokens / statistics.median(seconds)}
        )
    return found


def parking(bench: Bench) -> list[dict[str, Any]]:
    """Plain copies of as many bytes as a conversation of 9,000 tokens parks, alone and beside windows."""
    state, spec = bench.state, bench.model.spec
    per_token = sum(
        t.stride(3) * t.element_size() * t.shape[0] * t.shape[2] for t in (state.k, state.v)
    )
    per_token += state.index_blocks[:, 0, 0].numel() * 2 // spec.qsa.block_tokens
    size = per_token * _PARKED_TOKENS + state.s[:, 0].numel() * 4 + state.conv[:, 0].numel() * 2
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    restore = median_ms(lambda: device.copy_(host, non_blocking=True))
    side = torch.cuda.Stream()
    bench.step.window(random_ids(bench.model, 20), [0, 1, 2, 3], (5, 5, 5, 5), [512] * 4)
    alone = median_ms(lambda: bench.step.replay_window(20))

    def copy_beside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(device, non_blocking=True)

    beside = median_ms(lambda: bench.step.replay_window(20), copy_beside)
    torch.cuda.synchronize()
    mib = size / 2**20
    return [
        {"what": f"host to device, {mib:.0f} MiB", "ms": restore},
        {"what": "20-row window alone", "ms": alone},
        {"what": "20-row window while as much is copied to the host", "ms": beside},
    ]


def served(bench: Bench) -> list[dict[str, Any]]:
    """Windows through TorchEngine.run_window, host and picks included; what they allocate and wait for."""
    engine = bench.engine
    found: list[dict[str, Any]] = []
    for slots in (1, 4):
        for max_draft in (0, 4):
            for slot in range(slots):
                _seat(engine, slot, 512)
            steps = tuple(
                DecodeStep(slot=slot, max_draft=max_draft, spec_min_p=0.0) for slot in range(slots)
            )
            plan = WindowPlan(decodes=steps)
            rows = slots * (1 + max_draft)
            engine.run_window(plan)
            tokens: list[int] = []

            def window(plan: WindowPlan = plan, tokens: list[int] = tokens) -> None:
                result = engine.run_window(plan)
                tokens.append(sum(len(one.token_ids) for one in result.tokens))

            ms = _host_ms(window)
            graph = median_ms(lambda n=rows: bench.step.replay_window(n))
            found.append(
                {
                    "rows": rows,
                    "slots": slots,
                    "drafts": max_draft,
                    "ms": ms,
                    "window_graph_ms": graph,
                    "tokens_per_window": statistics.mean(tokens),
                    "cuda_mallocs": count_allocations(window).device_calls,
                    "waits": _count_waits(window),
                }
            )
    return found


def _seat(engine: TorchEngine, slot: int, num_tokens: int) -> None:
    """A sequence of random ids, read in the engine's pieces."""
    ids = torch.randint(4, engine.info.vocab_size, (num_tokens,)).tolist()
    size = engine.info.chunk_tokens
    starts = (SlotStart(slot=slot, sampling=SamplingParams(temperature=1.0, seed=slot)),)
    for first in range(0, num_tokens, size):
        part = tuple(ids[first : first + size])
        last = first + size >= num_tokens
        chunk = PrefillChunk(slot=slot, start=first, token_ids=part, is_last=last)
        engine.run_window(WindowPlan(starts=starts, chunks=(chunk,)))
        starts = ()


def _count_waits(work: Callable[[], object]) -> int:
    """How often torch waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught)


def floors(bench: Bench) -> list[dict[str, Any]]:
    """`stratagate floor` of this model: every slot at one position."""
    found: list[dict[str, Any]] = []
    for rows in (1, 5):
        measured = measure_floor(bench.engine, rows=rows, position=512, windows=_REPEATS)
        found.append({"text": measured.text().splitlines()})
    return found


def restoring(bench: Bench) -> list[dict[str, Any]]:
    """Parking a conversation and restoring it into another slot, and windows beside the copies."""
    engine = bench.engine
    pages = range(-(-_PARKED_TOKENS // PAGE_TOKENS))
    for slot in range(4):
        _seat(engine, slot, _PARKED_TOKENS if slot == 3 else 512)
    saves = tuple(SavePage(slot=3, page_id=i, index=i) for i in pages)
    park = WindowPlan(suspends=(Suspend(slot=3, checkpoint_id=0),), saves=saves)
    drop = WindowPlan(drop_page_ids=tuple(pages), drop_checkpoint_ids=(0,))
    ids = tuple(engine.sequence_ids(3))
    resume = Resume(checkpoint_id=0, page_ids=tuple(pages), token_ids=ids, num_output=1)
    start = SlotStart(slot=2, sampling=SamplingParams(temperature=1.0), resume=resume)
    steps = tuple(DecodeStep(slot=slot, max_draft=4, spec_min_p=0.0) for slot in (0, 1))
    beside = WindowPlan(decodes=steps)
    first = _timed(engine, park)
    engine.run_window(drop)
    times: dict[str, list[float]] = {}
    for _ in range(7):
        for what, plan in (
            ("park 9,000 tokens", park),
            ("restore 9,000 tokens", WindowPlan(starts=(start,))),
            ("drop", drop),
            ("window of 2 slots, 10 rows", beside),
            (
                "the same while 9,000 tokens are parked",
                replace(beside, suspends=park.suspends, saves=park.saves),
            ),
            ("the same while they are restored", replace(beside, starts=(start,))),
            ("drop", drop),
        ):
            issued, done = _timed(engine, plan)
            times.setdefault(what, []).append(done)
            times.setdefault(f"{what}, until run_window returns", []).append(issued)
    size = len(pages) * engine.info.page_bytes + engine.info.checkpoint_bytes
    return [
        {"what": "parked MiB", "mib": size / MIB},
        {"what": "park for the first time, pinning the memory", "ms": first[1]},
        *(
            {"what": what, "ms": statistics.median(ms), "largest_ms": max(ms)}
            for what, ms in times.items()
            if not what.startswith("drop")
        ),
    ]


def _timed(engine: TorchEngine, plan: WindowPlan) -> tuple[float, float]:
    """Milliseconds until a window has returned, and until the device has nothing left to do."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.run_window(plan)
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return (issued - began) * 1e3, (time.perf_counter() - began) * 1e3


def transformers_step(layers: int) -> dict[str, Any]:
    """One decode step of Hugging Face transformers on random weights of the same geometry, bf16 experts."""
    import transformers

    if not hasattr(transformers, "Qwen4ExpForCausalLM"):
        return {
            "layers": layers,
            "error": f"transformers {transformers.__version__} has no qwen4_exp",
        }
    keys: dict[str, Any] = {**REAL_CONFIG, "num_hidden_layers": layers}
    del keys["model_type"]
    config = transformers.Qwen4ExpTextConfig(**keys)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.Qwen4ExpForCausalLM(config).eval()
        ids = torch.randint(4, 248000, (1, 512), device="cuda")
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache_name = next(
            name for name in ("past_key_values", "cache") if getattr(output, name, None) is not None
        )
        token = output.logits[:, -1:].argmax(-1)

        def one() -> None:
            model(input_ids=token, use_cache=True, **{cache_name: getattr(output, cache_name)})

        one()
        ms = _host_ms(one)
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "layers": layers,
        "version": transformers.__version__,
        "ms": ms,
        "ms_per_layer": ms / layers,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hf-layers", type=int, default=8, help="0 leaves transformers out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="all", help="names of what to measure, with commas")
    options = parser.parse_args()
    bench = make(options.layers, max_context=33_000, num_slots=4)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "layers": options.layers,
        "copy_tb_per_s": bench.copy_rate / 1e12,
        "weights_gib": torch.cuda.memory_allocated() / 2**30,
    }

    def note(name: str, value: Any) -> None:
        results[name] = value
        for line in value if isinstance(value, list) else [value]:
            print(name, line, flush=True)  # noqa: T201 - the program's result

    note(
        "machine",
        {
            name: results[name]
            for name in ("device", "torch", "triton", "copy_tb_per_s", "weights_gib")
        },
    )
    wanted: list[tuple[str, Callable[[], Any]]] = [
        ("start", lambda: start(bench)),
        ("windows", lambda: windows(bench)),
        ("tiers", lambda: tiers(bench)),
        ("drafts", lambda: drafts(bench)),
        ("rates", lambda: rates(results["windows"], results["drafts"])),
        ("parts", lambda: parts(bench, 1) + parts(bench, 20)),
        ("served", lambda: served(bench)),
        ("floors", lambda: floors(bench)),
        ("restoring", lambda: restoring(bench)),
        ("parking", lambda: parking(bench)),
        ("prefill", lambda: prefills(bench)),
    ]
    for name, measure in wanted:
        if options.parts == "all" or name in options.parts.split(","):
            note(name, measure())
    if options.hf_layers:
        del bench
        torch.cuda.empty_cache()
        note("eight layers", _own_step(options.hf_layers))
        torch.cuda.empty_cache()
        note("transformers", transformers_step(options.hf_layers))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def _own_step(layers: int) -> dict[str, Any]:
    """This package's one-row window of the same depth as the transformers model."""
    bench = make(layers, max_context=1024, num_slots=1)

    def run() -> None:
        bench.step.window(random_ids(bench.model, 1), [0], [1], [512])

    run()
    return {"layers": layers, "ms": median_ms(lambda: bench.step.replay_window(1), run)}


if __name__ == "__main__":
    main()
