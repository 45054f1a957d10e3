"""The CUDA decode step against the plain fp32 reference: prompts, windows of several slots, roll-back, drafts, picks.

Every shape of the grid differs from the others where a kernel could be wrong: tails that no tile divides, few and many
heads, blocks of other sizes, no n-gram embedding.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from engine.cuda.quant import GROUP, pack4, unpack4
from engine.grammar import RowLimit
from engine.interface import SamplingParams
from engine.kv_cells import quantize
from engine.reference.model import ReferenceModel
from engine.reference.mtp import draft_chain, greedy_pick
from engine.sampling import Picker, PickRow, TokenHistory
from engine.state import KeptRows
from tests.digits import split_rows

if TYPE_CHECKING:
    from collections.abc import Callable

gpu = pytest.mark.gpu
DEVICE = "cuda"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "indexer_n_heads": 4,
    "indexer_head_dim": 20,
    "indexer_budget": 32,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "hc_lowrank": 24,
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 101,
    "make_ngram_vocab_size_divisible_by": 16,
    "eos_token_id": 3,
}
GRID: dict[str, dict[str, Any]] = {
    "small": {},
    "odd": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 40,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "hc_lowrank": 12,
        "hc_count": 2,
        "indexer_compress_ratio": 2,
    },
    "no_ple": {"ple_layer_ids": None, "linear_conv_kernel_dim": 3, "output_gate_type": "silu"},
}
KV = {"bf16": torch.bfloat16, "int8": torch.int8}
MEDIAN_ERROR, WORST_ERROR = 0.03, 0.35
"""Of a row's logits, relative to their norm. The worst row may have chosen another expert at a near-tie."""


def test_four_bits_keep_what_they_can_hold() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(3, 70, 2 * GROUP + 9, generator=generator)
    packed = pack4(weight)
    back = unpack4(packed, 70, 2 * GROUP + 9)
    step = packed.scales.to(torch.float32).max()
    assert float((back - weight).abs().max()) <= 0.51 * float(step)
    assert torch.equal(unpack4(pack4(back), 70, 2 * GROUP + 9), back)


class Recorded:
    """Tensors of a random model, and all that were taken, as a reference reads them."""

    def __init__(self, spec: Any, device: str) -> None:
        from engine.cuda.random_model import RandomTensors

        self._source = RandomTensors(torch.device(device))
        self.trunk = self._source.trunk
        self.taken: dict[str, Tensor] = {}
        ple = spec.ple
        for index, layer in enumerate(ple.layer_ids if ple else ()):
            prefix = f"model.layers.{layer}.ple.ple_embedding."
            self.taken[f"{prefix}layer_multipliers"] = torch.tensor(ple.multipliers(index))
            self.taken[f"{prefix}ngram_heads_vocab_sizes"] = torch.tensor(
                ple.head_vocab_sizes(index)
            )
            self.taken[f"{prefix}ngram_heads_offsets"] = torch.tensor(ple.head_offsets(index))

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def finish(self, *, ignore: tuple[str, ...] = ()) -> None:
        self._source.finish(ignore=ignore)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._source.take(name, shape)
        self.taken[name] = tensor.cpu()
        return tensor

    def take_into(self, name: str, target: Tensor) -> None:
        target.copy_(self.take(name, tuple(target.shape)))

    def take_each(self, name: str, shape: tuple[int, ...]) -> Callable[[int], Tensor]:
        whole = self.take(name, shape)
        return lambda index: whole[index]


