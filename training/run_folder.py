"""The folder of a run: held by one run at a time, and the same for all its ranks."""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from adaptiveload.training.distributed import Ranks

LOCK_NAME = "lock"
# NFS may say for some seconds that there is no such file.
_SEEN_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.2


def hold_run_folder(folder: Path, ranks: Ranks) -> None:
    """Make the folder, keep other runs out of it until this process ends, and see that all ranks share it.

    Raises:
        ValueError: On all ranks, if it cannot be written, if another run holds it, or if it is not the same folder on
            every node.
    """
    token = ranks.run_on_main(lambda: _lock(folder))
    # Rank 0 must not open the file again: closing it there would give up the lock.
    sees = ranks.is_main or _sees(folder / LOCK_NAME, token)
    told = ranks.gather_objects((socket.gethostname(), sees))
    if blind := sorted({host for host, sees in told if not sees}):
        raise ValueError(
            f"output_dir: {folder} as {told[0][0]} (rank 0) wrote it is not seen on {', '.join(blind)}. Checkpoints "
            "and figures need a folder that all nodes share: set output_dir to one"
        )


def _lock(folder: Path) -> str:
    """Lock the folder for this process and write who holds it; returns what other ranks must find there."""
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # stays open, and with it the lock
    except OSError as error:
        raise ValueError(f"output_dir: {folder} cannot be written ({error})") from error
    me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    me |= {"slurm_job": os.environ.get("SLURM_JOB_ID"), "slurm_restart": os.environ.get("SLURM_RESTART_COUNT", "0")}
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(f"{path}: no locks on this file system ({error.strerror}); start no second run there", flush=True)
        else:
            holder = _read_holder(os.pread(descriptor, 4096, 0))
            if not _is_before_requeue(holder, me):
                os.close(descriptor)
                job = f", Slurm job {holder['slurm_job']}" if holder.get("slurm_job") else ""
                raise ValueError(
                    f"{folder} is held by another run: host {holder.get('host')}, pid {holder.get('pid')}{job}. Wait "
                    "for its end, or choose another `name`"
                ) from error
            print(f"{path} is still held for this job's earlier start, on {holder['host']}; it goes on", flush=True)
    me["token"] = secrets.token_hex(8)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(me).encode(), 0)
    os.fsync(descriptor)
    return str(me["token"])


def _is_before_requeue(holder: dict[str, Any], me: dict[str, Any]) -> bool:
    """Whether Slurm has ended the holder and queued its job again; NFS may keep the lock of a node that is gone."""
    is_same = me["slurm_job"] is not None and holder.get("slurm_job") == me["slurm_job"]
    return is_same and holder.get("slurm_restart") != me["slurm_restart"]


def _read_holder(content: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(content)
    except ValueError:  # it has not written yet
        return {}
    return holder if isinstance(holder, dict) else {}


def _sees(path: Path, token: str) -> bool:
    end = time.monotonic() + _SEEN_WITHIN_S
    while True:
        try:
            if _read_holder(path.read_bytes()).get("token") == token:
                return True
        except OSError:  # not there, or a stale handle
            pass
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_EVERY_S)
