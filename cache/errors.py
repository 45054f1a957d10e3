"""Errors of the conversation store.

CacheError
 +-- StoreFull      there is no room, even without every conversation that could be evicted
 +-- StaleHandle    a lease was used after it was given back, put, or lost with the engine's memory
"""


class CacheError(Exception):
    """Anything the store refuses."""


class StoreFull(CacheError):
    """There is no room.

    needed_bytes, held_bytes, capacity_bytes: what was asked for, what running sequences hold, the limit.
    """

    def __init__(self, *, needed_bytes: int, held_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"{needed_bytes} bytes do not fit: {held_bytes} of {capacity_bytes} bytes are in use "
            "by running sequences"
        )
        self.needed_bytes = needed_bytes
        self.held_bytes = held_bytes
        self.capacity_bytes = capacity_bytes


class StaleHandle(CacheError):
    """A lease was used after its end."""
