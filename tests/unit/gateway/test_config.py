from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from gateway import cli, config
from gateway.config import AppConfig, ServeOptions, load_config, read_api_keys
from gateway.errors import ConfigError
from scheduler.config import ModelParts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

runner = CliRunner()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[AppConfig]:
    """Configurations that `serve` would have started a server with."""
    seen: list[AppConfig] = []

    def run_server(chosen: AppConfig, version: str) -> int:
        assert version
        seen.append(chosen)
        return 0

    monkeypatch.setattr("gateway.server.run_server", run_server)
    return seen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "abc"], ["--port", "abc", "0 to 65535"]),
        (["--port", "70000"], ["--port", "70000", "0 to 65535"]),
        (["--port", "-1"], ["--port", "-1"]),
        (["--batch", "1e9"], ["--batch", "1e9", "1 to 4"]),
        (["--batch", "0"], ["--batch", "1 to 4"]),
        (["--batch", "4.0"], ["--batch", "4.0"]),
        (["--batch", "٤"], ["--batch"]),
        (["--spec", "5"], ["--spec", "0 to 4"]),
        (["--spec", "0"], ["--spec", "draft layer", "--no-mtp"]),
        (["--no-mtp", "--spec", "4"], ["--no-mtp", "--spec is 4"]),
        (["--batch", "5"], ["--batch", "1 to 4"]),
        (["--model", ""], ["--model is empty"]),
        ([""], ["--model is empty"]),
        (["--native", "m.bin"], ["--native must be a GGUF file", "m.bin"]),
        (["--pack", "/nowhere"], ["--pack must be a directory with an index.txt", "/nowhere"]),
        (["--native", "m.gguf", "--model", "m"], ["--model and --native each name a model"]),
        (["--native", "m.gguf", "--model", "default"], ["--model and --native each name a model"]),
        (["default", "--pack", "p"], ["--model and --pack each name a model"]),
        (
            ["--native", "m.gguf", "--pack", "p", "--model", "m"],
            ["--model and --native and --pack each name a model"],
        ),
        (["--spec-min-p", "NaN"], ["--spec-min-p", "NaN", "0 to 1"]),
        (["--spec-min-p", "1.5"], ["--spec-min-p", "0 to 1"]),
        (["--spec-min-p", "0_1"], ["--spec-min-p"]),
        (["--drain-s", "inf"], ["--drain-s", "inf"]),
        (["--prefill", "0"], ["--prefill", "auto"]),
        (["--prefill", "lots"], ["--prefill", "lots"]),
        (["--max-context", "1"], ["--max-context", "16"]),
        (["--max-queue", ""], ["--max-queue"]),
        (["--expert-cache", "some"], ["--expert-cache", "auto or a whole number from 0", "some"]),
        (["--expert-cache", "-1"], ["--expert-cache", "-1"]),
        (["--expert-cache", "1e9"], ["--expert-cache", "1e9"]),
        (["--pool-workers", "1025"], ["--pool-workers", "0 to 1024"]),
        (["--pool-workers", "-1"], ["--pool-workers", "-1"]),
        (["--pool-workers", "NaN"], ["--pool-workers", "NaN"]),
        (["--vram-reserve-mib", "abc"], ["--vram-reserve-mib", "abc", "0 to 16777216"]),
        (["--vram-reserve-mib", "1e9"], ["--vram-reserve-mib", "1e9"]),
        (["--ple-io", "disk"], ["--ple-io", "ram, mmap, direct", "disk"]),
        (["--kv-resident", "abc"], ["--kv-resident", "abc"]),
        (["--kv-resident", "32768"], ["--kv-resident is 32768", "give 0"]),
        (["--batch-groups", "0"], ["--batch-groups", "1 to 4"]),
        (["--batch-groups", "3", "--batch", "2"], ["--batch-groups is 3", "--batch is 2"]),
        (["--batch-groups", "2", "--conversation-cache-dir", "d"], ["--conversation-cache-dir"]),
        (["--batch-groups", "2", "--expert-cache", "9"], ["--batch-groups is 2", "--expert-cache"]),
        (["--batch-groups", "2", "--expert-profile", "p"], ["--expert-profile"]),
        (["--vision"], ["--vision", "no image encoder"]),
        (["--mtp", "drafts", "--no-mtp"], ["--no-mtp serves without", "--mtp is drafts"]),
        (["--ple-gguf", "t.bin"], ["--ple-gguf must be a GGUF file", "t.bin"]),
        (["--conversation-cache-slots", "-1"], ["--conversation-cache-slots", "0 to 100000"]),
        (["--conversation-cache-mib", "1e3"], ["--conversation-cache-mib", "1e3"]),
        (["--conversation-cache-min-free-mib", "NaN"], ["--conversation-cache-min-free-mib"]),
        (["--conversation-cache-dir", "d", "--conversation-cache-mib", "0"], ["-mib is 0"]),
        (["--conversation-cache-disk-mib", "5"], ["--conversation-cache-dir", "not given"]),
        (["--conversation-cache-disk-mib", "0"], ["--conversation-cache-disk-mib", "1 to"]),
        (["--resume", "quick"], ["--resume", "exact, fast", "quick"]),
        (["--threads", "0"], ["--threads"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--device", "cuda:x"], ["--device"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--log-level", "loud"], ["--log-level", "loud"]),
        (["--kv", "int4"], ["--kv", "int4", "auto, fp32, bf16, int8"]),
        (["--vision"], ["--vision"]),
        (["--api-key-file", "/nonexistent"], ["--api-key-file", "/nonexistent"]),
        (["a", "--model", "b"], ["named twice"]),
        (["--otlp-endpoint", "collector:4318"], ["--otlp-endpoint", "collector:4318", "http"]),
        (["--cors-origin", ""], ["--cors-origin", "https://chat.example", "found ''"]),
        (["--cors-origin", "https://a", "--cors-origin", "junk"], ["--cors-origin", "'junk'"]),
        (["--cors-origin", "https://a/"], ["--cors-origin", "'https://a/'"]),
        (["--cors-origin", "https://A"], ["--cors-origin", "lower case", "'https://A'"]),
        (["--allowed-host", ""], ["--allowed-host", "box.lan", "found ''"]),
        (["--allowed-host", "a b"], ["--allowed-host", "'a b'"]),
        (["--allowed-host", "http://x"], ["--allowed-host", "without scheme", "'http://x'"]),
        (["--allowed-host", "x:80"], ["--allowed-host", "'x:80'"]),
        (["--host", ""], ["--host", "must be an address", "found ''"]),
        (["--served-model-name", ""], ["--served-model-name", "1 or more", "found ''"]),
        (["--served-model-name", "a\nb"], ["--served-model-name", "printable"]),
        (["--served-model-name", " a"], ["--served-model-name", "' a'"]),
        (["--otlp-endpoint", "http://"], ["--otlp-endpoint"]),
        (["--otlp-endpoint", "http://a:99999"], ["--otlp-endpoint"]),
        (["--otlp-endpoint", "http://a/?b"], ["--otlp-endpoint"]),
    ],
)
def test_bad_options_exit_2_and_say_why(
    started: list[AppConfig], arguments: list[str], words: list[str]
) -> None:
    result = runner.invoke(cli.app, ["serve", *arguments], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert started == []
    for word in words:
        assert word in result.output
    assert result.output.startswith("stratagate: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [
        "--api-key-file",
        "--conversation-cache-dir",
        "--expert-profile",
        "--mtp",
        "--native",
        "--pack",
        "--ple-gguf",
    ],
)
def test_no_empty_path_becomes_the_current_directory(started: list[AppConfig], option: str) -> None:
    result = runner.invoke(cli.app, ["serve", option, ""], env={"COLUMNS": "300", "TERM": "dumb"})
    assert (result.exit_code, started) == (2, [])
    assert f"'{option}'" in result.output
    assert "must be a path; found ''" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serf"], ["serf", "serve"]),
        (["serve", "--port"], ["--port"]),
        (["--nonsense"], ["--nonsense"]),
        (["serve", "a", "b"], ["b"]),
        (["serve", "--port", "x" * 5000 + "\n\n"], ["--port", "0 to 65535"]),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(arguments: list[str], words: list[str]) -> None:
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("stratagate: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 300
    for word in words:
        assert word in result.stderr


def test_a_fault_of_the_programme_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(chosen: AppConfig, version: str) -> int:
        raise RuntimeError(f"broken {chosen} {version}")

    monkeypatch.setattr("gateway.server.run_server", fail)
    assert isinstance(runner.invoke(cli.app, ["serve"]).exception, RuntimeError)


def test_a_pool_of_no_threads_can_be_asked_for(started: list[AppConfig]) -> None:
    for given, found in (([], None), (["--pool-workers", "0"], 0)):
        assert runner.invoke(cli.app, ["serve", *given]).exit_code == 0
        assert started.pop().scheduler.engine.pool_workers == found


def test_options_arrive(started: list[AppConfig], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:k1\n")
    arguments = (
        f"serve DIR --port 0 --batch 2 --max-context 512 --spec 3 --spec-min-p 0.25 --prefill 128 "
        f"--max-queue 9 --drain-s 1.5 --device cuda:1 --dtype float32 --kv int8 --threads 2 "
        f"--served-model-name m --cors-origin https://a --cors-origin https://b "
        f"--conversation-cache-slots 7 --conversation-cache-mib 100 --conversation-cache-min-free-mib 3 "
        f"--expert-cache 12 --expert-profile p.bin --pool-workers 3 --vram-reserve-mib 900 --ple-io mmap "
        f"--kv-resident 0 --batch-mtp --batch-groups 1 "
        f"--otlp-endpoint http://127.0.0.1:4318 --log-level error --host ::1 --api-key-file {keys}"
    )
    result = runner.invoke(cli.app, arguments.split())
    assert result.exit_code == 0, result.output
    gateway, scheduler = started[0].gateway, started[0].scheduler
    engine = scheduler.engine
    assert (engine.model, engine.num_slots, engine.max_context) == ("DIR", 2, 512)
    assert (engine.max_draft, scheduler.spec_min_p, engine.chunk_tokens) == (3, 0.25, 128)
    assert (engine.device, engine.dtype, engine.threads) == ("cuda:1", "float32", 2)
    assert engine.kv == "int8"
    assert (engine.expert_cache, engine.expert_profile) == (12, "p.bin")
    assert (engine.pool_workers, engine.vram_reserve_mib, engine.ple_io) == (3, 900, "mmap")
    assert (scheduler.max_queue, gateway.drain_s, gateway.port) == (9, 1.5, 0)
    cache = scheduler.cache
    assert (cache.max_conversations, cache.capacity_bytes) == (7, 100 * 2**20)
    assert cache.min_free_bytes == 3 * 2**20
    assert gateway.otlp_endpoint == "http://127.0.0.1:4318"
    assert gateway.cors_origins == ("https://a", "https://b")
    assert [key.name for key in gateway.api_keys] == ["ann"]
    assert (gateway.served_model_name, gateway.host, gateway.log_level) == ("m", "::1", "error")


def test_parts_of_the_model_arrive(started: list[AppConfig], tmp_path: Path) -> None:
    (tmp_path / "index.txt").touch()
    options = f"--pack {tmp_path} --native m.gguf --ple-gguf t.gguf --mtp drafts"
    result = runner.invoke(cli.app, ["serve", *options.split()])
    assert result.exit_code == 0, result.output
    engine = started[0].scheduler.engine
    assert engine.model == str(tmp_path)
    assert engine.parts == ModelParts(native="m.gguf", ple_gguf="t.gguf", mtp="drafts")
    runner.invoke(cli.app, ["serve", "--native", "m.gguf"])
    assert started[1].scheduler.engine.model == "m.gguf"
    assert started[1].scheduler.engine.parts == ModelParts()


def test_defaults_and_environment(started: list[AppConfig]) -> None:
    runner.invoke(cli.app, ["serve"])
    assert started[0] == load_config(ServeOptions())
    assert started[0].scheduler.engine.num_slots == 4
    runner.invoke(cli.app, ["serve", "--prefill", "auto"], env={"STRATAGATE_BATCH": "3"})
    assert started[1].scheduler.engine.num_slots == 3
    result = runner.invoke(cli.app, ["serve"], env={"STRATAGATE_BATCH": "x"})
    assert result.exit_code == 2


def test_no_mtp_is_the_way_without_drafts(started: list[AppConfig]) -> None:
    for arguments in (["--no-mtp"], ["--no-mtp", "--spec", "0"]):
        assert runner.invoke(cli.app, ["serve", *arguments]).exit_code == 0
    assert [chosen.scheduler.engine.max_draft for chosen in started] == [0, 0]


def test_origins_and_hosts_that_can_be_asked_for(started: list[AppConfig]) -> None:
    origins = ("*", "null", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md")
    hosts = ("Box.lan", "box", "my_box-1.example.com")
    options = [word for text in origins for word in ("--cors-origin", text)]
    options += [word for text in hosts for word in ("--allowed-host", text)]
    result = runner.invoke(cli.app, ["serve", *options, "--served-model-name", "my model/1"])
    assert result.exit_code == 0, result.output
    gateway = started[0].gateway
    assert (gateway.cors_origins, gateway.allowed_hosts) == (origins, hosts)
    assert gateway.served_model_name == "my model/1"


def test_version_and_help() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"stratagate {cli.version()}\n"
    assert "serve" in runner.invoke(cli.app, ["--help"]).output


@pytest.mark.parametrize("parse", [config.count(0, 9), config.number(0, 9)])
@pytest.mark.parametrize("text", ["", " 1", "1 ", "+1x", "0x1", "١", "10", "-1", "1" * 400])
def test_numbers_are_digits_and_nothing_else(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(ConfigError, match="0 to 9"):
        parse(text)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nann:secret-1\nsecret-2\n b : secret:3 \n")
    keys = read_api_keys(path)
    assert [(key.name, key.secret) for key in keys] == [
        ("ann", "secret-1"),
        ("key4", "secret-2"),
        ("b", "secret:3"),
    ]
    assert "secret-1" not in repr(keys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no key"),
        ("# only a comment\n", "no key"),
        ("ann:\n", "line 1"),
        ("a b\n", "line 1"),
        ("x:1\ny:1\n", "line 2: the same key twice"),
        (":secret\n", "line 1: a name"),
        ("schlüssel\n", "line 1"),
    ],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_api_keys(path)
    assert "secret" not in str(caught.value)


def test_a_gguf_file_or_a_pack_is_the_model(started: list[AppConfig], tmp_path: Path) -> None:
    (tmp_path / "index.txt").touch()
    for option, value in (("--native", "folder/m.gguf"), ("--pack", str(tmp_path))):
        assert runner.invoke(cli.app, ["serve", option, value]).exit_code == 0
        assert started[-1].scheduler.engine.model == value
        assert started[-1].gateway.served_model_name is None


def test_conversations_on_disk_belong_to_keys(tmp_path: Path) -> None:
    """A name that gets another key is somebody else; the key itself goes no further than its digest."""
    file = tmp_path / "keys"
    found: list[dict[str, str]] = []
    for secret in ("sk-one", "sk-two"):
        file.write_text(f"ann:{secret}\nbob:sk-bob\nbob:sk-bobs-other\n", encoding="utf-8")
        config = load_config(ServeOptions(api_key_file=file)).scheduler
        assert secret not in repr(config)
        found.append(dict(config.owner_identities))
    assert found[0].keys() == {"ann", "bob"}
    assert found[0]["bob"] == found[1]["bob"]
    assert found[0]["ann"] != found[1]["ann"]
    assert all(len(digest) == 64 for digest in found[0].values())


def test_options_of_the_disk_tier(started: list[AppConfig], tmp_path: Path) -> None:
    arguments = ["--conversation-cache-dir", str(tmp_path), "--resume", "fast"]
    runner.invoke(cli.app, ["serve", *arguments])
    runner.invoke(cli.app, ["serve", *arguments, "--conversation-cache-disk-mib", "3"])
    runner.invoke(cli.app, ["serve"])
    assert [config.scheduler.engine.parked_dir for config in started] == [
        *[str(tmp_path)] * 2,
        None,
    ]
    assert [config.scheduler.cache.disk_bytes >> 20 for config in started] == [8192, 3, 8192]
    assert [config.scheduler.cache.resumes_decoded for config in started] == [True, True, None]
