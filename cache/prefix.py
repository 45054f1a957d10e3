"""Which parked state a prompt can go on from: the longest checkpoint that is an exact token prefix of it. Pure.

Only at checkpoints, because running state cannot be cut; only where the caller may resume; and shorter than the
prompt, because its last token must be fed to get an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.entry import Checkpoint, ParkedConversation, TokenPrefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A conversation, and the checkpoint of it to resume at."""

    conversation: ParkedConversation
    checkpoint: Checkpoint


def longest_match(
    conversations: Iterable[ParkedConversation],
    owner: str,
    tokens: TokenPrefix,
    may_resume_at: Callable[[int], bool],
) -> Match | None:
    """The deepest usable checkpoint of this owner; among equals of the conversation used last."""
    best: Match | None = None
    for conversation in conversations:
        if conversation.owner != owner:
            continue
        checkpoint = deepest_usable(conversation, tokens, may_resume_at)
        if checkpoint is None:
            continue
        found = Match(conversation=conversation, checkpoint=checkpoint)
        if best is None or _rank(found) > _rank(best):
            best = found
    return best


def deepest_usable(
    conversation: ParkedConversation, tokens: TokenPrefix, may_resume_at: Callable[[int], bool]
) -> Checkpoint | None:
    """The last checkpoint up to which the tokens agree, of those where the caller may resume."""
    usable: Checkpoint | None = None
    start = 0
    for checkpoint in conversation.checkpoints:
        end = checkpoint.position
        if end >= len(tokens) or not tokens.agrees(conversation.tokens, start, end):
            break
        start = end
        if may_resume_at(end):
            usable = checkpoint
    return usable


def _rank(match: Match) -> tuple[int, int]:
    return match.checkpoint.position, match.conversation.last_used
