"""Keeps the store of a group ("store"), or is the only rank of a group that meets by it, and stands still or fails.

watched_rank.py store|stands|fails PORT
"""

import sys
import threading
from pathlib import Path

import torch.distributed as dist

from adaptiveload.training import group_watch

group_watch._LOOK_EVERY_S, group_watch._GRACE_S, group_watch._LAST_ANSWER_S = 0.1, 0.1, 1.0
ever = threading.Event()


def main() -> None:
    """Says "ready", then waits for a line before anything goes wrong."""
    what, port = sys.argv[1], int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, is_master=what == "store", wait_for_workers=False)
    if what == "store":
        print("ready", store.port, flush=True)
        ever.wait()
    dist.init_process_group("gloo", store=dist.PrefixStore(what, store), rank=0, world_size=1)
    watch = group_watch.GroupWatch(0, group_watch.WatchConfig(timeout_s=0.2), Path("nowhere"))
    print("ready", flush=True)
    sys.stdin.readline()
    if what == "fails":
        print(watch.end_all(3, "its own reason"), flush=True)
        sys.exit(3)
    watch.at("step 7, its end", ["sample3"])
    ever.wait()


if __name__ == "__main__":
    main()