class Case:
    """One model of the grid on the GPU and as a reference, with three prompts read by both."""

    def __init__(self, name: str, kv: str = "bf16") -> None:
        from engine.cuda.backend import build_cuda_step
        from engine.cuda.random_model import REAL_CONFIG, real_spec
        from engine.cuda.weights import CudaLoader
        from engine.state import SlotState

        config = {**REAL_CONFIG, **SMALL, **GRID[name]}
        self.spec = real_spec(**{**SMALL, **GRID[name]})
        source = Recorded(self.spec, DEVICE)
        device = torch.device(DEVICE)
        loader = CudaLoader(source, self.spec, device=device, max_context=200)
        model = loader.load(with_draft=True)
        loader.open_experts()
        model = loader.load_experts(model)
        self.firsts: dict[int, int] = {}
        self.reference = ReferenceModel(config, source.taken)
        self.state = SlotState(
            self.spec,
            num_slots=4,
            max_context=200,
            dtype=torch.bfloat16,
            kv_dtype=KV[kv],
            device=device,
        )
        self.backend = build_cuda_step(model, self.state, num_token_ids=self.spec.vocab_size)
        poison(self.backend.step.buffers)
        generator = torch.Generator().manual_seed(7)
        self.text = {
            slot: torch.randint(4, self.spec.vocab_size, (n + 20,), generator=generator).tolist()
            for slot, n in self.lengths.items()
        }
        self.text[1][10] = 3

    lengths = {0: 130, 1: 37, 2: 0, 3: 64}
    """Slot 2 is empty: what it holds is nobody's text."""

    def saved(self, slot: int | None = None) -> dict[str, Tensor]:
        """What windows advance, of one slot or all."""
        names = ("s", "conv", "ple", "k", "v", "index_ring", "index_blocks", "pending")
        scales = () if self.state.k_scale is None else ("k_scale", "v_scale")
        whole = {name: getattr(self.state, name) for name in (*names, *scales)}
        if slot is None:
            return {name: tensor.clone() for name, tensor in whole.items()}
        histories = {"conv": self.state.conv_history, "ple": self.state.ple_history}
        parts: dict[str, Tensor] = {}
        for name in ("s", "conv", "ple", "k", "v", "index_ring", *scales):
            part = whole[name][:, slot]
            parts[name] = part[:, : histories[name]].clone() if name in histories else part.clone()
        return parts

    def restore(self, saved: dict[str, Tensor]) -> None:
        for name, value in saved.items():
            getattr(self.state, name).copy_(value)

    def ids(self, slot: int, start: int, count: int) -> Tensor:
        context = self.backend.trunk.ngram_context
        padded = [3] * context + self.text[slot]
        rows = [padded[i : i + context + 1] for i in range(start, start + count)]
        return torch.tensor(rows, device=DEVICE)

    def read(self, slot: int, pieces: tuple[int, ...]) -> Tensor:
        start, logits = 0, []
        for piece in pieces:
            ids = self.ids(slot, start, piece)
            streams = self.backend.trunk.chunk(ids, slot, start, self.state)
            logits.append(self.backend.trunk.logits(streams))
            if self.backend.draft is not None:
                following = self.text[slot][start + 1 : start + piece + 1]
                self.backend.draft.read_chunk(
                    torch.tensor(following, device=DEVICE), streams, slot, start, self.state
                )
            start += piece
        return torch.cat(logits)

    def read_all(self) -> dict[int, Tensor]:
        return {
            0: self.read(0, (1, 2, 64, 63)),
            1: self.read(1, (37,)),
            3: self.read(3, (40, 24)),
        }

    def window(self, counts: dict[int, int], starts: dict[int, int]) -> dict[int, Tensor]:
        slots = sorted(counts, key=lambda slot: -counts[slot])
        ids = torch.cat([self.ids(slot, starts[slot], counts[slot]) for slot in slots])
        self.backend.step.window(ids, slots, [counts[s] for s in slots], [starts[s] for s in slots])
        self.firsts = {s: sum(counts[t] for t in slots[:b]) for b, s in enumerate(slots)}
        logits = self.backend.step.logits(len(ids)).clone()
        return dict(zip(slots, logits.split([counts[s] for s in slots]), strict=True))

    def commit(self, kept: dict[int, int]) -> None:
        """Keep the first rows of the last window."""
        rows = {slot: KeptRows(self.firsts[slot], count) for slot, count in kept.items()}
        self.backend.step.commit(rows)

    def wanted(self, slot: int, start: int, count: int) -> Tensor:
        return self.reference.forward(self.text[slot][: start + count])[0][start:]


