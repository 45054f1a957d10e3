"""Limits of rows: a walk with drafts taken back meets the same limits as one that never tried any."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from engine.config import model_path
from engine.grammar import Constraint, GrammarCompiler, GrammarError, RowLimit
from engine.interface import Grammar, GrammarKind, SamplingParams, Thought

END, TURN_END, CALL, CLOSE, OPEN = 8183, 8185, 8186, 8191, 8190
VOCAB = 8192
NEWLINES = 199
"""Any id will do for what stands between thought and answer."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
REGEX = Grammar(kind=GrammarKind.REGEX, text=r"[a-f]{3,6}(-\d{1,3}){0,2}")
THOUGHT = Thought(
    is_open=True,
    open_id=None,
    close_id=CLOSE,
    closing_ids=(CLOSE, NEWLINES),
    leaving_ids=(CALL,),
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(model_path("default"), VOCAB)


def constraint(compiler: GrammarCompiler, params: SamplingParams) -> Constraint:
    matcher = None if params.grammar is None else compiler.compile(params.grammar)
    return Constraint(params, matcher, VOCAB)


def params_of(grammar: Grammar | None, thought: Thought | None = None) -> SamplingParams:
    return SamplingParams(grammar=grammar, thought=thought, stop_token_ids=(TURN_END, END))


def ids_left(limit: RowLimit | None) -> set[int]:
    left = set(range(VOCAB))
    if limit is None:
        return left
    if limit.allowed is not None:
        left = set(np.flatnonzero(limit.allowed).tolist())
    return left - set(limit.banned)


def walk(
    compiler: GrammarCompiler, params: SamplingParams, seed: int, length: int = 60
) -> list[int]:
    """A random text within the limits, never trying anything."""
    plain, random_ids = constraint(compiler, params), random.Random(seed)
    ids: list[int] = []
    while len(ids) < length and not (ids and ids[-1] in params.stop_token_ids):
        left = sorted(ids_left(plain.limit_after([])))
        ids.append(random_ids.choice(left))
        plain.commit(ids[-1:])
    return ids


def test_a_grammar_that_only_just_begins_is_not_taken(compiler: GrammarCompiler) -> None:
    """Its copies share what is built for them, so that it would be refused or not by how often it was used."""
    crowded = Grammar(kind=GrammarKind.REGEX, text="(a?){1000}a{1000}" * 60)
    for _ in range(2):
        with pytest.raises(GrammarError, match="too many expressions"):
            compiler.compile(crowded)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("grammar", [JSON, REGEX], ids=["json", "regex"])
def test_drafts_that_are_taken_back_leave_nothing(
    compiler: GrammarCompiler, grammar: Grammar, seed: int
) -> None:
    """Windows of all lengths, drafts that part from the output anywhere, a thought's end within the chain."""
    thought = replace(THOUGHT, budget=seed) if seed % 2 else None
    params = params_of(grammar, thought)
    ids = walk(compiler, params, seed)
    plain, drafted = constraint(compiler, params), constraint(compiler, params)
    random_ids, at = random.Random(seed + 100), 0
    while at < len(ids):
        drafts: list[int] = []
        for depth in range(random_ids.randint(0, 4)):
            limit = drafted.limit_after(drafts)
            right = ids[at + depth] if at + depth < len(ids) else END
            left = sorted(ids_left(limit))
            drafts.append(right if random_ids.random() < 0.8 else random_ids.choice(left))
            if drafts[-1] in params.stop_token_ids:
                break
        limits = [drafted.limit_after(drafts[:i]) for i in range(len(drafts) + 1)]
        kept = 0
        while at < len(ids):
            assert ids_left(limits[kept]) == ids_left(plain.limit_after([]))
            plain.commit([ids[at]])
            at, kept = at + 1, kept + 1
            if kept > len(drafts) or drafts[kept - 1] != ids[at - 1]:
                break
        drafted.commit(ids[at - kept : at])


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_match(compiler: GrammarCompiler, seed: int) -> None:
    tokenizer = compiler._loaded()
    ids = walk(compiler, params_of(REGEX), seed)
    assert ids[-1] in (END, TURN_END)
    assert re.fullmatch(REGEX.text, tokenizer.decode_str(ids[:-1]))


def test_at_the_end_only_stop_ids_are_left_even_before_min_tokens(
    compiler: GrammarCompiler,
) -> None:
    grammar = Grammar(kind=GrammarKind.LARK, text='start: "yes"')
    params = replace(params_of(grammar), min_tokens=50)
    limits = constraint(compiler, params)
    limits.commit(compiler._loaded().tokenize_str("yes"))
    limit = limits.limit_after([])
    assert ids_left(limit) == {END, TURN_END}
    assert limit is not None and limit.overrules_min_tokens


def test_a_user_end_mark_does_not_replace_the_grammars_end(compiler: GrammarCompiler) -> None:
    """The model's own end mark is no way out when it is not among the request's stop ids."""
    grammar = Grammar(kind=GrammarKind.REGEX, text="ab?")
    params = SamplingParams(grammar=grammar, stop_token_ids=(TURN_END,))
    limits = constraint(compiler, params)
    limits.commit(compiler._loaded().tokenize_str("a"))
    left = ids_left(limits.limit_after([]))
    assert TURN_END in left and END not in left


def test_control_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    limits = constraint(compiler, params_of(JSON))
    limits.commit(compiler._loaded().tokenize_str('{"name":"'))
    assert not ids_left(limits.limit_after([])) & set(range(END, VOCAB))


def test_nothing_is_forbidden_in_a_thought_but_leaving_it(compiler: GrammarCompiler) -> None:
    limits = constraint(compiler, params_of(JSON, THOUGHT))
    limits.commit([5, 6, 7])
    assert ids_left(limits.limit_after([])) == set(range(VOCAB)) - {END, TURN_END, CALL}
    assert ids_left(limits.limit_after([CLOSE])) == {NEWLINES}
    behind = constraint(compiler, params_of(JSON)).limit_after([])
    assert ids_left(limits.limit_after([CLOSE, NEWLINES])) == ids_left(behind)
    assert ids_left(limits.limit_after([9])) == set(range(VOCAB)) - {END, TURN_END, CALL}


def test_a_thought_may_open_with_the_first_id_only(compiler: GrammarCompiler) -> None:
    thought = replace(THOUGHT, is_open=False, open_id=OPEN)
    limits = constraint(compiler, params_of(JSON, thought))
    first = ids_left(limits.limit_after([]))
    assert OPEN in first and 5 not in first
    assert 5 in ids_left(limits.limit_after([OPEN]))
    limits.commit(compiler._loaded().tokenize_str("{"))
    assert OPEN not in ids_left(limits.limit_after([]))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_closes_the_thought(compiler: GrammarCompiler, budget: int) -> None:
    params = params_of(None, replace(THOUGHT, budget=budget, closing_ids=(11, CLOSE, NEWLINES)))
    limits = constraint(compiler, params)
    drafts = [*range(20, 20 + budget), 11, CLOSE, NEWLINES]
    left = [ids_left(limits.limit_after(drafts[:i])) for i in range(len(drafts) + 1)]
    everything = set(range(VOCAB))
    assert left == [*([everything] * budget), {11}, {CLOSE}, {NEWLINES}, everything]


def test_a_thought_that_closes_in_time_is_not_closed_again(compiler: GrammarCompiler) -> None:
    limits = constraint(compiler, params_of(None, replace(THOUGHT, budget=2)))
    limits.commit([5, CLOSE])
    assert limits.limit_after([]) is None
    assert limits.limit_after([6, 7, 8]) is None


def test_a_call_ends_a_thought_with_a_budget(compiler: GrammarCompiler) -> None:
    limits = constraint(compiler, params_of(None, replace(THOUGHT, budget=2)))
    limits.commit([CALL, 5, 6])
    assert limits.limit_after([7]) is None


def test_limits_do_not_depend_on_the_order_of_questions(compiler: GrammarCompiler) -> None:
    limits, ids = (
        constraint(compiler, params_of(JSON)),
        compiler._loaded().tokenize_str('{"name":'),
    )
    backwards = [ids_left(limits.limit_after(ids[:i])) for i in reversed(range(len(ids) + 1))]
    fresh = [
        ids_left(constraint(compiler, params_of(JSON)).limit_after(ids[:i]))
        for i in range(len(ids) + 1)
    ]
    assert backwards[::-1] == fresh


def test_a_draft_outside_the_grammar_harms_nobody(compiler: GrammarCompiler) -> None:
    limits = constraint(compiler, params_of(REGEX))
    before = ids_left(limits.limit_after([]))
    wrong = compiler._loaded().tokenize_str("%%")
    limit = limits.limit_after(wrong)
    assert limit is not None and limit.error is not None
    assert ids_left(limits.limit_after([])) == before


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.REGEX, "a" * 3_000_000),
        (GrammarKind.JSON_SCHEMA, '{"type": "strange"}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "not": {"const": "a"}}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.org/schema"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        (GrammarKind.JSON_SCHEMA, "[1"),
        (GrammarKind.GRAMMAR, ""),
        (GrammarKind.GRAMMAR, 'root ::= "a" other'),
        (GrammarKind.GRAMMAR, "start: nowhere"),
        (GrammarKind.LARK, "start: <no_such_token>"),
    ],
)
def test_what_cannot_be_used_is_refused(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(Grammar(kind=kind, text=text))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


def test_a_model_without_tokenizer_is_refused(tmp_path: object) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        GrammarCompiler(model_path(str(tmp_path)), VOCAB).compile(JSON)


def test_gbnf_is_taken(compiler: GrammarCompiler) -> None:
    grammar = Grammar(kind=GrammarKind.GRAMMAR, text='root ::= ("x" | "y")+ "."\n')
    limits = constraint(compiler, params_of(grammar))
    limits.commit(compiler._loaded().tokenize_str("xy."))
    assert ids_left(limits.limit_after([])) == {END, TURN_END}
