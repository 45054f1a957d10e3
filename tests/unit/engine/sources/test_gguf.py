"""GGUF files: geometry out of metadata, text files both ways, and what broken files get."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import model_path
from engine.errors import ConfigMismatch, WeightMismatch
from engine.model_spec import spec_from_config
from engine.ple_table import MappedRows
from engine.sources.ggml_export import q8_bytes
from engine.sources.ggml_source import log_decay
from engine.sources.gguf_files import GgufFiles
from engine.sources.gguf_metadata import config_from_metadata, metadata_from_spec
from engine.sources.gguf_text import text_metadata, write_text_files
from engine.sources.gguf_writer import write_gguf
from engine.sources.opening import open_source, read_spec
from engine.weights import Checkpoint
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

REAL = spec_from_config(REAL_TEXT_CONFIG, name="real")


def real_metadata(**changes: Any) -> dict[str, Any]:
    values = {f"qwen4exp.{key}": value for key, value in metadata_from_spec(REAL).items()}
    return values | {"general.architecture": "qwen4exp"} | changes


@pytest.fixture(scope="module")
def default_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = model_path("default")
    spec = read_spec(path)
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(open_source(path, spec), spec, path, file)
    return file


def test_the_large_model_comes_back_from_its_metadata() -> None:
    metadata = real_metadata()
    # The draft layer, the last, selects blocks too.
    assert metadata["qwen4exp.attention.compress_ratios"] == [0, 0, 0, 4] * 12 + [4]
    # Written as fp32.
    metadata["qwen4exp.attention.layer_norm_rms_epsilon"] = float(np.float32(1e-6))
    config = config_from_metadata(metadata, vocab_size=248320, table_rows=320_001_536)
    spec = spec_from_config(config, name="real")
    assert spec.ple is not None
    assert REAL.ple is not None
    assert spec.norm_eps == 1e-6
    # A file does not say how the table was cut, nor the number that the primes were counted from.
    assert spec.ple.multipliers(0) == REAL.ple.multipliers(0)
    assert spec.ple.head_vocab_sizes(0) == REAL.ple.head_vocab_sizes(0)
    assert spec.ple.num_rows(0) == REAL.ple.num_rows(0)
    same_ple = dataclasses.replace(spec.ple, num_shards=128, vocab_base=20_000_000)
    assert dataclasses.replace(spec, ple=same_ple) == REAL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "qwen35moe"},
            "general.architecture: found 'qwen35moe', required 'qwen4exp'",
        ),
        (
            {"qwen4exp.attention.compress_ratios": [0, 0, 4, 0] * 12},
            r"layer_types\[7\]: found 'linear_attention'|layer_types",
        ),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = real_metadata(**changes)
    with pytest.raises(ConfigMismatch, match=message):
        config = config_from_metadata(metadata, vocab_size=248320, table_rows=None)
        spec_from_config(config, name="x")


def test_a_missing_key_is_named() -> None:
    metadata = real_metadata()
    del metadata["qwen4exp.ssm.state_size"]
    with pytest.raises(ConfigMismatch, match=r"qwen4exp\.ssm\.state_size: found no such key"):
        config_from_metadata(metadata, vocab_size=248320, table_rows=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": "silu"}, "output_gate_type: found 'silu', required 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob: found false, required true"),
        ({"ple_layer_ids": [2, 3]}, r"ple_layer_ids: found \(1, 2\), required one layer"),
    ],
)
def test_what_the_format_cannot_say_is_refused(changes: dict[str, Any], message: str) -> None:
    spec = spec_from_config({**REAL_TEXT_CONFIG, **changes}, name="x")
    with pytest.raises(ConfigMismatch, match=message):
        metadata_from_spec(spec)


@pytest.mark.parametrize("bad", [0.0, 0.5])
def test_a_decay_that_no_exponential_gives_is_refused(bad: float) -> None:
    with pytest.raises(WeightMismatch, match="ssm_a: found values of 0 or above"):
        log_decay(torch.tensor([-1.0, bad]))


def test_a_decay_has_a_logarithm_that_gives_it_back() -> None:
    generator = torch.Generator().manual_seed(5)
    logs = torch.cat(
        (torch.randn(5000, generator=generator) * 4, torch.linspace(-80, 80, 5001), torch.zeros(1))
    )
    decay = -logs.exp()
    assert torch.equal(-log_decay(decay).exp(), decay)


def test_tokenizer_and_template_come_back(default_gguf: Path, tmp_path: Path) -> None:
    original = model_path("default")
    write_text_files(GgufFiles(default_gguf, with_text=True).metadata, tmp_path)
    first = Tokenizer.from_file(str(original / "tokenizer.json"))
    second = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    sentence = "<|im_start|>user\nWhat's 12 + 345?\n\n  Café\u0301 — naïve <think>ok</think>\t!\r\n"
    assert first.encode(sentence).ids == second.encode(sentence).ids
    assert first.get_vocab() == second.get_vocab()
    ids = first.encode(sentence).ids
    assert first.decode(ids) == second.decode(ids)
    for name in ("chat_template.jinja",):
        assert (tmp_path / name).read_bytes() == (original / name).read_bytes()
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == json.loads((original / "generation_config.json").read_text())["eos_token_id"]


def test_a_tokenizer_without_a_name_is_refused(tmp_path: Path) -> None:
    assert text_metadata(tmp_path, 8) == {}
    tokenizer = json.loads((model_path("default") / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "x+"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigMismatch, match=r"found a pre-tokenizer that splits by 'x\+'"):
        text_metadata(tmp_path, 8192)
    with pytest.raises(ConfigMismatch, match=r"tokenizer\.ggml\.model: found 'llama', required"):
        write_text_files({"tokenizer.ggml.model": "llama"}, tmp_path)


def write_small(file: Path, **tensors: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(file, "qwen4exp")
    for name, tensor in tensors.items():
        writer.add_tensor(name.replace("__", "."), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_truncated_file_is_refused(default_gguf: Path, tmp_path: Path) -> None:
    for size in (100, 200_000, default_gguf.stat().st_size - 5000):
        file = tmp_path / f"{size}.gguf"
        with default_gguf.open("rb") as whole:
            file.write_bytes(whole.read(size))
        with pytest.raises(
            WeightMismatch, match=rf"{size}\.gguf: .*found {size} bytes, required at least \d+$"
        ):
            GgufFiles(file)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGXX" + bytes(100))
    with pytest.raises(WeightMismatch, match=r"a\.gguf: not a readable GGUF file"):
        GgufFiles(tmp_path / "a.gguf")
    with pytest.raises(WeightMismatch, match="found no such file, required a GGUF file"):
        read_spec(tmp_path / "b.gguf")


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    file = write_small(tmp_path / "a.gguf", token_embd__weight=np.zeros((2, 2), np.int32))
    with pytest.raises(WeightMismatch, match=r"a\.gguf: token_embd\.weight: found GGML type 26"):
        GgufFiles(file)


def test_all_shards_must_be_there(default_gguf: Path, tmp_path: Path) -> None:
    shutil.copy(default_gguf, tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(WeightMismatch, match=r"found no m-00002-of-00002\.gguf, required all 2"):
        GgufFiles(tmp_path / "m-00001-of-00002.gguf")
    shutil.copy(default_gguf, tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(WeightMismatch, match="found in two shards, required in one"):
        GgufFiles(tmp_path / "m-00001-of-00002.gguf")


def test_missing_misshapen_and_left_over_tensors_are_named(default_gguf: Path) -> None:
    spec = read_spec(default_gguf)
    source = open_source(default_gguf, spec)
    with Checkpoint(source) as checkpoint:
        name = "model.layers.0.linear_attn.conv1d.weight"
        with pytest.raises(WeightMismatch, match=r"conv1d\.weight: found shape \[1024, 1, 4\]"):
            checkpoint.take(name, (1024, 1, 3))
        with pytest.raises(WeightMismatch, match="found no such tensor"):
            checkpoint.take("model.layers.0.self_attn.q_proj.weight", (1, 1))
    fewer = dataclasses.replace(spec, num_draft_layers=0)
    left = set(open_source(default_gguf, fewer).names()) - set(source.names())
    assert "blk.8.nextn.eh_proj.weight" in left
    assert all(name.startswith("blk.8.") for name in left)
    more = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, num_experts=33))
    with pytest.raises(WeightMismatch, match="ffn_gate_exps.weight: found 32 experts, required"):
        open_source(default_gguf, more).shape("model.layers.0.mlp.experts.32.gate_proj.weight")


def test_rows_and_ranges_read_only_their_part(default_gguf: Path) -> None:
    source = open_source(default_gguf, read_spec(default_gguf))
    for name in ("model.embed_tokens.weight", "model.layers.0.linear_attn.out_proj.weight"):
        assert torch.equal(source.rows(name, 5, 9), source.get(name)[5:9])
    held = source.stored_rows("model.embed_tokens.weight")
    assert held is not None
    rows = torch.tensor([7, 0, 8191])
    assert torch.equal(MappedRows(held).read(rows), source.get("model.embed_tokens.weight")[rows])
    assert source.stored_rows("model.layers.0.linear_attn.out_proj.weight") is None
    assert source.codes("model.embed_tokens.weight") is None


def test_dtypes_are_told_without_reading(default_gguf: Path) -> None:
    source = open_source(default_gguf, read_spec(default_gguf))
    told = {name: source.dtype(name) for name in source.names()}
    for name, dtype in told.items():
        codes = source.codes(name) if dtype == torch.int8 else None
        given = source.get(name) if codes is None else codes.codes
        assert (name, given.dtype) == (name, dtype)


def test_q8_keeps_codes_and_rounds_scales_alone(tmp_path: Path) -> None:
    path = model_path("default")
    spec = read_spec(path)
    write_gguf(open_source(path, spec), spec, path, tmp_path / "q8.gguf", q8=True)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "q8.gguf").tensors}
    assert kinds["output.weight"] == kinds["blk.3.ffn_up_exps.weight"] == "Q8_0"
    assert kinds["blk.3.ffn_down_exps.weight"] == "F16"  # rows of 40
    assert kinds["blk.3.ffn_gate_inp.weight"] == "BF16"
    assert kinds["blk.0.ssm_conv1d.weight"] == kinds["blk.0.ssm_norm.weight"] == "F32"
    wide = read_spec(tmp_path / "q8.gguf")
    original, rounded = open_source(path, spec), open_source(tmp_path / "q8.gguf", wide)
    for name in ("lm_head.weight", "model.layers.0.linear_attn.out_proj.weight"):
        held = original.codes(name)
        assert held is not None
        scales = held.scales.to(torch.float16).to(torch.float32)
        assert torch.equal(rounded.get(name), held.codes * scales.unsqueeze(-1))
    held = original.codes("model.layers.3.mlp.experts.down_proj")
    assert held is not None
    values = held.codes[5] * held.scales[5].unsqueeze(-1)
    found = rounded.get("model.layers.3.mlp.experts.5.down_proj.weight")
    assert torch.equal(found, values.to(torch.float16))
    # The n-gram embedding has 16 heads of 16 columns, and of 24 where it is as wide as the residual.
    assert wide.ple is not None
    assert (wide.ple.embed_dim, wide.ple.head_dim) == (384, 24)
    name = "model.layers.1.ple.key_proj.weight"
    held = original.codes(name)
    assert held is not None
    found = rounded.get(name).unflatten(-1, (16, 24))
    values = held.codes * held.scales.to(torch.float16).to(torch.float32).unsqueeze(-1)
    assert torch.equal(found[..., :16], values.unflatten(-1, (16, 16)))
    assert not found[..., 16:].any()
    prefix = "model.layers.1.ple.ple_embedding.ngram_embedding"
    first = original.get(f"{prefix}.shard_0.weight")
    found = rounded.rows(f"{prefix}.weight", 0, len(first))
    assert torch.equal(found[:, :16], first.to(torch.float16))
    assert not found[:, 16:].any()


def test_a_scale_that_half_precision_cannot_hold_is_refused() -> None:
    codes = torch.ones(2, 32, dtype=torch.int8)
    with pytest.raises(WeightMismatch, match="found a value or scale of 70000, required at most"):
        q8_bytes((codes, torch.tensor([1.0, 7e4])))


def test_a_type_that_the_library_does_not_know_is_told(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "qwen4exp")
    writer.add_tensor("some.weight", np.zeros((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(file.read_bytes())
    # The type stands behind the name, the number of axes and both of them.
    at = data.index(b"some.weight") + len(b"some.weight") + 4 + 2 * 8
    assert data[at : at + 4] == b"\0\0\0\0"
    data[at] = 42
    file.write_bytes(data)
    with pytest.raises(
        WeightMismatch, match=r"does not know \(Q2_0 is 42\): .*42.* is not a valid"
    ):
        GgufFiles(file)
