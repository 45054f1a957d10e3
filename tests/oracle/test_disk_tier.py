"""A conversation read back from its file goes on as if it had never left memory, and a bad file changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import TorchEngine
from engine.interface import SamplingParams
from engine.loading import load_engine
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.messages import GenerateRequest
from tests.factories import make_request
from tests.oracle.conftest import Models, engine_config
from tests.property.schedules import TURN_ID, Asked, Server, Solo

CONFIG = SchedulerConfig(
    turn_token_id=TURN_ID,
    # Exact, so that what is found on disk is the same with every kind of layers.
    cache=CacheConfig(min_free_bytes=0, resumes_decoded=False),
    owner_identities=(("ann", "a1"), ("bob", "b1")),
)
SAMPLING = SamplingParams(seed=3, presence_penalty=0.5)
PROMPT = (TURN_ID, *range(20, 90), TURN_ID, 8)


def request(prompt: tuple[int, ...], owner: str = "ann") -> GenerateRequest:
    return replace(make_request(prompt_ids=prompt, max_tokens=5, owner=owner), sampling=SAMPLING)


def cached(asked: Asked) -> int:
    assert asked.usage is not None
    return asked.usage.cached_tokens


Start = Callable[..., Server]


@pytest.fixture
def start(checkpoints: Models, tmp_path: Path) -> Start:
    """Starts a server over the directory, after ending the one before."""
    running: list[TorchEngine] = []

    def begin(config: SchedulerConfig = CONFIG, **engine: object) -> Server:
        for old in running:
            old.close()
        chosen = replace(
            engine_config(checkpoints.checkpoint("no_ple")), parked_dir=str(tmp_path), **engine
        )  # type: ignore[arg-type]
        running[:] = [load_engine(chosen)]
        return Server(running[0], config)

    return begin


def next_turn(server: Server) -> GenerateRequest:
    """After the first turn, which is written to disk when this returns."""
    first = server.complete(request(PROMPT))
    return request((*PROMPT, *first.token_ids, TURN_ID, 30, TURN_ID, 8))


def test_a_conversation_survives_a_restart(start: Start, tmp_path: Path) -> None:
    second = next_turn(start())
    (file,) = tmp_path.glob("*.parked")
    server = start()
    asked = server.complete(second)
    assert cached(asked) == len(PROMPT) - 2
    assert tuple(asked.token_ids) == Solo(server.engine).tokens(second, TURN_ID)
    # The file of the turn before is of no more use.
    assert not file.exists()
    assert len(list(tmp_path.glob("*.parked"))) == 1
    # What came from disk is in memory now.
    assert cached(server.complete(second)) == len(second.prompt_ids) - 2
    assert server.roster.parking_stats().hits == 2
    disk = server.roster.disk_stats()
    assert disk is not None
    assert (disk.hits, disk.written, disk.failures) == (1, 1, 0)


def test_an_evicted_conversation_comes_back_from_disk(start: Start) -> None:
    server = start()
    second = next_turn(server)
    server.evict(everything=True)
    asked = server.complete(second)
    assert cached(asked) == len(PROMPT) - 2
    assert tuple(asked.token_ids) == Solo(server.engine).tokens(second, TURN_ID)


@pytest.mark.parametrize("offset", [100, 5000, -1])
def test_a_damaged_file_is_as_if_it_were_not_there(
    start: Start, tmp_path: Path, offset: int
) -> None:
    server = start()
    second = next_turn(server)
    server.evict(everything=True)
    (file,) = tmp_path.glob("*.parked")
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(data)
    asked = server.complete(second)
    assert cached(asked) == 0
    assert tuple(asked.token_ids) == Solo(server.engine).tokens(second, TURN_ID)
    disk = server.roster.disk_stats()
    assert disk is not None
    assert (disk.hits, disk.failures) == (0, 1)
    assert cached(server.complete(second)) > 0


def test_one_key_never_reads_anothers_file(start: Start, tmp_path: Path) -> None:
    second = next_turn(start())
    server = start()
    asked = server.complete(replace(second, owner="bob"))
    assert cached(asked) == 0
    assert server.roster.disk_stats().hits == 0  # type: ignore[union-attr]
    (data, *_) = [path.read_bytes() for path in tmp_path.glob("*.parked")]
    assert b"ann" not in data
    assert b"a1" not in data[:200]


def test_a_name_with_another_key_is_somebody_else(start: Start) -> None:
    second = next_turn(start())
    other = replace(CONFIG, owner_identities=(("ann", "a2"), ("bob", "a1")))
    server = start(other)
    assert cached(server.complete(second)) == 0
    # The name changed, the key did not.
    assert cached(start(other).complete(replace(second, owner="bob"))) == len(PROMPT) - 2


@pytest.mark.parametrize("change", [{"chunk_tokens": 16}, {"max_context": 200}])
def test_files_of_another_kind_of_engine_are_not_used(
    start: Start, change: dict[str, object]
) -> None:
    second = next_turn(start())
    assert cached(start(**change).complete(second)) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"turn_token_id": 8},
        {"cache": replace(CONFIG.cache, resumes_decoded=True)},
    ],
)
def test_files_of_prompts_that_were_read_otherwise_are_not_used(
    start: Start, change: dict[str, object]
) -> None:
    second = next_turn(start())
    changed = replace(CONFIG, **change)  # type: ignore[arg-type]
    assert cached(start(changed).complete(second)) == 0


def test_the_limit_of_the_files_holds(start: Start, tmp_path: Path) -> None:
    server = start()
    next_turn(server)
    (file,) = tmp_path.glob("*.parked")
    limit = int(2.5 * file.stat().st_size) + 8192
    server = start(replace(CONFIG, cache=replace(CONFIG.cache, disk_bytes=limit)))
    files = [file]
    for number in range(1, 6):
        server.complete(request((TURN_ID, *range(20 + number, 90), TURN_ID, 8)))
        files = list(tmp_path.glob("*.parked"))
        assert 0 < sum(path.stat().st_size for path in files) <= limit
    assert len(files) == 2
    assert server.roster.disk_stats().evictions == 4  # type: ignore[union-attr]


def test_what_is_too_large_is_not_written(start: Start, tmp_path: Path) -> None:
    server = start(replace(CONFIG, cache=replace(CONFIG.cache, disk_bytes=1000)))
    next_turn(server)
    assert list(tmp_path.glob("*.parked")) == []


def test_only_the_shared_beginning_is_read(start: Start) -> None:
    """Another conversation with the same system prompt reads that from the first one's file."""
    system = (TURN_ID, *range(20, 80))
    config = replace(CONFIG, cache=replace(CONFIG.cache, min_shared_tokens=40))
    start(config).complete(request((*system, TURN_ID, *range(90, 99), TURN_ID, 8)))
    server = start(config)
    other = request((*system, TURN_ID, 55, 56, TURN_ID, 8))
    asked = server.complete(other)
    assert cached(asked) == len(system)
    assert tuple(asked.token_ids) == Solo(server.engine).tokens(other, TURN_ID)


def test_several_who_wait_for_one_file(start: Start) -> None:
    second = next_turn(start())
    server = start()
    batch = [server.ask(replace(second, request_id=str(i))) for i in range(2)]
    batch.append(server.ask(request((9, 9, 9))))
    batch[0].handle.cancel()
    while server.run_window():
        pass
    for asked in batch[1:]:
        asked.read()
    assert [cached(asked) for asked in batch[1:]] == [len(PROMPT) - 2, 0]
    assert server.roster.disk_stats().hits == 1  # type: ignore[union-attr]
