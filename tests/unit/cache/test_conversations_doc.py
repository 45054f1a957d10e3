"""The table of docs/conversations.md is what the code computes at the real geometry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.config import GIB, MIB, CacheConfig
from cache.store import BlockSizes, ConversationStore
from engine.interface import PAGE_TOKENS
from engine.parked import ParkedStates
from engine.state import SlotState
from scheduler.parking import checkpoint_positions
from tests.unit.engine.test_model_spec import real

DOC = Path(__file__).resolve().parents[3] / "docs" / "conversations.md"
CHUNK_TOKENS = 2048
TURN = 1
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
SYSTEM_TOKENS = 2048


def real_sizes(kv_dtype: torch.dtype) -> BlockSizes:
    """Bytes at the real geometry in bf16; the meta device allocates nothing."""
    state = SlotState(
        real(),
        num_slots=1,
        max_context=4096,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device=torch.device("meta"),
    )
    parked = ParkedStates(state)
    return BlockSizes(
        page_tokens=PAGE_TOKENS,
        page_bytes=parked.page_bytes,
        checkpoint_bytes=parked.checkpoint_bytes,
    )


def prompt_of(number: int, length: int, shared_system: bool) -> tuple[int, ...]:
    """System prompt, one long user turn, the beginning of the answer."""
    system = min(SYSTEM_TOKENS, length // 2)
    system_id = 2 if shared_system else 10 + number
    user = length - system - 3
    return (TURN, *[system_id] * (system - 1), TURN, *[10 + number] * user, TURN, 3)


def park(store: ConversationStore, prompt: tuple[int, ...]) -> int:
    """Number of checkpoints that the prompt wants."""
    wanted = checkpoint_positions(
        prompt, chunk_tokens=CHUNK_TOKENS, turn_token_id=TURN, config=CacheConfig()
    )
    lease = store.take("", prompt, may_resume_at=wanted.__contains__, wanted_checkpoints=wanted)
    for position in sorted(wanted):
        if position > lease.num_resumed_tokens:
            store.add_checkpoint(lease, position)
    store.put(lease)
    return len(wanted)


def num_that_fit(sizes: BlockSizes, length: int, shared_system: bool) -> int:
    store = ConversationStore(CacheConfig(), sizes)
    while store.stats().evictions == 0 and len(store) < CacheConfig().max_conversations:
        park(store, prompt_of(len(store), length, shared_system))
    return len(store)


def table(sizes: BlockSizes) -> str:
    lines = [
        "| tokens | checkpoints | checkpoint MiB | page MiB | MiB in all | fit, own system prompts "
        "| fit, one system prompt |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for length in LENGTHS:
        store = ConversationStore(CacheConfig(capacity_bytes=64 * GIB), sizes)
        num_checkpoints = park(store, prompt_of(0, length, False))
        kept = num_checkpoints * sizes.checkpoint_bytes
        pages = store.num_bytes - kept
        fits = [num_that_fit(sizes, length, shared) for shared in (False, True)]
        lines.append(
            f"| {length:,} | {num_checkpoints} | {kept / MIB:,.0f} | {pages / MIB:,.0f} "
            f"| {store.num_bytes / MIB:,.0f} | {fits[0]} | {fits[1]} |"
        )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("kv_dtype", "page_words"),
    [(torch.bfloat16, f"a page of {PAGE_TOKENS} tokens"), (torch.int8, "a page has")],
    ids=["bf16", "int8"],
)
def test_the_table_is_what_the_code_computes(kv_dtype: torch.dtype, page_words: str) -> None:
    text = DOC.read_text(encoding="utf-8")
    sizes = real_sizes(kv_dtype)
    assert f"a checkpoint has {sizes.checkpoint_bytes:,} bytes" in text
    assert f"{page_words} {sizes.page_bytes:,}" in text
    expected = table(sizes)
    assert expected in text, f"docs/conversations.md should have\n{expected}"
