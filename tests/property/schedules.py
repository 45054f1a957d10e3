"""Random schedules: conversations arrive, go on, are cancelled, parked, evicted and preempted, on any engine.

One window at a time and seeded, so that a failing schedule can be run again. Every request must give exactly what it
gives alone on an empty server (product.md D3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from engine.fake import FakeEngine, FakeFiles, FakeScript
from engine.interface import Engine, SamplingParams, WindowPlan
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.handle import RequestHandle
from scheduler.messages import Finished, GenerateRequest, Tokens, Usage
from scheduler.roster import Roster
from tests.factories import FakeClock

TURN_ID = 7
WINDOW_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What conversations are made of."""

    vocab_size: int
    system_tokens: int
    user_tokens: int
    max_tokens: int
    max_prompt: int

    def words(self, rng: Random, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(TURN_ID + 1, self.vocab_size) for _ in range(count))

    def opening(self, rng: Random) -> tuple[int, ...]:
        """One of two system prompts, or none."""
        kind = rng.randrange(3)
        return (TURN_ID, *self.words(Random(kind), self.system_tokens)) if kind else ()

    def user_turn(self, rng: Random) -> tuple[int, ...]:
        """A user's turn and the beginning of the answer's."""
        said = self.words(rng, rng.randint(1, self.user_tokens))
        return (TURN_ID, *said, TURN_ID, TURN_ID + 1)


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A request and what came back."""

    request: GenerateRequest
    handle: RequestHandle
    token_ids: list[int] = field(default_factory=list[int])
    usage: Usage | None = None

    def read(self) -> None:
        while self.handle._events:
            match self.handle._events.popleft():
                case Tokens(token_ids=token_ids):
                    self.token_ids += token_ids
                case Finished(usage=usage):
                    self.usage = usage
                case failed:
                    raise AssertionError(f"{self.request.request_id}: {failed}")


class Server:
    """A roster over an engine that is called directly."""

    def __init__(
        self, engine: Engine, config: SchedulerConfig, held: Callable[[], object] | None = None
    ) -> None:
        """held: the ids that the engine has parked, where it can say."""
        self.engine = engine
        self.clock = FakeClock()
        self.roster = Roster(config, engine.info, self.clock)
        self._generation = 1
        self.roster.follow_engine(1)
        self._held = held

    @property
    def is_idle(self) -> bool:
        return not self.roster.num_waiting and not list(self.roster._table)

    def restart(self, engine: Engine, held: Callable[[], object] | None = None) -> None:
        """Go on with another engine."""
        self.engine = engine
        self._held = held
        self._generation += 1
        self.roster.follow_engine(self._generation, engine.info.files)

    def ask(self, request: GenerateRequest, leader: Asked | None = None) -> Asked:
        handle = self.roster.admit(request, None if leader is None else leader.handle)
        return Asked(request=request, handle=handle)

    def run_window(self) -> bool:
        """One window, False when there is nothing to do."""
        self.clock.advance(WINDOW_S)
        self.roster.give_up_overdue()
        self.roster.seat_waiting()
        plan = self.roster.plan()
        if plan is None:
            return False
        result = self.engine.run_window(plan)
        if self._held is not None:
            assert self._held() == self.roster._parking.held_ids()
        self.roster.apply(plan, result, WINDOW_S)
        self.roster.check_invariants()
        return True

    def complete(self, request: GenerateRequest) -> Asked:
        """Run a request to its end, alone."""
        asked = self.ask(request)
        while self.run_window():
            pass
        asked.read()
        return asked

    def evict(self, everything: bool = False) -> None:
        store = self.roster._parking._store
        if everything:
            store.evict_all()
        elif len(store):
            store.evict()

    def close(self) -> None:
        """Nothing may be left in the engine, or in the books."""
        assert self.is_idle
        store = self.roster._parking._store
        self.evict(everything=True)
        assert store.num_bytes == 0
        drops = store.take_drops()
        if drops.page_ids or drops.checkpoint_ids:
            self.engine.run_window(
                WindowPlan(drop_page_ids=drops.page_ids, drop_checkpoint_ids=drops.checkpoint_ids)
            )
        assert self.roster._parking.held_ids() == (frozenset(), frozenset())


@dataclass(slots=True)
class Seen:
    """What schedules have met, so that a test can tell whether it tested anything."""

    requests: int = 0
    cancelled: int = 0
    cached: int = 0
    evictions: int = 0
    preemptions: int = 0
    refused: int = 0
    from_disk: int = 0
    refused_files: int = 0
    restarts: int = 0


def random_config(rng: Random, engine: Engine) -> SchedulerConfig:
    """Room for few or for many, checkpoints far apart or close together."""
    info = engine.info
    unit = info.checkpoint_bytes + 2 * info.page_bytes
    return SchedulerConfig(
        max_queue=100,
        turn_token_id=rng.choice([TURN_ID, TURN_ID, None]),
        max_passes=rng.randrange(4),
        decode_share=rng.choice([0.0, 0.5]),
        cache=CacheConfig(
            max_conversations=rng.choice([1, 3, 20]),
            capacity_bytes=unit * rng.choice([2, 6, 40]),
            min_free_bytes=0,
            min_shared_tokens=rng.choice([8, 1000]),
            checkpoint_every_tokens=rng.choice([info.chunk_tokens, 4096]),
            disk_bytes=20_000 + unit * rng.choice([2, 400]),
        ),
        preempt_wait_s=rng.choice([0.0, 0.3]),
        preempt_run_s=rng.choice([0.0, 0.2]),
        max_preemptions=rng.choice([0, 2, 5]),
    )


class Schedule:
    """One random run of a server."""

    def __init__(
        self,
        engine: Engine,
        texts: Texts,
        rng: Random,
        solo: Solo,
        files: FakeFiles | None = None,
        resumes_decoded: bool | None = None,
    ) -> None:
        """files: what a scripted engine keeps on disk."""
        self.files = files
        self.restarts = 0
        self.texts = texts
        self.rng = rng
        self.solo = solo
        config = random_config(rng, engine)
        self.config = replace(config, cache=replace(config.cache, resumes_decoded=resumes_decoded))
        held = engine.parked_ids if isinstance(engine, FakeEngine) else None
        self.server = Server(engine, self.config, held)
        self.server.roster._parking._saves_per_window = rng.choice([1, 64])
        self.everyone: list[Asked] = []
        self.cancelled = 0

    def run(self, num_requests: int, seen: Seen) -> None:
        rng = self.rng
        arrivals = rng.choice([0.5, 0.1])
        while len(self.everyone) < num_requests or not self.server.is_idle:
            if len(self.everyone) < num_requests and rng.random() < arrivals:
                self.ask(self.next_request())
            if self.everyone and rng.random() < 0.03:
                chosen = rng.choice(self.everyone)
                self.cancelled += not chosen.handle.ended
                chosen.handle.cancel()
            if rng.random() < 0.03:
                self.server.evict()
            if self.files is not None:
                self.disturb_files(self.files)
            for _ in range(rng.randrange(4)):
                self.server.run_window()
            for asked in self.everyone:
                if not asked.handle.cancelled:
                    asked.read()
        while self.server.run_window():
            pass  # conversations that are still to be written
        for asked in self.everyone:
            self.check(asked)
        self.count(seen)
        self.server.close()

    def ask(self, request: GenerateRequest) -> None:
        """Ask once, or for several answers that share the reading of the prompt."""
        leader = self.server.ask(request)
        self.everyone.append(leader)
        for number in range(self.rng.choice([0, 0, 0, 1, 3])):
            sampling = replace(request.sampling, seed=10 + number)
            other = replace(request, request_id=f"{request.request_id}-{number}", sampling=sampling)
            self.everyone.append(self.server.ask(other, leader))

    def disturb_files(self, files: FakeFiles) -> None:
        """The engine dies while it rests, a file is damaged, the disk is full for a while."""
        rng = self.rng
        if self.server.is_idle and rng.random() < 0.1:
            engine = FakeEngine(self.solo.script, files=files)
            self.server.restart(engine, engine.parked_ids)
            self.restarts += 1
        if files.files and rng.random() < 0.02:
            rng.choice(list(files.files.values())).is_damaged = True
        if rng.random() < 0.05:
            files.is_full = not files.is_full

    def next_request(self) -> GenerateRequest:
        """The next turn of a conversation that has an answer, the same again, or a new one."""
        texts, rng = self.texts, self.rng
        previous = rng.choice(self.everyone) if self.everyone and rng.random() < 0.7 else None
        if previous is None:
            prompt, owner = texts.opening(rng) + texts.user_turn(rng), rng.choice(["ann", "bob"])
        else:
            prompt, owner = previous.request.prompt_ids, previous.request.owner
            if rng.random() < 0.85:
                # Some clients leave the first part of an answer out: its thinking.
                answer = tuple(previous.token_ids)[rng.choice([0, 0, 2]) :]
                prompt += answer + texts.user_turn(rng)
            if rng.random() < 0.1:
                owner = "bob"
        prompt = prompt[: texts.max_prompt]
        sampling = rng.choice(
            [SamplingParams(temperature=0.0), SamplingParams(seed=rng.randrange(3))]
        )
        if rng.random() < 0.2:
            sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.5)
        return GenerateRequest(
            request_id=f"request-{len(self.everyone)}",
            prompt_ids=prompt,
            sampling=sampling,
            max_tokens=rng.randint(1, texts.max_tokens),
            owner=owner,
            priority=rng.randrange(2),
            max_draft=rng.choice([None, 0, 1, 4]),
            spec_min_p=rng.choice([0.0, 0.3]),
        )

    def check(self, asked: Asked) -> None:
        expected = self.solo.tokens(asked.request, self.config.turn_token_id)
        if asked.handle.cancelled:
            assert tuple(asked.token_ids) == expected[: len(asked.token_ids)]
            return
        assert tuple(asked.token_ids) == expected
        assert asked.usage is not None
        assert asked.usage.cached_tokens <= self.longest_known(asked)

    def longest_known(self, asked: Asked) -> int:
        """The longest beginning of the prompt that a request of the same owner had sent, or been given, before."""
        prompt = asked.request.prompt_ids
        before = self.everyone[: self.everyone.index(asked)]
        decoded = self.config.cache.resumes_decoded is not False
        mine = [
            (*a.request.prompt_ids, *(a.token_ids if decoded else ()))
            for a in before
            if a.request.owner == asked.request.owner
        ]
        # Later arrivals may have been read earlier.
        after = self.everyone[self.everyone.index(asked) + 1 :]
        mine += [a.request.prompt_ids for a in after if a.request.owner == asked.request.owner]
        return max((common(prompt, other) for other in mine), default=0)

    def count(self, seen: Seen) -> None:
        stats = self.server.roster.parking_stats()
        seen.requests += len(self.everyone)
        seen.cancelled += self.cancelled
        seen.cached += stats.resumed_tokens
        seen.evictions += stats.evictions
        seen.refused += stats.refused
        seen.preemptions += self.server.roster.totals().preemptions
        seen.restarts += self.restarts
        disk = self.server.roster.disk_stats()
        if disk is not None:
            seen.from_disk += disk.hits
            seen.refused_files += disk.failures


class Solo:
    """What each request gives alone on a server that parks nothing; asked once each."""

    def __init__(self, engine: Engine, script: FakeScript | None = None) -> None:
        """script: of a scripted engine."""
        self.engine = engine
        self.script = script or FakeScript()
        self._known: dict[object, tuple[int, ...]] = {}

    def tokens(self, request: GenerateRequest, turn_token_id: int | None) -> tuple[int, ...]:
        key = (request.prompt_ids, request.sampling, request.max_tokens, turn_token_id)
        if key not in self._known:
            config = SchedulerConfig(
                turn_token_id=turn_token_id, cache=CacheConfig(max_conversations=0)
            )
            server = Server(self.engine, config)
            asked = server.complete(replace(request, max_draft=0, deadline_s=None))
            self._known[key] = tuple(asked.token_ids)
        return self._known[key]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
