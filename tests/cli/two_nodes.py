"""Run a real Slurm of two nodes on this machine from Debian's packages, with its own munged, slurmctld and two slurmd.

Daemons use free ports and a separate folder, and all of them end with the cluster. Nothing is installed.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
PACKAGES = "slurmctld slurmd slurm-client munge"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NODES = ("n0", "n1")

CONF = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=requeue_delay=1
KillWait=20
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=both Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def list_missing_programs() -> list[str]:
    """Return the programs of Slurm and munge that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class TwoNodes:
    """Run the cluster within a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [s.getsockname()[1] for s in sockets]
        for s in sockets:
            s.close()
        words = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, ports=ports, **words))
        try:
            self._start(
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder / 'munge.socket'}"),
                *(f"--{name}-file={self.folder / f'munged.{name}'}" for name in ("log", "pid", "seed")),
            )
            while not (self.folder / "munge.socket").exists():
                self._check()
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            while self.run_command("sinfo", "--noheader", "--format=%t %D") != "idle 2":
                self._check()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel jobs that a failed test left, because they would run on after the daemons end."""
        self.run_command("scancel", f"--user={getpass.getuser()}")
        while self.run_command("squeue", "--noheader"):
            time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()

    def run_command(self, *command: str) -> str:
        """Return the output of a Slurm command; empty if it fails."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self._daemons)}.printed").open("wb") as printed:
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
            )

    def _check(self) -> None:
        """Raise with the output of a daemon if it has exited."""
        time.sleep(0.1)
        for number, daemon in enumerate(self._daemons):
            if daemon.poll() is not None:
                (printed,) = self.folder.glob(f"*-{number}.printed")
                raise RuntimeError(f"{daemon.args} ended with {daemon.returncode}: {printed.read_text()[-2000:]}")
