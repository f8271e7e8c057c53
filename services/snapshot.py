"""Weight snapshots: a folder of safetensors shards, the model's configuration and a manifest with every checksum.

The trainer writes them; workers fetch them (DESIGN 8). A folder exists under its final name only when it is complete,
and its manifest's own SHA-256, which travels on the bus, pins every byte of it: the manifest has a BLAKE3 checksum of each
file, taken from the bytes as they are written. BLAKE3 is as hard to forge as SHA-256 and three to four times as fast on a
core; SHA-256, which earlier releases wrote, is still read. One fetch a node is shared by the
node's workers. All functions block: call them off the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import blake3
import fsspec  # pyright: ignore[reportMissingTypeStubs]
import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from services.models.files import Sink

T = TypeVar("T")
R = TypeVar("R")

MANIFEST: Final = "manifest.json"
COPIED: Final = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
ATTEMPTS: Final = 4
"""Tries at one file before the fetch fails; the command that asked for it is repeated anyway."""
RETRY_S: Final = 0.2
READ_ERRORS: Final = (OSError, EOFError, ValueError, ImportError, RuntimeError, http.client.HTTPException)
"""What a source may raise that means: not this time. fsspec's back ends turn their libraries' errors into OSError."""
READ_TIMEOUT_S: Final = 30.0
"""A source that sends nothing for so long has failed."""
SHARE_TIMEOUT_S: Final = 600.0
"""Longest wait for another worker of the node that fetches the same snapshot."""
HASHERS: Final = min(4, os.cpu_count() or 1)
"""Files whose checksums are computed at once; a node's workers may all be at it."""
READ_BYTES: Final = 1 << 20
"""Read and hashed at once: what fits into a core's cache."""
CACHED: Final = 3
"""Snapshots kept in a node's cache: the one being loaded, the one before, and one for a worker that lags."""


class SnapshotError(Exception):
    """A snapshot, or one shard of it, cannot be used: which, and why."""


class FileEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a snapshot, with at least one checksum."""

    name: str
    size: int
    sha256: str = ""
    blake3: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """What a snapshot consists of."""

    version: int
    files: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.size for entry in self.files)


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot just written: what `weights.published/1` says about it."""

    version: int
    uri: str
    manifest_sha256: str
    bytes: int


def write_snapshot(
    state: Mapping[str, Tensor], root: str | Path, version: int, config_dir: str | Path, *, keep: int = 4
) -> Snapshot:
    """Write `<root>/v<version>` atomically, then prune to the newest `keep`. One writer a root.

    `state` maps Hugging Face names to full tensors. A version written before is replaced unless it is the same.
    """
    from services.models.files import save_weights  # torch: only the trainer needs it here

    def fill(draft: Path) -> Iterable[FileEntry]:
        hashing = _Hashing()
        save_weights(state, draft, opener=hashing.opened)
        for name in COPIED:
            if (Path(config_dir) / name).is_file():
                shutil.copyfile(Path(config_dir) / name, draft / name)
        if not (draft / "config.json").is_file():
            raise SnapshotError(f"{config_dir}: no config.json to go with the weights")
        return hashing.entries

    return write_folder(fill, root, version, keep=keep)


def write_folder(
    fill: Callable[[Path], Iterable[FileEntry] | None], root: str | Path, version: int, *, keep: int = 4
) -> Snapshot:
    """`write_snapshot` of whatever files `fill` puts into the folder it is given.

    What it returns are those that are synced and whose checksums it knows.
    """
    assert keep >= 1
    base = Path(root).absolute()
    base.mkdir(parents=True, exist_ok=True)
    for stale in base.glob(".draft-*"):
        shutil.rmtree(stale, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=base))
    try:
        known = {entry.name: entry for entry in fill(draft) or ()}
        entries = tuple(_on_each(lambda file: known.get(file.name) or _synced_entry(file), sorted(draft.iterdir())))
        manifest = msgspec.json.encode(Manifest(version, entries))
        (draft / MANIFEST).write_bytes(manifest)
        _sync(draft / MANIFEST)
        digest = hashlib.sha256(manifest).hexdigest()
        target = base / f"v{version:08d}"
        if not _same(target, digest):
            _replace(draft, target)
        _sync(base)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in sorted(base.glob("v[0-9]*"))[:-keep]:
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
    return Snapshot(version, str(target), digest, Manifest(version, entries).bytes)


