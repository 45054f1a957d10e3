"""Constrained texts: always in the grammar, and the same whatever the drafts and the company.

The model is a random one with the shipped model's vocabulary, which nothing but the grammar keeps in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from engine.config import model_path
from engine.engine import TorchEngine
from engine.grammar import Constraint, GrammarCompiler
from engine.interface import (
    DecodeStep,
    Grammar,
    GrammarKind,
    PrefillChunk,
    Resume,
    SamplingParams,
    SavePage,
    SlotStart,
    Suspend,
    Thought,
    WindowPlan,
)
from tests.oracle.driver import Job, Progress, generate, generate_alone
from tests.oracle.words import words_engine

END, TURN_END, CALL, CALL_END, OPEN, CLOSE = 8183, 8185, 8186, 8187, 8190, 8191
STOPS = (TURN_END, END)
PLACES = ("Oslo", "Lima", "new york")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return words_engine(tmp_path_factory.mktemp("words"))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(model_path("default"), 8192)


def ids_of(text: str) -> list[int]:
    return compiler()._loaded().tokenize_str(text, parse_special=True)


def text_of(ids: Sequence[int]) -> str:
    return compiler()._loaded().decode_bytes([i for i in ids if i < END]).decode()


def prompt(question: str, *, thinks: bool = False) -> list[int]:
    thought = "<think>\n" if thinks else "<think>\n\n</think>\n\n"
    return ids_of(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{thought}")


def schema(**properties: object) -> Grammar:
    document = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(document))


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


SHORT = {"type": "string", "maxLength": 12}
GRAMMARS = {
    "number": schema(n={"type": "integer", "minimum": -5, "maximum": 300}),
    "string": schema(name=SHORT),
    "enum": schema(place={"enum": [*PLACES, None, 7]}),
    "nested": schema(
        a={
            "type": "object",
            "properties": {"b": {"type": "boolean"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        c={"type": "null"},
    ),
    "array": schema(items={"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}),
    "date": schema(day={"type": "string", "format": "date"}),
    "either": schema(x={"anyOf": [{"type": "boolean"}, {"const": "none"}]}),
    "ref": Grammar(
        kind=GrammarKind.JSON_SCHEMA,
        text=json.dumps(
            {"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "maxItems": 2, "items": SHORT}}}
        ),
    ),
    "phone": regex(r"\+[1-9][0-9]{1,2} [0-9]{4,6}"),
    "words": regex(r"([a-z]{2,5} ){2,3}end"),
    "unicode": regex("[äöüß]{2,4}[αβγ]{1,3}🙂?"),
    "gbnf": Grammar(kind=GrammarKind.GRAMMAR, text='root ::= ("yes" | "no") ("!" | "?"){1,3}'),
}  # fmt: skip


def sampling(grammar: Grammar | None, seed: int, **others: object) -> SamplingParams:
    params = SamplingParams(temperature=1.0, seed=seed, grammar=grammar, stop_token_ids=STOPS)
    return replace(params, **others)  # type: ignore[arg-type]


def check_text(name: str, text: str) -> None:
    grammar = GRAMMARS[name]
    if grammar.kind is GrammarKind.REGEX:
        assert re.fullmatch(grammar.text, text), text
    elif grammar.kind is GrammarKind.GRAMMAR:
        assert re.fullmatch(r"(yes|no)[!?]{1,3}", text), text
    else:
        value = json.loads(text)
        properties = json.loads(grammar.text).get("properties")
        assert properties is None or list(value) == list(properties)


@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_texts_match_and_do_not_depend_on_drafts_or_company(engine: TorchEngine, name: str) -> None:
    """Two seeds, greedy, and penalties with cuts: alone without drafts, then together with chains of all lengths."""
    grammar = GRAMMARS[name]
    params = [
        sampling(grammar, 1),
        sampling(grammar, 2),
        sampling(grammar, 0, temperature=0.0),
        sampling(grammar, 3, repetition_penalty=1.3, frequency_penalty=0.3, top_k=20, top_p=0.9),
    ]
    jobs = [
        Job(prompt=prompt(f"Give me a {name}."), num_tokens=150, sampling=p, slot=i, first_round=i)
        for i, p in enumerate(params)
    ]
    alone = [generate_alone(engine, job) for job in jobs]
    for ids in alone:
        assert ids[-1] in STOPS
        check_text(name, text_of(ids))
    depths = (4, 1, 3, 2)
    company = [replace(job, max_draft=d) for job, d in zip(jobs, depths, strict=True)]
    together = generate(engine, *company)
    assert [p.token_ids for p in together] == alone
    assert sum(step.num_accepted for p in together for step in p.steps) > 0


@pytest.mark.parametrize("max_draft", [0, 4])
def test_every_pick_is_that_of_a_matcher_that_never_went_back(
    engine: TorchEngine, max_draft: int
) -> None:
    """Row by row: the logits of the text so far under the limit of a fresh matcher, greedy."""
    params = sampling(GRAMMARS["nested"], 0, temperature=0.0)
    job = Job(prompt=prompt("Fill the form."), num_tokens=40, sampling=params, max_draft=max_draft)
    output = generate_alone(engine, job)
    logits = engine.prefill_logits(1, [*job.prompt, *output[:-1]], 0)[len(job.prompt) - 1 :]
    for i, token_id in enumerate(output):
        assert params.grammar is not None
        fresh = Constraint(params, compiler().compile(params.grammar), 8192)
        fresh.commit(output[:i]) if i else None
        limit = fresh.limit_after([])
        assert limit is not None and limit.allowed is not None
        row = np.where(limit.allowed, logits[i].numpy(), -np.inf)
        # The text was read in one piece here: another order of sums, so equal up to rounding.
        assert row[token_id] >= row.max() - 1e-3


def thought(**fields: object) -> Thought:
    given = Thought(
        is_open=True,
        open_id=None,
        close_id=CLOSE,
        closing_ids=(*ids_of("\n"), CLOSE, *ids_of("\n\n")),
        leaving_ids=(CALL,),
    )
    return replace(given, **fields)  # type: ignore[arg-type]


def run_at_all_depths(engine: TorchEngine, job: Job) -> list[Progress]:
    """Chains of 0 to 4 without a gate, so that they are as long as they may be."""
    runs = [generate(engine, replace(job, max_draft=depth))[0] for depth in range(5)]
    assert all(run.token_ids == runs[0].token_ids for run in runs)
    return runs


@pytest.mark.parametrize("seed", range(3))
def test_the_mask_holds_when_the_thought_ends_inside_a_chain(
    engine: TorchEngine, seed: int
) -> None:
    """The thought's end is made likely, so that it comes from the model, anywhere in a window."""
    params = sampling(
        GRAMMARS["number"],
        seed,
        thought=thought(),
        logit_bias=((CLOSE, 8.0 + seed),),
        repetition_penalty=1.1,
    )
    job = Job(prompt=prompt("How many?", thinks=True), num_tokens=120, sampling=params)
    ids = run_at_all_depths(engine, job)[0].token_ids
    at = ids.index(CLOSE)
    assert ids[-1] in STOPS
    assert not set(ids[:at]) & {*STOPS, CALL}
    check_text("number", text_of(ids[at + 1 :]).removeprefix("\n\n"))


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_holds_at_every_depth(engine: TorchEngine, budget: int) -> None:
    """Without a grammar, with one, and both with a thought that never ends by itself."""
    never = ((CLOSE, -100.0),)
    for grammar in (None, GRAMMARS["gbnf"]):
        limit = thought(budget=budget)
        params = sampling(grammar, budget, thought=limit, logit_bias=never, temperature=0.7)
        job = Job(prompt=prompt("Think.", thinks=True), num_tokens=20, sampling=params)
        ids = run_at_all_depths(engine, job)[0].token_ids
        end = budget + len(limit.closing_ids)
        assert tuple(ids[budget:end]) == limit.closing_ids
        assert CLOSE not in ids[end:]
        if grammar is not None:
            check_text("gbnf", text_of(ids[end:]))


