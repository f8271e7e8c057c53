"""Three hosts on one machine: network namespaces on a bridge, so that one can be cut off from the others.

Where namespaces may not be made (they need root), all hosts are loopback addresses and cannot be cut off; `Hosts.why_not`
says so, and the report repeats it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import msgspec

from tests.nats_fixture import free_port

NATS_PORT = 4222


class Host(msgspec.Struct, frozen=True):
    """One host. `namespace` is empty where hosts are not separate."""

    index: int
    address: str
    nats_port: int
    namespace: str = ""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command as it is run on this host; its process keeps the pid of what is started."""
        return ["ip", "netns", "exec", self.namespace, *command] if self.namespace else list(command)


class Hosts:
    """Makes the hosts, cuts them off and joins them again. `close` removes everything."""

    def __init__(self, count: int = 3) -> None:
        self.why_not = _why_no_namespaces()
        self._tag = f"pearl{os.getpid() % 100000}"
        self._bridge = f"{self._tag}b"
        self._count = count
        self._net = f"10.213.{os.getpid() % 250}"
        if self.why_not:
            self.all = tuple(Host(index, "127.0.0.1", free_port()) for index in range(count))
            return
        self.all = tuple(
            Host(index, f"{self._net}.{index + 1}", NATS_PORT, f"{self._tag}h{index}") for index in range(count)
        )
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise RuntimeError(f"cannot make network namespaces: {error.stderr or error}") from error

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self.all:
            outer, inner = self._link(host), f"{self._tag}i{host.index}"
            _ip("netns", "add", host.namespace)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", outer, "master", self._bridge)
            _ip("link", "set", inner, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", inner)
            _ip("-n", host.namespace, "link", "set", inner, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("link", "set", outer, "up")

    def _link(self, host: Host) -> str:
        return f"{self._tag}o{host.index}"

    def cut(self, host: Host) -> None:
        """Nothing passes between this host and any other."""
        _ip("link", "set", self._link(host), "down")

    def join(self, host: Host) -> None:
        """It passes again."""
        _ip("link", "set", self._link(host), "up")

    def close(self) -> None:
        """Remove namespaces and bridge; harmless where there are none. Processes must have ended."""
        if self.why_not:
            return
        for host in self.all:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", self._link(host)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True)


def _why_no_namespaces() -> str:
    """Why hosts cannot have networks of their own here, or ""."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"pearlprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False, text=True)
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    veth = subprocess.run(
        ["ip", "link", "add", f"pp{os.getpid()}", "type", "veth", "peer", "name", f"pq{os.getpid()}", "netns", probe],
        capture_output=True,
        check=False,
        text=True,
    )
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return f"`ip link add ... type veth` fails: {veth.stderr.strip()}" if veth.returncode else ""
