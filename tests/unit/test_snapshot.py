"""Snapshots: complete or absent, every byte pinned, torn and corrupt shards refused and fetched again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from services import snapshot
from services.models import read_weights
from services.snapshot import Snapshot, SnapshotError, fetch, verify, write_snapshot

SHARD = "model.safetensors"


@pytest.fixture
def written(tmp_path: Path) -> Snapshot:
    (tmp_path / "config.json").write_text("{}")
    return write_snapshot({"w": torch.arange(1000.0)}, tmp_path / "snapshots", 3, tmp_path)


class Source:
    """An HTTP server over a folder that spoils the first `spoil[name]` answers for a file."""

    def __init__(self, folder: Path) -> None:
        self.spoil: dict[str, list[bytes]] = {}
        self.served: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                outer.served.append(name)
                spoiled = outer.spoil.get(name)
                body = spoiled.pop(0) if spoiled else (folder / name).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}/any"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()


@pytest.fixture
def source(written: Snapshot) -> Iterator[Source]:
    source = Source(Path(written.uri))
    yield source
    source.server.shutdown()
    source.server.server_close()


def test_written_and_verified(written: Snapshot):
    manifest = verify(written.uri, written.manifest_sha256)
    assert (manifest.version, manifest.bytes) == (3, written.bytes)
    assert torch.equal(read_weights(written.uri)["w"], torch.arange(1000.0))
    assert not list(Path(written.uri).parent.glob(".draft*"))


def test_old_ones_are_pruned_and_writing_again_is_harmless(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    root = tmp_path / "snapshots"
    for version in range(5):
        last = write_snapshot({"w": torch.full((4,), float(version))}, root, version, tmp_path, keep=2)
    assert [item.name for item in sorted(root.iterdir())] == ["v00000003", "v00000004"]
    assert write_snapshot({"w": torch.full((4,), 4.0)}, root, 4, tmp_path, keep=2) == last
    changed = write_snapshot({"w": torch.zeros(4)}, root, 4, tmp_path, keep=2)
    assert changed.manifest_sha256 != last.manifest_sha256
    verify(changed.uri, changed.manifest_sha256)


@pytest.mark.parametrize("name", [SHARD, "config.json", "manifest.json"])
def test_any_changed_file_is_named(written: Snapshot, name: str):
    file = Path(written.uri) / name
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(bytes(body))
    with pytest.raises(SnapshotError, match=name):
        fetch(written.uri, "unused", written.manifest_sha256, retry_s=0)


def test_a_torn_file_is_named_with_its_size(written: Snapshot):
    file = Path(written.uri) / SHARD
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SnapshotError, match=rf"{SHARD}: torn: 100 of"):
        verify(written.uri, written.manifest_sha256)


def test_spoiled_answers_are_fetched_again(written: Snapshot, source: Source, tmp_path: Path):
    whole = (Path(written.uri) / SHARD).read_bytes()
    source.spoil = {SHARD: [whole[:50], whole[:-1] + b"x"], "manifest.json": [b"{}"]}
    local = fetch(source.uri, tmp_path / "cache", written.manifest_sha256, retry_s=0)
    verify(local, written.manifest_sha256)
    assert source.served.count(SHARD) == 3


def test_the_bound_holds_and_a_later_fetch_resumes(written: Snapshot, source: Source, tmp_path: Path):
    source.spoil = {SHARD: [b"nothing"] * snapshot.ATTEMPTS}
    with pytest.raises(SnapshotError, match=rf"{SHARD}: torn: 7 of .* attempts"):
        fetch(source.uri, tmp_path / "cache", written.manifest_sha256, retry_s=0)
    fetch(source.uri, tmp_path / "cache", written.manifest_sha256, retry_s=0)
    assert source.served.count("config.json") == 1


def test_workers_of_a_node_share_one_fetch(written: Snapshot, source: Source, tmp_path: Path):
    def work():
        fetch(source.uri, tmp_path / "cache", written.manifest_sha256)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.served.count(SHARD) == 1


def test_a_spoiled_cache_is_fetched_again(written: Snapshot, source: Source, tmp_path: Path):
    local = fetch(source.uri, tmp_path / "cache", written.manifest_sha256)
    (local / SHARD).write_bytes(b"")
    verify(fetch(source.uri, tmp_path / "cache", written.manifest_sha256), written.manifest_sha256)


def test_fsspec_uris(written: Snapshot, tmp_path: Path):
    local = fetch(Path(written.uri).as_uri(), tmp_path / "cache", written.manifest_sha256)
    assert local.parent == tmp_path / "cache"


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path):
    raw = b'{"version":1,"files":[{"name":"../x","size":1,"sha256":"0"}]}'
    (tmp_path / "manifest.json").write_bytes(raw)
    digest = snapshot.hashlib.sha256(raw).hexdigest()
    with pytest.raises(SnapshotError, match="not a plain file name"):
        verify(tmp_path, digest)
