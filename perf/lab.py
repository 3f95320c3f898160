"""Many hosts with a slow network on one Linux machine.

Each host is a network namespace, joined to a bridge in a namespace of its own by a veth pair that is
limited to the lab's rate in both directions. Nothing is made in the machine's own network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "okrt-lab"
RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
UNIT_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# Stands in for ssh: drops the options, takes the address, and runs the rest as a remote shell would.
LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
exec ip netns exec "{name}-${{address##*.}}" sh -c "exec $*"
"""


class LabError(RuntimeError):
    """The lab cannot be made here; one line that says why and what to do."""


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as "1gbit", "2.5gbit", "100mbit" or "500kbit"."""
    match = RATE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {text!r} is not a positive number with kbit, mbit or gbit, such as 100mbit or 2.5gbit")
    return float(match[1]) * UNIT_BITS[match[2]]


class Lab:
    """A context manager: `hosts` hosts whose links carry `rate` each way, removed at the end.

    Host h has the address `addresses[h]` on its interface eth0 and runs MPI rank h.
    """

    def __init__(self, hosts: int, rate: str) -> None:
        if not 1 <= hosts <= 254:
            raise LabError(f"a lab has 1 to 254 hosts, not {hosts}")
        try:
            self.bits_per_s = parse_rate(rate)
        except ValueError as error:
            raise LabError(str(error)) from None
        # The process id in the name tells a later lab whether this one has been left behind.
        self.name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
        # Labs share no link, so they can all use the same addresses.
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._switch = f"{self.name}-switch"
        self._hosts = [f"{self.name}-{host + 1}" for host in range(hosts)]
        self._launcher = Path(tempfile.gettempdir(), self.name, "launcher")
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Lab:
        _check_machine()
        _remove_stale()
        # These end a process without a chance to clean up, unless they become an exception.
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _exit_on_signal)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run `argv` with one MPI rank on each host and wait; `env` is added to this process's environment.

        `options` are those of subprocess.run, whose result is returned: its returncode is that of mpiexec.
        """
        return subprocess.run(self.mpiexec(argv), env=self.environment(env or {}), **options)

    def mpiexec(self, argv: Sequence[str]) -> list[str]:
        """The command that starts `argv` with one MPI rank on each host; it needs `environment()`."""
        hosts = ",".join(f"{address}:1" for address in self.addresses)
        launch = ["-launcher", "ssh", "-launcher-exec", str(self._launcher), "-hosts", hosts]
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        return ["ip", "netns", "exec", self._hosts[0], mpiexec, *launch, "-n", str(len(self._hosts)), *argv]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """This process's environment, the lab's settings and `env`; mpiexec hands all of it to the ranks."""
        network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
        # By default UCX's TCP halves the rate when two hosts send to each other at once.
        network["UCX_RNDV_SCHEME"] = "get_zcopy"
        return {**os.environ, **network, **env}

    def bytes_received(self) -> list[int]:
        """Bytes that each host's interface has received since the lab was made, headers included."""
        received = []
        for namespace in self._hosts:
            (link,) = json.loads(_ip("-n", namespace, "-s", "-j", "link", "show", "eth0"))
            received.append(link["stats64"]["rx"]["bytes"])
        return received

    def _make(self) -> None:
        self._launcher.parent.mkdir(mode=0o700)
        self._launcher.write_text(LAUNCHER.format(name=self.name))
        self._launcher.chmod(0o755)
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for namespace, address in zip(self._hosts, self.addresses, strict=True):
            port = "port" + address.rpartition(".")[2]
            _ip("netns", "add", namespace)
            peer = ["peer", "name", port, "netns", self._switch]
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            self._limit(namespace, "eth0")
            self._limit(self._switch, port)

    def _limit(self, namespace: str, device: str) -> None:
        """Let `device` send at the lab's rate."""
        # A burst passes at memory speed: 1 ms of it is too short to flatter a result.
        burst_bytes = max(32_000, int(self.bits_per_s / 8 * 1e-3))
        shape = ["rate", f"{self.bits_per_s:.0f}bit", "burst", str(burst_bytes), "latency", "200ms"]
        _call(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape])

    def _remove(self) -> None:
        # A second signal must not cut the clean-up short.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        _remove_lab(self.name)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGINT, interrupt)


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _check_machine() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise LabError("the lab makes network namespaces: run as root on Linux, or leave the lab out")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabError(f"the lab needs the command {' and '.join(missing)}: install iproute2")
    if not Path(sys.executable).with_name("mpiexec").exists():
        raise LabError("the lab needs the mpiexec of the MPICH wheel beside Python: pip install 'okrt[mpich]'")


def _call(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _call(["ip", *arguments])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _remove_lab(lab: str) -> None:
    """End every process in the namespaces of a lab, then delete them and its files."""
    names = [name for name in _namespaces() if name.startswith(f"{lab}-")]
    deadline = time.monotonic() + 5
    empty = 0
    # Twice: a process that goes from one namespace to another while they are listed may be in neither listing.
    while time.monotonic() < deadline and empty < 2:
        pids = _pids(names)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        empty = 0 if pids else empty + 1
        time.sleep(0.02)
    for name in names:
        # Another lab that starts now may remove the same stale one.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    left = sorted({*names} & {*_namespaces()})
    if left:
        raise LabError(f"could not remove the network namespaces {' '.join(left)}: ip netns delete them")
    shutil.rmtree(Path(tempfile.gettempdir(), lab), ignore_errors=True)


def _pids(names: list[str]) -> list[int]:
    """The processes in these namespaces."""
    listings = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in names]
    return [int(pid) for listing in listings for pid in listing.stdout.split()]


def _remove_stale() -> None:
    """Remove the labs of processes that were killed before they could."""
    for lab in {name.rpartition("-")[0] for name in _namespaces() if name.startswith(f"{PREFIX}-")}:
        pid = lab.split("-")[2]
        if not Path("/proc", pid).exists():
            _remove_lab(lab)