def test_a_thought_that_the_model_opens(engine: TorchEngine) -> None:
    question = ids_of("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    limit = thought(is_open=False, open_id=OPEN, budget=3)
    params = sampling(GRAMMARS["enum"], 0, thought=limit, logit_bias=((OPEN, 60.0), (CLOSE, -90.0)))
    ids = run_at_all_depths(engine, Job(prompt=question, num_tokens=80, sampling=params))[
        0
    ].token_ids
    assert ids[0] == OPEN
    end = 4 + len(limit.closing_ids)
    assert tuple(ids[4:end]) == limit.closing_ids
    check_text("enum", text_of(ids[end:]))


def test_a_length_cap_does_not_hide_a_stop(engine: TorchEngine) -> None:
    """With room for exactly the text and its stop id the stop is there, at every depth."""
    job = Job(prompt=prompt("Yes or no?"), num_tokens=80, sampling=sampling(GRAMMARS["gbnf"], 5))
    whole = generate_alone(engine, job)
    assert whole[-1] in STOPS
    for room in (len(whole), len(whole) + 2):
        for run in run_at_all_depths(engine, replace(job, num_tokens=room)):
            assert run.token_ids == whole
    cut = generate_alone(engine, replace(job, num_tokens=len(whole) - 1, max_draft=4))
    assert cut == whole[:-1]


def test_nothing_is_kept_past_the_stop(engine: TorchEngine) -> None:
    """Neither ids nor logprobs, at every depth."""
    params = sampling(GRAMMARS["gbnf"], 5, top_logprobs=2)
    job = Job(prompt=prompt("Yes or no?"), num_tokens=80, sampling=params)
    for run in run_at_all_depths(engine, job):
        assert [i for i in run.token_ids if i in STOPS] == [run.token_ids[-1]]
        for step in run.steps:
            assert step.logprobs is not None and len(step.logprobs) == len(step.token_ids)


def test_min_tokens_gives_way_to_the_grammars_end(engine: TorchEngine) -> None:
    params = sampling(GRAMMARS["gbnf"], 5, min_tokens=70)
    ids = run_at_all_depths(
        engine, Job(prompt=prompt("Yes or no?"), num_tokens=80, sampling=params)
    )[0].token_ids
    assert ids[-1] in STOPS
    check_text("gbnf", text_of(ids))


def test_a_grammar_that_cannot_be_used_fails_its_slot_alone(engine: TorchEngine) -> None:
    good = Job(prompt=prompt("Yes?"), num_tokens=5, sampling=sampling(GRAMMARS["gbnf"], 5), slot=1)
    starts = (
        SlotStart(slot=0, sampling=sampling(regex("(a"), 0)),
        SlotStart(slot=1, sampling=good.sampling),
    )
    ids = tuple(good.prompt)
    chunks = tuple(PrefillChunk(slot=i, start=0, token_ids=ids, is_last=True) for i in range(2))
    result = engine.run_window(WindowPlan(starts=starts, chunks=chunks))
    assert [failure.slot for failure in result.failures] == [0]
    assert "grammar" in result.failures[0].message
    assert result.failures[0].is_grammar
    assert [tokens.slot for tokens in result.tokens] == [1]


def test_a_suspended_text_goes_on_in_its_grammar(engine: TorchEngine) -> None:
    """Thought, dictated ids and grammar are where they were."""
    params = sampling(GRAMMARS["words"], 9, thought=thought(budget=3))
    question = tuple(prompt("Say words.", thinks=True))
    job = Job(prompt=question, num_tokens=40, sampling=params, max_draft=2)
    whole = generate_alone(engine, job)
    for cut in (1, 4, 6, 9):
        engine.run_window(
            WindowPlan(
                starts=(SlotStart(slot=0, sampling=params),),
                chunks=(PrefillChunk(slot=0, start=0, token_ids=question, is_last=True),),
            )
        )
        step = DecodeStep(slot=0, max_draft=0, spec_min_p=0.0)
        for _ in range(cut - 1):
            engine.run_window(WindowPlan(decodes=(step,)))
        known = (*question, *whole[:cut])
        resume = Resume(checkpoint_id=1, page_ids=(1,), token_ids=known, num_output=cut)
        assert len(known) <= 64
        engine.run_window(
            WindowPlan(
                suspends=(Suspend(slot=0, checkpoint_id=1),),
                saves=(SavePage(slot=0, page_id=1, index=0),),
            )
        )
        output = list(whole[:cut])
        plan = WindowPlan(
            starts=(SlotStart(slot=2, sampling=params, resume=resume),),
            decodes=(DecodeStep(slot=2, max_draft=4, spec_min_p=0.0),),
        )
        while output[-1] not in STOPS:
            output += engine.run_window(plan).tokens[0].token_ids
            plan = WindowPlan(decodes=plan.decodes)
        assert output == whole
        engine.run_window(WindowPlan(drop_page_ids=(1,), drop_checkpoint_ids=(1,)))


def test_drafts_that_are_dictated_pass_the_gate(engine: TorchEngine) -> None:
    """Their probability is counted among the ids that may come."""
    grammar = regex("abcdefghijklmnopqrstuvwxyz")
    job = Job(prompt=prompt("x"), num_tokens=60, sampling=sampling(grammar, 0, temperature=0.0))
    run = generate(engine, replace(job, max_draft=4, min_p=0.9))[0]
    assert text_of(run.token_ids) == "abcdefghijklmnopqrstuvwxyz"
    assert sum(s.num_accepted for s in run.steps) > 0
    torch.testing.assert_close(run.token_ids, generate_alone(engine, job))
