from __future__ import annotations

import gateway.errors as gateway_errors
from gateway.errors import TABLE, GatewayError, InvalidRequest, reply_for, shorten
from scheduler import errors as scheduler_errors
from scheduler.errors import SchedulerError


def descendants(root: type[Exception]) -> set[type[Exception]]:
    return {root, *(sub for child in root.__subclasses__() for sub in descendants(child))}


def test_every_error_has_a_row() -> None:
    known = descendants(GatewayError) | descendants(SchedulerError)
    ours = {
        error
        for error in known
        if error.__module__ in (gateway_errors.__name__, scheduler_errors.__name__)
    }
    assert ours - {GatewayError, SchedulerError} == set(TABLE)


def test_not_now_says_when() -> None:
    error = scheduler_errors.Overloaded("full", retry_after_s=1.2)
    reply = reply_for(error)
    assert (reply.status, reply.retry_after_s, reply.message) == (429, 2, "full")
    for error_type in (scheduler_errors.Draining, scheduler_errors.EngineUnavailable):
        reply = reply_for(error_type("later", retry_after_s=0.0))
        assert (reply.status, reply.retry_after_s) == (503, 1)


def test_unknown_errors_keep_their_text_to_themselves() -> None:
    reply = reply_for(RuntimeError("a secret path"))
    assert reply.status == 500
    assert "secret" not in reply.message


def test_the_body_is_openais_error_object() -> None:
    body = reply_for(InvalidRequest("n is wrong", param="n")).body()
    assert body == {
        "error": {
            "message": "n is wrong",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


def test_long_values_are_shortened() -> None:
    assert shorten("x" * 60) == "x" * 60
    assert len(shorten("x" * 10**6)) < 100
