"""GET /v1/status: one JSON object with what the server is and does now.

It has counts, states and sizes only: no text of a prompt or an answer, and no names that a client gave.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.routing import Route

from gateway.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.replies import JsonReply
    from gateway.routes import Service
    from scheduler.messages import EngineInfo
    from scheduler.stats import SchedulerStats, SlotView, Totals


def status_route(service: Service, now: Callable[[], float] = time.monotonic) -> Route:
    """The route over a running scheduler; the server's age is counted from this call."""
    started_s = now()

    async def show(request: Request) -> Response:
        del request
        return json_response(status_reply(service, uptime_s=now() - started_s, now_s=now()))

    return Route("/v1/status", show, methods=["GET"])


def status_reply(service: Service, *, uptime_s: float, now_s: float) -> JsonReply:
    """The whole object."""
    stats = service.scheduler.stats()
    info = service.scheduler.info
    recent = service.metrics.recent
    return {
        "object": "status",
        "version": service.version,
        "uptime_s": round(uptime_s, 3),
        "ready": service.scheduler.ready,
        "draining": stats.draining,
        "model": _model(service.model, info),
        "engine": {"state": str(stats.engine_state), "restarts": stats.restarts},
        "slots": [_slot(slot) for slot in stats.slots],
        "queue": {"length": stats.queued},
        "requests": _requests(stats.totals),
        "tokens": {
            "prompt": stats.totals.prompt_tokens,
            "completion": stats.totals.completion_tokens,
            "per_s": round(recent.per_s(now_s, uptime_s), 2),
            "window_s": recent.window_s,
        },
        "drafts": _drafts(info, stats.totals),
        "windows": {
            "count": stats.totals.windows,
            "seconds": round(stats.totals.window_s, 6),
        },
        "store": _store(stats),
        "memory_plan": [
            {
                "name": item.name,
                "planned_bytes": item.planned_bytes,
                "actual_bytes": item.actual_bytes,
            }
            for item in info.memory_plan
        ],
    }


def _model(name: str, info: EngineInfo) -> JsonReply:
    return {
        "id": name,
        "device": info.device,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "kernels": info.kernels,
        "max_context": info.max_context,
        "chunk_tokens": info.chunk_tokens,
        "load_s": round(info.load_s, 3),
    }


def _slot(slot: SlotView) -> JsonReply:
    return {
        "index": slot.index,
        "phase": "free" if slot.phase is None else str(slot.phase),
        "prompt_tokens": slot.prompt_tokens,
        "read_tokens": slot.read_tokens,
        "output_tokens": slot.output_tokens,
    }


def _requests(totals: Totals) -> JsonReply:
    return {
        "submitted": totals.submitted,
        "rejected": totals.rejected,
        "preemptions": totals.preemptions,
        "outcomes": {str(outcome): count for outcome, count in totals.outcomes},
    }


def _drafts(info: EngineInfo, totals: Totals) -> JsonReply:
    by_depth = zip(totals.drafts_offered, totals.drafts_accepted, strict=True)
    return {
        "max_depth": info.max_draft,
        "by_depth": [
            {"depth": depth, "offered": offered, "accepted": accepted}
            for depth, (offered, accepted) in enumerate(by_depth, start=1)
        ],
    }


def _store(stats: SchedulerStats) -> JsonReply | None:
    """Parked conversations; None when nothing can be parked."""
    store = stats.parking
    if store is None or not store.capacity_bytes:
        return None
    return {
        "conversations": store.num_conversations,
        "bytes": store.num_bytes,
        "capacity_bytes": store.capacity_bytes,
        "lookups": store.lookups,
        "hits": store.hits,
        "resumed_tokens": store.resumed_tokens,
        "parked": store.parked,
        "evictions": store.evictions,
        "refused": store.refused,
    }
