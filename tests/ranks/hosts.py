"""Hosts as network namespaces of one machine, joined by a bridge in one of its own; any of them can
be cut off, as by a switch that dies: nothing is refused or reset, it just never arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

NETWORK = "10.213.97"
CLONE_NEWNET = 0x40000000


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not():
    """Why there can be no such hosts here; empty if there can."""
    if shutil.which("ip") is None:
        return "no ip command (Debian: iproute2)"
    try:
        with Hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


class Hosts:
    """So many hosts, with a network that nothing else is on."""

    def __init__(self, number):
        self._name = f"shardkeep-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self._number = number
        self._made = []

    def __enter__(self):
        hub = self._name
        try:
            self._add(hub)
            ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
            ip("-n", hub, "link", "set", "bridge0", "up")
            for host in range(self._number):
                there = f"{hub}-{host}"
                self._add(there)
                ip("-n", hub, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0",
                   "netns", there)  # fmt: skip
                ip("-n", hub, "link", "set", f"port{host}", "master", "bridge0", "up")
                ip("-n", there, "address", "add", f"{NETWORK}.{host + 1}/24", "dev", "eth0")
                ip("-n", there, "link", "set", "eth0", "up")
                ip("-n", there, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, name):
        ip("netns", "add", name)
        self._made.append(name)

    def placed(self, case):
        """A case whose ranks are on these hosts."""
        hub = self._name
        return replace(
            case,
            store="rank 0",
            hosts=tuple(
                (f"/run/netns/{hub}-{host}", f"ip -n {hub} link set port{host} down", host)
                for host in case.hosts
            ),
        )

    def heal(self):
        """Connect all of them again."""
        for host in range(self._number):
            ip("-n", self._name, "link", "set", f"port{host}", "up")

    def __exit__(self, *_):
        for name in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        self._made = []


def join(rank, world, place, notes):
    """Enter a host's network with this process, and make a group of torch's over it.

    The store is held by rank 0, as torchrun does it where nothing else is asked for.
    """
    import torch.distributed as dist

    import shardkeep.engine.windows
    import shardkeep.hosts

    namespace, _, host = place
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    # One kernel, and so one boot id: these are to be two machines.
    shardkeep.hosts.host_name = shardkeep.engine.windows.host_name = lambda: f"host-{host}"
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    port = Path(notes) / "port"
    if rank == 0:
        listener = socket.socket()
        listener.bind(("0.0.0.0", 0))
        listener.listen(64)
        address, number = f"{NETWORK}.{host + 1}", listener.getsockname()[1]
        store = dist.TCPStore(address, number, is_master=True, wait_for_workers=False,
                              master_listen_fd=listener.detach())  # fmt: skip
        Path(f"{port}.new").write_text(f"{address} {number}")
        os.rename(f"{port}.new", port)
    else:
        while not port.exists():
            time.sleep(0.005)
        address, number = port.read_text().split()
        store = dist.TCPStore(address, int(number), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))  # fmt: skip
