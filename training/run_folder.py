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
# Ranks whose launcher was killed notice it within seconds, and end within half a minute.
_FREE_WITHIN_S = 40.0
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
    me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    me |= {"slurm_job": os.environ.get("SLURM_JOB_ID"), "slurm_restart": os.environ.get("SLURM_RESTART_COUNT", "0")}
    me["token"] = secrets.token_hex(8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(_take(path, me), json.dumps(me).encode())
    except OSError as error:
        raise ValueError(f"output_dir: {folder} cannot be written ({error})") from error
    return str(me["token"])


def _take(path: Path, me: dict[str, Any]) -> int:
    """A descriptor of the file, locked as long as it is open."""
    end, is_said = time.monotonic() + _FREE_WITHIN_S, False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(f"{path}: no locks on this file system ({error.strerror}); start no second run there", flush=True)
                return descriptor
        holder = _read_holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        if _is_before_requeue(holder, me):
            print(f"{path} is still held for this job's earlier start, on {holder['host']}; it is replaced", flush=True)
            path.unlink(missing_ok=True)
            continue
        host, job = holder.get("host"), f", Slurm job {holder['slurm_job']}" if holder.get("slurm_job") else ""
        held = f"{path.parent} is held by another run: host {host}, pid {holder.get('pid')}{job}"
        if time.monotonic() >= end:
            raise ValueError(f"{held}. Wait for its end, or choose another `name`; if {host} is gone, remove {path}")
        if not is_said:
            print(f"{held}; this start waits up to {_FREE_WITHIN_S:g} s for its end", flush=True)
            is_said = True
        time.sleep(_LOOK_EVERY_S)


def _write(descriptor: int, content: bytes) -> None:
    """Replace the file's content, which stays where the disk has no room for the new one."""
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
    os.fsync(descriptor)


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
