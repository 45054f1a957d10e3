"""The same model from safetensors, GGUF and a pack: the same weights to the bit, and the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, model_path
from engine.interface import SamplingParams
from engine.loading import load_engine
from engine.sources.gguf_writer import write_gguf
from engine.sources.opening import open_source, read_spec
from engine.tools.pack import pack
from tests.oracle.driver import Job, generate
from tests.oracle.tiny import GRID, make_checkpoint, text
from tests.whole_source import whole

FORMS = ("gguf", "shards", "pack", "pack of gguf")
SEEDED = SamplingParams(temperature=1.0, seed=7)


def converted(form: str, model: Path, directory: Path) -> Path:
    """The model in another form."""
    directory.mkdir(exist_ok=True)
    target = directory / "pack"
    if form == "pack":
        pack(str(model), target)
        return target
    spec = read_spec(model)
    source = open_source(model, spec)
    per_shard = 40 if form == "shards" else 0
    write_gguf(source, spec, model, directory / "model.gguf", tensors_per_shard=per_shard)
    source.close()
    file = sorted(directory.glob("*.gguf"))[-1]
    if form != "pack of gguf":
        return file
    pack(str(file), target)
    return target


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=sorted(GRID))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)


def test_weights_are_the_same_to_the_bit(form: str, tiny: Path, tmp_path: Path) -> None:
    other = converted(form, tiny, tmp_path)
    spec, other_spec = read_spec(tiny), read_spec(other)
    for part in ("gdn", "qsa", "moe", "qsa_layers", "norm_eps", "max_position", "num_draft_layers"):
        assert getattr(spec, part) == getattr(other_spec, part)
    expected, found = whole(open_source(tiny, spec)), whole(open_source(other, other_spec))
    assert set(found) == set(expected)
    for name, values in expected.items():
        if name.endswith("A_log"):
            # Stored as -exp: another value may stand for it, never another decay.
            assert torch.equal(found[name].exp(), values.exp()), name
        elif "norm" in name.rsplit(".", 2)[-2] and "linear_attn.norm" not in name:
            assert torch.equal(found[name] + 1.0, values + 1.0), name
        else:
            assert torch.equal(found[name], values), name


def tokens_of(model: Path, prompt: list[int], dtype: str) -> list[list[int]]:
    config = EngineConfig(model=str(model), device="cpu", dtype=dtype, threads=1, num_slots=2)
    engine = load_engine(config)
    jobs = [
        Job(prompt=prompt, num_tokens=16, max_draft=3),
        Job(prompt=prompt[:40], num_tokens=16, sampling=SEEDED, slot=1),
    ]
    tokens = [progress.token_ids for progress in generate(engine, *jobs)]
    engine.close()
    return tokens


@pytest.mark.parametrize(("name", "dtype"), [("gqa3_gdn2", "float32"), ("no_ple", "bfloat16")])
def test_tokens_of_small_models_are_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, name)
    expected = tokens_of(model, text(name), dtype)
    for form in ("shards", "pack of gguf"):
        other = converted(form, model, tmp_path / form)
        assert tokens_of(other, text(name), dtype) == expected, form


def test_tokens_of_the_default_model_are_the_same(tmp_path: Path) -> None:
    model = model_path("default")
    prompt = torch.randint(0, 8000, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = tokens_of(model, prompt, "float32")
    for form in ("gguf", "pack"):
        other = converted(form, model, tmp_path / form)
        assert tokens_of(other, prompt, "float32") == expected, form
