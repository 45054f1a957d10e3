"""Conversation files: whole or refused, whatever the disk, a crash or another model did to them."""

from __future__ import annotations

import errno
import logging
import os
import struct
from pathlib import Path

import pytest

from engine import loading, parked_file
from engine.config import EngineConfig
from engine.errors import FilesUnusable, WeightMismatch
from engine.fingerprint import model_fingerprint
from engine.interface import KeptCheckpoint, ReadFile, WriteFile
from engine.parked_files import FileLayout, FilesDirectory, Finished, ParkedFiles

BLOCK_BYTES = 320
LAYOUT = FileLayout(fingerprint=b"m" * 16, block_bytes=BLOCK_BYTES, blocks_per_checkpoint=2)
KEYS = tuple(KeptCheckpoint(position=n, digest=bytes([n]) * 32) for n in (64, 100))
ORDER = WriteFile(file_id="abc", checkpoints=KEYS, checkpoint_ids=(5, 6), page_ids=(1, 2))
CELLS = (63, None)
BLOCKS = [bytes([i]) * BLOCK_BYTES for i in range(6)]
"""Two pages, then two checkpoints of two blocks."""
WHOLE = ReadFile(file_id="abc", checkpoints=KEYS, checkpoint_ids=(7, 8), page_ids=(3, 4))
FIRST = ReadFile(file_id="abc", checkpoints=KEYS[:1], checkpoint_ids=(7,), page_ids=(3,))


def nothing() -> None:
    pass


def result(files: ParkedFiles) -> Finished:
    while True:
        found = files.take_finished(wait=True)
        if found:
            return found[0]


def write(files: ParkedFiles) -> bool:
    files.write(ORDER, CELLS, [memoryview(block) for block in BLOCKS], nothing)
    return result(files).done.ok


