"""Tokenizer and template: beside the weights, or out of a GGUF file's metadata while the server runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest

from engine.sources.gguf_text import text_metadata
from engine.sources.gguf_writer import add_metadata
from gateway.errors import TokenizerError
from gateway.model_files import load_model_files
from gateway.text_files import text_directory
from scheduler.config import EngineConfig, ModelParts, model_path

TEXT = "Grüße,\n  2 + 2 = 4 <|im_start|>"


def write_metadata(file: Path, *, with_text: bool = True) -> Path:
    writer = gguf.GGUFWriter(file, "qwen4exp")
    if with_text:
        add_metadata(writer, text_metadata(model_path("default"), 8192))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return file


def test_text_comes_out_of_the_file_and_goes_when_the_server_ends(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "m.gguf")
    shipped = load_model_files(model_path("default"))
    pack = tmp_path / "pack"
    pack.mkdir()
    with text_directory(
        EngineConfig(model=str(pack), parts=ModelParts(native=str(file)))
    ) as directory:
        made = load_model_files(directory)
    assert not directory.exists()
    assert made.encoder.encode_plain(TEXT, parse_special=True) == shipped.encoder.encode_plain(
        TEXT, parse_special=True
    )
    assert made.turn_token_id == shipped.turn_token_id
    assert set(made.defaults.stop_token_ids) == set(shipped.defaults.stop_token_ids)
    shutil.copy(model_path("default") / "tokenizer.json", tmp_path)
    with text_directory(EngineConfig(model=str(file))) as directory:
        assert directory == tmp_path


def test_a_file_without_tokenizer_is_told(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "m.gguf", with_text=False)
    with (
        pytest.raises(TokenizerError, match="m.gguf: found no tokenizer in its metadata"),
        text_directory(EngineConfig(model=str(file))),
    ):
        pass
