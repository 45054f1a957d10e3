"""A prompt resumes at the deepest checkpoint that is exactly its beginning, and nowhere else."""

from __future__ import annotations

import pytest

from cache.entry import Checkpoint, ParkedConversation, TokenPrefix
from cache.prefix import longest_match

TEXT = tuple(range(100, 120))


def parked(
    *positions: int, owner: str = "ann", text: tuple[int, ...] = TEXT, last_used: int = 0
) -> ParkedConversation:
    return ParkedConversation(
        owner=owner,
        tokens=TokenPrefix.of(text[: positions[-1]]),
        checkpoints=tuple(Checkpoint(position=p, checkpoint_id=p) for p in positions),
        page_ids=(),
        last_used=last_used,
    )


def position(
    prompt: tuple[int, ...],
    *conversations: ParkedConversation,
    owner: str = "ann",
    usable: range = range(1000),
) -> int | None:
    match = longest_match(conversations, owner, TokenPrefix.of(prompt), usable.__contains__)
    return None if match is None else match.checkpoint.position


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TEXT, 12),
        (TEXT[:13], 12),
        (TEXT[:12], 5),  # the last token must be fed
        (TEXT[:6], 5),
        (TEXT[:5], None),
        ((*TEXT[:11], 7, 7, 7), 5),
        ((*TEXT[:4], 7, 7, 7), None),
        ((7,), None),
    ],
)
def test_only_checkpoints_that_are_exact_prefixes_count(
    prompt: tuple[int, ...], expected: int | None
) -> None:
    assert position(prompt, parked(5, 12)) == expected


def test_where_the_caller_may_not_resume_nothing_matches() -> None:
    assert position(TEXT, parked(5, 12), usable=range(12)) == 5
    assert position(TEXT, parked(5, 12), usable=range(5)) is None


def test_another_owners_state_is_never_found() -> None:
    assert position(TEXT, parked(5, owner="bob")) is None
    assert position(TEXT, parked(12, owner="bob"), parked(5)) == 5


def test_the_deepest_wins_then_the_one_used_last() -> None:
    old, new = parked(5, 12, last_used=1), parked(12, 16, text=TEXT[:12] + (7,) * 8, last_used=2)
    assert position(TEXT, old, new) == 12
    match = longest_match((new, old), "ann", TokenPrefix.of(TEXT), lambda _: True)
    assert match is not None
    assert match.conversation is new


def test_ids_do_not_run_into_each_other() -> None:
    """Packed ids compare by whole ids, whatever their bytes."""
    one = TokenPrefix.of((1, 256))
    assert len(one) == 2
    assert not TokenPrefix.of((65537, 0)).begins_with(one)
    assert TokenPrefix.of((1, 256, 9)).begins_with(one)
    assert not one.agrees(TokenPrefix.of((1,)), 0, 2)
