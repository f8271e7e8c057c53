"""The connections on which KV goes from a prefill engine to a decode engine, in the worker's event loop.

Owns sockets and rooms, no KV: a sender gets bytes that were copied out of the cache, a receiver hands bytes on to the
engine thread, which alone writes them and checks first whether the blocks are still those of this hand-over. Every wait
has a bound, and what ends a hand-over on one side closes the connection, which ends it on the other. Trusts its network
as far as NATS is trusted: a peer must know room, request, attempt and context, and there is no encryption.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from services.rollout_worker.engines.kv_protocol import (
    END,
    LENGTHS,
    Alive,
    Answer,
    Broken,
    First,
    Hello,
    Key,
    Pages,
    ProtocolError,
    Refused,
    Rooms,
    digest,
    frame,
    lengths,
    read_answer,
    read_hello,
)

READ_AHEAD: Final = 1 << 20
"""Bytes a connection reads before they are asked for, doubled by asyncio."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of every wait, in seconds, and of what may wait."""

    connect_s: float = 2.0
    hello_s: float = 2.0  # a connection without a hello
    room_s: float = 3.0  # a receiver whose request does not come: messages take milliseconds
    join_s: float = 30.0  # a request whose receiver does not come: that may wait for blocks; the edge cancels sooner
    idle_s: float = 4.0  # a peer from which nothing comes, or that takes nothing
    beat_s: float = 1.0  # a sign of life where there is nothing to send
    rooms: int = 4096  # on either side


class HandOverError(Exception):
    """No KV came. `finish`: "refused" if nothing ran on the other side, "interrupted" if it stopped."""

    def __init__(self, finish: str, reason: str) -> None:
        super().__init__(reason)
        self.finish = finish


