"""`--resume`: a follow-up goes on from what decoding computed, and says so in its usage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.interface import SamplingParams
from scheduler.config import CacheConfig, SchedulerConfig
from tests.factories import make_request
from tests.oracle.conftest import Models
from tests.property.schedules import TURN_ID, Server

AUTO = SchedulerConfig(turn_token_id=TURN_ID, cache=CacheConfig(min_free_bytes=0))
EXACT = replace(AUTO, cache=replace(AUTO.cache, resumes_decoded=False))
FAST = replace(AUTO, cache=replace(AUTO.cache, resumes_decoded=True))
PROMPT = (TURN_ID, *range(20, 90), TURN_ID, 8)
GREEDY = SamplingParams(temperature=0.0)


def converse(
    server: Server, *, max_draft: int, dropped: int = 0, turns: int = 4
) -> list[tuple[tuple[int, ...], int, int]]:
    """(answer, cached tokens, prompt tokens) of each turn; dropped: answer ids that the client leaves out."""
    prompt = PROMPT
    found: list[tuple[tuple[int, ...], int, int]] = []
    for turn in range(turns):
        request = make_request(prompt_ids=prompt, max_tokens=7, max_draft=max_draft)
        asked = server.complete(replace(request, sampling=GREEDY))
        assert asked.usage is not None
        answer = tuple(asked.token_ids)
        found.append((answer, asked.usage.cached_tokens, len(prompt)))
        prompt = (*prompt, *answer[dropped:], TURN_ID, 30 + turn, TURN_ID, 8)
    server.close()
    return found


@pytest.mark.parametrize("max_draft", [0, 4])
def test_only_what_is_new_is_read(models: Models, max_draft: int) -> None:
    engine = models.engine("no_ple")
    turns = converse(Server(engine, FAST), max_draft=max_draft)
    for (answer, _, length), (_, cached, _) in zip(turns, turns[1:], strict=False):
        # All but the last id of the answer, which was picked and never fed.
        assert cached == length + len(answer) - 1


def test_texts_agree_where_no_two_ids_are_nearly_tied(models: Models) -> None:
    """In fp32 the random model's picks are far apart; the promise of equal texts is that of the exact mode alone."""
    engine = models.engine("no_ple")
    fast = converse(Server(engine, FAST), max_draft=4)
    exact = converse(Server(engine, EXACT), max_draft=4)
    assert [answer for answer, _, _ in fast] == [answer for answer, _, _ in exact]
    assert [cached for _, cached, _ in exact[1:]] == [length - 2 for _, _, length in exact[:-1]]


@pytest.mark.parametrize("name", ["gqa4_gdn3_deep", "gdn_wide_values"])
def test_by_itself_it_goes_on_where_that_changes_no_bit(models: Models, name: str) -> None:
    """The compiled step computes a row alike whether it is read or decoded; the torch layers do not."""
    engine = models.engine(name)
    auto = converse(Server(engine, AUTO), max_draft=4)
    exact = converse(Server(engine, EXACT), max_draft=4)
    assert [answer for answer, _, _ in auto] == [answer for answer, _, _ in exact]
    more = [a > b for (_, a, _), (_, b, _) in zip(auto[1:], exact[1:], strict=True)]
    assert engine.info.reads_as_decodes == (models.kernels == "compiled")
    assert more == [engine.info.reads_as_decodes] * 3


def test_a_client_that_drops_part_of_the_answer_goes_on_from_its_prompt(models: Models) -> None:
    turns = converse(Server(models.engine("no_ple"), FAST), max_draft=4, dropped=2)
    assert [cached for _, cached, _ in turns[1:]] == [length - 2 for _, _, length in turns[:-1]]


def test_a_turn_that_is_cancelled_leaves_nothing_that_was_decoded(models: Models) -> None:
    server = Server(models.engine("no_ple"), FAST)
    asked = server.ask(make_request(prompt_ids=PROMPT, max_tokens=50, max_draft=0))
    for _ in range(12):
        server.run_window()
    said = [token for event in asked.handle._events for token in event.token_ids]  # type: ignore[union-attr]
    assert len(said) > 3
    asked.handle.cancel()
    server.run_window()
    after = server.complete(make_request(prompt_ids=(*PROMPT, *said, 9), max_tokens=2))
    assert after.usage is not None
    assert after.usage.cached_tokens == len(PROMPT) - 2
    server.close()


def test_an_answer_of_one_token(models: Models) -> None:
    server = Server(models.engine("no_ple"), FAST)
    first = server.complete(make_request(prompt_ids=PROMPT, max_tokens=1))
    again = server.complete(make_request(prompt_ids=(*PROMPT, *first.token_ids, 9), max_tokens=2))
    assert again.usage is not None
    assert again.usage.cached_tokens == len(PROMPT)
    server.close()
