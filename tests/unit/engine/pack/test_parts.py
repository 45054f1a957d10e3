"""A model from several places: a pack that leaves tensors in a GGUF file, an n-gram table and a draft layer apart."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelParts
from engine.errors import ConfigMismatch, WeightMismatch
from engine.loading import load_engine
from engine.pack.experts import make_table
from engine.pack.index import ALIGN, IndexRow, Kind, PackFile, PackIndex, aligned
from engine.sources.base import TensorSource
from engine.sources.ggml_names import TABLE_NAME, is_expert_stack
from engine.sources.gguf_files import GgufFiles
from engine.sources.gguf_writer import write_gguf
from engine.sources.opening import open_source, read_spec
from engine.tensor_names import check_hash
from engine.tools.pack import pack
from engine.weights import Checkpoint
from tests.oracle.driver import Job, generate
from tests.random_weights import SMALL, write_checkpoint
from tests.unit.engine.pack.conftest import small_spec

WHOLE = ModelParts()
CONFIG = {**SMALL, "output_gate_type": "sigmoid"}
PROMPT = [7, 9, 1, 30, 31, 12, 7, 9, 40, 41, 1, 5]
CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


@pytest.fixture(scope="module")
def whole_pack(quantised_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parts") / "whole"
    pack(str(quantised_gguf), directory)
    return directory


@pytest.fixture
def thin_pack(quantised_gguf: Path, tmp_path: Path) -> Path:
    """Vectors in the pack; matrices and experts left in the GGUF file, as the reference engine's packs have them."""
    files, spec = GgufFiles(quantised_gguf), small_spec()
    directory = tmp_path / "thin"
    directory.mkdir()
    rows: list[IndexRow] = []
    data = b""
    for name, tensor in files.tensors.items():
        if is_expert_stack(name) or name.startswith("blk.4."):
            continue
        ne1, ne0 = (0, *tensor.shape)[-2:]
        row = IndexRow(
            name=name, file=PackFile.DENSE, kind=Kind.PLANES, src_off=0, src_bytes=0, dst_off=0, dst_bytes=0,
            ne0=ne0, ne1=ne1, code_bits=8, group_elems=32,
        )  # fmt: skip
        if not ne1:
            size = tensor.form.num_bytes
            row = dataclasses.replace(
                row,
                kind=Kind.F32,
                src_off=len(data),
                dst_off=len(data),
                src_bytes=size,
                dst_bytes=size,
            )
            data += bytes(tensor.raw().tolist())
            data += bytes(aligned(len(data), ALIGN) - len(data))
        rows.append(row)
    (directory / "dense.bin").write_bytes(data)
    index = PackIndex(align=ALIGN, pool_bytes=len(data), rows=tuple(rows))
    (directory / "index.txt").write_text(index.text("a test"))
    stacks = [
        [files.tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        for layer in range(spec.num_layers)
    ]
    table = make_table(spec, [(gate.kind, down.kind) for gate, _, down in stacks])
    layers = tuple(
        dataclasses.replace(row, gate_off=gate.offset, up_off=up.offset, down_off=down.offset)
        for row, (gate, up, down) in zip(table.layers, stacks, strict=True)
    )
    table = dataclasses.replace(table, file=quantised_gguf.name, layers=layers)
    (directory / "native_experts.txt").write_text(table.text())
    return directory


def opened(model: Path, parts: ModelParts) -> TensorSource:
    return open_source(model, read_spec(model, parts), parts)


def assert_same_tensors(expected: TensorSource, found: TensorSource) -> None:
    names = {name for name in expected.names() if not name.endswith(CONSTANTS)}
    assert {name for name in found.names() if not name.endswith(CONSTANTS)} == names
    for name in names:
        assert torch.equal(found.get(name), expected.get(name)), name


def tokens(model: Path, parts: ModelParts = WHOLE) -> list[object]:
    """Ids of a greedy job, and what was drafted and accepted for each window."""
    config = EngineConfig(
        model=str(model), parts=parts, device="cpu", dtype="float32", threads=1, num_slots=1,
        max_context=128,
    )  # fmt: skip
    engine = load_engine(config)
    (progress,) = generate(engine, Job(prompt=PROMPT, num_tokens=16, max_draft=3))
    engine.close()
    return [progress.token_ids, [(s.num_drafted, s.num_accepted) for s in progress.steps]]


def test_a_pack_reads_what_it_left_in_the_gguf_file(
    quantised_gguf: Path, thin_pack: Path, whole_pack: Path
) -> None:
    """All four places at once: no config.json in the pack, so the geometry is the GGUF file's."""
    file = str(quantised_gguf)
    parts = ModelParts(native=file, ple_gguf=file, mtp=str(whole_pack / "mtp"))
    expected = open_source(quantised_gguf, read_spec(quantised_gguf))
    assert_same_tensors(expected, opened(thin_pack, parts))
    assert tokens(thin_pack, parts) == tokens(quantised_gguf)


def test_a_pack_and_a_gguf_file_that_disagree_are_refused(
    quantised_gguf: Path, thin_pack: Path, whole_pack: Path
) -> None:
    parts = ModelParts(native=str(quantised_gguf), mtp=str(whole_pack))
    spec = read_spec(quantised_gguf)
    with pytest.raises(WeightMismatch, match="left in a GGUF file, required .* --native FILE"):
        open_source(thin_pack, spec)
    with pytest.raises(WeightMismatch, match="holds every tensor itself, required no --native"):
        open_source(whole_pack, spec, parts)
    with pytest.raises(ConfigMismatch, match="required a pack that leaves tensors"):
        open_source(thin_pack.parent, spec, parts)
    table = thin_pack / "native_experts.txt"
    original = table.read_text()
    first = original.splitlines()[2].split(" ")
    for old, new, message in (
        (
            first[5],
            "64",
            r"layer 0 in small.gguf: found gate as IQ2_XS in small.gguf at 64, required IQ2_XS",
        ),
        (
            f"in {quantised_gguf.name}",
            "in other.gguf",
            "layer 0 in other.gguf: found gate as IQ2_XS in other.gguf",
        ),
        ("n_expert 3", "n_expert 2", "required"),
    ):
        table.write_text(original.replace(old, new, 1))
        with pytest.raises(WeightMismatch, match=message):
            opened(thin_pack, parts)
    table.write_text(original)
    index = thin_pack / "index.txt"
    text = index.read_text()
    for old, new, message in (
        ("\noutput.weight", "\nother.weight", "found no other.weight in the GGUF file, required"),
        (
            " 256 64 8 0 32",
            " 256 65 8 0 32",
            r"found shape \[65, 256\], required \[64, 256\] by the GGUF",
        ),
    ):
        assert old in text
        index.write_text(text.replace(old, new, 1))
        with pytest.raises(WeightMismatch, match=message):
            opened(thin_pack, parts)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small") / "whole", CONFIG)


@pytest.fixture(scope="module")
def small_tokens(small: Path) -> list[object]:
    return tokens(small)


def without(model: Path, target: Path, part: str) -> Path:
    """The checkpoint without the tensors that have `part` in their names."""
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, target / "model.safetensors")
    return target