class Sender:
    """The prefill side of one connection. Of the event loop; `send` never blocks."""

    def __init__(self, hello: Hello, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self.hello = hello
        self.number: int | None = None  # of the engine's request, once they met
        self._writer = writer
        self._limits = limits
        self._queue: deque[tuple[Answer, memoryview | bytes]] = deque()
        self._wake = asyncio.Event()
        self._ended = self._first = False

    @property
    def key(self) -> Key:
        return (self.hello.room, self.hello.request, self.hello.attempt)

    def send(self, header: Answer, body: memoryview | bytes = b"") -> None:
        """Queue a frame; nothing after the end. What waits here is at most one context's KV."""
        if self._ended:
            return
        self._ended = isinstance(header, END)
        self._first = isinstance(header, First)
        self._queue.append((header, body))
        self._wake.set()

    async def run(self, reader: asyncio.StreamReader) -> bool:
        """Send until the end is sent and the receiver has closed; whether that end was `First`."""
        left = asyncio.ensure_future(_closed(reader))
        try:
            while not left.done():
                self._wake.clear()
                while self._queue:
                    header, body = self._queue.popleft()
                    self._writer.write(frame(header, len(body)))
                    if body:
                        self._writer.write(body)
                    async with asyncio.timeout(self._limits.idle_s):
                        await self._writer.drain()
                if self._ended:
                    # The receiver closes when it has read the end: then it has everything.
                    await asyncio.wait([left], timeout=self._limits.idle_s)
                    return left.done() and self._first
                waking = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait([left, waking], timeout=self._limits.beat_s, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                if not self._queue:
                    self._queue.append((Alive(), b""))
            return False
        except (OSError, TimeoutError):
            return False
        finally:
            left.cancel()


class Waiting(msgspec.Struct, frozen=True, eq=False):
    """A request of a prefill engine that waits for its receiver."""

    number: int
    key: Key
    context: bytes
    timer: asyncio.TimerHandle


class PrefillSide:
    """Listens for receivers, and brings each together with its request.

    `met(number, sender)`: the request has its receiver, and may be computed. `gone(number, handed_over)`: its receiver has
    everything, or is no more. `expired(number)`: no receiver came.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        met: Callable[[int, Sender], None],
        gone: Callable[[int, bool], None],
        expired: Callable[[int], None],
    ) -> None:
        self.endpoint = ""
        self._limits = limits
        self._met = met
        self._gone = gone
        self._expired = expired
        self._rooms: Rooms[Waiting, Sender] = Rooms(limits.rooms)
        self._waiting: dict[int, Waiting] = {}
        self._senders: dict[int, Sender] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> None:
        """Listen on a free port. Raises OSError."""
        self._server = await asyncio.start_server(self._connected, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"{host}:{port}"

    async def stop(self) -> None:
        """Close everything."""
        if self._server is None:
            return
        self._server.close()
        for waiting in tuple(self._waiting.values()):
            self.leave(waiting.number, Broken("the worker stops"))
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Requests without a receiver."""
        return tuple(self._waiting)

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections)

    def expect(self, number: int, key: Key, tokens: list[int]) -> None:
        """A request came; `met` may be called at once. Raises ProtocolError, and forgets it."""
        timer = asyncio.get_running_loop().call_later(self._limits.join_s, self._expired, number)
        waiting = Waiting(number, key, digest(tokens), timer)
        try:
            sender = self._rooms.request_came(key, waiting)
        except ProtocolError:
            timer.cancel()
            raise
        self._waiting[number] = waiting
        if sender is not None:
            self._meet(waiting, sender)

    def leave(self, number: int, end: Refused | Broken) -> None:
        """The request has ended, whatever its receiver got; that one is told, unless it has been."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._rooms.leave(waiting.key, waiting)
        sender = self._senders.pop(number, None)
        if sender is not None:
            sender.send(end)

    def _meet(self, waiting: Waiting, sender: Sender) -> None:
        waiting.timer.cancel()
        del self._waiting[waiting.number]
        sender.number = waiting.number
        self._senders[waiting.number] = sender
        if sender.hello.context != waiting.context:
            sender.send(Refused("the two sides were given different contexts"))  # and `gone` follows
        else:
            self._met(waiting.number, sender)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= 2 * self._limits.rooms:
            writer.transport.abort()
            return

        def ended(task: asyncio.Task[None]) -> None:
            self._connections.discard(task)
            writer.transport.abort()  # what was to be sent, was

        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                header, _ = await _read(reader)
            hello = read_hello(header)
        except (OSError, EOFError, TimeoutError, ProtocolError):
            return
        sender = Sender(hello, writer, self._limits)
        timer: asyncio.TimerHandle | None = None
        handed_over = False
        try:
            waiting = self._rooms.receiver_came(sender.key, sender)
            if waiting is not None:
                self._meet(waiting, sender)
            else:
                timer = asyncio.get_running_loop().call_later(self._limits.room_s, self._nobody_came, sender)
        except ProtocolError as error:
            sender.send(Refused(str(error)))
        try:
            handed_over = await sender.run(reader)
        finally:
            if timer is not None:
                timer.cancel()
            self._rooms.leave(sender.key, sender)
            if sender.number is not None and self._senders.pop(sender.number, None) is not None:
                self._gone(sender.number, handed_over)

    def _nobody_came(self, sender: Sender) -> None:
        if self._rooms.leave(sender.key, sender):
            sender.send(Refused(f"no request for room {sender.hello.room} came within {self._limits.room_s:g} s"))


async def receive(host: str, port: int, hello: Hello, limits: Limits, take: Callable[[Pages, bytes], None]) -> First:
    """Fetch KV: `take` gets it piece by piece. Raises HandOverError. Cancelling closes the connection."""
    where = f"prefill side {host}:{port}"
    try:
        async with asyncio.timeout(limits.connect_s):
            reader, writer = await asyncio.open_connection(host, port, limit=READ_AHEAD)
    except (OSError, TimeoutError) as error:
        raise HandOverError("refused", f"{where} cannot be reached: {error or 'no answer'}") from error
    try:
        writer.write(frame(hello))
        while True:
            async with asyncio.timeout(limits.idle_s):
                header, body = await _read(reader)
            answer = read_answer(header)
            match answer:
                case Pages():
                    take(answer, body)
                case Alive():
                    pass
                case First():
                    return answer
                case Refused(reason):
                    raise HandOverError("refused", reason)
                case Broken(reason):
                    raise HandOverError("interrupted", reason)
    except TimeoutError as error:
        raise HandOverError("interrupted", f"{where} is silent for {limits.idle_s:g} s") from error
    except (OSError, EOFError) as error:
        raise HandOverError("interrupted", f"{where} is gone") from error
    except ProtocolError as error:
        raise HandOverError("interrupted", f"{where}: {error}") from error
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """One frame. Raises ProtocolError, OSError, EOFError (asyncio's is one)."""
    header, body = lengths(await reader.readexactly(LENGTHS.size))
    return await reader.readexactly(header), await reader.readexactly(body) if body else b""


async def _closed(reader: asyncio.StreamReader) -> None:
    """Until the peer closes. It has nothing more to say; what it says is dropped."""
    with contextlib.suppress(OSError):
        while await reader.read(1024):
            pass
