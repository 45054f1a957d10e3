"""Limits of the conversation store."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much is kept of conversations that have no slot. Values are already checked by whoever parsed them."""

    max_conversations: int = 20
    """0 keeps nothing."""
    capacity_bytes: int = 8 * GIB
    """Of pages and checkpoints, those in use by running sequences included; 0 keeps nothing."""
    min_free_bytes: int = 512 * MIB
    """Nothing new is kept while the host has less free memory than this."""
    disk_bytes: int = 8 * GIB
    """Of conversation files, where the engine has a directory for them."""
    resumes_decoded: bool | None = None
    """Park the state that decoding has computed as well, and go on from it; None: where that changes no bit."""
    max_checkpoints: int = 6
    """Most checkpoints of one conversation, at least 2."""
    checkpoint_every_tokens: int = 16_384
    """Shortest distance of the checkpoints inside a long prompt."""
    min_shared_tokens: int = 512
    """A first turn (the system prompt) of so many tokens gets a checkpoint of its own."""

    @property
    def is_enabled(self) -> bool:
        return self.max_conversations > 0 and self.capacity_bytes > 0