def poison(buffers: Any) -> None:
    """NaN wherever a kernel is expected to write before anything reads."""
    for field in fields(buffers):
        value = getattr(buffers, field.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            value.fill_(float("nan"))
        elif is_dataclass(value):
            poison(value)


def errors(found: Tensor, wanted: Tensor) -> Tensor:
    difference = (found.cpu().to(torch.float32) - wanted).norm(dim=-1)
    return difference / wanted.norm(dim=-1)


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    each = torch.cat([errors(f, w) for f, w in zip(found, wanted, strict=True)])
    assert float(each.median()) < MEDIAN_ERROR
    assert float(each.max()) < WORST_ERROR


@gpu
@needs_cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", GRID)
@torch.inference_mode()
def test_prompts_windows_and_roll_back_match_the_reference(name: str, kv: str) -> None:
    case = Case(name, kv)
    read = case.read_all()
    check(list(read.values()), [case.wanted(s, 0, case.lengths[s]) for s in read])
    at = dict(case.lengths)
    for counts, kept in (
        ({0: 5, 1: 3, 3: 1}, {0: 2, 1: 3, 3: 1}),
        ({1: 4, 0: 5}, {1: 1, 0: 5}),
        ({3: 1}, {3: 1}),
        ({0: 1, 1: 5, 3: 5}, {0: 1, 1: 4}),
    ):
        found = case.window(counts, at)
        check(list(found.values()), [case.wanted(s, at[s], counts[s]) for s in found])
        case.commit(kept)
        for slot, rows in kept.items():
            at[slot] += rows


@gpu
@needs_cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", GRID)
@torch.inference_mode()
def test_rows_have_the_same_bits_in_any_company(name: str) -> None:
    """One row, one chain, and the 20 rows that fill two row tiles."""
    case = Case(name)
    case.read_all()
    saved = case.saved()
    found: list[Tensor] = []
    for counts in (
        {0: 5},
        {0: 5, 1: 5, 3: 5},
        {1: 5, 3: 5, 0: 2},
        {0: 1},
        {3: 5, 2: 5, 1: 5, 0: 5},
        {3: 5, 2: 5, 1: 5, 0: 1},
    ):
        case.restore(saved)
        found.append(case.window(counts, case.lengths)[0])
    for other in found[1:]:
        assert torch.equal(other, found[0][: len(other)])


@gpu
@needs_cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "kv"), [*((name, "bf16") for name in GRID), ("odd", "int8")])
@torch.inference_mode()
def test_bits_do_not_depend_on_how_rows_are_spread_over_windows(name: str, kv: str) -> None:
    """Five rows in one window, in five, and some of them voided first: equal logits, and equal state after them."""
    case = Case(name, kv)
    case.read_all()
    saved = case.saved()
    found: list[Tensor] = []
    states: list[dict[str, Tensor]] = []
    for kept_by_window in ((5,), (1, 1, 1, 1, 1), (2, 3), (1, 4)):
        case.restore(saved)
        at, parts = case.lengths[0], []
        for kept in kept_by_window:
            rows = case.window({0: 5, 1: 2} if kept == 2 else {0: kept}, {**case.lengths, 0: at})
            parts.append(rows[0][:kept])
            case.commit({0: kept})
            at += kept
        found.append(torch.cat(parts))
        states.append(case.saved(slot=0))
    for other, state in zip(found[1:], states[1:], strict=True):
        assert torch.equal(other, found[0])
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key


@gpu
@needs_cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", GRID)
@torch.inference_mode()
def test_int8_cells_are_what_the_torch_layers_write(name: str) -> None:
    """The first layer with K/V does not depend on how K/V is held: read in pieces and in a window."""
    held = {kv: Case(name, kv) for kv in KV}
    for case in held.values():
        case.read(0, (100,))
        case.window({0: 5}, {0: 100})
    cells = held["int8"].state
    for codes, scale, plain in (
        (cells.k, cells.k_scale, held["bf16"].state.k),
        (cells.v, cells.v_scale, held["bf16"].state.v),
    ):
        assert scale is not None
        # On the CPU: on a GPU torch divides by a number with a product.
        wanted, wanted_scale = quantize(plain[0, 0, :, :105].cpu())
        assert torch.equal(codes[0, 0, :, :105].cpu(), wanted)
        assert torch.equal(scale[0, 0, :, :105].cpu(), wanted_scale)


