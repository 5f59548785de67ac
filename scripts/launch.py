"""`accelerate launch` for schedulers: passes signals on to the ranks and ends with their exit code.

    python -m scripts.launch --config_file configs/accelerate/1node.yaml --num_processes 8 train.py ...

`accelerate launch` itself dies of SIGUSR1, gives the ranks 30 s after SIGTERM, ends with 1 whatever they end with, and
answers Ctrl-C with tracebacks.
"""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import psutil

from adaptiveload.training.stop_signals import STOP_SIGNALS


def forward_signals() -> None:
    """Send each of `STOP_SIGNALS` that comes to this process to its children.

    They are blocked here, which children inherit: a rank that is still starting gets them once it looks.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def forward() -> None:
        while True:
            number = signal.sigwait(STOP_SIGNALS)
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    child.send_signal(number)

    threading.Thread(target=forward, name="signals", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Launch, wait, and end as the ranks did: with the exit code of the first that failed, 128 + n for signal n."""
    forward_signals()
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except (KeyboardInterrupt, SignalException):  # Ctrl-C, which the ranks have got too
        code = 128 + signal.SIGINT
    else:
        return
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
