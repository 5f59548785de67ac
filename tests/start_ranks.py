"""Starts ranks as `accelerate launch` does, without its 3 s of imports: `python -m tests.start_ranks N script.py ...`.

The first rank that fails ends the others, and its exit code is this process's.
"""

import os
import socket
import subprocess
import sys
import time


def main() -> int:
    """One process a rank, with the variables that torch.distributed reads."""
    num_ranks, *command = sys.argv[1:]
    # Held until all have ended: rank 0 listens there only after seconds of imports, in which another launch of the same
    # machine could be given the port. It may bind it all the same, as both say SO_REUSEADDR and this end never listens.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
    shared |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    ranks = [
        subprocess.Popen([sys.executable, "-u", *command], env={**os.environ, **shared, "RANK": r, "LOCAL_RANK": r})
        for r in map(str, range(int(num_ranks)))
    ]
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.02)
        time.sleep(0.5 if None in codes else 0)  # the others may have words of their own
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return next((code for rank in ranks if (code := rank.wait())), 0)


if __name__ == "__main__":
    sys.exit(main())
