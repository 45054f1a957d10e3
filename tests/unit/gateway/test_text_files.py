"""Tokenizer and template: beside the weights, or out of a GGUF file's metadata while the server runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from engine.sources.gguf_text import text_metadata
from engine.sources.gguf_writer import add_metadata
from gateway.errors import TokenizerError
from gateway.model_files import load_model_files
from gateway.text_files import remove_left, text_directory
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


def ended_process() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen((sys.executable, "-c", ""))
    process.wait()
    return process.pid


def test_only_what_a_dead_server_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.text_files.gettempdir", lambda: str(tmp_path))
    gone = ended_process()
    elsewhere = tmp_path / "elsewhere"
    kept = [
        f"stratagate-text-{os.getpid()}-a",
        f"stratagate-text-{gone}-locked",
        "stratagate-text-old",
        f"other-{gone}-a",
        "elsewhere",
    ]
    for name in (*kept, f"stratagate-text-{gone}-a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    (tmp_path / f"stratagate-text-{gone}-link").symlink_to(elsewhere)
    (tmp_path / f"stratagate-text-{gone}-file").touch()
    held = os.open(tmp_path / kept[1], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    remove_left()
    os.close(held)
    left = {path.name for path in tmp_path.iterdir()}
    links = {f"stratagate-text-{gone}-link", f"stratagate-text-{gone}-file"}
    assert left == {*kept, *links}
    assert all((tmp_path / name / "tokenizer.json").exists() for name in kept)


def test_what_another_user_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.text_files.gettempdir", lambda: str(tmp_path))
    directory = tmp_path / f"stratagate-text-{ended_process()}-a"
    directory.mkdir()
    monkeypatch.setattr("gateway.text_files.os.getuid", lambda: directory.stat().st_uid + 1)
    remove_left()
    assert directory.exists()


def test_a_killed_server_s_directory_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_metadata(tmp_path / "m.gguf")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("gateway.text_files.gettempdir", lambda: str(tmp_path))
    code = (
        "import os, sys; from gateway.text_files import text_directory\n"
        "from scheduler.config import EngineConfig\n"
        "with text_directory(EngineConfig(model=sys.argv[1])) as directory:\n"
        "    print(directory, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = (sys.executable, "-c", code, str(file))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.parent == tmp_path
    assert (left / "tokenizer.json").exists()
    remove_left()
    assert not left.exists()
