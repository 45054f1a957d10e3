"""Checkpoint -> the structures of the compiled step; weights keep their stored precision, packed for its products."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import engine.tensor_names as names
from engine.layers.ple import HashedRows
from engine.native import abi
from engine.ple_table import stored_table
from engine.state import RING_ROWS, WINDOW_ROWS

if TYPE_CHECKING:
    from engine.layers.rotary import RotaryTable
    from engine.model_spec import ModelSpec
    from engine.weights import Checkpoint

KINDS = {torch.float32: abi.KIND_F32, torch.bfloat16: abi.KIND_BF16, torch.int8: abi.KIND_I8}


_VALUE_BYTES = {abi.KIND_F32: 4, abi.KIND_BF16: 2, abi.KIND_I8: 1, abi.KIND_TILES: 1}

ALIGNMENT = 64
"""Bytes: every tensor begins with a cache line."""

Change = Callable[[Tensor], Tensor]


def _same(values: Tensor) -> Tensor:
    return values


def _by_tap(conv: Tensor) -> Tensor:
    """A depthwise convolution's weight [C, 1, width] -> [width, C]."""
    return conv[:, 0].t()


def _huge_pages(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], on huge pages where the system has some to give."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without them says so; the weights then lie on small pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return (
        torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
        if num_bytes
        else torch.empty(0)
    )


class Keeper:
    """Owns the memory that the structures point to, and counts it by part.

    All tensors lie in one block, in the order in which they come. It asks for huge pages: a token reads a third of the
    weights, and at 4 KiB a page the processor spends a fifth of that time on finding pages.
    """

    def __init__(self, block_bytes: int = 0) -> None:
        """block_bytes: what all tensors will take, counted by another keeper; 0 for counting alone."""
        self._kept: list[Any] = []
        self._block = _huge_pages(block_bytes)
        self._used_bytes = 0
        self.part_bytes: dict[str, int] = {}

    def pointer(self, tensor: Tensor, part: str) -> int:
        """Address of a copy of the tensor, which is kept and counted."""
        place = self.reserve(tensor.numel() * tensor.element_size(), part)
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return place.data_ptr()

    def reserve(self, num_bytes: int, part: str) -> Tensor:
        """uint8 [num_bytes] of the block, counted."""
        first = self._used_bytes
        self.count(part, num_bytes)
        return self._block[first : first + num_bytes]

    def count(self, part: str, num_bytes: int) -> int:
        """Count bytes of a part, to the next multiple of ALIGNMENT; 0, the address of nothing."""
        num_bytes += -num_bytes % ALIGNMENT
        self.part_bytes[part] = self.part_bytes.get(part, 0) + num_bytes
        self._used_bytes += num_bytes
        return 0

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return self._used_bytes

    def structure(self, value: ctypes.Structure) -> Any:
        """A pointer to a structure, which is kept."""
        self._kept.append(value)
        return ctypes.pointer(value)

    def array(self, kind: type[ctypes.Structure], values: Sequence[ctypes.Structure]) -> Any:
        """A pointer to an array of structures, which is kept."""
        made = (kind * len(values))(*values)
        self._kept.append(made)
        return ctypes.cast(made, ctypes.POINTER(kind))


