"""The host over a real server that is killed and started again while inputs come in."""

from __future__ import annotations

import asyncio
from pathlib import Path

from messages.decision_engine import BudgetChanged
from messages.envelope import decode, encode
from messages.subjects import event_subject, state_bucket, stream, subject_of
from services.runtime import bus_nats
from services.runtime.bus import BucketSpec, StreamSpec
from services.runtime.host import CoreHost
from tests.nats_fixture import NatsServer
from tests.unit.test_host import JOB, EchoCore, gpu

INPUTS = 60


async def test_a_killed_server_and_a_restarted_host_account_for_each_input_once(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.start()
    try:
        feeder = await bus_nats.connect(server.url, name="feeder", inbox_prefix="_INBOX_f")
        for family in ("ev", "dead"):
            await feeder.ensure_stream(StreamSpec(name=stream(JOB, family), subjects=(f"pearl.{JOB}.{family}.>",)))
        await feeder.ensure_bucket(BucketSpec(name=state_bucket(JOB)))

        async def say(number: int) -> None:
            message = gpu(f"n{number}")
            await feeder.publish_durable(subject_of(JOB, message), encode(message), msg_id=f"in{number}")

        async def run_until(inputs: int, kill_at: int) -> CoreHost[object]:
            bus = await bus_nats.connect(server.url, name="echo", inbox_prefix="_INBOX_e")
            host: CoreHost[object] = CoreHost(EchoCore(), bus, job_name=JOB, tick_ms=20)  # type: ignore[arg-type]
            stop = asyncio.Event()
            task = asyncio.create_task(host.run(stop))
            for number in range(inputs - INPUTS // 2, inputs):
                if number == kill_at:
                    server.kill()
                    await asyncio.get_running_loop().run_in_executor(None, server.start)
                await say(number)
            while len(host.state.inputs) < inputs and not task.done():  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stop.set()
            await task
            await bus.close()
            return host

        async with asyncio.timeout(40):
            await run_until(INPUTS // 2, kill_at=INPUTS // 4)
            host = await run_until(INPUTS, kill_at=INPUTS * 3 // 4)
        expected = [f"n{number}" for number in range(INPUTS)]
        assert list(host.state.inputs) == expected  # type: ignore[attr-defined]
        found = feeder.read(stream(JOB, "ev"), event_subject(JOB, BudgetChanged))
        assert [decode(delivery.data, BudgetChanged).cause async for delivery in found] == expected
        await feeder.close()
    finally:
        server.stop()
