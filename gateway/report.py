"""What a server prints when it is ready: the plan, what was chosen, where it listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from scheduler.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.routes import Service
    from scheduler.messages import EngineInfo
    from scheduler.stats import StoreStats

_MIB = 2**20


def print_report(console: Console, service: Service, *, url: str, ready_s: float) -> None:
    """Memory plan and facts of a started server."""
    info = service.scheduler.info
    if info.memory_plan:
        console.print(_plan_table(info, service.scheduler.stats().parking))
    drafts = f"up to {counted(info.max_draft, 'token')}" if info.max_draft else "off"
    facts = {
        "model": service.model,
        "device": f"{info.device}, {info.dtype}, K/V in {info.kv_dtype}",
        "kernels": info.kernels,
        "slots": f"{info.num_slots} x {info.max_context} tokens, prompts in chunks of {info.chunk_tokens}",
        "drafts": drafts,
        "parking": _parking(service.scheduler.stats().parking),
        "keys": counted(len(service.config.api_keys), "API key")
        if service.config.api_keys
        else "none needed",
        "API": f"{url}/v1",
        "page": f"{url}/",
    }
    for name, value in facts.items():
        console.print(f"[bold]{name:>8}[/bold]  {value}", soft_wrap=True, highlight=False)
    console.print(
        f"ready in {ready_s:.1f} s (model loaded in {info.load_s:.1f} s)", highlight=False
    )


def _parking(store: StoreStats | None) -> str:
    if store is None or not store.max_conversations or not store.capacity_bytes:
        return "off"
    limit_mib = store.capacity_bytes / _MIB
    return f"up to {counted(store.max_conversations, 'conversation')} in {limit_mib:.0f} MiB"


def _plan_table(info: EngineInfo, store: StoreStats | None) -> Table:
    table = Table(title="memory plan, MiB")
    table.add_column("part")
    table.add_column("planned", justify="right")
    table.add_column("actual", justify="right")
    for item in info.memory_plan:
        actual = "-" if item.actual_bytes is None else f"{item.actual_bytes / _MIB:.1f}"
        table.add_row(item.name, f"{item.planned_bytes / _MIB:.1f}", actual)
    total = sum(item.planned_bytes for item in info.memory_plan)
    known = sum(item.actual_bytes or 0 for item in info.memory_plan)
    table.add_section()
    table.add_row("total, taken at the start", f"{total / _MIB:.1f}", f"{known / _MIB:.1f}")
    if store is not None and store.max_conversations and store.capacity_bytes:
        # A limit and not a plan: nothing of it is taken before a conversation is parked.
        limit, taken = f"up to {store.capacity_bytes / _MIB:.1f}", store.num_bytes / _MIB
        table.add_row("parking, on the host as it comes", limit, f"{taken:.1f}")
    return table
