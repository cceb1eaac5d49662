"""Two hosts on one machine: network, process table, /dev/shm and /tmp of their own, and a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Host(msgspec.Struct, frozen=True):
    """One of them."""

    name: str
    namespace: str
    address: str
    interface: str
    tmp: Path
    """What the host sees as /tmp."""

    def command(self, words: list[str]) -> list[str]:
        """Start the host's main process: it sees this host's processes, network and /tmp, and no others."""
        enter = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        return [
            *enter,
            "sh",
            "-c",
            f'mount -t tmpfs tmpfs /dev/shm && mount --bind "{self.tmp}" /tmp && exec "$@"',
            "sh",
            *words,
        ]

    def beside(self, pid: int, words: list[str]) -> list[str]:
        """Run a command beside the main process, whose process id (as seen from outside) is `pid`."""
        return ["nsenter", "--target", str(pid), "--mount", "--pid", "--net", *words]


def possible() -> bool:
    """Whether namespaces can be made here (root, and the tools)."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    return (
        subprocess.run(
            ["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else; gone at the end."""
    mark = os.getpid() % 10000
    hosts = tuple(
        Host(
            f"host-{rank}", f"kvtier-{mark}-{rank}", f"10.213.7.{rank + 1}", f"kv{mark}-{rank}", folder / f"tmp-{rank}"
        )
        for rank in (0, 1)
    )
    try:
        for host in hosts:
            host.tmp.mkdir(parents=True)
            _ip("netns", "add", host.namespace)
        _ip("link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
