"""The simulator's engine against the timing model that emulated workers run: the same requests end at the same times."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from services.simulator.whatif.engine import Costs, FastEngine, Work
from services.timing import hardware as descriptions
from services.timing.engine import NEVER, EngineModel
from services.timing.hardware import Curve, Hardware, Value

CHUNK = 2048


class Session:
    """A trajectory whose context only grows: turns of (new tokens, reply tokens, seconds before the next)."""

    def __init__(self, number: int, generator: random.Random, turns: int) -> None:
        self.name = f"s{number}"
        self.base = number * 1_000_000 + 1
        self.begin_s = generator.random() * 3
        self.turns = [
            (generator.randint(1, 1500), generator.choice((1, 2, 40, 300)), generator.choice((0.0, 0.2, 3.0)))
            for _ in range(turns)
        ]


class Script:
    """Plays sessions on an engine behind a few calls, and notes when each request ended."""

    def __init__(self, sessions: list[Session], updates: list[float]) -> None:
        self.sessions = sessions
        self.updates = updates

    def play(self, engine: Model | Fast) -> list[tuple[str, int, float]]:
        ended: list[tuple[str, int, float]] = []
        due = [(session.begin_s, index, 0, 0) for index, session in enumerate(self.sessions)]
        due += [(at_s, -1, 0, 0) for at_s in self.updates]
        now = 0.0
        while due or engine.next_s() != NEVER:
            due.sort()
            at_s = min(due[0][0] if due else NEVER, engine.next_s())
            now = max(now, at_s)
            for end_s, index, turn, total in engine.advance(now):
                session = self.sessions[index]
                ended.append((session.name, turn, end_s))
                if turn + 1 < len(session.turns):
                    # On a grid, so that the two engines' last bits cannot order two arrivals differently; and off the
                    # middle between two of its points, on which times that are whole microseconds would fall.
                    again_s = round(end_s + session.turns[turn][2] + 0.001 + math.pi * 1e-6, 4)
                    due.append((max(again_s, now), index, turn + 1, total))
            due.sort()
            while due and due[0][0] <= now:
                _, index, turn, context = due.pop(0)
                if index < 0:
                    engine.update()
                    continue
                new, reply, _ = self.sessions[index].turns[turn]
                engine.submit(index, turn, context + new, context + new + reply)
        return sorted(ended)


class Model:
    """The timing model, with a range of token numbers for each session."""

    def __init__(self, sessions: list[Session], hardware: Hardware, max_running: int, kv_tokens: int) -> None:
        self.model = EngineModel(hardware, max_running=max_running, chunk_tokens=CHUNK, kv_tokens=kv_tokens)
        self.sessions = sessions
        self.totals: dict[int, int] = {}

    def next_s(self) -> float:
        return self.model.next_event_s()

    def advance(self, now: float) -> list[tuple[float, int, int, int]]:
        ends = [event for event in self.model.advance_to(now) if event.kind == "end"]
        return [(event.at_s, event.key // 1000, event.key % 1000, self.totals[event.key]) for event in ends]

    def submit(self, index: int, turn: int, start: int, total: int) -> None:
        key, base = index * 1000 + turn, self.sessions[index].base
        self.totals[key] = total
        self.model.submit(key, range(base, base + total), start)

    def update(self) -> None:
        self.model.new_weights()


class Fast:
    """The engine under test."""

    def __init__(self, sessions: list[Session], hardware: Hardware, max_running: int, kv_tokens: int) -> None:
        costs = Costs(hardware, max_running, CHUNK)
        self.engine = FastEngine(costs, max_running=max_running, chunk_tokens=CHUNK, kv_tokens=kv_tokens)
        self.sessions = sessions

    def next_s(self) -> float:
        return self.engine.next_s

    def advance(self, now: float) -> list[tuple[float, int, int, int]]:
        self.engine.advance(now)
        ended, self.engine.ended = self.engine.ended, []
        return [(at_s, *work.of, work.total) for at_s, work in ended]  # type: ignore[misc]

    def submit(self, index: int, turn: int, start: int, total: int) -> None:
        self.engine.submit(Work(self.sessions[index].name, start, total, (index, turn)))

    def update(self) -> None:
        self.engine.new_weights()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("max_running", "kv_tokens"),
    [(64, 800_000), (4, 800_000), (64, 60_000), (64, 22_000)],
    ids=["roomy", "few slots", "little KV", "too little KV"],
)
def test_requests_end_when_the_timing_model_ends_them(seed: int, max_running: int, kv_tokens: int) -> None:
    hardware = descriptions.load("h800-qwen3-8b" if seed % 2 else "h800-qwen3-30b-a3b")
    if seed % 3 == 2:  # an engine that computes chunks apart from decoding
        hardware = msgspec.structs.replace(hardware, prefill=Curve((1, 1000), (0.001, 0.05), "made up"))
    if seed % 4 == 3:  # and one whose decoding does not depend on the contexts' length
        flat = Value(0.0, "made up")
        hardware = msgspec.structs.replace(
            hardware, attention_floor_s=flat, attention_fixed_s=flat, attention_s_per_token=flat
        )
    generator = random.Random(seed)
    sessions = [Session(number, generator, generator.randint(1, 12)) for number in range(generator.choice((3, 24)))]
    script = Script(sessions, updates=sorted(generator.random() * 20 for _ in range(seed % 4)))
    slow = Model(sessions, hardware, max_running, kv_tokens)
    fast = Fast(sessions, hardware, max_running, kv_tokens)
    expected, found = script.play(slow), script.play(fast)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in expected], rel=1e-6)
    sums, ours = slow.model.sums, fast.engine.sums
    assert (ours.iterations, ours.decoded, ours.prefilled, ours.cached, ours.retracted) == (
        sums.iterations,
        sums.decoded,
        sums.prefilled,
        sums.cached,
        sums.retracted,
    )
    assert ours.decode_s == pytest.approx(sums.decode_s, rel=1e-6)
