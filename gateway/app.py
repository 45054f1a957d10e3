"""build_app(): routes and middleware put together; no logic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from gateway.errors import ErrorReply
from gateway.hosts import HostCheck, checks_hosts
from gateway.middleware import ApiKeys, BodyLimit, Envelope
from gateway.openapi import openapi_route
from gateway.other_apis import OtherApis
from gateway.page.files import page_routes
from gateway.responses import error_response
from gateway.routes import Endpoints
from gateway.status import status_route
from gateway.tracing import Tracing

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.routes import Service


def build_app(service: Service) -> Starlette:
    """The ASGI application over a running scheduler. Starting and stopping the scheduler is the caller's."""
    config = service.config
    middleware = [Middleware(Tracing, tracer=service.tracer)] if service.tracer else []
    if config.cors_origins:
        # Around the envelope: a page of an allowed origin may read why it was refused, too.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(Envelope))
    has_checks = checks_hosts(config.host, config.allowed_hosts)
    middleware += [
        Middleware(HostCheck, allowed_hosts=config.allowed_hosts if has_checks else None),
        Middleware(ApiKeys, keys=config.api_keys),
        Middleware(BodyLimit, limit_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s),
    ]
    return Starlette(
        routes=[
            *page_routes(),
            status_route(service),
            *Endpoints(service).routes(),
            *OtherApis(service).routes(),
            openapi_route(service.version, service.scheduler.info),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    reply = ErrorReply(
        status=error.status_code,
        message=message,
        type="invalid_request_error",
        param=None,
        code="not_found" if error.status_code == 404 else "bad_request",
        retry_after_s=None,
    )
    response = error_response(reply, path=request.url.path)
    response.headers.update(error.headers or {})
    return response
