"""The structures and calls of the compiled step, as src/model.h and src/step.c declare them."""

from __future__ import annotations

import ctypes
import platform
import sys
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from engine.native.build import LIBRARY, sources_hash

PANEL = 16
"""Rows of a weight that lie side by side."""
KIND_F32, KIND_BF16, KIND_I8, KIND_TILES = 0, 1, 2, 3
TILE_QUAD = 4
"""Values of k that lie side by side in a weight of KIND_TILES."""
MAX_TILE_K = 131_071
"""Of a weight of KIND_TILES: longer sums might not fit 32 bits."""
_ADVICE = f"run `{sys.executable} -m engine.native.build`, which needs a C compiler or the package ziglang"
_NEEDED_FLAGS = ("avx2", "fma")
"""What the library is compiled for on x86-64, beside what every such processor has."""


class Matrix(Structure):
    """A packed weight [n, k]."""

    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
    )


def _ints(names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, c_int32) for name in names.split())


def _pointers(names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, c_void_p) for name in names.split())


class Geometry(Structure):
    """Numbers of the model and of its state."""

    _fields_ = (
        *_ints("hidden num_streams rank vocab_size num_layers"),
        ("norm_eps", c_float),
        *_ints("key_heads value_heads key_dim value_dim conv_width gate_is_silu"),
        *_ints(
            "heads kv_heads head_dim rotary_dim index_heads index_dim budget_blocks block_tokens"
        ),
        *_ints("num_experts num_active expert_dim shared_dim normalize"),
        *_ints("num_slots capacity ring_rows window_rows"),
        *_ints("tiles wide"),
    )


class Residual(Structure):
    """A gated residual."""

    _fields_ = (("norm", c_void_p), ("down", Matrix), ("up", Matrix), ("inject", Matrix))


class Gdn(Structure):
    """A GDN layer."""

    _fields_ = (
        ("in_proj", Matrix),
        ("gates", Matrix),
        ("out_proj", Matrix),
        *_pointers("conv decay dt_bias norm"),
    )


class Qsa(Structure):
    """An attention layer."""

    _fields_ = (
        ("in_proj", Matrix),
        ("out_proj", Matrix),
        *_pointers("q_norm k_norm index_q_norm index_k_norm"),
        ("index", c_int32),
    )


