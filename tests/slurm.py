"""A Slurm of one's own on this machine: real daemons of two nodes, on free ports, in a folder that is thrown away.

Nothing of the machine's own Slurm is read or written.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launching import ROOT, environment

_PACKAGES = ("slurm-wlm", "munge")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))  # where the daemons are

# cred_expire: a requeued job waits so many seconds before it starts again; less than 5 counts as 120, the default.
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={root}/munge.sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=all Nodes=node[1-2] Default=YES State=UP
"""


class Slurm:
    """A running Slurm.

    Attributes:
        environment: For whatever is to talk to it; jobs get it too.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = environment() | {"SLURM_CONF": str(root / "slurm.conf"), "VENV": sys.prefix, "PATH": _PATH}
        # The interpreter of the tests may be in no virtual environment of its own to activate.
        if not (Path(sys.prefix) / "bin" / "activate").exists():
            (root / "bin").mkdir()
            (root / "bin" / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
            self.environment["VENV"] = str(root)

    def call(self, *command: object) -> str:
        """What a command of Slurm prints; it must succeed."""
        words = list(map(str, command))
        result = subprocess.run(words, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def submit(self, output: Path, *arguments: object) -> str:
        """Submit a batch script from the repository; its job's id."""
        return self.call("sbatch", "--parsable", f"--output={output}", *arguments).strip()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, ExitCode, Restarts and more."""
        return dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", job).split() if "=" in word)

    def wait(self, job: str, within_s: float) -> dict[str, str]:
        """The same, once the job has ended for good."""
        deadline = time.monotonic() + within_s
        while (found := self.job(job))["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, f"job {job} has not ended within {within_s} s: {found}"
            time.sleep(0.2)
        return found


def install() -> None:
    """Have Slurm's programs on this machine: in a container of root's own from the packages, else skip the test."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root: slurmd starts jobs as their users")
    if not missing:
        return
    command = f"apt-get install -y --no-install-recommends {' '.join(_PACKAGES)}"
    if shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(missing)} are not installed, and this is no Debian to install them on")
    if Path("/run/systemd/system").exists():  # installed, the services would start
        pytest.skip(f"{', '.join(missing)} are not installed, and this is no container: {command}")
    result = subprocess.run(
        f"apt-get update -qq && DEBIAN_FRONTEND=noninteractive {command}", shell=True, capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"{command} failed: {result.stderr[-500:]}")


@contextlib.contextmanager
def running_slurm(root: Path) -> Iterator[Slurm]:
    """Start the daemons in the folder `root`, whose path must be short; all that they started ends with them.

    Raises:
        AssertionError: If the nodes are not idle in time, with what the daemons said.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    (root / "slurm.conf").write_text(_CONFIG.format(root=root, ports=ports))
    (root / "state").mkdir()
    key = root / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    slurm = Slurm(root)
    munge = {name: f"--{name}={root}/munge.{end}" for name, end in _MUNGE_FILES.items()}
    commands = [["munged", "--foreground", *munge.values()], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", node] for node in ("node1", "node2")]
    daemons = []
    try:
        with (root / "daemons.log").open("w") as log:
            for command in commands:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                daemons.append(subprocess.Popen(command, env=slurm.environment, start_new_session=True, **streams))
        _wait_until_idle(slurm, daemons)
        yield slurm
    finally:
        for daemon in daemons:
            daemon.terminate()
        ours = [process for process in psutil.process_iter() if _is_of(process, slurm)]
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=10)
        for daemon in daemons:
            daemon.wait()


_MUNGE_FILES = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _wait_until_idle(slurm: Slurm, daemons: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 30
    while True:
        command = ["sinfo", "--noheader", "--format=%T"]
        sinfo = subprocess.run(command, env=slurm.environment, capture_output=True, text=True)
        if sinfo.stdout.split() == ["idle"]:
            return
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        said = (slurm.root / "daemons.log").read_text()
        assert not ended, f"{ended} ended:\n{said}"
        assert time.monotonic() < deadline, f"the nodes are not idle: {sinfo}\n{said}"
        time.sleep(0.2)


def _is_of(process: psutil.Process, slurm: Slurm) -> bool:
    """Whether a process, a daemon's or a job's, belongs to this Slurm, by its environment."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get("SLURM_CONF") == slurm.environment["SLURM_CONF"]
    return False
