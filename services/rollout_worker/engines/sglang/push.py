"""Weights of a snapshot handed to a server from this process, where `rollout.sglang.weights` is not "disk".

- "tensor": through shared memory, to a server on this machine. Only handles go over HTTP. Shared by file name: SGLang 0.5.23 exits where
  they are shared by file descriptor, which is torch's default.
- "distributed": by broadcast in a group of this process (rank 0) and the server's ranks, to a server anywhere. Over gloo, which needs no
  GPU here. The group lives as long as one update, so that the death of either side leaves nothing to be told.

Both are sessions of several calls, whose failure in the middle leaves tensors of two versions in the server.
"""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from safetensors import SafetensorError, safe_open

from messages.ids import PolicyVersion
from services.rollout_worker.engines.sglang.api import LOAD_S, Api, ApiError, ServerGoneError
from services.rollout_worker.engines.sglang.server import free_port

if TYPE_CHECKING:
    from torch import Tensor

BATCH_BYTES: Final = 256 << 20
"""Sent by one call, and held twice here while it is: a tensor that is larger goes alone."""
JOIN_S: Final = 60.0
"""For both sides to meet in a group, and for a broadcast that nobody takes."""
BACKEND: Final = "gloo"


class PushError(Exception):
    """The server does not hold the snapshot. `mixed`: it may hold some of it."""

    def __init__(self, problem: str, *, mixed: bool) -> None:
        super().__init__(problem)
        self.mixed = mixed


class Place(msgspec.Struct, frozen=True):
    """Where a tensor is."""

    file: Path
    name: str


def batches(folder: str | Path, most: int) -> list[list[Place]]:
    """All tensors there, in parts of at most so many bytes (a larger tensor alone). Raises PushError."""
    found: list[list[Place]] = []
    left = 0
    try:
        for file in sorted(Path(folder).glob("*.safetensors")):
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    size = _bytes_of(opened.get_slice(name))
                    if size > left:
                        found.append([])
                        left = most
                    found[-1].append(Place(file, name))
                    left -= size
    except (OSError, SafetensorError) as error:
        raise PushError(f"{folder}: {error}", mixed=False) from error
    if not found:
        raise PushError(f"{folder} has no safetensors", mixed=False)
    return found


def _opened(file: Path) -> Any:
    opened: Any = safe_open(file, framework="pt")  # pyright: ignore[reportUnknownVariableType] - safetensors has no types
    return opened


_ITEM: Final = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "F16": 2, "BF16": 2}
"""Bytes of an element, by safetensors' name of its type; 4 or 8 of the others."""


def _bytes_of(part: Any) -> int:
    size = _ITEM.get(part.get_dtype(), 8 if part.get_dtype().endswith("64") else 4)
    for length in part.get_shape():
        size *= length
    return size


async def push(api: Api, way: str, directory: str, version: PolicyVersion, *, ranks: int, address: str) -> None:
    """Bring the snapshot into a server whose generation is paused. `ranks`: its tensor-parallel size; `address`: of this node.

    Raises PushError.
    """
    parts = await asyncio.to_thread(batches, directory, BATCH_BYTES)
    sender = _Shared(api, ranks) if way == "tensor" else _Group(api, ranks, address)
    try:
        await sender.open()
    except (ApiError, ServerGoneError, RuntimeError) as error:
        await sender.close()
        raise PushError(str(error), mixed=False) from error
    begun = False
    try:
        await api.post("/begin_weight_update", within_s=LOAD_S)
        begun = True
        for number, places in enumerate(parts, 1):
            tensors = await asyncio.to_thread(_read, places)
            named = {"weight_version": str(version)} if number == len(parts) else {}
            await sender.send(tensors, {"flush_cache": False, **named})
        await api.post("/end_weight_update", within_s=LOAD_S)
    except (ApiError, ServerGoneError, OSError, SafetensorError, RuntimeError) as error:  # torch raises RuntimeErrors
        if begun:
            with suppress(ApiError, ServerGoneError):
                await api.post("/end_weight_update", within_s=LOAD_S)  # else no update could begin again
        raise PushError(str(error), mixed=begun) from error
    finally:
        await sender.close()


