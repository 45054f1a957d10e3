"""Where an expert lies never changes a token: every cache size against every other, and against no tiers at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.errors import ExpertsNotReady, PlanRefused, ProfileMismatch
from engine.expert_profile import ExpertProfile, profile_of_counts, write_profile
from engine.loading import load_engine
from engine.startup_budget import slots_per_layer
from engine.tools.pack import pack
from tests.oracle.conftest import Models
from tests.oracle.driver import Job, generate_alone
from tests.random_weights import SMALL, write_checkpoint

PROMPT = [7, 9, 1, 30, 31, 12, 7, 9, 40, 41, 1, 5, 6, 7, 9, 1, 30]
NUM_PAIRS = 20
JOB = Job(prompt=PROMPT, num_tokens=12, max_draft=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiers") / "small", SMALL)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks every pair, hot ones first of all in the last layer."""
    path = tmp_path_factory.mktemp("profile") / "expert-profile.bin"
    write_profile(
        path, profile_of_counts([[7 * layer + e % 3 for e in range(5)] for layer in range(4)])
    )
    return path


@pytest.fixture
def engines() -> Iterator[list[TorchEngine]]:
    loaded: list[TorchEngine] = []
    yield loaded
    for engine in loaded:
        engine.close()


@pytest.fixture(scope="module")
def untiered_tokens(checkpoint: Path) -> list[int]:
    return generate_alone(load_engine(config(checkpoint)), JOB)


