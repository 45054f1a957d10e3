"""K and V held in another type than is computed in: rounded cells, and every promise of exactness as before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.layers.qsa import QsaLayer
from tests.oracle import test_engine_exact as exact
from tests.oracle import test_engine_parking as parking
from tests.oracle import tiny
from tests.oracle.conftest import Models
from tests.oracle.driver import generate, generate_alone, seat
from tests.oracle.test_engine_rollback import AFTER, CHAIN, window_with_wrong_drafts
from tests.oracle.test_engine_trunk import read, step
from tests.oracle.tolerances import INT8_KV_DIVERGENCE, INT8_KV_MEDIAN_LOGITS

if TYPE_CHECKING:
    from torch import Tensor

    from engine.engine import TorchEngine
    from engine.state import SlotState

NAMES = sorted(tiny.GRID)


@pytest.fixture(scope="module")
def int8(models: Models) -> Models:
    return replace(models, kv="int8", _engines={})


@pytest.fixture(scope="module")
def bf16(models: Models) -> Models:
    return replace(models, kv="bf16", _engines={})


def cells_of(state: SlotState, layer: int, slot: int, end: int) -> list[Tensor]:
    """All that a slot's first cells are held as."""
    return [tensor[layer, slot, :, :end] for tensor in state.kv_tensors()]


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_the_fp32_engines_within_half_a_step(
    models: Models, int8: Models, name: str
) -> None:
    """In the first attention layer, which has the same inputs in both: K as rotated, V as projected."""
    ids = tiny.text(name)[:90]
    engines = models.engine(name), int8.engine(name)
    for engine in engines:
        seat(engine, 1)
        read(engine, 1, ids)
    plain, rounded = (engine._state for engine in engines)
    for x, codes, scale in zip(
        cells_of(plain, 0, 1, 90), *pairs(cells_of(rounded, 0, 1, 90)), strict=True
    ):
        assert codes.dtype == torch.int8
        assert torch.equal(scale, x.abs().amax(-1) / 127)
        error = (x.double() - codes.double() * scale.double().unsqueeze(-1)).abs()
        assert bool((error <= scale.double().unsqueeze(-1) * 0.500_01).all())