@gpu
@needs_cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", GRID)
@torch.inference_mode()
def test_a_greedy_chain_drafts_what_the_reference_drafts(name: str) -> None:
    case = Case(name)
    case.read_all()
    slots = (0, 1)
    ids, streams, same = [], [], 0
    for slot in slots:
        length = case.lengths[slot]
        ids.append(case.text[slot][length])
        streams.append(case.reference.forward(case.text[slot][:length])[1][-1])
    greedy = SamplingParams(temperature=0.0)
    steps = [[PickRow(params=greedy, position=0, num_output=0, history=None)] * 2] * 4
    drafted = case.backend.step.chain(
        torch.tensor(ids, device=DEVICE),
        torch.stack(streams).to(DEVICE, torch.bfloat16),
        slots,
        [1, 1],
        [case.lengths[slot] - 1 for slot in slots],
        steps,
    )
    for b, slot in enumerate(slots):
        text = case.text[slot][: case.lengths[slot] + 1]
        streams_of_text = case.reference.forward(text[:-1])[1]
        wanted = draft_chain(case.reference, text, streams_of_text, 4, greedy_pick)
        assert drafted[0].ids[b] == wanted[0].token_id
        same += sum(drafted[j].ids[b] == wanted[j].token_id for j in range(4))
    # A near-tie may turn a later pick, and every pick after it.
    assert same >= 5


def pick_row(index: int, **params: Any) -> PickRow:
    chosen = SamplingParams(seed=index, **params)
    return PickRow(params=chosen, position=index, num_output=0, history=None)


PLAIN: dict[str, Any] = {"temperature": 1.0}
NUCLEUS: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "all ids": [PLAIN],
    "some ids": [NUCLEUS],
    "few ids": [{"temperature": 1.3, "top_k": 5, "min_p": 0.1}],
    "mixed": [PLAIN, NUCLEUS, {"temperature": 0.0, "top_k": 20}],
    "what torch must pick": [
        {"temperature": 0.8, "top_p": 0.7},
        PLAIN,
        {"temperature": 1.0, "top_k": 200},
    ],
}


@gpu
@needs_cuda
@pytest.mark.timeout(300)
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_picks_are_those_of_the_sampler_whatever_the_company(kind: str) -> None:
    from engine.cuda.pick_rows import CudaPicker

    case = Case("no_ple")
    step = case.backend.step
    vocab = case.spec.vocab_size
    step.num_token_ids = vocab - 7
    case.window({0: 5, 1: 5, 2: 5, 3: 5}, dict.fromkeys(range(4), 0))
    generator = torch.Generator(DEVICE).manual_seed(9)
    step.logits(20).copy_(4 * torch.randn(20, vocab, device=DEVICE, generator=generator))
    step.logits(20)[3, 17] = float("inf")
    rows = [pick_row(i, **KINDS[kind][i % len(KINDS[kind])]) for i in range(20)]
    picker = CudaPicker(step)
    found = picker.pick(step.logits(20), rows, check=True)
    assert found.finite == [i != 3 for i in range(20)]
    wanted = Picker(vocab - 7).pick(step.logits(20), rows)
    good = [i for i in range(20) if i != 3]
    assert [found.ids[i] for i in good] == [wanted.ids[i] for i in good]
    shares = torch.tensor([[found.probabilities[i], wanted.probabilities[i]] for i in good])
    assert torch.allclose(shares[:, 0], shares[:, 1], rtol=1e-4)
    for i in good:
        alone = picker.pick(step.logits(20)[i : i + 1].clone(), [rows[i]])
        assert alone.ids == [found.ids[i]]


@gpu
@needs_cuda
@torch.inference_mode()
def test_rows_that_need_history_or_limits_are_left_to_torch() -> None:
    from engine.cuda.pick_rows import can_pick

    def row(num_output: int = 0, **params: Any) -> PickRow:
        chosen = SamplingParams(**params)
        return PickRow(params=chosen, position=1, num_output=num_output, history=None)

    must_go_on: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (2,)}
    assert can_pick(row(temperature=0.0, top_p=0.5))
    assert can_pick(row(3, **must_go_on))
    assert not can_pick(row(2, **must_go_on))
    assert not can_pick(row(logit_bias=((4, 1.0),)))
    history = TokenHistory.empty(8, torch.device("cpu"))
    assert not can_pick(replace(row(), history=history))
    assert not can_pick(replace(row(), limit=RowLimit()))


