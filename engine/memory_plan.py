"""MemoryPlan: every byte named from the geometry alone, before anything is allocated (D7). Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.errors import PlanRefused
from engine.interface import MAX_SLOTS, MAX_SPEC

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine.model_spec import ModelSpec

FP32_BYTES = 4
MIB = 1 << 20
ALIGN_BYTES = 64
"""Experts begin at multiples of this: a library also rounds by how its input is aligned."""
QUERY_TILE_SCORES = 1 << 24
"""Attention scores that a prompt piece holds at once."""
_GDN_CHUNK = 64
"""Rows that the delta rule takes at once."""
DENSE_MAX_BYTES = 16 << 20
"""Expert weights of one layer up to this stay in cache, where two products over all experts beat a loop over few."""
STAGED_BYTES = 64 << 20
"""Experts from host memory that a prompt piece holds on the device at once."""
_PLACE_BYTES = 2 * 2 * 8 + 4
"""An expert's entries in the tables that kernels find it by: words and scales of both parts, its place in order."""


class Step(StrEnum):
    """The checkpoints of a start, in order; what is allocated after one is part of the next."""

    WEIGHTS = "weights, sessions, drafter"
    HEAD = "head"
    CACHE = "expert cache opened"
    FILL = "experts filled in"
    HITS = "hit path"
    PROMPT = "prompt path"
    VERIFIER = "verifier and drafter bound"


class Place(StrEnum):
    """Whose memory a line takes. On a machine without GPU the device's memory is the host's."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """One named part."""

    name: str
    num_bytes: int
    step: Step
    place: Place = Place.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Planned bytes by name, in the order in which they are allocated."""

    lines: tuple[PlanLine, ...]

    def total(self, place: Place | None = None) -> int:
        """Sum of all lines, or of those in one place."""
        return _sum(line for line in self.lines if place in (None, line.place))

    def session_names(self) -> tuple[str, ...]:
        """Tensors of SlotState that have a line."""
        names = (line.name for line in self.lines if line.name.startswith(SESSION))
        return tuple(name.removeprefix(SESSION) for name in names)

    def until(self, step: Step, place: Place | None = None) -> int:
        """Bytes that are taken, in all places or one, when a checkpoint is reached."""
        steps = list(Step)[: list(Step).index(step) + 1]
        lines = (line for line in self.lines if line.step in steps)
        return _sum(line for line in lines if place in (None, line.place))

    def of(self, step: Step) -> int:
        """Bytes that are taken between a checkpoint and the one before it."""
        return _sum(line for line in self.lines if line.step == step)

    def require(self, available_bytes: int, where: str, place: Place | None = None) -> None:
        """Raise PlanRefused, with both numbers and what to change, if the lines of a place need more than there is."""
        needed = self.total(place)
        if needed <= available_bytes:
            return
        lines = [line for line in self.lines if place in (None, line.place)]
        sessions = _sum(line for line in lines if line.name.startswith(SESSION))
        experts = _sum(line for line in lines if line.name in (TIER_ONE, TIER_TWO))
        table = _sum(line for line in lines if line.name == TABLE)
        parts = [f"{sessions / MIB:.0f} MiB are sessions: lower --max-context or --batch"] * bool(
            sessions
        )
        if table:
            parts.append(
                f"{table / MIB:.0f} MiB are the n-gram table: leave it on disk with --ple-io direct"
            )
        if experts and place == Place.HOST:
            parts.append(f"{experts / MIB:.0f} MiB are experts beside the device's")
        elif experts:
            parts.append(f"{experts / MIB:.0f} MiB are experts: lower --expert-cache")
        raise PlanRefused(
            f"the plan needs {needed / MIB:.0f} MiB of {where} but {available_bytes / MIB:.0f} MiB are "
            f"available; of it {'; '.join(parts)}"
        )