class NativeLoader:
    """Builds an abi.Model from an open checkpoint. One use."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        keeper: Keeper,
        ple_io: str = "ram",
        *,
        tiles: bool,
    ) -> None:
        """ple_io: where the n-gram tables lie; unless in `ram`, `tables` are what reads them.

        tiles: int8 weights are packed for a tile unit.
        """
        self._checkpoint = checkpoint
        self._spec = spec
        self._keeper = keeper
        self._ple_io = ple_io
        self._tiles = tiles
        self.tables: list[HashedRows] = []

    # Values

    def _stored(self, parts: Sequence[names.Part]) -> tuple[Tensor, Tensor | None]:
        """Parts one after the other on the first axis, in the precision of `_kind`, with int8's row scales."""
        kind = self._kind(parts)
        found = [self._one(name, shape) for name, shape in parts]
        if kind == abi.KIND_I8:
            scales = [scale for _, scale in found if scale is not None]
            return torch.cat([values for values, _ in found]), torch.cat(scales)
        values = [v if s is None else v.to(torch.float32) * s.unsqueeze(-1) for v, s in found]
        if kind == abi.KIND_F32:
            values = [v.to(torch.float32) for v in values]
        return torch.cat(values), None

    def _kind(self, parts: Sequence[names.Part]) -> int:
        """int8 or bf16 if all parts are, else fp32."""
        dtypes = {self._checkpoint.dtype(name) for name, _ in parts}
        return KINDS.get(dtypes.pop(), abi.KIND_F32) if len(dtypes) == 1 else abi.KIND_F32

    def _one(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        codes = self._checkpoint.take_codes(name, shape)
        if codes is not None:
            return codes.codes, codes.scales.to(torch.float32)
        return self._checkpoint.take(name, shape), None

    def _floats(self, name: str, shape: tuple[int, ...], part: str, change: Change = _same) -> int:
        """Address of a tensor in fp32, changed."""
        values = self._checkpoint.take(name, shape).to(torch.float32)
        return self._keeper.pointer(change(values), part)

    def _norm(self, name: str, width: int, part: str) -> int:
        """A zero-centred norm's factor, 1 + w."""
        return self._floats(name, (width,), part, lambda w: w + 1.0)

    def _ids(self, values: Sequence[int], part: str) -> int:
        return self._keeper.pointer(torch.tensor(values, dtype=torch.int64), part)

    # Weights

    def _matrix(self, parts: Sequence[names.Part], part: str) -> abi.Matrix:
        return self._matrices(parts, 1, part)[0]

    def _matrices(self, parts: Sequence[names.Part], count: int, part: str) -> list[abi.Matrix]:
        """Joined parts [count, n, k] -> as many weights, packed as `pack` does."""
        values, scale = self._stored(parts)
        values = values.view(count, -1, values.shape[-1])
        kind = self._packed_kind(KINDS[values.dtype], values.shape[2])
        packed = pack(values, kind)
        missing = -values.shape[1] % abi.PANEL
        data = self._keeper.pointer(packed, part)
        scales = None
        if scale is not None:
            by_row = torch.nn.functional.pad(scale.view(count, -1), (0, missing))
            scales = self._keeper.pointer(by_row, part)
        stride_bytes = packed.numel() * packed.element_size() // count
        return _addressed(values, kind, data, stride_bytes, scales)

    def _packed_kind(self, kind: int, k: int) -> int:
        """How a weight that is stored as `kind` is packed."""
        tiles = self._tiles and kind == abi.KIND_I8 and k <= abi.MAX_TILE_K
        return abi.KIND_TILES if tiles else kind

    def _rows(self, parts: Sequence[names.Part], part: str) -> tuple[int | None, int | None, int]:
        """A table that is gathered, as stored: data, scale, kind."""
        values, scale = self._stored(parts)
        data = self._keeper.pointer(values, part)
        return (
            data,
            None if scale is None else self._keeper.pointer(scale, part),
            KINDS[values.dtype],
        )

    def _finish(self, ignore: tuple[str, ...]) -> None:
        self._checkpoint.finish(ignore=ignore)

    # Parts of the model

    def load(
        self, numbers: abi.Geometry, rotary: RotaryTable | None, *, with_draft: bool
    ) -> abi.Model:
        """Read every tensor the model has; the rotary tables may be set later.

        Raises WeightMismatch for a missing, misshapen or left-over tensor.
        """
        spec, prefix, keep = self._spec, self._checkpoint.trunk, self._keeper
        vocab = (spec.vocab_size, spec.hidden)
        embedding, scale, kind = self._rows([(f"{prefix}embed_tokens.weight", vocab)], "embedding")
        layers = [self._layer(i) for i in range(spec.num_layers)]
        model = abi.Model(
            geometry=numbers,
            embedding=embedding,
            embedding_scale=scale,
            embedding_kind=kind,
            layers=keep.array(abi.Layer, layers),
            final=self._residual(f"{prefix}hyper_connection_mixer.", "residual", inject=False),
            head=self._matrix([("lm_head.weight", vocab)], "head"),
        )
        if rotary is not None:
            model.cos = keep.pointer(rotary.cos, "rotary tables")
            model.sin = keep.pointer(rotary.sin, "rotary tables")
        if with_draft:
            model.draft = keep.structure(self._draft())
        self._finish(() if with_draft else (names.DRAFT_PREFIX,))
        return model

    def _layer(self, index: int) -> abi.Layer:
        spec, keep = self._spec, self._keeper
        prefix = f"{self._checkpoint.trunk}layers.{index}."
        layer = abi.Layer(
            moe=keep.structure(self._moe(f"{prefix}mlp.", "moe")),
            mixer_residual=self._residual(f"{prefix}attn_hyper_connection.", "residual"),
            moe_residual=self._residual(f"{prefix}mlp_hyper_connection.", "residual"),
        )
        if spec.ple and index in spec.ple.layer_ids:
            layer.ple = keep.structure(self._ple(f"{prefix}ple.", spec.ple.layer_ids.index(index)))
        if spec.is_qsa(index):
            qsa = self._qsa(f"{prefix}self_attn.", spec.qsa_layers.index(index), "qsa")
            layer.qsa = keep.structure(qsa)
        else:
            layer.gdn = keep.structure(self._gdn(f"{prefix}linear_attn."))
            layer.gdn_index = spec.gdn_layers.index(index)
        return layer

    def _residual(self, prefix: str, part: str, *, inject: bool = True) -> abi.Residual:
        spec = self._spec
        width = spec.stream_width
        down = (f"{prefix}input_mix_weight_down.weight", (spec.mix_rank, width))
        up = (f"{prefix}input_mix_weight_up.weight", (width, spec.mix_rank))
        residual = abi.Residual(
            norm=self._norm(f"{prefix}hc_norm.weight", width, part),
            down=self._matrix([down], part),
            up=self._matrix([up], part),
        )
        if inject:
            name = f"{prefix}block_inject_weight.weight"
            residual.inject = self._matrix([(name, (spec.num_streams, width))], part)
        return residual

    def _gdn(self, prefix: str) -> abi.Gdn:
        spec, gdn = self._spec, self._spec.gdn
        heads, channels = gdn.num_value_heads, gdn.conv_channels
        parts = names.gdn_in(prefix, spec)
        return abi.Gdn(
            in_proj=self._matrix(parts[:2], "gdn"),
            gates=self._matrix(parts[2:], "gdn"),
            out_proj=self._matrix(
                [(f"{prefix}out_proj.weight", (spec.hidden, gdn.value_channels))], "gdn"
            ),
            conv=self._floats(
                f"{prefix}conv1d.weight", (channels, 1, gdn.conv_width), "gdn", _by_tap
            ),
            decay=self._floats(f"{prefix}A_log", (heads,), "gdn", lambda a_log: -a_log.exp()),
            dt_bias=self._floats(f"{prefix}dt_bias", (heads,), "gdn"),
            norm=self._floats(f"{prefix}norm.weight", (gdn.value_dim,), "gdn"),
        )

    def _qsa(self, prefix: str, index: int, part: str) -> abi.Qsa:
        spec, qsa = self._spec, self._spec.qsa
        queries = qsa.num_heads * qsa.head_dim
        indexer = f"{prefix}indexer."
        return abi.Qsa(
            in_proj=self._matrix(names.qsa_in(prefix, spec), part),
            out_proj=self._matrix([(f"{prefix}o_proj.weight", (spec.hidden, queries))], part),
            q_norm=self._norm(f"{prefix}q_norm.weight", qsa.head_dim, part),
            k_norm=self._norm(f"{prefix}k_norm.weight", qsa.head_dim, part),
            index_q_norm=self._norm(f"{indexer}q_layernorm.weight", qsa.index_dim, part),
            index_k_norm=self._norm(f"{indexer}k_layernorm.weight", qsa.index_dim, part),
            index=index,
        )

    def _moe(self, prefix: str, part: str) -> abi.Moe:
        spec, moe, keep = self._spec, self._spec.moe, self._keeper
        shared = f"{prefix}shared_expert."
        head, num_experts = names.moe_head(prefix, spec), moe.num_experts
        gate_up, down = names.fused_experts(f"{prefix}experts.", spec)
        gate_ups, downs = [gate_up], [down]
        if not self._checkpoint.has(gate_up[0]):
            gate_ups, downs = names.expert_parts(f"{prefix}experts.", spec)
        return abi.Moe(
            # What routes is often kept in more bits than what it routes to: two products.
            router=self._matrix(head[:2], part),
            shared_in=self._matrix(head[2:], part),
            shared_down=self._matrix(
                [(f"{shared}down_proj.weight", (spec.hidden, moe.shared_dim))], part
            ),
            gate_up=keep.array(abi.Matrix, self._matrices(gate_ups, num_experts, part)),
            down=keep.array(abi.Matrix, self._matrices(downs, num_experts, part)),
        )

    def _ple(self, prefix: str, index: int) -> abi.Ple:
        spec, ple = self._spec, self._spec.ple
        assert ple is not None
        width = spec.stream_width
        self._check_hash(prefix, index)
        table, scale, kind = self._table(
            names.ple_table(self._checkpoint, prefix, ple, index), index
        )
        return abi.Ple(
            key_value=self._matrix(names.ple_key_value(prefix, spec, ple), "ple"),
            table=table,
            table_scale=scale,
            table_kind=kind,
            norm_key=self._norm(f"{prefix}norm_key.weight", width, "ple"),
            norm_query=self._norm(f"{prefix}norm_query.weight", width, "ple"),
            norm_conv=self._norm(f"{prefix}norm_conv.weight", width, "ple"),
            conv=self._floats(f"{prefix}conv1d.weight", (width, 1, ple.conv_width), "ple", _by_tap),
            multipliers=self._ids(ple.multipliers(index), "ple"),
            sizes=self._ids(ple.head_vocab_sizes(index), "ple"),
            offsets=self._ids(ple.head_offsets(index), "ple"),
            eos_id=ple.eos_id,
            heads_per_ngram=ple.heads_per_ngram,
            head_dim=ple.head_dim,
            ngram_size=ple.ngram_size,
            conv_width=ple.conv_width,
            index=index,
        )

    def _table(self, parts: Sequence[names.Part], index: int) -> tuple[int | None, int | None, int]:
        """As `_rows`; nothing of a table that stays on the disk."""
        if self._ple_io == "ram":
            return self._rows(parts, "ple table")
        self._leave(parts, index)
        return None, None, abi.KIND_F32

    def _leave(self, parts: Sequence[names.Part], index: int) -> None:
        assert self._spec.ple is not None
        table = stored_table(self._checkpoint, parts, self._ple_io, torch.float32)
        self.tables.append(HashedRows(self._spec.ple, index, table))

    def _check_hash(self, prefix: str, index: int) -> None:
        assert self._spec.ple is not None
        names.check_hash(self._checkpoint, prefix, self._spec.ple, index)

    def _draft(self) -> abi.Draft:
        spec, keep = self._spec, self._keeper
        mtp, part, square = names.DRAFT_PREFIX, "draft layer", (spec.hidden, spec.hidden)
        layer = f"{mtp}layers.0."
        qsa = self._qsa(f"{layer}self_attn.", len(spec.qsa_layers), part)
        return abi.Draft(
            fc_embedding=self._matrix([(f"{mtp}fc_embedding.weight", square)], part),
            fc_hidden=self._matrix([(f"{mtp}fc_hidden.weight", square)], part),
            norm_embedding=self._norm(f"{mtp}pre_fc_norm_embedding.weight", spec.hidden, part),
            norm_hidden=self._norm(f"{mtp}pre_fc_norm_hidden.weight", spec.stream_width, part),
            mixer_residual=self._residual(f"{layer}attn_hyper_connection.", part),
            moe_residual=self._residual(f"{layer}mlp_hyper_connection.", part),
            final=self._residual(f"{mtp}hyper_connection_mixer.", part, inject=False),
            qsa=keep.structure(qsa),
            moe=keep.structure(self._moe(f"{layer}mlp.", part)),
        )


class NativePlanner(NativeLoader):
    """Goes the loader's way over names, shapes and dtypes alone: counts in its keeper, reads and keeps no values."""

    def _floats(self, name: str, shape: tuple[int, ...], part: str, change: Change = _same) -> int:
        del name, change
        return self._keeper.count(part, 4 * math.prod(shape))

    def _ids(self, values: Sequence[int], part: str) -> int:
        return self._keeper.count(part, 8 * len(values))

    def _matrices(self, parts: Sequence[names.Part], count: int, part: str) -> list[abi.Matrix]:
        stored, shapes = self._kind(parts), [shape for _, shape in parts]
        k = shapes[0][-1]
        kind = self._packed_kind(stored, k)
        n = sum(math.prod(shape) for shape in shapes) // (k * count)
        padded = count * (n + -n % abi.PANEL)
        padded_k = k + (-k % abi.TILE_QUAD if kind == abi.KIND_TILES else 0)
        self._keeper.count(part, padded * padded_k * _VALUE_BYTES[kind])
        if stored == abi.KIND_I8:
            self._keeper.count(part, padded * 4)
        return [abi.Matrix(kind=kind, n=n, k=k)] * count

    def _rows(self, parts: Sequence[names.Part], part: str) -> tuple[int | None, int | None, int]:
        kind, shapes = self._kind(parts), [shape for _, shape in parts]
        self._keeper.count(part, sum(map(math.prod, shapes)) * _VALUE_BYTES[kind])
        if kind == abi.KIND_I8:
            self._keeper.count(part, sum(math.prod(shape[:-1]) for shape in shapes) * 4)
        return None, None, kind

    def _leave(self, parts: Sequence[names.Part], index: int) -> None:
        del parts, index

    def _check_hash(self, prefix: str, index: int) -> None:
        del prefix, index

    def _finish(self, ignore: tuple[str, ...]) -> None:
        del ignore


def pack(values: Tensor, kind: int) -> Tensor:
    """[count, n, k] -> [count, panels, k, PANEL], for KIND_TILES [count, panels, k / 4, PANEL, 4]; zero padded."""
    quad = abi.TILE_QUAD if kind == abi.KIND_TILES else 1
    missing = (0, -values.shape[2] % quad, 0, -values.shape[1] % abi.PANEL)
    padded = torch.nn.functional.pad(values, missing)
    return padded.unflatten(2, (-1, quad)).unflatten(1, (-1, abi.PANEL)).transpose(2, 3)


def _addressed(
    values: Tensor, kind: int, data: int, stride_bytes: int, scales: int | None
) -> list[abi.Matrix]:
    """Weights [E, n, k] that lie packed behind one another."""
    count, n, k = values.shape
    padded_bytes = 4 * (n + -n % abi.PANEL)
    return [
        abi.Matrix(
            data=data + i * stride_bytes,
            scale=None if scales is None else scales + i * padded_bytes,
            kind=kind,
            n=n,
            k=k,
        )
        for i in range(count)
    ]


def geometry(
    spec: ModelSpec, *, num_slots: int, capacity: int, tiles: bool, wide: bool = True
) -> abi.Geometry:
    """The numbers that the compiled step needs; capacity: K/V cells of a slot; tiles: see NativeLoader.

    wide: vectors may be as wide as the processor has them.
    """
    gdn, qsa, moe = spec.gdn, spec.qsa, spec.moe
    return abi.Geometry(
        hidden=spec.hidden,
        num_streams=spec.num_streams,
        rank=spec.mix_rank,
        vocab_size=spec.vocab_size,
        num_layers=spec.num_layers,
        norm_eps=spec.norm_eps,
        key_heads=gdn.num_key_heads,
        value_heads=gdn.num_value_heads,
        key_dim=gdn.key_dim,
        value_dim=gdn.value_dim,
        conv_width=gdn.conv_width,
        gate_is_silu=int(gdn.gate == "silu"),
        heads=qsa.num_heads,
        kv_heads=qsa.num_kv_heads,
        head_dim=qsa.head_dim,
        rotary_dim=qsa.rotary_dim,
        index_heads=qsa.num_index_heads,
        index_dim=qsa.index_dim,
        budget_blocks=qsa.budget_blocks,
        block_tokens=qsa.block_tokens,
        num_experts=moe.num_experts,
        num_active=moe.num_active,
        expert_dim=moe.expert_dim,
        shared_dim=moe.shared_dim,
        normalize=int(moe.normalize),
        num_slots=num_slots,
        capacity=capacity,
        ring_rows=RING_ROWS,
        window_rows=WINDOW_ROWS,
        tiles=int(tiles),
        wide=int(wide),
    )
