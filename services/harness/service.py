"""The harness runner: takes sessions from the gateway, runs an agent program for each, posts what the work is worth.

Owns: the sessions it opened, their working copies and processes. Never decides what is rolled out, and takes no part in what the
agent and the model say to each other. Driven by the gateway, over HTTP alone: it may run on any machine that reaches one.

Invariants: a session that it opened is rewarded or given up, unless its gateway is gone; the owner's key, without which nobody
rewards a session, never leaves this process; no process of an episode outlives it.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from services.harness import sandbox
from services.harness.client import GatewayClient, GatewayError, Session
from services.harness.config import Config, tls_of
from services.harness.core import GiveUp, Post, pause_after
from services.harness.episode import marker_of, play
from services.jobfile import ConfigError, JobFile
from services.runtime.log import get_logger

LONGEST_RETRY_S: Final = 5.0
OUTPUT_TOLD: Final = 2000
"""Characters of a failed episode's output that the log shows."""

log = get_logger("harness")


class _Where(msgspec.Struct, frozen=True):
    url: str


class Runner:
    """One process's episodes. `run` until told to stop. Raises ConfigError."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rewarded = 0
        self.given_up = 0
        self._opened = config.index

    async def run(self, stop: asyncio.Event) -> None:
        """Play until `stop`; then give up what runs."""
        config = self.config
        sandbox.sweep(marker_of(config))  # of a runner of this index that was killed
        sandbox.remove(config.folder)
        async with GatewayClient(self._find, config.api_key, tls_of(config.ca_file)) as gateway:
            playing = {asyncio.create_task(self._keep_playing(gateway)) for _ in range(config.concurrency)}
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({*playing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*playing, stopped):
                    task.cancel()
                ended = await asyncio.gather(*playing, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error
        log.info(f"{self.rewarded} episodes rewarded, {self.given_up} given up", action="harness.stopped")

    def _find(self) -> str:
        """Of several gateways the next that runs."""
        if self.config.gateway:
            return self.config.gateway
        files = self.config.gateway_files
        self._opened += 1
        for each in range(len(files)):
            try:
                data = files[(self._opened + each) % len(files)].read_bytes()
                return msgspec.json.decode(data, type=_Where).url
            except (OSError, msgspec.MsgspecError):
                continue
        return ""

    async def _keep_playing(self, gateway: GatewayClient) -> None:
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            try:
                session = await gateway.open()
            except GatewayError as error:
                if '"no_task"' not in str(error):
                    log.info(str(error), action="no_session")
                await asyncio.sleep(min(error.retry_s, LONGEST_RETRY_S))
                continue
            done = await self._episode(gateway, session)
            pause_s = pause_after(done, pause_s)

    async def _episode(self, gateway: GatewayClient, session: Session) -> bool:
        """Whether it was rewarded."""
        ended = None
        keeping = asyncio.create_task(gateway.keep(session))
        try:
            ended = await play(self.config, session)
            if isinstance(ended.what, GiveUp):
                text = (
                    f"{session.trajectory} {ended.task}: {ended.what.reason}; output: ...{ended.output[-OUTPUT_TOLD:]}"
                )
                log.warning(text, action="episode_failed")
            else:
                await gateway.post(session, ended.what)
                self.rewarded += 1
                text = f"{session.trajectory} {ended.task}: {ended.what.status}, reward {ended.what.reward:g}"
                log.info(text, action="episode_ended", session=session.id)
        except GatewayError as error:
            log.warning(f"{session.trajectory}: {error}", action="reward_lost")
            ended = None
        finally:
            keeping.cancel()
            if ended is None or isinstance(ended.what, GiveUp):
                self.given_up += 1
                try:
                    await gateway.give_up(session)
                except GatewayError as error:  # gone, or ended by its idleness soon
                    log.info(str(error), action="session_lost")
        return isinstance(ended.what, Post) if ended is not None else False


async def serve(job: JobFile, stop: asyncio.Event, index: int = 0) -> None:
    """Run harness runner `index` until `stop`. Raises ConfigError."""
    if not job.harness.gateway and not job.gateway.bind:
        raise ConfigError("harness.gateway: no gateway to speak to; give its URL, or set gateway.bind")
    await Runner(Config.of(job, index)).run(stop)
