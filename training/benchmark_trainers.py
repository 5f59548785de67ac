"""Trainers that benchmarks hold side by side, on random samples: this project's, and the one that people write.

The plain trainer is `diffusers.WanTransformer3DModel` under FSDP2 as its tutorials do it: a unit a block, bf16 compute
over fp32 masters, every block recomputed in backward, one shape a micro-batch, texts padded. Blocks are recomputed
inside their unit (as here), so that weights are gathered as often, and the same timer sits on them. Inputs are not cast
by FSDP, which would round the rotary tables. Diffusers' own choice of attention is left alone.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)
from torch.utils.checkpoint import checkpoint

from adaptiveload.models.attention import AttentionBatch
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import Shape
from adaptiveload.training.config import RunConfig
from adaptiveload.training.distributed import Ranks, clip_gradients, reshard, set_meeting
from adaptiveload.training.live_step import build_model, run_micro_batch
from adaptiveload.training.metrics import RankMeasurement, StepMeasurement, gather_measurements
from adaptiveload.training.optimizer import build_optimizer
from adaptiveload.training.schedule import model_geometry
from adaptiveload.training.step_timer import StepTimer
from adaptiveload.training.synthetic import synthetic_batch, warm_up_attention


class BenchmarkTrainer(Protocol):
    """A sharded model with its timer and optimizer."""

    name: str
    model: Any
    timer: StepTimer
    optimizer: torch.optim.Optimizer

    def warm_up(self, micro_batches: Sequence[Sequence[Shape]]) -> int:
        """Let libraries plan the attention calls of these micro-batches; how many were new."""
        ...

    def make_batch(self, shapes: Sequence[Shape]) -> Any:
        """Random samples of these shapes, on the device; a filler if there are none."""
        ...

    def run(self, batch: Any, *, scale: float, meet: str, is_last: bool, recompute: str, permille: int) -> torch.Tensor:
        """Forward and backward; the sum of the samples' losses. Arguments as of `run_micro_batch`."""
        ...


class OwnTrainer:
    """This project's model on the path that trains."""

    name = "adaptiveload"

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self.model, self.timer, self.optimizer = build_model(config, ranks)
        self.config, self.ranks = config, ranks
        self._planned: set[AttentionBatch] = set()

    def warm_up(self, micro_batches: Sequence[Sequence[Shape]]) -> int:
        """See `BenchmarkTrainer`."""
        geometry = model_geometry(self.config.model)
        lengths = [[geometry.num_tokens(shape) for shape in shapes] for shapes in micro_batches if shapes]
        return warm_up_attention(lengths, self.config.model, self.ranks.device, self.config.precision, self._planned)

    def make_batch(self, shapes: Sequence[Shape]) -> Any:
        """See `BenchmarkTrainer`."""
        return synthetic_batch(shapes, model_geometry(self.config.model), self.config.model, self.ranks.device)

    def run(self, batch: Any, *, scale: float, meet: str, is_last: bool, recompute: str, permille: int) -> torch.Tensor:
        """See `BenchmarkTrainer`."""
        losses = run_micro_batch(
            self.model,
            self.timer,
            batch,
            scale=scale,
            meet=meet,
            is_last=is_last,
            recompute=recompute,
            permille=permille,
        )
        return losses.sum()


