"""Busy seconds of a rank: time in its own blocks, waiting for other ranks excluded.

Wall time of a step is equal on all ranks under FSDP, since they wait for each other in every block. So each block
gets a mark at its entry and one at its exit, inside FSDP's hooks: a forward span starts after the wait for gathered
weights, a backward span ends before the gradients' reduce. Recompute runs inside the backward span and counts.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from adaptiveload.training.compile_watch import CompileWatch


class StepTimer:
    """Times the blocks of a sharded model. Call `attach` after sharding, `start_micro_batch` before each forward.

    Attributes:
        is_traced: Whether spans are marked as `busy` for a profiler that runs.
    """

    def __init__(self, device: torch.device, compile_watch: CompileWatch | None = None) -> None:
        self.on_gpu = device.type == "cuda"
        self.compile_watch = compile_watch
        self.is_traced = False
        self._spans: list[list[tuple[Any, Any]]] = []
        self._compiled_s: list[float] = []  # before each micro-batch, since the process began
        self._open: Any = None
        self._mark: record_function | None = None

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Put the marks on `blocks`; they must be sharded already, so that the marks lie inside FSDP's hooks."""
        for block in blocks:
            # Registered later than FSDP's, so they run after its unshard at entry ...
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            # ... and before its reshard at the exit.
            block.register_forward_hook(self._leave, prepend=True)
            # A tensor's gradient hooks run in the order of registration: this one follows FSDP's pre-backward unshard.
            block.register_forward_hook(self._after_fsdp_exit)

    def start_step(self) -> None:
        """Forget the spans of the last step."""
        self._spans, self._compiled_s = [], []

    def start_micro_batch(self) -> int:
        """Spans from here on belong to a new micro-batch, whose number in the step is returned."""
        self._spans.append([])
        self._compiled_s.append(self._compile_s())
        return len(self._spans) - 1

    def busy_s(self) -> list[float]:
        """Busy seconds of each micro-batch of the step; on a GPU only once its backward passes are known to be done.

        `torch.compile` compiles inside the spans; its seconds are taken off.
        """
        if self.on_gpu:
            spent = [sum(start.elapsed_time(end) for start, end in spans) / 1e3 for spans in self._spans]
        else:
            spent = [sum(end - start for start, end in spans) for spans in self._spans]
        ends = [*self._compiled_s[1:], self._compile_s()]
        # A GPU may work on while the host compiles, so that more would be taken off than was spent.
        return [max(busy - (end - start), 0.0) for busy, start, end in zip(spent, self._compiled_s, ends, strict=True)]

    def compile_s(self) -> float:
        """Seconds of this step that went into compiling."""
        return self._compile_s() - self._compiled_s[0] if self._compiled_s else 0.0

    def _compile_s(self) -> float:
        return self.compile_watch.seconds if self.compile_watch else 0.0

    def begin(self) -> None:
        """A block's work begins."""
        self._end_mark()
        if self.is_traced:
            self._mark = record_function("busy")
            self._mark.__enter__()
        self._open = self._now()

    def end(self) -> None:
        """A block's work has ended."""
        if self._spans and self._open is not None:
            self._spans[-1].append((self._open, self._now()))
        self._open = None
        self._end_mark()

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _differentiable((args, kwargs))
        if not inputs and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            # The first block with trained weights, behind frozen ones: nothing would tell the end of its backward. Its
            # first input gets a gradient that nobody reads, which costs a block's worth of it.
            inputs = [next(leaf for leaf in tree_leaves((args, kwargs)) if _is_floating(leaf)).requires_grad_()]
        if inputs:
            # Fires once all gradients of the block's inputs are there, before FSDP's reduce, which waits upstream.
            register_multi_grad_hook(inputs, lambda _gradients: self.end(), mode="all")
        self.begin()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.end()

    def _after_fsdp_exit(self, _module: nn.Module, _args: Any, output: Any) -> None:
        outputs = _differentiable(output)
        if outputs:
            register_multi_grad_hook(outputs, lambda _gradient: self.begin(), mode="any")


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _differentiable(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