def _read(places: Sequence[Place]) -> list[tuple[str, Tensor]]:
    """Each with memory of its own: what is shared of a view is all that it is a view of."""
    found: list[tuple[str, Tensor]] = []
    for place in places:
        with _opened(place.file) as opened:
            found.append((place.name, opened.get_tensor(place.name).clone()))
    return found


class _Shared:
    """Through shared memory."""

    def __init__(self, api: Api, ranks: int) -> None:
        self._api = api
        self._ranks = ranks

    async def open(self) -> None:
        import torch.multiprocessing  # heavy; and it registers how tensors are pickled

        sharing: Any = torch.multiprocessing
        sharing.set_sharing_strategy("file_system")

    async def send(self, tensors: list[tuple[str, Tensor]], options: dict[str, Any]) -> None:
        handles = await asyncio.to_thread(lambda: [_handle(tensors) for _ in range(self._ranks)])
        call = "/update_weights_from_tensor"
        await self._api.post(call, within_s=LOAD_S, serialized_named_tensors=handles, **options)

    async def close(self) -> None:
        pass


def _handle(tensors: list[tuple[str, Tensor]]) -> str:
    """One rank's own: each is counted as one user of the memory."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


class _Group:
    """By broadcast."""

    def __init__(self, api: Api, ranks: int, address: str) -> None:
        self._api = api
        self._size = 1 + ranks
        self._address = address
        self._name = f"pearl-{secrets.token_hex(4)}"
        self._group: Any = None
        self._met = False

    async def open(self) -> None:
        port = free_port(self._address)
        call = "/init_weights_update_group"
        asked = self._api.post(
            call,
            within_s=JOIN_S,
            master_address=self._address,
            master_port=port,
            rank_offset=1,
            world_size=self._size,
            group_name=self._name,
            backend=BACKEND,
        )
        self._group, _ = await asyncio.gather(asyncio.to_thread(self._join, port), asked)
        self._met = True

    def _join(self, port: int) -> Any:
        """As SGLang makes its side, by torch's own parts of a group beside others. Raises RuntimeError."""
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d  # what is private there is what every trainer uses that joins a group of SGLang's
        patience = timedelta(seconds=JOIN_S)
        store, rank, size = next(c10d.rendezvous(f"tcp://{self._address}:{port}", 0, self._size, timeout=patience))
        store.set_timeout(patience)
        named = c10d.PrefixStore(self._name, store)
        made = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend(BACKEND), named, group_name=self._name, timeout=patience
        )
        c10d._world.pg_group_ranks[made[0]] = {each: each for each in range(size)}  # which its destruction looks for
        return made[0]

    async def send(self, tensors: list[tuple[str, Tensor]], options: dict[str, Any]) -> None:
        asked = self._api.post(
            "/update_weights_from_distributed",
            within_s=LOAD_S,
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            group_name=self._name,
            **options,
        )
        broadcast = asyncio.to_thread(self._broadcast, [tensor for _, tensor in tensors])
        both = [asyncio.create_task(each) for each in (asked, broadcast)]
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if both[1].done() and both[1].exception() is not None:
            self._leave()  # else the server would wait for the rest
        await asyncio.wait(both)  # a thread in a broadcast is not left alone with its group; see JOIN_S
        await asyncio.gather(*both)

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for work in [self._group.broadcast(tensor, 0) for tensor in tensors]:
            work.wait()

    def _leave(self) -> None:
        from torch.distributed import destroy_process_group

        group, self._group = self._group, None
        if group is not None:
            destroy_process_group(group)

    async def close(self) -> None:
        self._leave()
        if self._met:
            with suppress(ApiError, ServerGoneError):
                await self._api.post("/destroy_weights_update_group", group_name=self._name)
