"""The arithmetic of the benchmark's table, and the processes it starts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from loadtest.bench import Round, decode_rate, machine
from loadtest.bench_report import markdown
from loadtest.llama_server import LlamaServer
from loadtest.server_process import StartError, free_port, running
from tests.unit.loadtest.records import record

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_decode_rate_leaves_the_first_chunk_out() -> None:
    records = [
        record(chunk_times_s=(1.0, 1.5, 2.0), completion_tokens=9),
        record(chunk_times_s=(5.0, 6.0), completion_tokens=5),
        record(chunk_times_s=(7.0,), completion_tokens=1),
    ]
    assert decode_rate(records) == (8 + 4) / (1.0 + 1.0)
    assert decode_rate([]) == 0.0


def rounds(*rates: float, answers: Sequence[str] = ("a", "b")) -> list[dict[str, object]]:
    return [
        asdict(
            Round(
                one_stream_tokens_per_s=rate,
                one_client_tokens_per_s=rate,
                four_streams_tokens_per_s=rate * 3,
                prefill_tokens_per_s=rate * 20,
                greedy_answers=list(answers),
                acceptance={"1": (10.0, 8.0), "2": (5.0, 2.0)},
            )
        )
        for rate in rates
    ]


def test_the_table_shows_medians_and_ratios() -> None:
    text = markdown(
        {
            "date": "2030-01-01",
            "machine": "a machine",
            "load_before": 0.1,
            "command": "a command",
            "servers": {
                "without drafts": rounds(90.0, 100.0, 500.0),
                "with drafts": rounds(200.0, 150.0, 100.0),
                "llama.cpp without drafts": rounds(80.0, answers=["a", "c"]),
                "llama.cpp with drafts": rounds(300.0),
            },
            "transformers": [
                {
                    "dtype": "float32",
                    "decode_tokens_per_s": [10.0],
                    "prefill_tokens_per_s": [1000.0],
                    "torch": "2",
                    "transformers": "5",
                }
            ],
        }
    )
    assert "| one stream, tokens/s | 100.0 | 150.0 | 80.0 | 300.0 |" in text
    assert "With drafts against without: one stream 1.50x" in text
    assert "3.00 times the tokens of one" in text
    assert "0.67 in all; depth 1: 0.80 of 30, depth 2: 0.40 of 15" in text
    assert "Ours without drafts against llama.cpp without drafts: one stream 1.25x" in text
    assert "Ours with drafts against llama.cpp with drafts: one stream 0.50x" in text
    assert "as ours without drafts, with drafts: 2 of 2." in text
    assert "as ours without drafts, llama.cpp without drafts: 1 of 2." in text
    assert (
        "10.0 tokens/s (ours without drafts: 10.0x), prompt reading 1,000 tokens/s (2.0x)" in text
    )


def test_llama_gets_the_models_sampling_and_four_whole_contexts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 3}')
    rival = LlamaServer(executable=Path("server"), file=Path("m.gguf"))
    command = " ".join(rival.command(tmp_path, 2))
    assert command.startswith("server --model m.gguf ")
    assert "--parallel 4 " in command
    assert command.endswith("--ctx-size 2048 --repeat-last-n 512 --threads 2 --temp 0.7")


def test_the_machine_is_named() -> None:
    assert "cores" in machine()


def test_a_server_runs_until_the_end_of_the_block(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with running(command, port=port, ready_path="/ready", log=tmp_path / "log") as server:
        assert server.start_up_s > 0
        assert server.sample_memory() == server.peak_bytes > 1 << 20
        pid = server.process.pid
    assert not psutil.pid_exists(pid)


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no model here')"]
    with (
        pytest.raises(StartError, match="no model here"),
        running(command, port=free_port(), ready_path="/", log=tmp_path / "log"),
    ):
        pytest.fail("it never ran")