def read(files: ParkedFiles, order: ReadFile) -> tuple[Finished, list[bytes]]:
    memory = [
        bytearray(BLOCK_BYTES) for _ in range(len(order.page_ids) + 2 * len(order.checkpoints))
    ]
    files.read(order, [memoryview(block) for block in memory], nothing)
    return result(files), [bytes(block) for block in memory]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with one file."""
    files = ParkedFiles(FilesDirectory(tmp_path), LAYOUT)
    assert write(files)
    files.close()
    return tmp_path


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*.parked")
    return path


def test_what_was_written_is_read_after_a_restart(written: Path) -> None:
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    (kept,) = files.kept
    assert (kept.file_id, kept.checkpoints) == ("abc", KEYS)
    assert kept.num_bytes == only_file(written).stat().st_size
    finished, memory = read(files, WHOLE)
    assert finished.done.ok
    assert [mark.num_draft_cells for mark in finished.marks] == [63, None]
    assert memory == BLOCKS
    finished, memory = read(files, FIRST)
    assert [mark.key for mark in finished.marks] == list(KEYS[:1])
    assert memory == [BLOCKS[0], BLOCKS[2], BLOCKS[3]]
    files.close()


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("keep", [0, 10, 200, 4096, 4096 + 6 * BLOCK_BYTES - 1])
def test_a_truncated_file_is_refused_at_the_start(
    written: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(only_file(written), keep)
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    assert files.kept == ()
    assert list(written.glob("*.parked")) == []
    assert "is refused and deleted" in caplog.text
    files.close()


def test_a_file_that_cannot_be_deleted_is_told(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(only_file(written), 10)

    def denied(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", denied)
    assert ParkedFiles(FilesDirectory(written), LAYOUT).kept == ()
    assert "cannot be deleted and stays" in caplog.text


@pytest.mark.parametrize("offset", [0, 13, 30, 100])
def test_a_flipped_byte_in_the_header_is_found_at_the_start(written: Path, offset: int) -> None:
    damage(only_file(written), offset)
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    assert files.kept == ()
    files.close()


@pytest.mark.parametrize("block", range(6))
def test_a_flipped_byte_in_a_block_is_found_when_it_is_read(
    written: Path, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    damage(only_file(written), 4096 + block * BLOCK_BYTES + 17)
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    assert len(files.kept) == 1
    finished, _ = read(files, WHOLE)
    assert not finished.done.ok
    assert finished.marks == ()
    assert f"block {block} of 6 does not have its checksum" in caplog.text
    assert list(written.glob("*.parked")) == []
    finished, _ = read(files, WHOLE)
    assert not finished.done.ok
    files.close()


def test_a_file_that_shrank_behind_our_back_is_refused(written: Path) -> None:
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    os.truncate(only_file(written), 5000)
    assert not read(files, WHOLE)[0].done.ok
    files.close()


def test_a_file_of_another_model_is_never_used(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = FileLayout(fingerprint=b"n" * 16, block_bytes=BLOCK_BYTES, blocks_per_checkpoint=2)
    files = ParkedFiles(FilesDirectory(written), other)
    (kept,) = files.kept
    assert kept.checkpoints == ()
    assert f"of model {b'm'.hex() * 16}, required {b'n'.hex() * 16}" in caplog.text
    assert not read(files, WHOLE)[0].done.ok
    assert only_file(written).exists()
    files.delete(kept.file_id)
    assert write(files)
    assert [path.name[:8] for path in written.glob("*.parked")] == ["6e6e6e6e"]
    files.close()


def test_a_file_of_another_version_is_never_used(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = only_file(written)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    path.write_bytes(data)
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    assert [kept.checkpoints for kept in files.kept] == [()]
    assert "version 2, required 1" in caplog.text
    files.close()


@pytest.mark.parametrize("name", ["copy.parked", "other.parked", "00000000-abc.parked"])
def test_a_copy_under_another_name_takes_no_files_place(written: Path, name: str) -> None:
    whole = only_file(written)
    (written / name).write_bytes(whole.read_bytes())
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    found = {kept.file_id: kept.checkpoints for kept in files.kept}
    assert found == {"abc": KEYS, name.removesuffix(".parked"): ()}
    files.delete(name.removesuffix(".parked"))
    files.close()
    assert only_file(written) == whole


@pytest.mark.parametrize("suffix", [".parked", ".part"])
def test_folders_and_links_do_not_stop_the_start(
    written: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    (written / f"folder{suffix}").mkdir()
    (written / f"broken{suffix}").symlink_to(written / "nowhere")
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    files.close()
    assert [kept.file_id for kept in files.kept] == ["abc"]
    assert caplog.text.count("is left alone: it is not a regular file") == 2
    assert (written / f"folder{suffix}").is_dir()
    assert (written / f"broken{suffix}").is_symlink()


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = ParkedFiles(FilesDirectory(tmp_path), LAYOUT)
    with monkeypatch.context() as patch:
        patch.setattr(parked_file.os, "fsync", full)
        assert not write(files)
    assert "is not written: No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert write(files)
    files.close()


def test_a_crash_before_the_renaming_leaves_nothing(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        """Nobody handles it: as if the process had ended here."""

    def die(_: Path, __: Path) -> Path:
        raise Crash

    path = only_file(written)
    header = parked_file.read_header(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(Crash):
            parked_file.write_file(
                written / "other.parked", header, [memoryview(b) for b in BLOCKS]
            )
    assert (written / "other.part").stat().st_size == path.stat().st_size
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    assert [kept.file_id for kept in files.kept] == ["abc"]
    assert not list(written.glob("*.part"))
    files.close()


def test_only_the_servers_user_may_read_what_is_written(written: Path) -> None:
    path = only_file(written)
    header = parked_file.read_header(path)
    written.chmod(0o755)
    left = written / "other.part"
    left.touch()
    left.chmod(0o644)
    umask = os.umask(0)
    try:
        parked_file.write_file(written / "other.parked", header, [memoryview(b) for b in BLOCKS])
    finally:
        os.umask(umask)
    assert (written / "other.parked").stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_lock_is_its_users_alone_like_what_it_guards(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        for _ in range(2):
            files = ParkedFiles(FilesDirectory(tmp_path), LAYOUT)
            assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
            files.close()
            (tmp_path / "lock").chmod(0o644)  # as an earlier version made it
    finally:
        os.umask(umask)


def test_a_directory_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FilesUnusable, match=r"--conversation-cache-dir .*/file/dir: Not a dir"):
        FilesDirectory(tmp_path / "file" / "dir")
    with pytest.raises(FilesUnusable, match=r"--conversation-cache-dir /proc/"):
        FilesDirectory(Path("/proc/parked"))


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    files = ParkedFiles(FilesDirectory(tmp_path), LAYOUT)
    with pytest.raises(FilesUnusable, match="another server uses it"):
        FilesDirectory(tmp_path)
    files.close()
    ParkedFiles(FilesDirectory(tmp_path), LAYOUT).close()


def test_those_used_last_come_last(written: Path) -> None:
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    for file_id in ("b", "c"):
        order = WriteFile(file_id=file_id, checkpoints=KEYS, checkpoint_ids=(5, 6), page_ids=(1, 2))
        files.write(order, CELLS, [memoryview(block) for block in BLOCKS], nothing)
        assert result(files).done.ok
    for number, name in enumerate(("abc", "b", "c")):
        os.utime(written / f"6d6d6d6d-{name}.parked", (number, number))
    assert read(files, WHOLE)[0].done.ok
    files.close()
    files = ParkedFiles(FilesDirectory(written), LAYOUT)
    assert [kept.file_id for kept in files.kept] == ["b", "c", "abc"]
    files.close()


def test_a_models_fingerprint_is_of_its_weights_and_of_how_it_is_run(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(300_000))
    before = model_fingerprint(tmp_path, ("float32",))
    assert model_fingerprint(tmp_path, ("float32",)) == before
    assert model_fingerprint(tmp_path, ("bfloat16",)) != before
    assert model_fingerprint(weights, ("float32",)) == before
    weights.write_bytes(bytes([1]) * 300_000)
    assert model_fingerprint(tmp_path, ("float32",)) != before


def test_the_fingerprint_of_a_file_is_of_its_shards_too(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(b"a")
    second.write_bytes(b"b")
    before = model_fingerprint(first, ())
    (tmp_path / "n-00001-of-00002.gguf").write_bytes(b"other")
    assert model_fingerprint(first, ()) == before
    second.write_bytes(b"c")
    assert model_fingerprint(first, ()) != before


def test_a_start_claims_the_directory_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def fail(*_: object) -> None:
        loaded.append(None)
        raise WeightMismatch("damaged")

    monkeypatch.setattr(loading, "load_part", fail)
    config = EngineConfig(device="cpu", parked_dir=str(tmp_path))
    taken = FilesDirectory(tmp_path)
    with pytest.raises(FilesUnusable, match="another server uses it"):
        loading.load_engine(config)
    assert not loaded
    taken.close()
    with pytest.raises(WeightMismatch, match="damaged"):
        loading.load_engine(config)
    FilesDirectory(tmp_path).close()  # a start that failed has let go of it
