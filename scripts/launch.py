"""`accelerate launch` for schedulers: passes signals on to the ranks, ends with their exit code, and starts them again.

    python -m scripts.launch --config_file configs/accelerate/1node.yaml --num_processes 8 train.py ...

`accelerate launch` itself dies of SIGUSR1, gives the ranks 30 s after SIGTERM, ends with 1 whatever they end with, and
answers Ctrl-C with tracebacks. Ranks that ran out of memory and wrote down a lower limit are started again, at most
`--memory_restarts` times (3).
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil

from adaptiveload.training.stop_signals import LOWER_LIMIT_EXIT_CODE, STOP_SIGNALS

_PORT = "--main_process_port"


def forward_signals(command: Sequence[str]) -> None:
    """Send each of `STOP_SIGNALS` that comes to this process to the ranks, as soon as there are any.

    They are blocked here, which children inherit: a rank that is still starting gets them once it looks. `command` is
    what the ranks run; accelerate has other children too, such as nvidia-smi before it starts them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def forward() -> None:
        while True:
            number = signal.sigwait(STOP_SIGNALS)
            while not (ranks := [child for child in psutil.Process().children() if _runs(child, command)]):
                time.sleep(0.1)  # accelerate's imports take seconds
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    rank.send_signal(number)

    threading.Thread(target=forward, name="signals", daemon=True).start()


def _runs(child: psutil.Process, command: Sequence[str]) -> bool:
    """Whether `child` is a rank: its command line ends as `command` does, and is not the launcher's, as before exec."""
    try:
        words = child.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return False
    return bool(words) and words[-1:] == list(command[-1:]) and words != psutil.Process().cmdline()


def launch(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; exit code of the first that failed, 128 + n for signal n, else 0."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        code = int(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except (KeyboardInterrupt, SignalException):  # Ctrl-C, which the ranks have got too
        code = 128 + signal.SIGINT
    else:
        return 0
    return code if code >= 0 else 128 - code


def with_next_port(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the port that the nodes meet at, if they name one, raised by one.

    A node that is quick to start again must not find the store of the last start, on a first node that is slow to end.
    """
    words = list(arguments)
    for i, (word, following) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        if word == _PORT and following not in ("", "0"):
            words[i + 1] = str(int(following) + 1)
        elif word.startswith(f"{_PORT}=") and word != f"{_PORT}=0":
            words[i] = f"{_PORT}={int(word.split('=')[1]) + 1}"
    return words


def main(arguments: Sequence[str] | None = None) -> None:
    """Launch, wait, and end as the ranks did."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--memory_restarts", type=int, default=3)
    own, others = parser.parse_known_args(arguments)
    forward_signals(others)
    code = launch(others)
    if code == LOWER_LIMIT_EXIT_CODE and own.memory_restarts > 0:
        print(f"scripts.launch: starts again under the lower limit, {own.memory_restarts - 1} more times", flush=True)
        command = ["-m", "scripts.launch", "--memory_restarts", str(own.memory_restarts - 1), *with_next_port(others)]
        # A new process: this one still holds the ports and the memory of what has ended.
        os.execv(sys.executable, [sys.executable, *command])
    sys.exit(code)


if __name__ == "__main__":
    main()
