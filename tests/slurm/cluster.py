"""A real Slurm on this machine: munged, slurmctld and two slurmd on loopback, all its files in one folder.

`python tests/slurm/cluster.py COMMAND…` runs a command with it, such as `bash`; it needs root, slurm-wlm and munge.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
START_S, END_S = 60, 20

# Nothing is an MPI default: a script must say it itself. A requeued job waits as long as a credential lives. Numbers of
# jobs differ from those of the cluster before: MPICH names its shared memory by them, and killed ranks leave it behind.
CONFIG = """
ClusterName=okrt
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
ReturnToService=2
JobRequeue=1
KillWait=3
OverTimeLimit=0
MessageTimeout=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def why_not() -> str:
    """What is missing for a Slurm of one's own; empty if nothing is."""
    missing = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"no {', '.join(missing)}: a real Slurm needs the packages slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """Two nodes, idle when entered; everything is ended when left, jobs first."""

    def __init__(self) -> None:
        # Not in pytest's folder: the path of a socket has to be short, and munged wants all above to be safe.
        self.folder = Path(tempfile.mkdtemp(prefix="okrt-slurm-"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        config = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            ports=free_ports(3),
            first_job=1 + secrets.randbelow(1_000_000),
        )
        (folder / "slurm.conf").write_text(config)
        files = [f"--{name}={folder}/munge.{ending}" for name, ending in MUNGE_FILES.items()]
        self._run("munged", "munged", "--foreground", "--num-threads=2", *files)
        self._wait_for("the socket of munged", (folder / "munge.socket").exists)
        self._run("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self._run(node, "slurmd", "-D", "-c", "-N", node)
        self._wait_for("two idle nodes", lambda: self.ask("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"])

    def _run(self, name: str, *command: str) -> None:
        # Also if this process is killed, nothing of it stays.
        with open(self.folder / f"{name}.out", "wb") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env={**os.environ, **self.environment, "PATH": search_path()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _wait_for(self, what: str, there: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not there():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > until:
                raise TimeoutError(f"waited for {what}; ended: {dead or 'none'}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of all logs, for a test that fails."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in sorted(files))

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints; nothing if it fails."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    def job(self, number: str) -> dict[str, str]:
        """What scontrol tells of a job."""
        words = self.ask("scontrol", "-o", "show", "job", number).split()
        return {key: value for key, equals, value in (word.partition("=") for word in words) if equals}

    def close(self) -> None:
        """Ends jobs, then daemons by their ids; the folder goes too."""
        if {"slurmctld", *NODES} <= self._daemons.keys():
            self.ask("scancel", "--user=root")
            until = time.monotonic() + END_S
            while self.ask("squeue", "-h").strip() and time.monotonic() < until:
                time.sleep(0.1)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        until = time.monotonic() + END_S
        while any(daemon.poll() is None for daemon in self._daemons.values()) and time.monotonic() < until:
            time.sleep(0.05)
        for daemon in self._daemons.values():
            daemon.kill()  # which one that has ended does not feel
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


MUNGE_FILES = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main(command: list[str]) -> Any:
    if reason := why_not():
        return reason
    with Cluster() as cluster:
        return subprocess.run(command or ["bash"], env={**os.environ, **cluster.environment}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
