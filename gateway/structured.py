"""What an answer must look like: response formats, structured outputs, forced and strict tool calls, thinking budgets.

Turns all of them into at most one grammar and one description of the thought, and proves that the grammar compiles
before anything is queued. Knows the family's form of calls; the engine knows none of this.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import anyio
import anyio.to_thread
import orjson

from gateway.errors import InvalidRequest
from gateway.fields import as_object, check_depth, describe, refuse
from gateway.json_input import CrowdedJson, load_json
from gateway.output_parser import THINK_CLOSE
from gateway.tools import CALL_CLOSE, CALL_OPEN
from scheduler.grammar import GrammarCompiler, GrammarError, json_rule, regex_rule
from scheduler.messages import Grammar, GrammarKind, Thought

if TYPE_CHECKING:
    from gateway.fields import Fields, JsonObject
    from gateway.model_files import ModelFiles
    from gateway.template import RenderedPrompt
    from gateway.tools import Tool
    from gateway.wire import ChatRequest, GenerationOptions

MAX_STRUCTURE_CHARS = 64 * 1024
"""Of a schema, regex or grammar."""
MAX_GRAMMAR_CHARS = 16 * 1024
"""Of a grammar in rules, whose translation is slow."""
MAX_COMPILE_S = 1.0
"""Of processor time: the engine compiles it once more, between two windows."""
MAX_CHOICE_STRINGS = 1024
MAX_CALLS = 16
"""Calls of one answer whose grammar is enforced."""
FORMAT_NAME = r"[A-Za-z0-9_-]{1,64}"
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
NOT_STRUCTURED = ("structural_tag", "whitespace_pattern")
_ANY_OBJECT: JsonObject = {"type": "object"}
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"}
)
_ROOT_KEYS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
}  # fmt: skip
_TEXT_KEYS = _ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength"}
_END = '"\\n</parameter>"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A grammar that a client asked for, and the field that did."""

    grammar: Grammar
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls an answer may have."""

    required: bool = False
    """The answer is a call."""
    name: str | None = None
    """Of this function."""
    parallel: bool = True
    """More than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine is to enforce."""

    grammar: Grammar | None = None
    thought: Thought | None = None


def parse_structure(fields: Fields) -> Structure | None:
    """`response_format` or `structured_outputs`."""
    by_format, by_extra = _response_format(fields), _structured_outputs(fields)
    if by_format is not None and by_extra is not None:
        refuse("structured_outputs", "cannot be combined with response_format")
    return by_format or by_extra


def parse_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls`; `none` has left no tools."""
    parallel = fields.boolean("parallel_tool_calls") is not False
    value = fields.get("tool_choice")
    if value is None or value in ("none", "auto"):
        return ToolChoice(parallel=parallel)
    if value == "required":
        if not tools:
            refuse("tool_choice", "is 'required' but there are no tools")
        return ToolChoice(required=True, parallel=parallel)
    if isinstance(value, str):
        refuse("tool_choice", f"must be none, auto, required or a function; found {value!r:.60}")
    choice = as_object("tool_choice", value)
    if choice.get("type") != "function":
        refuse("tool_choice.type", f"must be 'function'; found {describe(choice.get('type'))}")
    function = choice.object("function")
    name = None if function is None else function.string("name")
    if name is None:
        refuse("tool_choice.function.name", "is required")
    if name not in [tool.name for tool in tools]:
        refuse("tool_choice.function.name", f"is {name!r:.80}, which no tool is called")
    return ToolChoice(required=True, name=name, parallel=parallel)


def _response_format(fields: Fields) -> Structure | None:
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"))
    match kind:
        case None:
            refuse("response_format.type", "is required")
        case "json_object":
            schema = wanted.object("schema")
            param = "response_format" if schema is None else "response_format.schema"
            return _json_structure(param, _ANY_OBJECT if schema is None else schema.values)
        case "json_schema":
            return _json_schema(wanted)
        case _:
            return None


