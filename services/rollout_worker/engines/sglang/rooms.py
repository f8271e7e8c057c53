"""Beside SGLang's own transfer: which prefill and decode request belong together, and whether they may (DESIGN 7, PD).

SGLang's hand-over does not compare weight versions, learns of a dead prefill server after 14 s, and can corrupt pages when an abort
races a transfer. So each prefill worker listens here; a decode worker asks before it submits and keeps its connection until its first
token came. Both sides submit only once they know of each other and of the same version; the end of the connection is the end of the
other side.

One JSON object a line:  decode -> prefill `{"room","version"}`;  prefill -> decode `{"bootstrap_port"}`, or `{"refused"}` and, at any
time later, `{"broken"}`.  The decode side says `{"left":true}` where nobody waits for its reply any more, and `{"have":true}` when its
server has the context, left or not; then it closes. A connection that ends before is a decode server's end: what that was to get would
wait in the prefill server for five minutes, and is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from typing import Final

import msgspec

LONGEST_LINE: Final = 4096


class Hello(msgspec.Struct, frozen=True):
    """A decode worker wants the context of this room, computed with this version."""

    room: int
    version: int


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Go on at this bootstrap port; or why not."""

    bootstrap_port: int = 0
    refused: str = ""


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """Later: the hand-over will not be (`broken`), has been (`have`), or goes on for nobody (`left`)."""

    broken: str = ""
    have: bool = False
    left: bool = False


class End(enum.Enum):
    """How the decode side left its room."""

    HAVE = "has the context"
    LEFT = "waits for nothing, its server does"
    GONE = "is gone"


class RefusedError(Exception):
    """The other side will not; its reason."""


class Room:
    """A prefill request that waits for its decode side, then for the hand-over."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.joined: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it may not, "": it may
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()  # of the decode side's interest
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # True: its server has the context
        self.broken: asyncio.Future[str] = (
            asyncio.get_running_loop().create_future()
        )  # why, to be told to the decode side


class Rooms:
    """The prefill side: listens at `endpoint` from `start` to `stop`. `room_s`: how long a side waits for the other."""

    def __init__(self, address: str, bootstrap_port: int, room_s: float) -> None:
        self._address = address
        self.bootstrap_port = bootstrap_port  # of this worker's server
        self._room_s = room_s
        self._server: asyncio.Server | None = None
        self._rooms: dict[int, Room] = {}
        self._wanted: dict[int, asyncio.Event] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, self._address, 0, limit=LONGEST_LINE)
        self.endpoint = f"{self._address}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Drop everyone."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def open(self) -> int:
        """Rooms and connections there are."""
        return len(self._rooms) + len(self._connections)

    def enter(self, number: int, version: int) -> Room:
        """A prefill request is here. Raises RefusedError where the room is taken."""
        if number in self._rooms:
            raise RefusedError(f"room {number} is taken")
        room = self._rooms[number] = Room(version)
        if number in self._wanted:
            self._wanted[number].set()
        return room

    def leave(self, number: int, reason: str = "") -> None:
        """Its request is over: handed over, or for a `reason` that the decode side is told."""
        room = self._rooms.pop(number)
        if reason and not room.broken.done():
            room.broken.set_result(reason)
        if not room.joined.done():
            room.joined.cancel()

    def announce(self, bootstrap_port: int) -> None:
        """An adopted server's own port."""
        self.bootstrap_port = bootstrap_port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._talk(reader, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError, msgspec.DecodeError, asyncio.CancelledError):
            pass  # whoever it was is gone, or speaks something else
        finally:
            self._connections.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._room_s):
            hello = msgspec.json.decode(await reader.readuntil(b"\n"), type=Hello)
        room = await self._room(hello.room)
        if room is None:
            _tell(writer, Answer(refused=f"no prefill request came to room {hello.room} within {self._room_s:g} s"))
            return
        if room.joined.done():
            _tell(writer, Answer(refused=f"room {hello.room} has its decode side"))
            return
        if room.version != hello.version:
            reason = f"the prefill side has version {room.version}, the decode side {hello.version}"
            room.joined.set_result(reason)
            _tell(writer, Answer(refused=reason))
            return
        room.joined.set_result("")
        _tell(writer, Answer(bootstrap_port=self.bootstrap_port))
        telling = asyncio.create_task(self._tell_broken(room, writer))
        have = False
        try:
            while not have and (line := await reader.readline()):
                said = msgspec.json.decode(line, type=Said)
                have = said.have
                if not room.ended.done():
                    room.ended.set_result(End.HAVE if have else End.LEFT)
        finally:
            telling.cancel()
            if not room.ended.done():
                room.ended.set_result(End.GONE)
            room.over.set_result(have)

    async def _tell_broken(self, room: Room, writer: asyncio.StreamWriter) -> None:
        _tell(writer, Said(broken=await room.broken))
        with contextlib.suppress(OSError):
            await writer.drain()

    async def _room(self, number: int) -> Room | None:
        if number not in self._rooms:
            came = self._wanted.setdefault(number, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._room_s):
                    await came.wait()
            self._wanted.pop(number, None)
        return self._rooms.get(number)


class Joined:
    """The decode side of a room. `bootstrap_port` is for SGLang; `lost` ends, with a reason, if the prefill side does."""

    def __init__(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, bootstrap_port: int) -> None:
        self.bootstrap_port = bootstrap_port
        self._writer = writer
        self.lost: asyncio.Task[str] = asyncio.create_task(_reason(reader))

    def say(self, end: End) -> None:
        """What is known of the decode side now."""
        self.lost.cancel()
        _tell(self._writer, Said(have=end is End.HAVE, left=end is End.LEFT))

    async def close(self) -> None:
        """Hang up; before the word that the server has the context, this says that it never will."""
        self.lost.cancel()
        with contextlib.suppress(OSError):
            self._writer.close()
            await self._writer.wait_closed()


async def join(host: str, port: int, room: int, version: int, within_s: float) -> Joined:
    """Meet a prefill worker's request. Raises RefusedError."""
    where = f"{host}:{port}"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
            _tell(writer, Hello(room, version))
            answer = msgspec.json.decode(await reader.readuntil(b"\n"), type=Answer)
            if answer.refused:
                raise RefusedError(answer.refused)
            joined, writer = Joined(writer, reader, answer.bootstrap_port), None
            return joined
    except TimeoutError:
        raise RefusedError(f"the prefill side at {where} does not answer within {within_s:g} s") from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise RefusedError(f"the prefill side at {where} cannot be reached: {error}") from error
    except msgspec.DecodeError as error:
        raise RefusedError(f"the prefill side at {where} speaks another protocol: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _reason(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
        return msgspec.json.decode(line, type=Said).broken if line else "the prefill side is gone"
    except (OSError, ValueError, msgspec.DecodeError) as error:
        return f"the prefill side is gone: {error}"


def _tell(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")