def pairs(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """[k, v, k_scale, v_scale] -> ([k, v], [k_scale, v_scale])."""
    return tensors[:2], tensors[2:]


@pytest.mark.parametrize("name", NAMES)
def test_logits_stay_near_those_of_fp32_cells(models: Models, int8: Models, name: str) -> None:
    ids = tiny.text(name)[:100]

    def logits(engine: TorchEngine) -> Tensor:
        seat(engine, 0)
        return torch.cat((read(engine, 0, ids[:90]), step(engine, 0, ids[90:])))

    plain, rounded = logits(models.engine(name)), logits(int8.engine(name))
    assert not torch.equal(plain, rounded)
    assert float((plain - rounded).square().mean(-1).sqrt().median()) <= INT8_KV_MEDIAN_LOGITS
    log_p, log_q = plain.log_softmax(-1), rounded.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert float(divergence.mean()) <= INT8_KV_DIVERGENCE


@pytest.mark.parametrize("name", ["gqa3_gdn2", "mha_gdn1_two_streams"])
def test_a_piece_and_a_window_hold_equal_rows_in_equal_cells(int8: Models, name: str) -> None:
    """Of the torch layers; of the compiled step whole texts are compared bit by bit in its own tests."""
    engine = replace(int8, kernels="torch", _engines={}).engine(name)
    state = engine._state
    mixers = (layer.mixer for layer in engine.trunk.layers)
    attention = next(mixer for mixer in mixers if isinstance(mixer, QsaLayer))
    x = torch.randn(5, tiny.BASE["hidden_size"], generator=torch.Generator().manual_seed(9))
    seat(engine, 0, 3)
    with torch.inference_mode():
        attention.project_chunk(x, 0, 2, state)
        attention.project(x, torch.full((5,), 3), torch.arange(2, 7), state)
    for tensor in state.kv_tensors():
        assert torch.equal(tensor[attention.index, 0, :, 2:7], tensor[attention.index, 3, :, 2:7])


@pytest.mark.parametrize(
    ("name", "sampling"), [("gqa3_gdn2", "hot"), ("gdn_wide_values", "greedy")]
)
def test_any_chain_length_gives_the_same_tokens(int8: Models, name: str, sampling: str) -> None:
    exact.test_any_chain_length_gives_the_same_tokens(int8, name, sampling)


def test_other_float_cells_give_the_same_tokens_at_any_chain_length(bf16: Models) -> None:
    exact.test_any_chain_length_gives_the_same_tokens(bf16, "gqa3_gdn2", "hot")


@pytest.mark.parametrize("name", ["gqa4_gdn3_deep", "no_ple"])
def test_company_changes_nothing(int8: Models, name: str) -> None:
    exact.test_company_changes_nothing(int8, {}, name, 3, (1, 4, 7))


@pytest.mark.parametrize("cut", [5, 70])
def test_a_prompt_resumed_at_a_checkpoint_goes_on_as_if_read_whole(int8: Models, cut: int) -> None:
    parking.test_a_prompt_resumed_at_a_checkpoint_goes_on_as_if_read_whole(
        int8, "gqa3_gdn2", cut, parking.PENALIZED
    )


def test_a_suspended_sequence_goes_on_as_if_never_stopped(int8: Models) -> None:
    parking.test_a_suspended_sequence_goes_on_as_if_never_stopped(int8, "no_ple", 4, 5)


def test_a_parked_page_comes_back_to_the_bit(int8: Models) -> None:
    engine = int8.engine("gqa3_gdn2")
    state, parked = engine._state, engine._parked
    seat(engine, 0, 2)
    read(engine, 0, tiny.text("gqa3_gdn2")[:64])
    held = [tensor[:, 0, :, :64].clone() for tensor in state.kv_tensors()]
    assert len(held) == 4
    with torch.inference_mode():
        parked.save_pages(0, [(0, 900)])
        read(engine, 0, tiny.text("gqa3_gdn2", 1)[:64])
        parked.load_pages(2, [(0, 900)])
    parked.drop_page(900)
    for tensor, before in zip(state.kv_tensors(), held, strict=True):
        assert torch.equal(tensor[:, 2, :, :64], before)
        assert not torch.equal(tensor[:, 0, :, :64], before)


@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize("name", ["gqa3_gdn2", "gdn_wide_values"])
def test_a_rejected_draft_leaves_no_trace(int8: Models, name: str, num_right: int) -> None:
    engine, ids, prefix = int8.engine(name), tiny.text(name), 28
    accepted = prefix + 1 + num_right
    end = accepted + AFTER
    seat(engine, 0)
    plain = torch.cat((read(engine, 0, ids[:prefix]), step(engine, 0, ids[prefix:end])))
    cells = [tensor[:, 0, :, :end].clone() for tensor in engine._state.kv_tensors()]
    seat(engine, 0)
    read(engine, 0, ids[:prefix])
    window = window_with_wrong_drafts(name, ids, prefix, num_right)
    assert len(window) == 1 + CHAIN
    drafted = engine.verify_logits({0: window})[0][: 1 + num_right].clone()
    engine.commit({0: 1 + num_right})
    after = step(engine, 0, ids[accepted:end])
    assert torch.equal(drafted, plain[prefix:accepted])
    assert torch.equal(after, plain[accepted:end])
    num_trunk = engine._state.k.shape[0] - 1
    for tensor, before in zip(engine._state.kv_tensors(), cells, strict=True):
        assert torch.equal(tensor[:num_trunk, 0, :, :end], before[:num_trunk])


def test_the_draft_layer_reads_and_writes_int8_cells_of_its_own(int8: Models) -> None:
    engine = int8.engine("gqa3_gdn2")
    job = exact.job("gqa3_gdn2", "hot", max_draft=4)
    progress = generate(engine, job)[0]
    assert sum(step.num_accepted for step in progress.steps) > 0
    assert generate_alone(engine, job) == progress.token_ids
    scale = engine._state.k_scale
    assert scale is not None
    cells = scale[-1, 0, :, : len(job.prompt)]
    assert bool((cells > 1e-4).all())
