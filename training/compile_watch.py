"""Counts what `torch.compile` compiles in this process, and the seconds that it takes."""

import time

from torch._dynamo.callback import callback_handler


class CompileWatch:
    """Compilations since it was made, those of backward passes included. A cached one counts too.

    Attributes:
        count: Compilations.
        seconds: What they took.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._began = 0.0
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Stop counting."""
        callback_handler.remove_start_callback(self._begin)
        callback_handler.remove_end_callback(self._end)

    def _begin(self, _arguments: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _arguments: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self.count += 1
