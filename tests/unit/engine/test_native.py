"""The compiled step: a row's bits depend on nothing but the row, every precision of weights, and what stops it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import TorchEngine
from engine.errors import ConfigMismatch
from engine.loading import load_engine
from engine.native import abi, build
from tests.oracle.tiny import GRID, make_checkpoint

_ROWS = 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(checkpoint: Path, *, threads: int = 1, kernels: str = "compiled") -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype="float32",
        threads=threads,
        max_context=160,
        chunk_tokens=32,
        kernels=kernels,
    )


def text(name: str, num_ids: int) -> list[int]:
    vocab = GRID[name].config().vocab_size
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, vocab, (num_ids,), generator=generator).tolist()


def read(engine: TorchEngine, slot: int, ids: list[int], sizes: list[int]) -> Tensor:
    """Logits of every position, the text read in pieces of these sizes."""
    parts: list[Tensor] = []
    first = 0
    for size in sizes:
        parts.append(engine.prefill_logits(slot, ids[first : first + size], first))
        first += size
    return torch.cat(parts)


def step(engine: TorchEngine, slot: int, ids: list[int], sizes: list[int], first: int) -> Tensor:
    """The same through verify windows, each kept whole."""
    parts: list[Tensor] = []
    for size in sizes:
        rows = tuple(ids[first : first + size])
        parts.append(engine.verify_logits({slot: rows})[slot])
        engine.commit({slot: size})
        first += size
    return torch.cat(parts)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", GRID)
def test_a_text_has_the_same_bits_however_it_is_cut(directory: Path, name: str, kv: str) -> None:
    engine = load_engine(replace(config(make_checkpoint(directory, name)), kv=kv))
    ids = text(name, 100)
    whole = read(engine, 0, ids, [100])
    assert torch.equal(whole, read(engine, 1, ids, [1, 2, 3, 29, 48, 5, 12]))
    assert torch.equal(whole[:7], read(engine, 2, ids, [7]))
    assert torch.equal(whole[7:], step(engine, 2, ids, [5, 1, 4, 3, 2] * 6 + [3], 7))


@pytest.mark.parametrize("name", GRID)
def test_the_width_of_vectors_changes_no_bit(directory: Path, name: str) -> None:
    """Without int8 weights nothing else differs from the portable step."""
    checkpoint = make_checkpoint(directory, name)
    ids = text(name, 60)
    portable = load_engine(config(checkpoint, kernels="portable"))
    widest = load_engine(config(checkpoint))
    for engine in (portable, widest):
        read(engine, 0, ids[:40], [33, 7])
    assert torch.equal(
        step(portable, 0, ids, [5, 4, 1, 3, 2, 5], 40), step(widest, 0, ids, [5, 4, 1, 3, 2, 5], 40)
    )


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(directory: Path, threads: int) -> None:
    checkpoint = make_checkpoint(directory, "gqa4_gdn3_deep")
    ids = text("gqa4_gdn3_deep", 90)
    alone = read(load_engine(config(checkpoint)), 0, ids, [60, 30])
    for _ in range(3):
        engine = load_engine(config(checkpoint, threads=threads))
        assert torch.equal(alone, read(engine, 0, ids, [60, 30]))


def requantized(directory: Path, name: str, dtype: torch.dtype) -> Path:
    """The checkpoint with its matrices in another precision; others keep theirs, so kinds are mixed."""
    source = make_checkpoint(directory, name)
    target = directory / f"{name}-{dtype}".replace(".", "_")
    if target.exists():
        return target
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for key in list(tensors):
        value = tensors[key]
        if value.ndim < 2 or value.dtype == torch.int64 or "in_proj_a" in key or "inject" in key:
            continue
        if dtype != torch.int8:
            tensors[key] = value.to(dtype)
            continue
        scale = (value.float().abs().amax(-1) / 127).clamp_min(1e-8)
        tensors[key] = (value.float() / scale.unsqueeze(-1)).round().to(torch.int8)
        tensors[f"{key}_scale"] = scale
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("kernels", ["compiled", "portable"])
@pytest.mark.parametrize("name", ["gqa3_gdn2", "mha_gdn1_two_streams"])
def test_with_int8_weights_a_text_has_the_same_bits_however_it_is_cut_and_by_any_threads(
    directory: Path, name: str, kernels: str
) -> None:
    """In tiles where the processor has them, and by the multiply-adds that every processor has."""
    checkpoint = requantized(directory, name, torch.int8)
    engine = load_engine(config(checkpoint, kernels=kernels))
    ids = text(name, 100)
    whole = read(engine, 0, ids, [100])
    assert torch.equal(whole, read(engine, 1, ids, [1, 2, 3, 29, 48, 5, 12]))
    assert torch.equal(whole[:7], read(engine, 2, ids, [7]))
    assert torch.equal(whole[7:], step(engine, 2, ids, [5, 1, 4, 3, 2] * 6 + [3], 7))
    engine = load_engine(config(checkpoint, kernels=kernels, threads=3))
    assert torch.equal(whole, read(engine, 0, ids, [60, 40]))


@pytest.mark.parametrize("kernels", ["compiled", "portable"])
def test_rows_of_a_window_have_the_bits_of_each_alone(directory: Path, kernels: str) -> None:
    checkpoint = requantized(directory, "gqa3_gdn2", torch.int8)
    ids = text("gqa3_gdn2", 60)
    engine = load_engine(config(checkpoint, kernels=kernels))
    parts = {slot: ids[10 + slot : 15 + slot] for slot in range(4)}
    for slot in parts:
        read(engine, slot, ids[:10], [10])
    together = engine.verify_logits({slot: tuple(part) for slot, part in parts.items()})
    for slot, part in parts.items():
        read(engine, slot, ids[:10], [10])
        assert torch.equal(together[slot], step(engine, slot, ids[:10] + part, [1] * 5, 10))


def test_what_computes_is_said_and_can_be_chosen(directory: Path) -> None:
    checkpoint = requantized(directory, "gqa3_gdn2", torch.int8)
    best = load_engine(config(checkpoint)).info.kernels
    assert best == (
        "compiled step, int8 products in AMX tiles" if abi.has_tiles() else "compiled step"
    )
    assert load_engine(config(checkpoint, kernels="portable")).info.kernels == "compiled step"


@pytest.mark.parametrize("kernels", ["compiled", "portable"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gqa3_gdn2", "mha_gdn1_two_streams"])
def test_weights_of_any_precision_give_the_logits_of_the_torch_layers(
    directory: Path, name: str, dtype: torch.dtype, kernels: str
) -> None:
    checkpoint = requantized(directory, name, dtype)
    ids = text(name, 70)
    compiled = read(load_engine(config(checkpoint, kernels=kernels)), 0, ids, [40, 30])
    layers = read(load_engine(config(checkpoint, kernels="torch")), 0, ids, [40, 30])
    assert compiled.isfinite().all()
    torch.testing.assert_close(compiled, layers, atol=1e-4, rtol=1e-4)


def test_what_the_step_cannot_do_is_refused_when_asked_for_and_left_to_torch_otherwise(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(directory, "gqa3_gdn2")
    wanted = replace(config(checkpoint), dtype="bfloat16")
    with pytest.raises(ConfigMismatch, match="--kernels compiled: it computes in float32, not in"):
        load_engine(wanted)
    with caplog.at_level("INFO", logger="engine.startup"):
        engine = load_engine(replace(wanted, kernels="auto"))
    assert engine.info.dtype == "bfloat16"
    line = "the torch layers run, several times slower: it computes in float32, not in bfloat16"
    assert line in caplog.messages


def test_a_missing_foreign_or_damaged_library_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "libstep.so"
    monkeypatch.setattr(abi, "LIBRARY", file)
    assert "was not compiled" in str(abi.why_unavailable())
    file.write_bytes(b"not a library")
    assert "cannot be loaded" in str(abi.why_unavailable())
    shutil.copy(build.LIBRARY, file)
    assert abi.why_unavailable() is None
    monkeypatch.setattr(abi, "sources_hash", lambda: "0" * 16)
    assert "compiled from other sources" in str(abi.why_unavailable())


def test_a_processor_without_the_instructions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(abi, "processor_flags", lambda: frozenset({"avx2"}))
    assert abi.why_unavailable() == "this processor has no fma"


def test_a_machine_without_compiler_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libstep.so")
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.main() == 1
    assert "no C compiler found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag"),
    [(["cc"], "-march=x86-64-v3"), (["python", "-m", "ziglang", "cc"], "-mcpu=x86_64_v3")],
)
def test_every_compiler_is_told_the_processor_in_its_own_words(
    command: list[str], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def run(arguments: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        called.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libstep.so")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.subprocess, "run", run)
    build.compile_library(command)
    assert called[0][: len(command)] == command
    assert [a for a in called[0] if a.startswith(("-march", "-mcpu"))] == [flag]


def test_a_failed_compilation_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libstep.so")
    monkeypatch.setenv("CC", "cc -include missing.h")
    assert build.main() == 1
    assert "cc -include missing.h: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