def _json_schema(wanted: Fields) -> Structure:
    spec = wanted.object("json_schema")
    if spec is None:
        refuse("response_format.json_schema", "is required")
    name = spec.string("name")
    if name is None or not re.fullmatch(FORMAT_NAME, name):
        refuse(spec.param("name"), "must be 1 to 64 letters, digits, dashes or underscores")
    spec.string("description")
    spec.boolean("strict")
    schema = spec.object("schema")
    if schema is None:
        refuse(spec.param("schema"), "is required")
    return _json_structure(spec.param("schema"), schema.values)


def _json_structure(param: str, schema: JsonObject) -> Structure:
    check_depth(param, schema)
    return _structure(param, GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def _structure(param: str, kind: GrammarKind, text: str) -> Structure:
    limit = MAX_GRAMMAR_CHARS if kind is GrammarKind.GRAMMAR else MAX_STRUCTURE_CHARS
    if not 0 < len(text) <= limit:
        refuse(param, f"must have 1 to {limit} characters; found {len(text)}")
    return Structure(grammar=Grammar(kind=kind, text=text), param=param)


def _structured_outputs(fields: Fields) -> Structure | None:
    wanted = fields.object("structured_outputs")
    if wanted is None:
        return None
    for name in NOT_STRUCTURED:
        if wanted.get(name) is not None:
            refuse(wanted.param(name), "is not supported by this server")
    given = [name for name in _STRUCTURED if wanted.get(name) not in (None, False)]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        refuse("structured_outputs", f"needs one of {', '.join(_STRUCTURED)}; found {found}")
    param = wanted.param(given[0])
    match given[0]:
        case "regex":
            return _structure(param, GrammarKind.REGEX, wanted.string("regex") or "")
        case "grammar":
            return _structure(param, GrammarKind.GRAMMAR, wanted.string("grammar") or "")
        case "choice":
            return _choice(param, wanted.array("choice") or [])
        case "json_object":
            wanted.boolean("json_object")
            return _json_structure(param, _ANY_OBJECT)
        case _:
            return _json_structure(param, _schema_or_text(param, wanted.get("json")))


def _schema_or_text(param: str, value: object) -> JsonObject:
    if isinstance(value, str):
        try:
            value = load_json(value)
        except CrowdedJson as error:
            refuse(param, f"has {error}")
        except orjson.JSONDecodeError as error:
            refuse(param, f"is not valid JSON: {error.msg}")
    return as_object(param, value).values


def _choice(param: str, items: list[object]) -> Structure:
    if not 0 < len(items) <= MAX_CHOICE_STRINGS:
        refuse(param, f"must have 1 to {MAX_CHOICE_STRINGS} strings; found {len(items)}")
    for index, item in enumerate(items):
        if not isinstance(item, str) or not item:
            refuse(f"{param}[{index}]", f"must be a string with text; found {describe(item)}")
    literals = " | ".join(_literal(cast("str", item)) for item in items)
    return _structure(param, GrammarKind.LARK, f"start: {literals}")


def _literal(text: str) -> str:
    """Text as a literal of a LARK grammar."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")


class Structurer:
    """Makes the limits of requests for one loaded model."""

    def __init__(self, files: ModelFiles, vocab_size: int) -> None:
        self._files = files
        self._compiler = GrammarCompiler(files.directory, vocab_size)
        self._limiter = anyio.CapacityLimiter(1)
        """The compiler is no friend of threads."""
        ids = {token.text: token.id for token in files.tokenizer.control_tokens}
        self._call_ids = (ids.get(CALL_OPEN), ids.get(CALL_CLOSE))

    async def chat_limits(self, request: ChatRequest, prompt: RenderedPrompt) -> Limits:
        """Raises InvalidRequest. Cancellation waits for a compilation that has begun."""
        options = request.options
        grammar = await self._grammar(options, request.tools, request.tool_choice)
        budget = options.thinking_budget
        if budget is not None and self._files.think_ids is None:
            refuse(
                "thinking_token_budget", "is for models that mark their thoughts; this one does not"
            )
        if grammar is None and budget is None:
            return Limits()
        thought = self._thought(request, prompt, budget)
        return Limits(grammar=grammar, thought=thought)

    async def text_limits(self, options: GenerationOptions) -> Limits:
        """Of a raw completion, which has neither thought nor calls. Raises as `chat_limits` does."""
        return Limits(grammar=await self._grammar(options, (), ToolChoice()))

    async def _grammar(
        self, options: GenerationOptions, tools: tuple[Tool, ...], choice: ToolChoice
    ) -> Grammar | None:
        structure = options.structure
        is_about_calls = choice.required or any(tool.is_strict for tool in tools)
        is_about_calls |= bool(tools) and (not choice.parallel or structure is not None)
        if structure is None and not is_about_calls:
            return None
        if options.ignore_eos:
            refuse("ignore_eos", "cannot be combined with a format of the answer: it has an end")
        if not self._files.defaults.stop_token_ids:
            raise InvalidRequest("this model has no end mark for a format to end with", param=None)

        def build() -> Grammar:
            if not is_about_calls:
                assert structure is not None
                self._prove(structure.grammar, structure.param)
                return structure.grammar
            if structure is not None:
                self._prove(structure.grammar, structure.param)
            grammar = self._calls(tools, choice, structure)
            self._prove(grammar, "tools")
            return grammar

        return await anyio.to_thread.run_sync(build, limiter=self._limiter)

    def _prove(self, grammar: Grammar, param: str) -> None:
        began_s = time.thread_time()
        try:
            self._compiler.compile(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"{param} cannot be used: {error}", param=param) from error
        took_s = time.thread_time() - began_s
        if took_s > MAX_COMPILE_S:
            refuse(param, f"took {took_s:.1f} s to compile; at most {MAX_COMPILE_S:g} s are given")

    def _thought(
        self, request: ChatRequest, prompt: RenderedPrompt, budget: int | None
    ) -> Thought | None:
        if self._files.think_ids is None:
            return None
        opening, closing = self._files.think_ids
        may_open = not prompt.in_thought and not request.continue_final
        may_open = may_open and self._last_word(prompt.token_ids) != closing
        if not prompt.in_thought and not may_open:
            return None
        call_id = self._call_ids[0]
        return Thought(
            is_open=prompt.in_thought,
            open_id=opening if may_open else None,
            close_id=closing,
            closing_ids=self._files.encoder.encode_plain(
                f"\n{THINK_CLOSE}\n\n", parse_special=True
            ),
            budget=budget,
            leaving_ids=(call_id,) if request.tools and call_id is not None else (),
        )

    def _last_word(self, ids: tuple[int, ...]) -> int | None:
        """The last id that is more than white space."""
        token_bytes = self._files.tokenizer.token_bytes
        return next(
            (i for i in reversed(ids) if token_bytes(i).strip() or not token_bytes(i)), None
        )

    def _calls(
        self, tools: tuple[Tool, ...], choice: ToolChoice, structure: Structure | None
    ) -> Grammar:
        opening, closing = self._call_ids
        if opening is None or closing is None:
            refuse("tool_choice", "needs a model that marks its calls; this one does not")
        chosen = [(i, tool) for i, tool in enumerate(tools) if choice.name in (None, tool.name)]
        rules = [f'call: <[{opening}]> "\\n" function "\\n" <[{closing}]>']
        more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if choice.parallel else ""
        rules.append(f"calls: call{more}")
        rules.append("function: " + " | ".join(f"f{i}" for i, _ in chosen))
        for index, tool in chosen:
            rules += _FunctionRules(index, tool, self._compiler).rules()
        if choice.required:
            start = ["start: calls"]
        elif structure is None:
            # Calls spelled out in letters would be calls to the reader as well.
            text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){CALL_OPEN}(?s:.*)/"
            start = ["start: TEXT calls?", text]
        else:
            start = ["start: answer | calls", _answer_rule(structure)]
        return Grammar(kind=GrammarKind.LARK, text="\n".join([*start, *rules]) + "\n")


def _answer_rule(structure: Structure) -> str:
    text = structure.grammar.text
    match structure.grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return "answer: " + json_rule(cast("JsonObject", orjson.loads(text)))
        case GrammarKind.REGEX:
            return f"answer: ANSWER\nANSWER: {regex_rule(text)}"
        case GrammarKind.LARK:
            return "answer: " + text.removeprefix("start: ")
        case GrammarKind.GRAMMAR:
            refuse(structure.param, "cannot be combined with tools")


class _FunctionRules:
    """One function's call as rules: parameters in the order of their declaration, each by its schema."""

    def __init__(self, index: int, tool: Tool, compiler: GrammarCompiler) -> None:
        self._tool = tool
        self._compiler = compiler
        self._name = f"f{index}"
        self._param = f"tools[{index}].function.parameters"
        self._rules: list[str] = []

    def rules(self) -> list[str]:
        """Raises InvalidRequest for a strict function with a schema that cannot be enforced."""
        schema = self._tool.parameters
        properties = schema.get("properties", {} if not schema else None)
        if self._tool.is_strict:
            self._check_root(schema)
        if isinstance(properties, dict):
            body = self._declared(schema, cast("JsonObject", properties))
        elif self._tool.is_strict:
            body = ""
        else:
            body = self._anything()
        head = _literal(f"<function={self._tool.name}>\n")
        return [f'{self._name}: {head} {body} "</function>"', *self._rules]

    def _check_root(self, schema: JsonObject) -> None:
        if schema and schema.get("type") != "object":
            refuse(f"{self._param}.type", "must be 'object' for a strict function")
        self._check_keys(self._param, schema, _ROOT_KEYS)

    def _check_keys(self, param: str, schema: JsonObject, known: frozenset[str]) -> None:
        if unknown := sorted(schema.keys() - known):
            refuse(param, f"has {unknown[0]!r:.60}, which cannot be enforced for a strict function")

    def _declared(self, schema: JsonObject, properties: JsonObject) -> str:
        required = schema.get("required")
        required = cast("list[object]", required) if isinstance(required, list) else []
        names = [*properties, *(n for n in required if isinstance(n, str) and n not in properties)]
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts: list[str] = []
        for number, name in enumerate(dict.fromkeys(names)):
            if not name or name != name.strip() or set(name) & set("<>\r\n"):
                refuse(
                    f"{self._param}.properties", f"has the name {name!r:.60}, which no call can say"
                )
            rule = f"{self._name}_p{number}"
            found = properties.get(name, {})
            given = cast("JsonObject", found) if isinstance(found, dict) else {}
            value = self._value(rule, name, given, shared)
            head = _literal(f"<parameter={name}>\n")
            self._rules.append(f'{rule}: {head} {value} "\\n"')
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def _value(self, rule: str, name: str, schema: JsonObject, shared: JsonObject) -> str:
        """The value with what closes it."""
        if self._tool.takes_text(name):
            return self._text(rule, name, schema)
        whole = {**schema, **shared}
        try:
            text = orjson.dumps(whole).decode()
            self._compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=text))
        except GrammarError as error:
            if self._tool.is_strict:
                refuse(f"{self._param}.properties.{name}", f"cannot be enforced: {error}")
            whole = {}
        self._rules.append(f"{rule}_json: {json_rule(whole)}")
        return f"{rule}_json {_END}"

    def _text(self, rule: str, name: str, schema: JsonObject) -> str:
        """Strings are written without quotes, as far as the closing tag."""
        if self._tool.is_strict:
            self._check_keys(f"{self._param}.properties.{name}", schema, _TEXT_KEYS)
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(options, list):
            texts = [o for o in cast("list[object]", options) if isinstance(o, str)]
            if texts:
                return f"({' | '.join(map(_literal, texts))}) {_END}"
        low, high = _count(schema.get("minLength"), "0"), _count(schema.get("maxLength"), "")
        span = "*" if (low, high) == ("0", "") else f"{{{low},{high}}}"
        self._rules.append(f"{rule}_text[suffix={_END}]: /(?s:.){span}/")
        return f"{rule}_text"

    def _anything(self) -> str:
        """Parameters of any name, with any text."""
        rule = self._name
        self._rules += [
            f'{rule}_any: "<parameter=" {rule.upper()}_KEY ">\\n" {rule}_text "\\n"',
            f"{rule.upper()}_KEY: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/",
            f"{rule}_text[suffix={_END}]: /(?s:.*)/",
        ]
        return f"{rule}_any{{0,16}}"


def _count(value: object, default: str) -> str:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return str(value) if is_count else default
