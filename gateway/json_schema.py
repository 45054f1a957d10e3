"""Short words for JSON Schema, as /openapi.json uses them. A field that may be left out may also be null."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.fields import JsonObject

TEXT: JsonObject = {"type": "string"}
FLAG: JsonObject = {"type": "boolean"}
COUNT: JsonObject = {"type": "integer", "minimum": 0}
NUMBER: JsonObject = {"type": "number"}
SECONDS: JsonObject = {"type": "number", "minimum": 0}
ANY_OBJECT: JsonObject = {"type": "object"}


def integer(low: int, high: int) -> JsonObject:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float, *, open_low: bool = False) -> JsonObject:
    bound = "exclusiveMinimum" if open_low else "minimum"
    return {"type": "number", bound: low, "maximum": high}


def text(low: int = 0, high: int | None = None) -> JsonObject:
    """low, high: characters."""
    schema: JsonObject = {"type": "string", "minLength": low}
    return schema if high is None else {**schema, "maxLength": high}


def matching(pattern: str) -> JsonObject:
    """A string that a regular expression matches from end to end."""
    return {"type": "string", "pattern": f"^{pattern}$"}


def array(items: JsonObject, low: int = 0, high: int | None = None) -> JsonObject:
    schema: JsonObject = {"type": "array", "items": items, "minItems": low}
    return schema if high is None else {**schema, "maxItems": high}


def one_of(*values: str) -> JsonObject:
    return {"type": "string", "enum": list(values)}


def either(*schemas: JsonObject) -> JsonObject:
    return {"anyOf": list(schemas)}


def optional(schema: JsonObject) -> JsonObject:
    """The same, or null."""
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    return either(schema, {"type": "null"})


def struct(
    required: Mapping[str, JsonObject],
    more: Mapping[str, JsonObject] | None = None,
) -> JsonObject:
    """An object with fields that it must have, and others that may be left out or null."""
    properties = {**required, **{name: optional(schema) for name, schema in (more or {}).items()}}
    schema: JsonObject = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def reply(**fields: JsonObject) -> JsonObject:
    """An object of an answer: it always has all of these."""
    return struct(fields)


def described(schema: JsonObject, words: str) -> JsonObject:
    return {**schema, "description": words}


def off(values: Iterable[object]) -> JsonObject:
    """A field of other servers that is taken only when it asks for nothing."""
    return {"enum": [*values, None], "description": "Not served: only values that ask for nothing."}


def ref(name: str) -> JsonObject:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}