class Moe(Structure):
    """A mixture of experts; gate_up and down point to one Matrix an expert."""

    _fields_ = (
        ("router", Matrix),
        ("shared_in", Matrix),
        ("shared_down", Matrix),
        ("gate_up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
    )


class Ple(Structure):
    """A hashed n-gram embedding."""

    _fields_ = (
        ("key_value", Matrix),
        *_pointers(
            "table table_scale norm_key norm_query norm_conv conv multipliers sizes offsets"
        ),
        ("eos_id", c_int64),
        *_ints("table_kind heads_per_ngram head_dim ngram_size conv_width index"),
    )


class Layer(Structure):
    """A trunk layer."""

    _fields_ = (
        ("ple", POINTER(Ple)),
        ("gdn", POINTER(Gdn)),
        ("qsa", POINTER(Qsa)),
        ("moe", POINTER(Moe)),
        ("mixer_residual", Residual),
        ("moe_residual", Residual),
        ("gdn_index", c_int32),
    )


class Draft(Structure):
    """The draft layer."""

    _fields_ = (
        ("fc_embedding", Matrix),
        ("fc_hidden", Matrix),
        *_pointers("norm_embedding norm_hidden"),
        ("mixer_residual", Residual),
        ("moe_residual", Residual),
        ("final", Residual),
        ("qsa", POINTER(Qsa)),
        ("moe", POINTER(Moe)),
    )


class Model(Structure):
    """A whole model."""

    _fields_ = (
        ("geometry", Geometry),
        ("embedding", c_void_p),
        ("embedding_scale", c_void_p),
        ("embedding_kind", c_int32),
        ("layers", POINTER(Layer)),
        ("final", Residual),
        ("head", Matrix),
        ("draft", POINTER(Draft)),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


STATE_TENSORS = (
    *("s", "replay_k", "replay_delta", "replay_factor", "conv", "ple"),
    *("k", "v", "k_scale", "v_scale", "index_ring", "index_blocks", "pending"),
)
"""Attributes of engine.state.SlotState that the step reads and writes."""


class State(Structure):
    """The tensors of engine.state.SlotState."""

    _fields_ = (
        *_pointers(" ".join(STATE_TENSORS)),
        ("ple_rows", c_int32),
        ("kv_kind", c_int32),
    )


class Piece(Structure):
    """Rows [first, first + count) of a call: positions [start, start + count) of a slot."""

    _fields_ = _ints("slot first count start")


class Kept(Structure):
    """The first rows of a slot's window that are kept: flat rows [first, first + count)."""

    _fields_ = _ints("slot first count")


class PickRow(Structure):
    """What one row's pick depends on beside its logits."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("seed", c_uint64),
        ("position", c_int64),
        *_pointers("seen counts allowed bias_ids banned drafts biases"),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
        *_ints("top_k num_biases num_banned num_drafts"),
    )


class Gate(Structure):
    """Where a chain of drafts ends."""

    _fields_ = (("min_p", c_double), ("stops", c_void_p), *_ints("num_stops max_drafts"))


RECENT_IDS, MOST_ROWS, MOST_SLOTS = 16, 8, 8
"""Of a seat: ids before a window, rows; seats of a call."""


class Asked(Structure):
    """What a slot's window begins with."""

    _fields_ = (
        *((name, c_int64) for name in ("num_computed", "num_pending", "max_drafts", "is_drafted")),
        ("ids", c_int64 * RECENT_IDS),
    )


class Found(Structure):
    """What came of it."""

    _fields_ = (
        *_ints("num_drafted num_accepted is_finite num_tokens"),
        ("tokens", c_int32 * MOST_ROWS),
    )


class Seat(Structure):
    """A slot as a window in one call sees it."""

    _fields_ = (
        *(("row", PickRow), ("gate", Gate), ("asked", Asked), ("found", Found)),
        ("drafts", c_int32 * MOST_ROWS),
    )


class PackedExperts(Structure):
    """4-bit matrices, one behind another, as engine.cuda.quant packs them."""

    _fields_ = (*_pointers("words scales"), *_ints("groups tiles"))


class FarBuffers(Structure):
    """What the threads of src/far_pool.c write while they compute, and the sizes of the largest window."""

    _fields_ = (
        *_ints("max_rows top num_experts hidden width wide"),
        *_pointers("x_digits hidden_digits x_units hidden_units middle x_excess hidden_excess"),
    )


class FarWork(Structure):
    """One layer of a window, for src/far_pool.c."""

    _fields_ = (
        ("pool", c_void_p),
        ("gate_up", PackedExperts),
        ("down", PackedExperts),
        *_pointers("order ids x parts"),
        *_ints("num_rows rests"),
    )


STAGES = ("start", "PLE", "GDN", "QSA", "MoE", "head")
"""What a probe tells apart: of a layer its n-gram embedding, its mixer and its experts, each with its residual."""


RowsOf = ctypes.CFUNCTYPE(c_void_p, c_int)
"""Rows of the index-th n-gram table for a call's ids, waited for where they are used; NULL when they failed."""

_CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sources": (c_char_p, ()),
    "tiles": (c_int, ()),
    "product": (None, (POINTER(Matrix), c_void_p, c_int, c_int, c_void_p, c_void_p)),
    "product_floats": (c_int64, (POINTER(Matrix), c_int)),
    "far_open": (c_void_p, (POINTER(FarBuffers), c_int)),
    "far_close": (None, (c_void_p,)),
    "far_threads": (c_int, (c_void_p,)),
    "far_parts": (None, (c_void_p,)),
    "scratch_floats": (c_int64, (POINTER(Model), c_int, c_int)),
    "open": (c_void_p, (POINTER(Model), POINTER(State), c_int, c_int, c_void_p)),
    "close": (None, (c_void_p,)),
    "probe": (None, (c_void_p, c_void_p, c_void_p)),
    "trunk": (None, (c_void_p, POINTER(Piece), c_int, c_int, c_void_p, c_int, RowsOf, c_void_p)),
    "logits": (None, (c_void_p, c_void_p, c_int, c_void_p)),
    "commit": (None, (c_void_p, POINTER(Kept), c_int, c_void_p)),
    "draft_cells": (None, (c_void_p, POINTER(Piece), c_int, c_void_p, c_void_p)),
    "pick": (
        None,
        (c_void_p, c_int, c_int, POINTER(PickRow), c_int, *[c_void_p] * 4),
    ),
    "draft": (None, (c_void_p, POINTER(Piece), c_int, *[c_void_p] * 4)),
    "chain": (
        None,
        (
            *(c_void_p, POINTER(Piece), c_int, c_void_p, c_void_p),
            *(POINTER(PickRow), POINTER(Gate), c_int, c_void_p, c_void_p),
        ),
    ),
    "ahead": (c_double, (c_void_p, POINTER(Seat), c_void_p, c_int, c_int, c_void_p)),
    "window": (
        None,
        (c_void_p, POINTER(Seat), c_void_p, c_int, c_int, c_int, *[c_void_p] * 3),
    ),
}


class Library:
    """The loaded library; one attribute a call."""

    sources: Any
    tiles: Any
    product: Any
    product_floats: Any
    far_open: Any
    far_close: Any
    far_threads: Any
    far_parts: Any
    scratch_floats: Any
    open: Any
    close: Any
    probe: Any
    trunk: Any
    logits: Any
    commit: Any
    draft_cells: Any
    pick: Any
    draft: Any
    chain: Any
    ahead: Any
    window: Any

    def __init__(self, file: Path) -> None:
        """Raises OSError for a file that the loader cannot load."""
        library = ctypes.CDLL(str(file))
        for name, (result, arguments) in _CALLS.items():
            call = getattr(library, f"stratagate_{name}")
            call.restype, call.argtypes = result, arguments
            setattr(self, name, call)


def why_unavailable() -> str | None:
    """Why the compiled step cannot run on this machine; None when it can."""
    if not LIBRARY.is_file():
        return f"it was not compiled: {_ADVICE}"
    missing = [flag for flag in _NEEDED_FLAGS if flag not in processor_flags()]
    if platform.machine() in ("x86_64", "AMD64") and missing:
        return f"this processor has no {', '.join(missing)}"
    try:
        found = Library(LIBRARY).sources().decode()
    except (OSError, AttributeError) as error:
        return f"{LIBRARY.name} cannot be loaded ({error}): {_ADVICE}"
    # Another layout of the structures would read and write wrong memory.
    if found != sources_hash():
        return f"{LIBRARY.name} was compiled from other sources: {_ADVICE}"
    return None


def has_tiles() -> bool:
    """Whether this processor multiplies int8 weights in tiles (AMX) and the system lets this process do so."""
    return bool(Library(LIBRARY).tiles())


def processor_flags() -> frozenset[str]:
    """What /proc/cpuinfo lists; without that file everything needed is taken to be there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset(_NEEDED_FLAGS)
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