class Experts:
    """Twenty rows and experts whose width and columns no tile divides."""

    hidden, rows = 300, 20

    def __init__(self, *, num_active: int = 3) -> None:
        from engine.cuda.moe import MoeScratch, MoeWeights
        from engine.cuda.random_model import real_spec

        changes = {"num_experts_per_tok": num_active, "moe_intermediate_size": 200}
        self.spec = real_spec(**{**SMALL, **changes}).moe
        count, width = self.spec.num_experts, self.spec.expert_dim
        generator = torch.Generator(DEVICE).manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=generator)

        gate_up = pack4(normal(count, 2 * width, self.hidden) / 10)
        down = pack4(normal(count, self.hidden, width) / 6)
        empty = torch.empty(0, device=DEVICE)
        self.weights = MoeWeights(head=empty, shared_down=empty, gate_up=gate_up, down=down)
        self.x = normal(self.rows, self.hidden).to(torch.bfloat16)
        self.ids = normal(self.rows, count).topk(num_active).indices.to(torch.int32)
        self._make = lambda rows: MoeScratch.make(self.spec, self.hidden, rows, self.x.device)

    def parts(self, of: slice, **cut: int) -> Tensor:
        """fp32 [rows, k, H] of these rows, in fresh buffers."""
        from engine.cuda.moe import ExpertTiling, multiply_split

        x, ids = self.x[of], self.ids[of]
        scratch = self._make(len(x))
        poison(scratch)
        scratch.ids.copy_(ids)
        split_rows(x, scratch.x)
        multiply_split(len(x), self.weights, scratch, self.spec, ExpertTiling(**cut))
        return scratch.parts

    def wanted(self) -> Tensor:
        """In fp32."""
        width = self.spec.expert_dim
        gate_up = unpack4(self.weights.gate_up, 2 * width, self.hidden)[self.ids.long()]
        middle = torch.einsum("rknh,rh->rkn", gate_up, self.x.to(torch.float32))
        middle = torch.nn.functional.silu(middle[..., 0::2]) * middle[..., 1::2]
        down = unpack4(self.weights.down, self.hidden, width)[self.ids.long()]
        return torch.einsum("rkhn,rkn->rkh", down, middle)


@gpu
@needs_cuda
@torch.inference_mode()
def test_experts_lose_less_than_bf16_and_depend_neither_on_company_nor_on_tiling() -> None:
    case = Experts()
    parts = case.parts(slice(None))
    assert float(errors(parts.flatten(0, 1), case.wanted().flatten(0, 1).cpu()).max()) < 5e-4
    assert torch.equal(case.parts(slice(None), rows=8, down_rows=128, down_warps=4), parts)
    for row in range(0, case.rows, 7):
        assert torch.equal(case.parts(slice(row, row + 1)), parts[row : row + 1])


@gpu
@needs_cuda
@torch.inference_mode()
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_ends_so_and_spoils_no_other(strange: float) -> None:
    case = Experts()
    good = case.parts(slice(None))
    case.x[11, 290] = strange
    parts = case.parts(slice(None))
    assert not bool(parts[11].isfinite().any())
    assert torch.equal(parts[:11], good[:11])
    assert torch.equal(parts[12:], good[12:])


@gpu
@needs_cuda
@torch.inference_mode()
def test_rows_of_any_size_are_multiplied() -> None:
    """The smallest and the largest numbers that bf16 has, and zeros."""
    case = Experts()
    case.x[0] = 0.0
    case.x[1] *= 1e-12
    case.x[2] *= 1e36
    case.x[3, :128] *= 1e-30
    parts, wanted = case.parts(slice(None)), case.wanted()
    assert bool((parts[0] == 0.0).all())
    for row in (1, 3):
        scale = float(wanted[row].abs().max())
        assert float((parts[row] - wanted[row]).abs().max()) <= 1e-3 * scale
    assert torch.equal(parts[2].isfinite(), wanted[2].isfinite())


@gpu
@needs_cuda
@torch.inference_mode()
def test_all_rows_may_choose_one_expert() -> None:
    from engine.cuda.moe import ExpertTiling, MoeScratch, MoeWeights, multiply_split
    from engine.cuda.random_model import real_spec

    spec = real_spec(**{**SMALL, "num_experts_per_tok": 1}).moe
    hidden, width = 96, spec.expert_dim
    gate_up = torch.randn(spec.num_experts, 2 * width, hidden, device=DEVICE) / 10
    down = torch.randn(spec.num_experts, hidden, width, device=DEVICE) / 6
    pairs = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    empty = torch.empty(0, device=DEVICE)
    weights = MoeWeights(head=empty, shared_down=empty, gate_up=pack4(pairs), down=pack4(down))
    scratch = MoeScratch.make(spec, hidden, 20, torch.device(DEVICE))
    poison(scratch)
    scratch.ids.fill_(5)
    x = torch.randn(20, hidden, device=DEVICE, dtype=torch.bfloat16)
    split_rows(x, scratch.x)
    multiply_split(20, weights, scratch, spec, ExpertTiling())
    middle = x.to(torch.float32) @ unpack4(weights.gate_up, 2 * width, hidden)[5].t()
    middle = torch.nn.functional.silu(middle[:, 0::2]) * middle[:, 1::2]
    wanted = middle @ unpack4(weights.down, hidden, width)[5].t()
    assert float(errors(scratch.parts[:, 0], wanted.cpu()).max()) < 0.02