class DiffusersTrainer:
    """The plain trainer; it recomputes every block, whatever the plan says."""

    name = "diffusers"

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        """Build and shard the model of `config`'s sizes.

        Raises:
            ValueError: If the run's model is none of Wan's.
        """
        from diffusers import WanTransformer3DModel

        if not isinstance(config.model, WanConfig):
            raise ValueError("the plain trainer is of diffusers' Wan alone: leave it out for this model")
        self.config, self.ranks = config, ranks
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        torch.manual_seed(config.seed)
        with torch.device(ranks.device):
            self.model = WanTransformer3DModel(**config.model.to_diffusers())
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        mixed = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )
        for block in self.model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            fully_shard(block, mesh=mesh, mp_policy=mixed)
        fully_shard(self.model, mesh=mesh, mp_policy=mixed)
        self.timer = StepTimer(ranks.device)
        self.timer.attach(list(self.model.blocks))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self._planned: set[tuple[int, int]] = set()

    def warm_up(self, micro_batches: Sequence[Sequence[Shape]]) -> int:
        """See `BenchmarkTrainer`."""
        if self.ranks.device.type != "cuda":
            return 0
        geometry, model = model_geometry(self.config.model), self.config.model
        calls = {(len(shapes), geometry.num_tokens(shapes[0])) for shapes in micro_batches if shapes} - self._planned
        for batch_size, seq_len in sorted(calls):
            for key_len in (seq_len, model.text_len):
                query, key, value = (
                    torch.randn(
                        (batch_size, length, model.num_attention_heads, model.attention_head_dim),
                        device=self.ranks.device, dtype=self.dtype, requires_grad=True,
                    ).transpose(1, 2)
                    for length in (seq_len, key_len, key_len)
                )  # fmt: skip
                F.scaled_dot_product_attention(query, key, value).transpose(1, 2).sum().backward()
        self._planned |= calls
        torch.cuda.synchronize(self.ranks.device)
        torch.cuda.empty_cache()
        return 2 * len(calls)

    def make_batch(self, shapes: Sequence[Shape]) -> Any:
        """Latents, noise and text, stacked, and whether they count. See `BenchmarkTrainer`.

        Raises:
            ValueError: If the shapes differ: without packing a micro-batch is one bucket.
        """
        if len(set(shapes)) > 1:
            raise ValueError(f"the plain trainer takes one shape a micro-batch, not {sorted(set(shapes))}")
        geometry, model, device = model_geometry(self.config.model), self.config.model, self.ranks.device
        shape = shapes[0] if shapes else Shape(1, *geometry.pixel_multiple)
        size = (max(len(shapes), 1), *geometry.latent_size(shape))
        latents, noise = torch.randn(2, *size, device=device)
        text = torch.randn(size[0], model.text_len, model.text_dim, device=device)
        return latents, noise, text, bool(shapes)

    def run(self, batch: Any, *, scale: float, meet: str, is_last: bool, recompute: str, permille: int) -> torch.Tensor:
        """See `BenchmarkTrainer`."""
        latents, noise, text, counts = batch
        set_meeting(self.model, meet=meet, is_last=is_last)
        self.timer.start_micro_batch()
        noisy = 0.5 * (latents + noise)
        timestep = torch.full((len(latents),), 500.0, device=latents.device)
        velocity = self.model(noisy.to(self.dtype), timestep, text.to(self.dtype), return_dict=False)[0]
        losses = (velocity.float() - (noise - latents)).square().flatten(1).mean(1)
        loss = losses.sum() if counts else 0 * losses.sum()
        (loss * scale).backward()
        return loss.detach()


def run_plan(
    trainer: BenchmarkTrainer, plan: StepPlan, table: SampleTable, ranks: Ranks, max_grad_norm: float
) -> StepMeasurement:
    """One optimizer step of the plan on random latents, measured as in training."""
    batches = [trainer.make_batch(shapes) for shapes in shapes_of(plan, table, ranks.rank)]
    ranks.barrier()
    began = time.perf_counter()
    trainer.timer.start_step()
    loss_sum = torch.zeros((), device=ranks.device)
    for g, batch in enumerate(batches):
        loss_sum += trainer.run(
            batch,
            scale=ranks.world_size / plan.normalizer,
            meet=plan.meet,
            is_last=g == len(batches) - 1,
            recompute=plan.recompute,
            permille=int(plan.recomputed[g, ranks.rank]),
        )
    reshard(trainer.model)
    clip_gradients(trainer.optimizer, max_grad_norm)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    mine = RankMeasurement(
        loss_sum=float(loss_sum),  # waits for the device
        step_s=time.perf_counter() - began,
        data_wait_s=0.0,
        memory_peak_gib=ranks.take_memory_peak_gib(),
        num_lost=0,
        busy_s=trainer.timer.busy_s(),
    )
    return gather_measurements(ranks, plan, mine)


def shapes_of(plan: StepPlan, table: SampleTable, rank: int) -> list[list[Shape]]:
    """Shapes of the samples of each micro-batch of `rank`; none for a filler."""
    return [[table.shapes[table.shape_ids[plan.sample_ids[i]]] for i in batch] for batch in plan.micro_batches(rank)]
