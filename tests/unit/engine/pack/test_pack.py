"""Packs written, continued, read and refused; a pack of a quantised GGUF file holds what the file holds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.config import EngineConfig, model_path
from engine.errors import EngineError, WeightMismatch
from engine.loading import load_engine
from engine.pack.budget import pack_budget, total
from engine.pack.draft import parse_dense, parse_format
from engine.pack.index import IndexRow, Kind, PackFile
from engine.pack.plan import plan_pack
from engine.pack.reader import open_pack, read_index
from engine.pack.stored import PromotedTensor
from engine.pack.writer import UNFINISHED, write_pack
from engine.ple_table import MappedRows
from engine.sources import ggml_types as types
from engine.sources.base import TensorSource
from engine.sources.mapped import MappedFile
from engine.sources.opening import open_source, read_spec
from engine.tools.app import app
from engine.tools.pack import pack
from engine.weights import Checkpoint
from tests.whole_source import whole


def silent(_name: str, _done: int, _total: int) -> None:
    """No bar."""


@pytest.fixture(scope="module")
def quantised_pack(quantised_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packs") / "small"
    pack(str(quantised_gguf), directory)
    return directory


@pytest.fixture(scope="module")
def default_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packs") / "default"
    pack("default", directory)
    return directory


def copied(directory: Path, target: Path) -> Path:
    return shutil.copytree(directory, target / "copy")


def assert_same(expected: TensorSource, found: TensorSource) -> None:
    wanted, given = whole(expected), whole(found)
    assert set(given) == set(wanted)
    for name, values in wanted.items():
        assert torch.equal(given[name], values), name


def assert_same_table(*models: Path) -> None:
    """Rows of a quantised n-gram table are read by themselves, dequantised as the whole table would be."""
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    for model in models:
        source = open_source(model, read_spec(model))
        stored = source.stored_rows(name)
        assert stored is not None
        rows = torch.tensor([source.shape(name)[0] - 1, 0, 17, 17])
        assert source.stored(name).type_name not in ("F32", "F16", "BF16")
        assert torch.equal(MappedRows(stored).read(rows), source.get(name)[rows])


def test_a_quantised_file_and_its_pack_hold_the_same(
    quantised_gguf: Path, quantised_pack: Path
) -> None:
    expected = open_source(quantised_gguf, read_spec(quantised_gguf))
    assert_same(expected, open_source(quantised_pack, read_spec(quantised_pack)))
    assert_same_table(quantised_gguf, quantised_pack)
    kinds = {row.kind for row in read_index(quantised_pack).rows}
    assert kinds == {Kind.PLANES, Kind.F32, Kind.BF16, Kind.F16, Kind.BLOCKS}
    assert (quantised_pack / "tokenizer.json").is_file()


def test_16_bit_floats_held_in_32_shrink_back_exactly(
    quantised_gguf: Path, quantised_pack: Path, tmp_path: Path
) -> None:
    pack(str(quantised_gguf), tmp_path / "wide", promote=True)
    spec = read_spec(quantised_pack)
    wide, narrow = open_pack(tmp_path / "wide", spec), open_pack(quantised_pack, spec)
    assert_same(narrow, wide)
    assert all(wide.get(n).dtype == narrow.get(n).dtype for n in wide.names())
    rows = read_index(tmp_path / "wide").rows
    kinds = {row.kind for row in rows if row.file is not PackFile.EXTRA}
    assert kinds == {Kind.PLANES, Kind.F32, Kind.BF16_IN_F32, Kind.F16_IN_F32, Kind.BLOCKS}
    assert read_index(tmp_path / "wide").pool_bytes == read_index(quantised_pack).pool_bytes


@pytest.mark.parametrize(
    ("kind", "value"), [(Kind.BF16_IN_F32, 1.001), (Kind.F16_IN_F32, 1e-9), (Kind.F16_IN_F32, 1e6)]
)
def test_a_value_that_16_bits_cannot_hold_is_refused(
    kind: Kind, value: float, tmp_path: Path
) -> None:
    values = torch.tensor([1.0, value, -0.0, 2.0])
    (tmp_path / "dense.bin").write_bytes(values.numpy().tobytes())
    row = IndexRow(
        name="w", file=PackFile.DENSE, kind=kind, src_off=0, src_bytes=16, dst_off=0, dst_bytes=8,
        ne0=2, ne1=2,
    )  # fmt: skip
    tensor = PromotedTensor(row=row, file=MappedFile(tmp_path / "dense.bin"))
    with pytest.raises(WeightMismatch, match="w: found values that are not torch"):
        tensor.values(0, 2)
    exact = tensor.values(1, 2)
    assert exact.tolist() == [[-0.0, 2.0]]
    assert torch.equal(exact.signbit(), torch.tensor([[True, False]]))


def test_int8_codes_come_through_a_pack(default_pack: Path) -> None:
    path = model_path("default")
    expected, found = (
        open_source(path, read_spec(path)),
        open_pack(default_pack, read_spec(default_pack)),
    )
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.in_proj_qkv.weight",
        "model.layers.0.linear_attn.out_proj.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    ):
        codes, held = expected.codes(name), found.codes(name)
        assert codes is not None
        assert held is not None
        assert torch.equal(codes.codes, held.codes)
        assert torch.equal(codes.scales, held.scales)
    for prefix in ("model.layers.3.mlp.experts.", "mtp.layers.0.mlp.experts."):
        for name in ("gate_up_proj", "down_proj"):
            codes, held = expected.codes(prefix + name), found.codes(prefix + name)
            assert codes is not None
            assert held is not None
            assert torch.equal(codes.codes, held.codes)
            assert torch.equal(codes.scales, held.scales)
            assert torch.equal(expected.rows(prefix + name, 5, 6), found.rows(prefix + name, 5, 6))
    assert found.codes("model.layers.0.linear_attn.A_log") is None


def test_a_whole_pack_has_nothing_missing_and_nothing_over(default_pack: Path) -> None:
    spec = read_spec(default_pack)
    with Checkpoint(open_pack(default_pack, spec)) as checkpoint:
        for name in open_pack(default_pack, spec).names():
            checkpoint.take(name, checkpoint.shape(name))
        checkpoint.finish()


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = model_path("default")
    spec = read_spec(path)
    plan = plan_pack(open_source(path, spec), spec, comment="from a test", origin="this one")
    write_pack(plan, tmp_path / "whole", silent)
    directory = tmp_path / "pack"

    class Stopped(Exception):
        pass

    stops = [plan.num_bytes // 10, plan.num_bytes // 2, plan.num_bytes * 9 // 10]
    kept = [-1]
    for stop in (*stops, None):

        def progress(_name: str, done: int, _total: int, limit: int | None = stop) -> None:
            if limit is not None and done >= limit:
                raise Stopped

        try:
            kept.append(write_pack(plan, directory, progress))
        except Stopped:
            assert not (directory / "index.txt").exists()
            # The end of what was written may be torn.
            torn = next(iter(directory.rglob("*.part")))
            torn.write_bytes(torn.read_bytes()[:-3])
    assert kept[-1] > plan.num_bytes * 7 // 10
    for file in (tmp_path / "whole").rglob("*"):
        if file.is_file():
            assert (
                directory / file.relative_to(tmp_path / "whole")
            ).read_bytes() == file.read_bytes()
    assert not (directory / UNFINISHED).exists()
    assert not list(directory.rglob("*.part"))


def test_another_source_does_not_go_on(tmp_path: Path) -> None:
    path = model_path("default")
    spec = read_spec(path)
    source = open_source(path, spec)

    def stop(_name: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    plan = plan_pack(source, spec, comment="x", origin="one")
    with pytest.raises(KeyboardInterrupt):
        write_pack(plan, tmp_path / "pack", stop)
    other = plan_pack(source, spec, comment="x", origin="two")
    with pytest.raises(WeightMismatch, match="found an unfinished pack of another source"):
        write_pack(other, tmp_path / "pack", silent)
    write_pack(plan, tmp_path / "pack", silent)
    with pytest.raises(WeightMismatch, match="found a pack, required a new directory"):
        write_pack(plan, tmp_path / "pack", silent)


@pytest.mark.parametrize(
    "file",
    ["dense.bin", "embd.bin", "extra.bin", "experts.bin", "mtp/dense.bin", "mtp/experts.bin"],
)
def test_a_file_of_another_size_is_refused(file: str, default_pack: Path, tmp_path: Path) -> None:
    directory = copied(default_pack, tmp_path)
    spec = read_spec(directory)
    size = (directory / file).stat().st_size
    for data in ((directory / file).read_bytes()[:-1], (directory / file).read_bytes() + b"x"):
        (directory / file).write_bytes(data)
        with pytest.raises(
            WeightMismatch, match=rf"{file}: found {len(data)} bytes, required {size}"
        ):
            open_pack(directory, spec)
        (directory / file).write_bytes(data[:size].ljust(size, b"\0"))
    (directory / file).unlink()
    with pytest.raises(WeightMismatch, match=rf"{file}: found 0 bytes, required {size}"):
        open_pack(directory, spec)


@pytest.mark.parametrize("file", ["native_experts.txt", "mtp/dense.txt", "mtp/experts.fmt"])
def test_a_missing_table_is_named(file: str, default_pack: Path, tmp_path: Path) -> None:
    directory = copied(default_pack, tmp_path)
    (directory / file).unlink()
    with pytest.raises(WeightMismatch, match=rf"{file}: cannot be read"):
        open_pack(directory, read_spec(directory))


def test_a_pack_without_its_draft_layer_says_what_to_do(default_pack: Path, tmp_path: Path) -> None:
    directory = copied(default_pack, tmp_path)
    shutil.rmtree(directory / "mtp")
    for kernels in ("torch", "compiled"):
        config = EngineConfig(model=str(directory), device="cpu", max_context=64, kernels=kernels)
        with pytest.raises(WeightMismatch, match=r"found no draft layer .*--mtp DIR.*--no-mtp"):
            load_engine(config)
        load_engine(replace(config, max_draft=0)).close()


def test_a_budget_of_a_pack_without_its_draft_layer_has_no_line_of_it(
    default_pack: Path, tmp_path: Path
) -> None:
    directory = copied(default_pack, tmp_path)
    shutil.rmtree(directory / "mtp")
    assert "MTP" in {line.part for line in pack_budget(default_pack, read_spec(default_pack))}
    assert "MTP" not in {line.part for line in pack_budget(directory, read_spec(directory))}


def test_a_draft_tensor_of_another_name_is_told(default_pack: Path, tmp_path: Path) -> None:
    directory = copied(default_pack, tmp_path)
    table = directory / "mtp" / "dense.txt"
    table.write_text(table.read_text().replace("pre_fc_norm_embedding.weight", "nope"))
    config = EngineConfig(model=str(directory), device="cpu", max_context=64)
    with pytest.raises(WeightMismatch, match=r"pre_fc_norm_embedding.*: found no such tensor"):
        load_engine(config)


def test_what_is_damaged_is_no_bare_configuration(default_pack: Path, tmp_path: Path) -> None:
    directory = copied(default_pack, tmp_path)
    dense = directory / "dense.bin"
    dense.write_bytes(dense.read_bytes()[:-1])
    for command in ("inspect", "plan"):
        result = CliRunner().invoke(app, [command, str(directory)])
        assert isinstance(result.exception, WeightMismatch), command


def test_a_target_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file", Path("/proc/x")):
        with pytest.raises(WeightMismatch, match="cannot be made a directory"):
            pack("default", target)


def test_tables_that_leave_tensors_elsewhere_are_named(default_pack: Path, tmp_path: Path) -> None:
    directory = copied(default_pack, tmp_path)
    spec = read_spec(directory)
    table = directory / "native_experts.txt"
    original = table.read_text()
    table.write_text(original.replace("in experts.bin", "in m-00001-of-00002.gguf"))
    with pytest.raises(
        WeightMismatch, match="in m-00001-of-00002.gguf: found .* left in a GGUF file, required"
    ):
        open_pack(directory, spec)
    table.write_text(original.replace("n_expert 32", "n_expert 31"))
    with pytest.raises(WeightMismatch, match="required"):
        open_pack(directory, spec)
    table.write_text(original)
    index = directory / "index.txt"
    rows = index.read_text().splitlines()
    rows[-1] = "blk.9.x 0 0 0 0 0 0 4 4 8 0 32 0 0 0 0 0 0 0"
    last = read_index(directory).rows[-1]
    rows[2] = rows[2].replace(rows[2].split()[4], str(last.dst_off))
    dense = directory / "dense.bin"
    dense.write_bytes(dense.read_bytes()[: last.src_off])
    index.write_text("\n".join(rows))
    with pytest.raises(
        WeightMismatch, match="index.txt .blk.9.x.: found blk.9.x left in a GGUF file"
    ):
        open_pack(directory, spec)


DENSE = [
    "fc_embedding.weight bf16 4 4 0 32",
    "pre_fc_norm_embedding.weight f32 1 4 256 16",
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "old", "new", "message"),
    [
        (1, "weight bf16", "we ight bf16", "row 1: found 7 fields, required 6"),
        (1, " 32", "", "row 1: found 5 fields, required 6"),
        (1, " 4 4 ", " 4 x ", "row 1 .*found 'x', required a whole number"),
        (1, "bf16", "bf17", "row 1 .*found 'bf17', required one of f32"),
        (1, " 32", " 31", "row 1 .*found bytes 31, required 32"),
        (2, " 256 ", " 32 ", "row 2 .*found offset 32, required 256"),
        (2, "pre_fc_norm_embedding", "fc_embedding", "found twice"),
    ],
)
def test_a_wrong_row_of_the_draft_layer_is_refused(
    row: int, old: str, new: str, message: str
) -> None:
    lines = list(DENSE)
    assert len(parse_dense("\n".join(lines))) == 2
    lines[row - 1] = lines[row - 1].replace(old, new)
    with pytest.raises(WeightMismatch, match=message):
        parse_dense("\n".join(lines))


def test_the_format_of_draft_experts_is_checked() -> None:
    assert parse_format("q8_0 8 8\n") == (types.Q8_0, types.Q8_0)
    for text, message in (
        ("q8_0 8", "required 'name gu_type d_type'"),
        ("q8_0 8 x", "required 'name gu_type d_type'"),
        ("q4_0 8 8", "found 'q4_0', required 'q8_0' for type 8"),
        ("q8_0 4 8", "found GGML type 4"),
    ):
        with pytest.raises(WeightMismatch, match=message):
            parse_format(text)


def test_the_budget_counts_both_ways(
    quantised_gguf: Path, quantised_pack: Path, tmp_path: Path
) -> None:
    spec = read_spec(quantised_pack)
    pack(str(quantised_gguf), tmp_path / "wide", promote=True)
    lines = {line.part: line for line in pack_budget(quantised_pack, spec)}
    wide = {line.part: line for line in pack_budget(tmp_path / "wide", spec)}
    # Held wide or not, the engine holds the same; the pack is larger by what shrinks back.
    for part, line in lines.items():
        assert wide[part].engine == line.engine
        assert wide[part].pack - line.pack == wide[part].shrunk - line.shrunk
        assert line.shrunk == 0
    assert sum(line.shrunk for line in wide.values()) > 0
    # Q8_0 and IQ4_NL: a scale of two bytes for 32 values becomes one of four. Layer 0 has IQ4_NL down, layer 1 Q8_0.
    values = spec.hidden * spec.moe.expert_dim
    assert lines["routed experts"].widened == 3 * 2 * (values // 32) * 2
    blobs = (quantised_pack / "experts.bin").stat().st_size
    assert lines["routed experts"].pack == blobs
    rows = read_index(quantised_pack).rows
    dense = sum(line.engine for p, line in lines.items() if p not in ("routed experts", "MTP"))
    assert dense == sum(row.dst_bytes for row in rows)
    assert total(tuple(lines.values())).pack == sum(line.pack for line in lines.values())


def test_the_commands(default_pack: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    text = runner.invoke(app, ["pack-budget", str(default_pack)]).output
    row = next(line for line in text.splitlines() if line.startswith("routed experts")).split()
    assert row[2:6] == ["24", "12,271,616", "0", "+0"]
    assert runner.invoke(app, ["pack-budget", str(tmp_path)]).exit_code == 2
    assert runner.invoke(app, ["pack", str(default_pack), str(tmp_path / "x")]).exit_code == 2
    inspected = runner.invoke(app, ["inspect", str(default_pack)]).output
    stored = inspected[inspected.index("stored in ") :].splitlines()
    row = next(line for line in stored if line.startswith("routed experts")).split()
    assert row[2:] == ["12,271,616", "I8_ROW"]
    with pytest.raises(EngineError, match="required a new directory"):
        runner.invoke(app, ["pack", "default", str(default_pack)], catch_exceptions=False)