SESSION = "session "
TABLE = "ple table"
LIBRARY = "library workspace"
TIER_ONE = "experts, tier one"
TIER_TWO = "experts, tier two"
EXPERTS_4_BITS = "experts, 4 bits"
HIT_PATH = "experts' addresses and staging"
POOL = "experts' pool"
ROUTES = "experts' routes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How the routed experts of the trunk are divided between the device and the host.

    num_slots: pairs (layer, expert) that have a place in tier one; num_in_host: pairs whose weights lie in host memory.
    Without a profile these overlap: the host keeps what the slots may be filled with.
    """

    num_slots: int
    num_in_host: int
    is_first_come: bool = False
    """Experts in 4 bits trade places until each slot has one that came."""


def make_plan(
    spec: ModelSpec,
    *,
    state_bytes: dict[str, int],
    element_bytes: int,
    converts_kv: bool,
    num_positions: int,
    max_context: int,
    chunk_tokens: int,
    window_rows: int,
    with_draft: bool,
    experts: ExpertPlan | None = None,
    table_in_ram: bool = True,
) -> MemoryPlan:
    """Plan a model with weights and activations of `element_bytes`.

    state_bytes: bytes of each tensor of SlotState; converts_kv: K and V are held in another type; num_positions:
    entries of the rotary tables; window_rows: most rows of a verify window; experts: None keeps all of them on the
    device; table_in_ram: the n-gram table lies in the host's memory and not on disk.
    """
    parts = weight_bytes(
        spec, element_bytes=element_bytes, num_positions=num_positions, with_draft=with_draft
    )
    tiered = experts is not None
    split = experts or ExpertPlan(num_slots=num_pairs(spec), num_in_host=0)
    is_dense = experts_are_dense(spec, element_bytes)
    blob = blob_bytes(spec, element_bytes)
    padding = spec.moe.num_experts * blob - routed_bytes(spec, element_bytes)
    if not is_dense or tiered:
        parts["moe"] -= spec.num_layers * routed_bytes(spec, element_bytes)
    if not is_dense and with_draft:
        parts["draft layer"] += padding
    head = parts.pop("head", 0)
    if not table_in_ram:
        parts.pop(TABLE, None)
    lines = [
        PlanLine(
            name=name,
            num_bytes=n,
            step=Step.WEIGHTS,
            place=Place.HOST if name == TABLE else Place.DEVICE,
        )
        for name, n in parts.items()
    ]
    lines += [
        PlanLine(name=f"{SESSION}{name}", num_bytes=n, step=Step.WEIGHTS)
        for name, n in state_bytes.items()
    ]
    if spec.is_last:
        lines.append(PlanLine(name="head", num_bytes=head, step=Step.HEAD))
    if not is_dense or tiered:
        tier_one = split.num_slots * blob
        lines.append(PlanLine(name=TIER_ONE, num_bytes=tier_one, step=Step.CACHE))
    if tiered:
        tier_two = split.num_in_host * blob
        lines.append(PlanLine(name=TIER_TWO, num_bytes=tier_two, step=Step.FILL, place=Place.HOST))
    chunk = _chunk_bytes(spec, chunk_tokens, max_context, element_bytes)
    lines.append(PlanLine(name="prefill buffers", num_bytes=chunk, step=Step.PROMPT))
    if converts_kv and spec.qsa_layers:
        converted = _converted_kv_bytes(spec, num_positions, element_bytes)
        lines.append(PlanLine(name="converted K/V", num_bytes=converted, step=Step.PROMPT))
    if spec.is_last:
        logits = window_rows * spec.vocab_size * FP32_BYTES
        lines.append(PlanLine(name="window logits", num_bytes=logits, step=Step.VERIFIER))
    return MemoryPlan(lines=tuple(lines))


def make_step_plan(lines: Iterable[PlanLine], state_bytes: Mapping[str, int]) -> MemoryPlan:
    """Plan a step that reads its weights all at once. lines: what it takes beside the slots' state."""
    sessions = [
        PlanLine(name=f"{SESSION}{name}", num_bytes=n, step=Step.WEIGHTS)
        for name, n in state_bytes.items()
    ]
    order = list(Step)
    ordered = sorted((*lines, *sessions), key=lambda line: order.index(line.step))
    return MemoryPlan(lines=tuple(ordered))


def with_tiers(
    lines: Iterable[PlanLine], spec: ModelSpec, experts: ExpertPlan
) -> tuple[PlanLine, ...]:
    """A step's lines with its 4-bit experts divided between the device and pinned host memory.

    A line for the pool is kept where there is something for it to compute.
    """
    lines = tuple(line for line in lines if line.name != POOL or experts.num_in_host)
    blob = packed_blob_bytes(lines, spec)
    path = num_pairs(spec) * _PLACE_BYTES + experts.num_in_host * 4
    if experts.num_in_host:
        path += num_staged(spec, blob) * blob
    routes = spec.num_layers * MAX_SLOTS * (MAX_SPEC + 1) * spec.moe.num_active * 4
    firsts: tuple[PlanLine, ...] = ()
    if experts.is_first_come:
        # One expert and two addresses on their way, and what a window chose: on the device, and once more on the host.
        path += blob + 2 * 8 + routes
        firsts = (PlanLine(name=ROUTES, num_bytes=routes, step=Step.HITS, place=Place.HOST),)
    return (
        *(line for line in lines if line.name != EXPERTS_4_BITS),
        PlanLine(name=TIER_ONE, num_bytes=experts.num_slots * blob, step=Step.CACHE),
        PlanLine(
            name=TIER_TWO,
            num_bytes=experts.num_in_host * blob,
            step=Step.FILL,
            place=Place.HOST,
        ),
        PlanLine(name=HIT_PATH, num_bytes=path, step=Step.HITS),
        *firsts,
    )