def test_a_draft_layer_of_its_own(small: Path, small_tokens: list[object], tmp_path: Path) -> None:
    trunk = without(small, tmp_path / "trunk", "mtp.")
    config = trunk / "config.json"
    config.write_text(
        config.read_text().replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 0')
    )
    pack(str(small), tmp_path / "pack")
    assert tokens(trunk, ModelParts(mtp=str(tmp_path / "pack" / "mtp"))) == small_tokens
    expected = {n: v for n, v in drafts(opened(small, WHOLE)).items() if "experts." not in n}
    for directory in (small, tmp_path / "pack"):
        found = drafts(opened(trunk, ModelParts(mtp=str(directory))))
        assert all(torch.equal(found[name], values) for name, values in expected.items())
    with pytest.raises(WeightMismatch, match=r"--mtp .*: found no dense.txt, .* required a draft"):
        opened(trunk, ModelParts(mtp=str(tmp_path)))
    assert not drafts(opened(trunk, ModelParts(mtp=str(trunk))))


def drafts(source: TensorSource) -> dict[str, torch.Tensor]:
    return {name: source.get(name) for name in source.names() if name.startswith("mtp.")}


def test_another_draft_layer_replaces_the_models_own(small: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", CONFIG, seed=1)
    for model in (small, tmp_path / "pack"):
        if model is not small:
            pack(str(small), model)
        source = opened(model, ModelParts(mtp=str(other)))
        name = "mtp.fc_hidden.weight"
        assert torch.equal(source.get(name), opened(other, WHOLE).get(name))
        assert not torch.equal(source.get(name), opened(small, WHOLE).get(name))


def test_an_ngram_table_of_its_own(small: Path, small_tokens: list[object], tmp_path: Path) -> None:
    spec = read_spec(small)
    file = tmp_path / "m.gguf"
    write_gguf(open_source(small, spec), spec, small, file)
    bare = without(small, tmp_path / "bare", "ngram_embedding")
    parts = ModelParts(ple_gguf=str(file))
    assert tokens(bare, parts) == small_tokens
    shards = {name for name in opened(small, WHOLE).names() if ".shard_" in name}
    assert not shards & set(opened(small, parts).names())
    with pytest.raises(WeightMismatch, match="none.gguf: found no such file, required a GGUF"):
        opened(bare, ModelParts(ple_gguf=str(tmp_path / "none.gguf")))


def test_a_table_that_does_not_belong_to_the_model_is_refused(
    small: Path, quantised_gguf: Path, tmp_path: Path
) -> None:
    parts = ModelParts(ple_gguf=str(quantised_gguf))
    other = opened(small, parts)
    spec = read_spec(small)
    assert spec.ple is not None
    with pytest.raises(WeightMismatch, match="vocab_sizes: found .31, .* required .11, "):
        check_hash(Checkpoint(other), "model.layers.1.ple.", spec.ple, 0)
    spec = dataclasses.replace(read_spec(small), ple=None)
    with pytest.raises(ConfigMismatch, match="--ple-gguf .*found a model without n-gram embedding"):
        open_source(small, spec, parts)
    with pytest.raises(WeightMismatch, match=f"--ple-gguf .*found no tensor {TABLE_NAME}"):
        read_spec(small, ModelParts(ple_gguf=str(without_table(tmp_path))))


def without_table(directory: Path) -> Path:
    """A GGUF file of a model without n-gram embedding."""
    config = {**CONFIG, "ple_layer_ids": None}
    model = write_checkpoint(directory / "plain", config)
    spec = read_spec(model)
    file = directory / "plain.gguf"
    write_gguf(open_source(model, spec), spec, model, file)
    return file
