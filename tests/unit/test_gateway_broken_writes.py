"""Sessions whose writes fail, are answered too late, or meet another's: each task ends once, and its client is told how."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from messages.agent import RolloutTask
from services.router.gateway.sessions import Session, end_of
from services.router.gateway.trajectories import LOOKS, Trajectories
from services.runtime.bus import Bus, BusUnavailable, WrongLastSequence
from tests.gateway_world import World, chat, hello, task_of
from tests.waiting import until


def bus_of(world: World) -> Bus:
    return world.gateway.trajectories._bus


def fail(
    monkeypatch: pytest.MonkeyPatch, bus: Bus, which: Callable[[str], bool], *, number: int = 1, stored: bool = False
) -> None:
    """The `number`th of the publishes on such subjects fails, `stored` or not."""
    publish, left = bus.publish_durable, number

    async def broken(subject: str, data: bytes, **rest: Any) -> int:
        nonlocal left
        left -= which(subject)
        if not which(subject) or left != 0:
            return await publish(subject, data, **rest)
        if stored:
            await publish(subject, data, **rest)
        raise BusUnavailable(f"{subject}: the broker is away")

    monkeypatch.setattr(bus, "publish_durable", broken)


async def opened(world: World, **body: Any) -> tuple[str, dict[str, str]]:
    session = await world.post("/v1/sessions", {"wait_s": 1, **body}, status=201)
    return f"/v1/sessions/{session['id']}", {"Authorization": f"Bearer {session['key']}"}


async def talk(world: World, header: dict[str, str], turns: int = 1) -> None:
    said: list[str] = []
    for turn in range(turns):
        answer = await world.post("/v1/chat/completions", chat(*said, f"turn {turn}"), **header)
        said += [f"turn {turn}", answer["choices"][0]["message"]["content"]]


@pytest.mark.parametrize("stored", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
async def test_a_reward_goes_on_where_it_stopped(number: int, stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns and an end; whichever of them fails, also if duplicates are forgotten when it is posted again."""
    async with World(hello) as world:
        await world.give(task_of())
        path, header = await opened(world)
        await talk(world, header, 3)
        fail(monkeypatch, bus_of(world), lambda _: True, number=number, stored=stored)
        await world.post(f"{path}/reward", {"reward": 1.0}, status=503, **header)
        monkeypatch.undo()
        world.clock.advance(130_000)
        result = await world.post(f"{path}/reward", {"reward": 1.0}, **header)
        assert (result["status"], result["turns"]) == ("completed", 3)
        report = await world.report()
        assert report.ok, report.violations
        assert (report.completed, report.duplicated, len(await world.turns())) == (1, 0, 3)
        assert not await world.left()