def find_snapshot(root: str | Path, version: int) -> Snapshot | None:
    """A snapshot written before, or None. Readers verify its files; a folder with this name was complete."""
    target = Path(root).absolute() / f"v{version:08d}"
    try:
        manifest = (target / MANIFEST).read_bytes()
        size = msgspec.json.decode(manifest, type=Manifest).bytes
    except (OSError, msgspec.MsgspecError):
        return None
    return Snapshot(version, str(target), hashlib.sha256(manifest).hexdigest(), size)


def verify(directory: str | Path, manifest_sha256: str) -> Manifest:
    """Check every byte of a snapshot folder. Raises SnapshotError naming the first file that is wrong."""
    base = Path(directory)
    manifest = _manifest(_read(base / MANIFEST), manifest_sha256, str(base))
    problems = _on_each(lambda entry: _problem(base / entry.name, entry), manifest.files)
    for entry, problem in zip(manifest.files, problems, strict=True):
        if problem:
            raise SnapshotError(f"{base / entry.name}: {problem}")
    return manifest


def version_of(directory: str | Path) -> int:
    """The version that a snapshot folder says it is; its content is not looked at. Raises SnapshotError."""
    file = Path(directory) / MANIFEST
    try:
        return msgspec.json.decode(_read(file), type=Manifest).version
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"{file}: {error}") from error


def fetch(uri: str, cache_dir: str | Path, manifest_sha256: str, *, retry_s: float = RETRY_S) -> Path:
    """A verified local folder with the snapshot at `uri`: a path (used in place), http(s)://, or any fsspec URI.

    Everything but a path is copied once into `cache_dir`, whoever of the node's workers comes first; files that are
    torn or have a wrong checksum are fetched again, `ATTEMPTS` times. Raises SnapshotError naming the file.
    """
    if "://" not in uri:
        _in_place(Path(uri), manifest_sha256, retry_s)
        return Path(uri)
    cache = Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / manifest_sha256[:40]
    with _lock(cache / f"{target.name}.lock"):
        if _same(target, manifest_sha256):
            os.utime(target)
            return target
        shutil.rmtree(target, ignore_errors=True)
        draft = cache / f"{target.name}.draft"
        draft.mkdir(exist_ok=True)  # may hold whole files of a fetch whose process died
        _download(uri, draft, manifest_sha256, retry_s)
        draft.rename(target)
    with _lock(cache / "prune.lock"):
        kept = sorted((item for item in cache.iterdir() if item.is_dir()), key=lambda item: -item.stat().st_mtime)
        for old in kept[CACHED:]:
            shutil.rmtree(old, ignore_errors=True)
            (cache / f"{old.name}.lock").unlink(missing_ok=True)
    return target