def packs_experts(lines: Iterable[PlanLine]) -> bool:
    """Whether these are lines of a step that holds its experts in 4 bits."""
    return any(line.name == EXPERTS_4_BITS for line in lines)


def packed_blob_bytes(lines: Iterable[PlanLine], spec: ModelSpec) -> int:
    """One expert in 4 bits: all are equally large."""
    return _sum(line for line in lines if line.name == EXPERTS_4_BITS) // num_pairs(spec)


def num_staged(spec: ModelSpec, blob_bytes: int) -> int:
    """Experts from host memory that a prompt piece holds on the device at once."""
    return min(spec.moe.num_experts, max(1, STAGED_BYTES // blob_bytes))


def num_pairs(spec: ModelSpec) -> int:
    """(layer, expert) pairs of the trunk."""
    return spec.num_layers * spec.moe.num_experts


def routed_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """The routed experts of one layer, without padding."""
    moe = spec.moe
    return 3 * moe.num_experts * moe.expert_dim * spec.hidden * element_bytes


def experts_are_dense(spec: ModelSpec, element_bytes: int) -> bool:
    """Whether a layer's experts are so small that all are computed for every row."""
    return routed_bytes(spec, element_bytes) <= DENSE_MAX_BYTES


def blob_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """One expert as it is held by itself: gate and up rows, then down rows, each part aligned."""
    down = spec.moe.expert_dim * spec.hidden * element_bytes
    return aligned(2 * down) + aligned(down)


def aligned(num_bytes: int) -> int:
    """To the next multiple of ALIGN_BYTES."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _sum(lines: Iterable[PlanLine]) -> int:
    return sum(line.num_bytes for line in lines)


def weight_bytes(
    spec: ModelSpec, *, element_bytes: int, num_positions: int, with_draft: bool
) -> dict[str, int]:
    """Bytes of the weights as held, by part."""
    e = element_bytes
    parts = {
        "embedding": spec.vocab_size * spec.hidden * e if spec.is_first or with_draft else 0,
        "ple": 0,
        "ple table": 0,
        "gdn": len(spec.gdn_layers) * _gdn_bytes(spec, e),
        "qsa": len(spec.qsa_layers) * _qsa_bytes(spec, e),
        "residual": 2 * spec.num_layers * _residual_bytes(spec, e, inject=True)
        + (_residual_bytes(spec, e, inject=False) if spec.is_last else 0),
        "moe": spec.num_layers * _moe_bytes(spec, e),
        "head": spec.vocab_size * spec.hidden * e if spec.is_last else 0,
    }
    for layer in spec.ple_layers:
        assert spec.ple is not None
        dense, table = _ple_bytes(spec, e, spec.ple.layer_ids.index(layer))
        parts["ple"] += dense
        parts["ple table"] += table
    if with_draft:
        parts["draft layer"] = _draft_bytes(spec, e)
    parts["rotary tables"] = 2 * num_positions * spec.qsa.rotary_dim * e
    return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}


def _residual_bytes(spec: ModelSpec, e: int, *, inject: bool) -> int:
    width = spec.stream_width
    rows = 2 * spec.mix_rank + (spec.num_streams if inject else 0)
    return width * FP32_BYTES + rows * width * e


def _gdn_bytes(spec: ModelSpec, e: int) -> int:
    gdn = spec.gdn
    heads = gdn.num_value_heads
    rows = gdn.conv_channels + gdn.value_channels + 2 * heads
    return (
        (rows + gdn.value_channels) * spec.hidden * e
        + (gdn.conv_channels * gdn.conv_width + gdn.value_dim) * e
        + 2 * heads * FP32_BYTES
    )


def _qsa_bytes(spec: ModelSpec, e: int) -> int:
    qsa = spec.qsa
    queries, kv = qsa.num_heads * qsa.head_dim, qsa.num_kv_heads * qsa.head_dim
    rows = 2 * queries + 2 * kv + (qsa.num_index_heads + 1) * qsa.index_dim
    norms = 2 * (qsa.head_dim + qsa.index_dim) * FP32_BYTES
    return (rows + queries) * spec.hidden * e + norms


def _moe_bytes(spec: ModelSpec, e: int) -> int:
    moe = spec.moe
    rows = moe.num_experts + 1 + 3 * (moe.shared_dim + moe.num_experts * moe.expert_dim)
    return rows * spec.hidden * e


def _ple_bytes(spec: ModelSpec, e: int, index: int) -> tuple[int, int]:
    ple = spec.ple
    assert ple is not None
    width = spec.stream_width
    dense = (width + spec.hidden) * ple.embed_dim * e + 3 * width * FP32_BYTES
    return dense + width * ple.conv_width * e, ple.num_rows(index) * ple.head_dim * e


def _draft_bytes(spec: ModelSpec, e: int) -> int:
    norms = (spec.hidden + spec.stream_width) * FP32_BYTES
    residuals = 2 * _residual_bytes(spec, e, inject=True) + _residual_bytes(spec, e, inject=False)
    layers = _qsa_bytes(spec, e) + _moe_bytes(spec, e)
    return 2 * spec.hidden**2 * e + norms + residuals + layers


def _converted_kv_bytes(spec: ModelSpec, num_cells: int, e: int) -> int:
    """K and V of one layer and slot as a prompt piece reads them, and one of them in fp32 on the way there."""
    elements = num_cells * spec.qsa.num_kv_heads * spec.qsa.head_dim
    return elements * (2 * e + (FP32_BYTES if e != FP32_BYTES else 0))


def _chunk_bytes(spec: ModelSpec, chunk_tokens: int, max_context: int, e: int) -> int:
    """Most bytes that are alive together while a prompt piece is read at the end of a context.

    Each term counts the tensors of one block at its widest point, if there is such a block: a stage may lack one. The
    streams and the block's input live beside it.
    """
    gdn, moe, qsa, wide, fp32 = spec.gdn, spec.moe, spec.qsa, spec.stream_width, FP32_BYTES
    heads = gdn.num_value_heads
    delta_rule = 9 * heads * gdn.key_dim + 4 * gdn.value_channels + 5 * heads * _GDN_CHUNK
    if experts_are_dense(spec, e):
        routed = 3 * moe.num_experts * moe.expert_dim
    else:
        routed = 2 * moe.num_active * spec.hidden
    queries, index = qsa.num_heads * qsa.head_dim, qsa.num_index_heads * qsa.index_dim
    projected = 2 * queries + 2 * qsa.num_kv_heads * qsa.head_dim
    # The delta rule fills its last chunk up.
    filled = -(-chunk_tokens // _GDN_CHUNK) * _GDN_CHUNK * delta_rule * fp32
    recurrence = filled + chunk_tokens * 2 * gdn.conv_channels * e
    per_token = {
        "qsa": (projected + 4 * queries) * e if spec.qsa_layers else 0,
        "moe": (routed + 3 * spec.hidden) * e,
        "residual": wide * (2 * fp32 + e),
        "ple": wide * (4 * fp32 + 3 * e // 2) if spec.ple else 0,
    }
    pairs = min(
        chunk_tokens * max_context,
        max(QUERY_TILE_SCORES // qsa.num_heads, max_context),
    )
    # Of a tile of queries: scores, their softmax, what is rounded of it, and which cells count for all heads; and the
    # queries and what they give, copied where K/V heads are apart.
    attention = pairs * (qsa.num_heads * (2 * fp32 + (e if e < fp32 else 0)) + 1)
    copies = 1 if qsa.num_kv_heads == 1 else 3
    attention += pairs // max_context * queries * copies * e
    attention += chunk_tokens * (3 * queries + index) * e
    # Before them, where blocks are chosen: index keys widened for each of the tile's queries, and how they score.
    blocks = max_context // qsa.block_tokens if max_context > qsa.dense_tokens else 0
    widened = qsa.index_dim if e < fp32 else 0
    chosen = pairs // max_context * blocks * (widened + qsa.num_index_heads + 1) * fp32
    chosen += chunk_tokens * (3 * queries + index) * e
    beside = chunk_tokens * (wide + 2 * spec.hidden) * e
    widest = max(
        chunk_tokens * max(per_token.values()),
        recurrence if spec.gdn_layers else 0,
        max(attention, chosen) if spec.qsa_layers else 0,
    )
    return beside + widest