async def test_given_up_after_its_end_was_stored_it_has_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(hello) as world:
        await world.give(task_of())
        path, header = await opened(world)
        await talk(world, header)
        fail(monkeypatch, bus_of(world), lambda subject: ".ev." in subject, stored=True)
        await world.post(f"{path}/reward", {"reward": 0.5}, status=503, **header)
        async with world.http.delete(path, headers=header) as response:
            told = await response.json()
        assert (told["status"], told["reward"], told["turns"]) == ("completed", 0.5, 1)
        (end,) = await world.ends()
        assert end.status == "completed" and not await world.left()


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("by", ["client", "idleness"])
async def test_it_is_not_given_up_while_nobody_can_say_how_it_ended(
    by: str, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(hello) as world:
        await world.give(task_of())
        path, header = await opened(world)
        await talk(world, header)
        fail(monkeypatch, bus_of(world), lambda subject: ".ev." in subject, stored=True)
        await world.post(f"{path}/reward", {"reward": 0.5}, status=503, **header)

        async def nobody(stream: str, subject: str) -> None:
            raise BusUnavailable(f"{subject}: the broker is away")

        if away:
            monkeypatch.setattr(bus_of(world), "last", nobody)
        if by == "client":
            async with world.http.delete(path, headers=header) as response:
                assert response.status == (503 if away else 200)
        else:
            world.clock.advance(world.config.session_idle_ms)
            await world.gateway.trajectories.look_after()
        monkeypatch.undo()
        result = await world.post(f"{path}/reward", {"reward": 0.5}, **header)
        assert (result["status"], result["reward"]) == ("completed", 0.5)
        assert len(await world.ends()) == 1 and not await world.left()


@pytest.mark.parametrize("changed", [{"reward": 0.5}, {"reward": 1.0, "status": "truncated"}])
@pytest.mark.parametrize("late", [False, True])
async def test_a_reward_that_is_another_than_the_stored_one_is_told_that(
    changed: dict[str, Any], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: the first end arrives when the second is on its way."""
    async with World(hello) as world:
        await world.give(task_of())
        path, header = await opened(world)
        await talk(world, header)
        bus, first = bus_of(world), []
        publish = bus.publish_durable

        async def unanswered(subject: str, data: bytes, **rest: Any) -> int:
            if ".ev." in subject and not first:
                first.append(subject)
                if not late:
                    await publish(subject, data, **rest)
                first.append(data)
                raise BusUnavailable(f"{subject}: the broker is away")
            if ".ev." in subject and late and len(first) == 2:
                first.append(await publish(first[0], first[1], **{**rest, "msg_id": "first"}))
            return await publish(subject, data, **rest)

        monkeypatch.setattr(bus, "publish_durable", unanswered)
        await world.post(f"{path}/reward", {"reward": 1.0}, status=503, **header)
        answer = await world.post(f"{path}/reward", changed, status=409, **header)
        assert answer["error"]["code"] == "session_ended" and "completed with reward 1" in answer["error"]["message"]
        (end,) = await world.ends()
        assert (end.status, end.reward) == ("completed", 1.0)
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **header))["status"] == "completed"


@pytest.mark.parametrize("stored", [False, True], ids=["before", "after"])
async def test_an_interruption_that_was_not_journalled_is_before_the_next_record(
    stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(hello) as world:
        world.cluster.script.append("cut:3")
        await world.give(task_of())
        path, header = await opened(world)
        fail(monkeypatch, bus_of(world), lambda subject: ".journal." in subject, stored=stored)
        answer = await world.post("/v1/chat/completions", chat("Hi"), status=503, **header)
        assert answer["error"]["code"] == "no_bus"
        await talk(world, header)
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **header))["status"] == "completed"
        assert len(await world.journal()) == 2


async def test_a_client_goes_away_while_an_interruption_is_journalled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(hello) as world:
        world.cluster.script.append("cut:3")
        await world.give(task_of())
        path, header = await opened(world)
        bus, stored = bus_of(world), asyncio.Event()
        publish = bus.publish_durable

        async def unanswered(subject: str, data: bytes, **rest: Any) -> int:
            await publish(subject, data, **rest)
            stored.set()
            return await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(bus, "publish_durable", unanswered)
        asking = asyncio.create_task(talk(world, header))
        await stored.wait()
        monkeypatch.undo()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: world.gateway.generation.in_flight == 0)
        await talk(world, header)
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **header))["status"] == "completed"
        assert len(await world.journal()) == 2


async def test_what_runs_for_a_session_without_a_task_ends_with_it() -> None:
    async with World(hello) as world:
        world.cluster.before = asyncio.Event()
        path, header = await opened(world, train=False)
        asking = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi"), status=409, **header))
        await until(lambda: bool(world.cluster.generates))
        async with world.http.delete(path, headers=header) as response:
            assert response.status == 200
        assert (await asking)["error"]["code"] == "session_ended" and world.gateway.generation.in_flight == 0


async def test_what_runs_for_a_session_that_is_given_up_ends_and_disturbs_no_other_try() -> None:
    async with World(hello) as world:
        world.cluster.before = go = asyncio.Event()
        await world.give(task_of())
        path, header = await opened(world)
        asking = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi"), status=409, **header))
        await until(lambda: bool(world.cluster.generates))
        async with world.http.delete(path, headers=header) as response:
            assert response.status == 200
        assert (await asking)["error"]["code"] == "session_ended" and world.gateway.generation.in_flight == 0
        world.cluster.before = None
        go.set()
        await world.give(task_of(retry=1))
        path, header = await opened(world)
        await talk(world, header)
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **header))["status"] == "completed"
        assert not world.gateway.trajectories._locks


async def half_written(world: World, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Session, Trajectories]:
    """A session whose turns are stored and whose end is not; and another gateway's trajectories."""
    await world.give(task_of(**changes))
    path, header = await opened(world)
    await talk(world, header)
    fail(monkeypatch, bus_of(world), lambda subject: ".ev." in subject)
    await world.post(f"{path}/reward", {"reward": 1.0}, status=503, **header)
    monkeypatch.undo()
    session = world.gateway.trajectories.book.find(path.rpartition("/")[2])
    return session, Trajectories(world.config, world.broker.connect(), "gw11111111", world.clock)


async def assert_it_takes_the_next(world: World, other: Trajectories) -> None:
    """The half written task comes to the other gateway, and one more: a session of that is what its client gets."""
    world.clock.advance(60_000)
    await world.give(task_of("b3-g0-m1"))
    try:
        assert (await other.open(train=True, wait_s=1, task=None)).trajectory == "b3-g0-m1"
    finally:
        await other.stop()


async def test_a_slow_gateways_end_is_not_a_failure_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes its trajectory's end while another is about to end that half written try as failed."""
    async with World(hello) as world:
        session, other = await half_written(world, monkeypatch)
        end_failed = other._end_failed

        async def late(task: Any, reason: str) -> None:
            await world.gateway.trajectories.reward(session, 1.0, "completed")
            await end_failed(task, reason)

        monkeypatch.setattr(other, "_end_failed", late)
        await assert_it_takes_the_next(world, other)
        assert [end.status for end in await world.ends()] == ["completed"]


async def test_an_earlier_trys_end_that_comes_late_ends_no_other_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The try itself was left half written: it ends as failed, after the other's end."""
    async with World(hello) as world:
        session, other = await half_written(world, monkeypatch, retry=1)
        last_end, looked = other._last_end, 0

        async def looked_too_early(task: Any) -> Any:
            nonlocal looked
            found = await last_end(task)
            looked += 1
            if looked == 2:
                first = task_of()
                failed = Session(id="", secret=b"", holding="", task=first, opened_ms=0, touched_ms=0)
                end = end_of(first, failed.result("abandoned", None), (), ())
                await world.gateway.trajectories._publish_end(first, end)
            return found

        monkeypatch.setattr(other, "_last_end", looked_too_early)
        await assert_it_takes_the_next(world, other)
        assert session.task is not None
        assert [(end.retry, end.status) for end in await world.ends()] == [(0, "failed"), (1, "failed")]


async def test_a_task_given_again_by_its_holder_is_another_session() -> None:
    """The first answer was lost: that session's idleness must not end the task that the second plays."""
    async with World(hello) as world:
        body = {"task": msgspec.to_builtins(task_of())}
        first, _ = await opened(world, **body)
        world.clock.advance(world.config.session_idle_ms - 1)
        path, header = await opened(world, **body)
        await talk(world, header)
        world.clock.advance(2)
        await world.gateway.trajectories.look_after()
        assert (await world.get(first))["status"] == "abandoned"
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **header))["status"] == "completed"
        assert [end.status for end in await world.ends()] == ["completed"]