@gpu
@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 5, 20])
@torch.inference_mode()
def test_routing_takes_the_largest_logits_and_of_equal_ones_the_first(num_rows: int) -> None:
    from engine.cuda.moe import MoeScratch, MoeWeights, route, route_into
    from engine.cuda.primitives import row_tile
    from engine.cuda.random_model import real_spec

    spec = real_spec(**SMALL).moe
    hidden, count, shared = 1032, spec.num_experts, spec.shared_dim
    head = torch.randn(count + 1 + 2 * shared, hidden, device=DEVICE, dtype=torch.bfloat16) / 30
    head[[7, 9]] = head[[3, 3]]
    empty = torch.empty(0, device=DEVICE)
    packed = pack4(torch.zeros(1, 1, 1, device=DEVICE))
    weights = MoeWeights(head=head, shared_down=empty, gate_up=packed, down=packed)
    scratch = MoeScratch.make(spec, hidden, 20, torch.device(DEVICE))
    poison(scratch)
    x = torch.randn(num_rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    x[0] = 0.0
    x[-1] += head[3] * 30
    route(x, weights, scratch, spec)
    pieces, _, width = scratch.head.shape
    sums = scratch.head.flatten()[: pieces * row_tile(num_rows) * width].view(pieces, -1, width)
    wanted = reduce(torch.add, sums)[:num_rows, : head.shape[0]].to(torch.bfloat16)
    whole = x.to(torch.float32) @ head.to(torch.float32).t()
    assert pieces > 1
    assert torch.allclose(wanted.to(torch.float32), whole, rtol=1e-2, atol=1e-2)
    logits, gate, middle = wanted.to(torch.float32).split((count, 1, 2 * shared), dim=1)
    order = logits.sort(dim=1, descending=True, stable=True)
    ids = order.indices[:, : spec.num_active]
    share = order.values[:, : spec.num_active].softmax(1)
    middle = torch.nn.functional.silu(middle[:, :shared]) * middle[:, shared:]
    assert torch.equal(scratch.ids[:num_rows].to(torch.int64), ids)
    assert torch.allclose(scratch.weights[:num_rows], share, atol=4e-3)
    assert torch.equal(scratch.gates[:num_rows], gate[:, 0])
    found_middle = scratch.shared[:num_rows].to(torch.float32)
    assert torch.allclose(found_middle, middle, rtol=2e-2, atol=2e-2)
    # Of the whole product, as prompts are routed: the same.
    found = torch.zeros_like(scratch.weights), torch.zeros_like(scratch.ids)
    route_into(wanted, found[0][:num_rows], found[1][:num_rows], scratch.shared, spec)
    assert torch.equal(found[1][:num_rows].to(torch.int64), ids)
    assert torch.allclose(found[0][:num_rows], share, atol=4e-3)


@gpu
@needs_cuda
@torch.inference_mode()
def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    from engine.cuda.moe import route_into
    from engine.cuda.random_model import real_spec

    spec = real_spec(**SMALL).moe
    values = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, 1.0])
    pick = torch.randint(6, (20, spec.num_experts + 1 + 2 * spec.shared_dim))
    head = values[pick].to(DEVICE, torch.bfloat16)
    weights = torch.empty(20, spec.num_active, device=DEVICE)
    ids = torch.full((20, spec.num_active), -1, dtype=torch.int32, device=DEVICE)
    route_into(head, weights, ids, torch.empty(20, spec.shared_dim, device=DEVICE), spec)
    assert bool(((ids >= 0) & (ids < spec.num_experts)).all())
    assert bool((ids.sort(1).values.diff(dim=1) > 0).all())
