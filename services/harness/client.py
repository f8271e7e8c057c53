"""A gateway's sessions, as who owns them sees them: open one, reward it, give it up."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from services.harness.core import Post
from services.jobfile import ConfigError

WAIT_S: Final = 5.0
"""For a task, in the gateway."""
IDLE_S: Final = 30.0
"""A session of a runner that was killed is abandoned after so long: its task is then tried again."""
KEEP_S: Final = IDLE_S / 4
TRIES: Final = 20
"""Of posting a reward: the gateway may be busy with the program's last request, or without its bus."""


class SessionTask(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout task of a session, as far as a harness cares."""

    task_seed: int
    group: str
    evaluation: bool = False


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """An open session: `key` is for the program, `owner_key` for its owner alone."""

    id: str
    trajectory: str
    task: SessionTask
    key: str
    owner_key: str
    url: str = ""  # of its gateway
    model: str = ""


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class GatewayError(Exception):
    """A gateway cannot do what it is asked, or is away. `retry_s`: when it may be asked again."""

    def __init__(self, text: str, retry_s: float, status: int = 0) -> None:
        super().__init__(text)
        self.retry_s = retry_s
        self.status = status


class GatewayClient:
    """`async with`. `find`: the URL of the gateway to open the next session at, "" while none runs."""

    def __init__(self, find: Callable[[], str], api_key: str, tls: ssl.SSLContext | bool) -> None:
        self._find = find
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = tls

    async def __aenter__(self) -> GatewayClient:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=60),
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def open(self) -> Session:
        """A session with the next rollout task. Raises GatewayError, ConfigError for a key that is not known."""
        url = self._find()
        if not url:
            raise GatewayError("no gateway runs", 0.5)
        models = msgspec.json.decode(await self._call("GET", f"{url}/v1/models"), type=_Models)
        body = {"wait_s": WAIT_S, "owner_key": True, "idle_s": IDLE_S}
        session = msgspec.json.decode(await self._call("POST", f"{url}/v1/sessions", body), type=Session)
        return msgspec.structs.replace(session, url=url, model=models.data[0].id)

    async def keep(self, session: Session) -> None:
        """Until cancelled: keep a session open, however seldom its program asks. What the gateway answers is its program's to learn."""
        while True:
            await asyncio.sleep(KEEP_S)
            with contextlib.suppress(GatewayError):
                await self._call("GET", f"{session.url}/v1/sessions/{session.id}", None, self._owner(session))

    async def post(self, session: Session, reward: Post) -> None:
        """End it with a reward: its trajectory is in the stream on return. Raises GatewayError."""
        body = msgspec.structs.asdict(reward)
        for left in range(TRIES, 0, -1):
            try:
                await self._call("POST", f"{session.url}/v1/sessions/{session.id}/reward", body, self._owner(session))
                return
            except GatewayError as error:
                if left == 1 or error.status not in (0, 409, 503) or _is_final(error):
                    raise
                await asyncio.sleep(error.retry_s)

    async def give_up(self, session: Session) -> None:
        """Abandon it: its task is tried again. Raises GatewayError."""
        await self._call("DELETE", f"{session.url}/v1/sessions/{session.id}", None, self._owner(session))

    @staticmethod
    def _owner(session: Session) -> Mapping[str, str]:
        return {"X-Session-Owner": session.owner_key}

    async def _call(self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
        # Any: what msgspec encodes
        data = b"" if body is None else msgspec.json.encode(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with self._http.request(method, url, data=data or None, headers=sent) as response:
                answer = await response.read()
                if response.status < 400:
                    return answer
                text = f"{method} {url}: {response.status} {answer[:300].decode('utf-8', 'replace')}"
                if response.status in (401, 403) and method != "DELETE" and url.endswith(("/models", "/sessions")):
                    raise ConfigError(f"harness.api_key_file: the gateway does not take this key ({text})")
                after = response.headers.get("Retry-After", "")
                raise GatewayError(text, float(after) if after.isdigit() else 1.0, response.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayError(f"{method} {url}: {type(error).__name__} {error}", 1.0) from error


def _is_final(error: GatewayError) -> bool:
    """409s that another try does not change."""
    return any(code in str(error) for code in ('"session_ended"', '"session_empty"', '"session_superseded"'))