async def test_what_runs_for_a_task_that_is_given_again_ends() -> None:
    async with World(hello) as world:
        world.cluster.before = go = asyncio.Event()
        body = {"task": msgspec.to_builtins(task_of())}
        _, header = await opened(world, **body)
        asking = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi"), status=409, **header))
        await until(lambda: bool(world.cluster.generates))
        path, again = await opened(world, **body)
        assert (await asking)["error"]["code"] == "session_ended" and world.gateway.generation.in_flight == 0
        go.set()
        world.cluster.before = None
        await talk(world, again)
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **again))["status"] == "completed"


async def test_a_task_that_is_given_again_after_its_end_was_stored_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(hello) as world:
        body = {"task": msgspec.to_builtins(task_of())}
        path, header = await opened(world, **body)
        await talk(world, header)
        fail(monkeypatch, bus_of(world), lambda subject: ".ev." in subject, stored=True)
        await world.post(f"{path}/reward", {"reward": 1.0}, status=503, **header)
        monkeypatch.undo()
        assert (await world.post("/v1/sessions", body, status=409))["error"]["code"] == "task_ended"
        assert (await world.post(f"{path}/reward", {"reward": 1.0}, **header))["status"] == "completed"


async def test_a_task_that_others_end_and_end_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(hello) as world:
        await world.give(task_of())
        looked = 0

        async def met(task: RolloutTask) -> None:
            nonlocal looked
            looked += 1
            raise WrongLastSequence("another's end was first")

        monkeypatch.setattr(world.gateway.trajectories, "_take_up_once", met)
        answer = await world.post("/v1/sessions", {"wait_s": 1}, status=503)
        assert "another process is ending b3-g0-m0" in answer["error"]["message"] and looked == LOOKS
        assert await world.left() == ["b3-g0-m0"]


async def test_who_does_not_wait_gets_the_task_behind_one_that_has_ended() -> None:
    async with World(hello) as world:
        await world.give(task_of())
        path, header = await opened(world)
        await talk(world, header)
        world.gateway.trajectories._tasks.held.clear()  # its gateway dies before the acknowledgement
        await world.post(f"{path}/reward", {"reward": 1.0}, **header)
        world.clock.advance(60_000)
        await world.give(task_of("b3-g0-m1"))
        await opened(world, wait_s=0)
        assert await world.left() == ["b3-g0-m1"]