def config(checkpoint: Path, **changes: object) -> EngineConfig:
    values = {
        "model": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "kernels": "torch",  # one arithmetic with and without tiers
        "pool_workers": 2,
        "max_context": 128,
        "chunk_tokens": 16,
        **changes,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def outcome(engine: TorchEngine) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt of two pieces, and of a window of four rows after it."""
    read = [engine.prefill_logits(0, PROMPT[:16], 0), engine.prefill_logits(0, PROMPT[16:], 16)]
    return torch.cat(read), engine.verify_logits({0: (3, 4, 5, 6)})[0]


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def refill(engine: TorchEngine, ranking: ExpertProfile, num_slots: int) -> None:
    """Give a store whose experts all lie in the host's memory another number of slots, filled by rank."""
    store = engine.experts
    assert store is not None
    slots = slots_per_layer(num_slots, ranking.ranked_per_layer())
    store.open(slots)
    for layer, expert in ranking.chosen(slots):
        held = store.layers[layer].find(expert)
        store.layers[layer].put_slot(expert, held.gate_up, held.down)
    assert store.hits_ready()


def test_no_cache_size_changes_a_bit(
    checkpoint: Path, engines: list[TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = load_engine(config(checkpoint, expert_cache=0))
    engines.append(tiered)
    nothing_cached = outcome(tiered)
    ranking = profile_of_counts([list(range(5))] * 4)
    for num_slots in range(1, NUM_PAIRS + 1):
        refill(tiered, ranking, num_slots)
        assert same(outcome(tiered), nothing_cached), num_slots
    monkeypatch.setattr("engine.memory_plan.DENSE_MAX_BYTES", 0)
    untiered = load_engine(config(checkpoint))
    engines.append(untiered)
    assert same(outcome(untiered), nothing_cached)


def test_no_cache_size_changes_a_token_while_the_first_that_come_take_the_slots(
    checkpoint: Path, engines: list[TorchEngine], untiered_tokens: list[int]
) -> None:
    tiered = load_engine(config(checkpoint, expert_cache=0))
    engines.append(tiered)
    store = tiered.experts
    assert store is not None
    for num_slots in range(NUM_PAIRS + 1):
        slots = slots_per_layer(num_slots, (5,) * 4)
        store.open(slots)
        for layer in store.layers:
            layer.admit_first_come()
        assert generate_alone(tiered, JOB) == untiered_tokens, num_slots
        assert store.hits_ready()
        # Twelve tokens ask for every expert: no slot is left, and nothing that has one has lost it.
        assert [layer.num_free for layer in store.layers] == [0] * 4


@pytest.mark.parametrize("with_profile", [True, False], ids=["profile", "first come"])
@pytest.mark.parametrize("num_slots", [0, 7, NUM_PAIRS])
def test_a_start_with_tiers_gives_the_same_tokens(
    checkpoint: Path,
    profile: Path,
    engines: list[TorchEngine],
    num_slots: int,
    with_profile: bool,
    untiered_tokens: list[int],
) -> None:
    tiered = load_engine(
        config(
            checkpoint,
            expert_cache=num_slots,
            expert_profile=str(profile) if with_profile else None,
        )
    )
    engines.append(tiered)
    assert generate_alone(tiered, JOB) == untiered_tokens
    items = {item.name: item for item in tiered.info.memory_plan}
    one, two = items["experts, tier one"], items["experts, tier two"]
    blob = 3 * 24 * 12 * 4  # of 2304 and 1152 bytes: nothing to pad
    assert one.planned_bytes == one.actual_bytes == num_slots * blob
    in_host = NUM_PAIRS - num_slots if with_profile else NUM_PAIRS
    assert two.planned_bytes == two.actual_bytes == in_host * blob


def test_experts_of_a_pack_stay_where_they_lie(
    checkpoint: Path, engines: list[TorchEngine], tmp_path: Path
) -> None:
    """Tier two is the mapped file: no copy, and the bits of every cache size are those of copies."""
    directory = tmp_path / "pack"
    pack(str(checkpoint), directory)
    copied = load_engine(config(checkpoint, expert_cache=NUM_PAIRS, dtype="bfloat16"))
    mapped = load_engine(config(directory, expert_cache=0, dtype="bfloat16"))
    engines += [copied, mapped]
    assert mapped.experts is not None
    homes = [layer.find(e) for layer in mapped.experts.layers for e in range(5)]
    assert all(is_mapped(directory / "experts.bin", home.down) for home in homes)
    assert all(is_mapped(directory / "experts.bin", home.gate_up) for home in homes)
    expected = outcome(copied)
    assert same(outcome(mapped), expected)
    for num_slots in (1, 7, NUM_PAIRS):
        refill(mapped, profile_of_counts([list(range(5))] * 4), num_slots)
        assert same(outcome(mapped), expected), num_slots


def is_mapped(file: Path, tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in this process's mapping of a file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(str(file)):
            first, last = (int(address, 16) for address in line.split()[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return True
    return False


@pytest.mark.parametrize("name", ["gqa3_gdn2", "gdn_wide_values"])
def test_tiny_models_give_the_same_tokens_with_half_of_their_experts_in_slots(
    models: Models, engines: list[TorchEngine], name: str
) -> None:
    job = Job(prompt=[5, 6, 7, 8, 9, 3, 11, 12], num_tokens=10, max_draft=4)
    changes = {"expert_cache": 15, "chunk_tokens": 32, "max_context": 256}
    tiered = load_engine(config(models.checkpoint(name), **changes))
    engines.append(tiered)
    assert generate_alone(tiered, job) == generate_alone(models.engine(name), job)


def test_first_come_takes_slots_until_a_layer_is_full(
    checkpoint: Path, engines: list[TorchEngine]
) -> None:
    engine = load_engine(config(checkpoint, expert_cache=6))
    engines.append(engine)
    assert engine.experts is not None
    assert [layer.num_slots for layer in engine.experts.layers] == [2, 2, 1, 1]
    before = outcome(engine)
    assert [layer.num_free for layer in engine.experts.layers] == [0, 0, 0, 0]
    assert same(outcome(engine), before)


def test_a_profile_fills_once_and_admits_nothing_later(
    checkpoint: Path, profile: Path, engines: list[TorchEngine]
) -> None:
    engine = load_engine(config(checkpoint, expert_cache=4, expert_profile=str(profile)))
    engines.append(engine)
    assert engine.experts is not None
    homes = [[layer.find(e) for e in range(5)] for layer in engine.experts.layers]
    outcome(engine)
    assert homes == [[layer.find(e) for e in range(5)] for layer in engine.experts.layers]


def test_a_half_filled_store_is_refused(checkpoint: Path, engines: list[TorchEngine]) -> None:
    engine = load_engine(config(checkpoint, expert_cache=0))
    engines.append(engine)
    assert engine.experts is not None
    engine.experts.layers[2]._in_host[3] = None
    with pytest.raises(ExpertsNotReady, match=r"1 faults .* layer 2: expert 3 is in neither tier"):
        engine.experts.hits_ready()


def test_weights_of_another_type_in_one_tier_are_refused(
    checkpoint: Path, engines: list[TorchEngine]
) -> None:
    """A tier that computes with other numbers than its neighbour changes tokens without any error."""
    engine = load_engine(config(checkpoint, expert_cache=0))
    engines.append(engine)
    assert engine.experts is not None
    layer = engine.experts.layers[1]
    held = layer.find(0)
    layer._in_host[0] = type(held)(held.gate_up.half(), held.down.half())
    with pytest.raises(ExpertsNotReady, match=r"2 faults .* layer 1: .*float16"):
        engine.experts.hits_ready()


def test_what_cannot_be_cached_is_refused_before_loading(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PlanRefused, match="--expert-cache 21: there are 20 pairs of layer and expert"
    ):
        load_engine(config(checkpoint, expert_cache=21))
    other = tmp_path / "other.bin"
    write_profile(other, profile_of_counts([[1, 2, 3]] * 4))
    with pytest.raises(
        ProfileMismatch, match="found a profile of 4 layers x 3 experts, required 4 x 5"
    ):
        load_engine(config(checkpoint, expert_profile=str(other)))
    short = tmp_path / "short.bin"
    write_profile(short, ExpertProfile(num_layers=4, num_experts=5, pairs=((0, 1), (3, 4))))
    with pytest.raises(PlanRefused, match="--expert-cache 3: there are 2 pairs in the profile"):
        load_engine(config(checkpoint, expert_cache=3, expert_profile=str(short)))