def _in_place(base: Path, manifest_sha256: str, retry_s: float) -> None:
    """A shared file system may show a folder before its content: look again, within the bound."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            verify(base, manifest_sha256)
            return
        except SnapshotError:
            if attempt == ATTEMPTS:
                raise
            time.sleep(retry_s * attempt)


def _download(uri: str, draft: Path, manifest_sha256: str, retry_s: float) -> None:
    raw = _retried(uri, MANIFEST, draft, lambda file: _manifest_problem(file, manifest_sha256, uri), retry_s)
    for entry in _manifest(raw.read_bytes(), manifest_sha256, uri).files:
        if _problem(draft / entry.name, entry):
            _retried(uri, entry.name, draft, lambda file, entry=entry: _problem(file, entry), retry_s)


def _retried(uri: str, name: str, draft: Path, problem_of: Callable[[Path], str], retry_s: float) -> Path:
    """Fetch one file until `problem_of` finds nothing wrong with it."""
    part = draft / f"{name}.part"
    problem = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _opened(f"{uri.rstrip('/')}/{name}") as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            problem = problem_of(part)
        except READ_ERRORS as error:
            problem = f"cannot be read: {error}"
        if not problem:
            part.rename(draft / name)
            return draft / name
        if attempt < ATTEMPTS:
            time.sleep(retry_s * attempt)
    part.unlink(missing_ok=True)
    raise SnapshotError(f"{uri}/{name}: {problem} ({ATTEMPTS} attempts)")


@contextlib.contextmanager
def _opened(uri: str) -> Generator[IO[bytes], None, None]:
    if uri.startswith(("http://", "https://")):
        with urllib.request.urlopen(uri, timeout=READ_TIMEOUT_S) as response:
            yield response
    else:
        untyped: Any = fsspec  # the library has no stubs
        with untyped.open(uri, "rb") as file:
            yield file


def _manifest_problem(file: Path, manifest_sha256: str, where: str) -> str:
    try:
        _manifest(file.read_bytes(), manifest_sha256, where)
    except SnapshotError as error:
        return str(error)
    return ""


def _manifest(raw: bytes, manifest_sha256: str, where: str) -> Manifest:
    digest = hashlib.sha256(raw).hexdigest()
    if digest != manifest_sha256:
        raise SnapshotError(
            f"{where}/{MANIFEST}: checksum is {digest[:12]}..., announced was {manifest_sha256[:12]}..."
        )
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"{where}/{MANIFEST}: {error}") from error
    for entry in manifest.files:
        if Path(entry.name).name != entry.name or entry.name in ("", ".", "..", MANIFEST):
            raise SnapshotError(f"{where}/{MANIFEST}: {entry.name!r} is not a plain file name")
    return manifest


def _problem(file: Path, entry: FileEntry) -> str:
    """What is wrong with a file, "" if nothing."""
    try:
        size = file.stat().st_size
        if size != entry.size:
            return f"torn: {size} of {entry.size} bytes"
        if not entry.blake3 and not entry.sha256:
            return "the manifest has no checksum of it"
        if (entry.blake3 and _digest(file) != entry.blake3) or (not entry.blake3 and _sha256(file) != entry.sha256):
            return "wrong checksum"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _same(directory: Path, manifest_sha256: str) -> bool:
    try:
        verify(directory, manifest_sha256)
    except SnapshotError:
        return False
    return True


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{file}: cannot be read: {error.strerror}") from error


def _digest(file: Path) -> str:
    """BLAKE3 of a file. Read, not mapped: a map of a file that is cut short meanwhile ends the process."""
    hasher = blake3.blake3()
    piece = memoryview(bytearray(READ_BYTES))
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(piece):
            hasher.update(piece[:size])
    return hasher.hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _synced_entry(file: Path) -> FileEntry:
    digest = _digest(file)
    _sync(file)
    return FileEntry(file.name, file.stat().st_size, blake3=digest)


class _Hashing:
    """Opens files whose checksums are taken from what is written, and which are synced when they take their place."""

    def __init__(self) -> None:
        self.entries: list[FileEntry] = []

    @contextlib.contextmanager
    def opened(self, file: Path) -> Generator[_HashingSink]:
        from services.models.files import replacing

        with replacing(file) as sink:
            hashing = _HashingSink(sink)
            yield hashing
        _sync(file)
        self.entries.append(FileEntry(file.name, hashing.size, blake3=hashing.hasher.hexdigest()))


class _HashingSink:
    def __init__(self, sink: Sink) -> None:
        self.hasher = blake3.blake3()
        self.size = 0
        self._sink = sink

    def write(self, data: memoryview) -> int:
        written: int = self._sink.write(data)
        self.hasher.update(data[:written])
        self.size += written
        return written


def _on_each(work: Callable[[T], R], files: Sequence[T]) -> list[R]:
    """`work` of each, in order, several at once: checksums, most of a snapshot's time, are computed without the GIL."""
    if len(files) < 2:
        return [work(file) for file in files]
    with ThreadPoolExecutor(min(HASHERS, len(files)), thread_name_prefix="snapshot") as pool:
        return list(pool.map(work, files))


def _sync(path: Path) -> None:
    """A rename must not reach the disk before the bytes it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(draft: Path, target: Path) -> None:
    old = draft.with_name(f"{draft.name}.old")
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """An advisory lock that ends with its process. Polls, so that a stopping process is not held up for long."""
    deadline = time.monotonic() + SHARE_TIMEOUT_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise SnapshotError(f"{path}: another worker holds it for over {SHARE_TIMEOUT_S:.0f} s") from error
                time.sleep(0.02)
        yield
