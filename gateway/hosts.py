"""Which names a server answers to: a defence against DNS rebinding.

A web page can have its own name resolve to 127.0.0.1 and then read, as if from its own origin, what a server there
answers. Its requests still carry that name, so a server that only this machine should reach takes none but its own.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from gateway.errors import HostNotAllowed, InvalidRequest

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class HostCheck:
    """Refuses requests for other hosts, and those of HTTP/1.1 that do not name one host.

    Addresses are let in: a name is needed for rebinding. So is a request of HTTP/1.0 without a host, as no browser
    sends one.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...] | None) -> None:
        """None allows every host."""
        self._app = app
        self._allowed = (
            None if allowed_hosts is None else frozenset(host.lower() for host in allowed_hosts)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) > 1 or (scope["http_version"] == "1.1" and not any(hosts)):
                raise InvalidRequest("the request must have one Host header", param=None)
            if hosts and not self._is_ours(_without_port(hosts[0]).lower().rstrip(".")):
                raise HostNotAllowed(hosts[0])
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        if self._allowed is None or host in self._allowed:
            return True
        return host == "localhost" or host.endswith(".localhost") or _is_address(host)


def checks_hosts(bound_to: str, allowed_hosts: tuple[str, ...]) -> bool:
    """Whether there is anything to check: the server is for this machine alone, or hosts are named."""
    return bool(allowed_hosts) or _is_loopback(bound_to)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
