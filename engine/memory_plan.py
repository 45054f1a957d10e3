"""MemoryPlan: every byte named from the geometry alone, before anything is allocated (D7). Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import PlanRefused

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

FP32_BYTES = 4
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Planned bytes by name, in allocation order."""

    weights: tuple[tuple[str, int], ...]
    sessions: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]

    def items(self) -> tuple[tuple[str, int], ...]:
        """All lines."""
        return self.weights + self.sessions + self.buffers

    @property
    def total_bytes(self) -> int:
        """Sum of all lines."""
        return sum(num_bytes for _, num_bytes in self.items())

    def require(self, available_bytes: int, where: str) -> None:
        """Raise PlanRefused, with both numbers and what to change, if the plan is larger than what is available."""
        if self.total_bytes <= available_bytes:
            return
        sessions = sum(num_bytes for _, num_bytes in self.sessions)
        raise PlanRefused(
            f"the plan needs {self.total_bytes / MIB:.0f} MiB of {where} but {available_bytes / MIB:.0f} MiB are "
            f"available; of it {sessions / MIB:.0f} MiB are sessions: lower --max-context or --batch"
        )


def make_plan(
    spec: ModelSpec,
    *,
    state_bytes: dict[str, int],
    element_bytes: int,
    converts_kv: bool,
    num_positions: int,
    chunk_tokens: int,
    window_rows: int,
    with_draft: bool,
) -> MemoryPlan:
    """Plan a model with weights and activations of `element_bytes`.

    state_bytes: bytes of each tensor of SlotState; converts_kv: K and V are held in another type; num_positions:
    entries of the rotary tables; window_rows: most rows of a verify window.
    """
    return MemoryPlan(
        weights=tuple(
            weight_bytes(
                spec,
                element_bytes=element_bytes,
                num_positions=num_positions,
                with_draft=with_draft,
            ).items()
        ),
        sessions=tuple((f"session {name}", n) for name, n in state_bytes.items()),
        buffers=(
            (
                "prefill buffers",
                _chunk_bytes(spec, chunk_tokens, num_positions) * element_bytes,
            ),
            *(
                [("converted K/V", _converted_kv_bytes(spec, num_positions, element_bytes))]
                if converts_kv
                else []
            ),
            ("window logits", window_rows * spec.vocab_size * FP32_BYTES),
        ),
    )


def weight_bytes(
    spec: ModelSpec, *, element_bytes: int, num_positions: int, with_draft: bool
) -> dict[str, int]:
    """Bytes of the weights as held, by part."""
    e = element_bytes
    parts = {
        "embedding": spec.vocab_size * spec.hidden * e,
        "ple": 0,
        "ple table": 0,
        "gdn": len(spec.gdn_layers) * _gdn_bytes(spec, e),
        "qsa": len(spec.qsa_layers) * _qsa_bytes(spec, e),
        "residual": 2 * spec.num_layers * _residual_bytes(spec, e, inject=True)
        + _residual_bytes(spec, e, inject=False),
        "moe": spec.num_layers * _moe_bytes(spec, e),
        "head": spec.vocab_size * spec.hidden * e,
    }
    for index in range(len(spec.ple.layer_ids) if spec.ple else 0):
        dense, table = _ple_bytes(spec, e, index)
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


def _chunk_bytes(spec: ModelSpec, chunk_tokens: int, num_positions: int) -> int:
    """Elements of the widest intermediates that are alive together while a prompt piece is read."""
    gdn, moe, qsa = spec.gdn, spec.moe, spec.qsa
    widest = max(
        3 * gdn.conv_channels + 4 * gdn.value_channels,
        4 * spec.stream_width,
        3 * moe.num_experts * moe.expert_dim,
        2 * qsa.num_heads * min(num_positions, 4096),
    )
    return chunk_tokens * (widest + 2 * spec.stream_width)
