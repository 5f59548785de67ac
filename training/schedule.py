"""What decides who computes what in a run: index, order, models and policy, or what takes their place in a stream."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from adaptiveload.data.corpus import Corpus, open_corpus
from adaptiveload.data.stream import find_shards, peek_normalization, shard_names
from adaptiveload.models.config import ModelConfig
from adaptiveload.scheduling.order import EndlessOrder, held_out_mask
from adaptiveload.scheduling.paper_policies import BucketPolicy
from adaptiveload.scheduling.policies import (
    Policy,
    ScheduleConfig,
    build_policy,
    limit_of,
    num_replicas,
    resolve_lookahead,
)
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.scheduling.updates import CostHistory, ScheduleUpdate
from adaptiveload.training.config import RunConfig
from adaptiveload.training.cost import (
    Hardware,
    RunModels,
    build_models,
    device_memory_bytes,
    model_dims,
    resolve_gpu,
    resolve_memory,
)
from adaptiveload.training.live_step import lay_out_model
from adaptiveload.training.memory_limits import lower_limit
from adaptiveload.training.stream import check_stream_config
from adaptiveload.training.trained_weights import frozen_identity

# bf16 weights and fp32 gradients, of the whole model, which `meet: step` keeps on every rank over a step.
_WEIGHT_BYTES, _GRADIENT_BYTES = 2, 4
# `meet: auto` spends at most this share of a rank's memory on them; 1.3B takes 8.5 GB of an H200's 141.
_UNSHARDED_SHARE = 0.125
# The paper's p on Wan 1.3B; without an index there are no lengths to fit one to.
_STREAM_COST_EXPONENT = 1.45


@dataclass
class Schedule:
    """Everything that decides who computes what.

    Attributes:
        corpus: All samples, and where they lie.
        table: The samples as the scheduler sees them.
        train_ids, held_out_ids: int64 rows of the corpus.
        order: Order of the training samples.
        policy: Plans steps.
        models: Cost and memory models that the run starts with.
        history: Cost model of every step; it grows while the run adapts.
        meet: "slot" or "step".
        hardware: What it is planned for.
        identity: What a resumed run must have in common with the one that saved.
        config: The run's configuration with every "auto" of the schedule replaced by what it came to.
        settings: The schedule's part of it; the run may have learnt of a lower memory limit since.
        lowered: What to say of that, or None.
    """

    corpus: Corpus
    table: SampleTable
    train_ids: np.ndarray
    held_out_ids: np.ndarray
    order: EndlessOrder
    policy: Policy
    models: RunModels
    history: CostHistory
    meet: str
    hardware: Hardware
    identity: dict[str, object]
    config: RunConfig
    settings: ScheduleConfig
    lowered: str | None = None


@dataclass
class StreamSchedule:
    """What takes the place of `Schedule` without an index.

    Attributes:
        meet: "slot" or "step".
        identity: What a resumed run must have in common with the one that saved.
        config: The run's configuration with every "auto" of the schedule replaced by what it came to.
    """

    meet: str
    identity: dict[str, object]
    config: RunConfig


def build_schedule(
    config: RunConfig,
    ranks: int,
    device: torch.device,
    saved: dict[str, object] | None,
    memory_records: Sequence[dict[str, Any]] = (),
    hardware: Hardware | None = None,
) -> Schedule:
    """Index, split, order, models and policy of a run on `ranks` ranks.

    Args:
        config: The run's configuration.
        ranks: Data-parallel ranks to plan for.
        device: Whose prior prices the samples when `cost.gpu` is "auto", and whose memory sets limits.
        saved: The state beside the checkpoint that is resumed, whose lookahead and history of costs stay.
        memory_records: What the run has written into its `limits.yaml`; `balanced` keeps to it.
        hardware: What all ranks agreed on, where several make this schedule; None takes `device` as it is.

    Raises:
        ValueError: If the data set is absent, damaged or does not fit the model, or the schedule cannot be kept.
    """
    hardware = hardware or Hardware.of(device)
    corpus = open_checked_corpus(config)
    table = corpus.table
    held_out = held_out_mask(corpus.source_names, config.data.held_out_share, config.seed)[corpus.source_codes]
    train_ids, held_out_ids = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    gpu = resolve_gpu(config.cost, hardware)
    meet = resolve_meet(config, gpu, hardware)
    models = _models(config, gpu, hardware, meet, ranks, np.unique(table.computed_tokens()).tolist())
    asked = resolve_memory(replace(config.schedule, meet=meet), models, device_memory_bytes(gpu, hardware))
    repeats = corpus.repeats[train_ids]
    order = EndlessOrder(train_ids, config.schedule.seed, config.schedule.order_block_size, repeats=repeats)
    settings, lowered = asked, None
    if config.schedule.policy == "balanced":
        known = [each for each in memory_records if each["under"] == memory_conditions(config, ranks, hardware, meet)]
        settings, lowered = lower_limit(asked, known, table, order)
    lookahead = _lookahead(saved, settings, table, order, models, ranks, meet)
    settings = replace(settings, lookahead=lookahead)
    adaptation = saved.get("adaptation") if saved else None
    updates = adaptation["updates"] if isinstance(adaptation, dict) else []
    history = CostHistory(models.cost, [ScheduleUpdate.from_json(record) for record in updates])
    policy = build_policy(settings, table, order, history, ranks, meet)
    identity = _schedule_identity(config, ranks, corpus, policy, lookahead)
    check_same_data(saved, identity)
    return Schedule(
        corpus=corpus,
        table=table,
        train_ids=train_ids,
        held_out_ids=held_out_ids,
        order=order,
        policy=policy,
        models=models,
        history=history,
        meet=meet,
        hardware=hardware,
        identity=identity,
        config=replace(config, schedule=replace(asked, lookahead=lookahead), cost=replace(config.cost, gpu=gpu)),
        settings=settings,
        lowered=lowered,
    )


def open_checked_corpus(config: RunConfig) -> Corpus:
    """The samples of `config.data`. Raises ValueError where they do not fit the model."""
    geometry = model_geometry(config.model)
    corpus = open_corpus(config.data.all_sources, geometry)
    paths = ", ".join(source.path for source in corpus.sources)
    if corpus.info.geometry != geometry:
        raise ValueError(
            f"{paths}: latents of {corpus.info.geometry}, but model.in_channels="
            f"{config.model.in_channels}, model.patch_size={list(config.model.patch_size)} and "
            f"model.spatial_stride={config.model.spatial_stride} take {geometry}"
        )
    if corpus.info.text_dim != config.model.text_dim:
        raise ValueError(f"{paths}: text_dim {corpus.info.text_dim}, but model.text_dim={config.model.text_dim}")
    if (longest := int(corpus.table.text_len.max())) > config.model.text_len:
        raise ValueError(f"{paths}: a text of {longest} rows, but model.text_len={config.model.text_len}")
    return replace(corpus, table=replace(corpus.table, text_joins=model_dims(config.model).text_joins))


def _lookahead(
    saved: dict[str, object] | None,
    settings: ScheduleConfig,
    table: SampleTable,
    order: EndlessOrder,
    models: RunModels,
    ranks: int,
    meet: str,
) -> str:
    """`schedule.lookahead`, or what "auto" comes to: what the checkpoint has, so that its order goes on."""
    if settings.lookahead != "auto":
        return settings.lookahead
    if settings.policy != "balanced":
        return "1"  # the paper's policies draw in plain order
    if saved and "schedule.lookahead" in saved:
        return str(saved["schedule.lookahead"])
    return str(resolve_lookahead(settings, table, order, models.cost, ranks, meet))


def _schedule_identity(
    config: RunConfig, ranks: int, corpus: Corpus, policy: Policy, lookahead: str
) -> dict[str, object]:
    """What a resumed run must keep of its samples and their order."""
    identity: dict[str, object] = {
        "data_fingerprint": corpus.fingerprint,
        "num_samples": len(corpus.table),
        "seed": config.seed,
        "schedule.seed": config.schedule.seed,
        "schedule.policy": config.schedule.policy,
        "schedule.samples_per_step": config.schedule.samples_per_step,
        "schedule.order_block_size": config.schedule.order_block_size,
        "schedule.lookahead": lookahead,
        "data.held_out_share": config.data.held_out_share,
    }
    if isinstance(policy, BucketPolicy):
        # Every rank fills buckets of its own there: which samples a step holds depends on these too.
        identity |= {"ranks": ranks, "schedule.slots_per_step": config.schedule.slots_per_step}
        identity["batch_sizes"] = policy.batch_sizes.tolist()
    return identity


def memory_conditions(config: RunConfig, ranks: int, hardware: Hardware, meet: str) -> dict[str, Any]:
    """What decides, beside a micro-batch, whether it fits in memory: a record of `limits.yaml` holds under it alone."""
    return {
        "device": hardware.name,
        "ranks": ranks,
        "meet": meet,
        "recompute": config.schedule.recompute,
        "precision": config.precision,
        "shard_ranks": config.schedule.shard_ranks,
        "compile": config.compile,
    }


def build_stream_schedule(config: RunConfig, ranks: int, hardware: Hardware) -> StreamSchedule:
    """What decides over a run without an index. Raises ValueError for what needs one."""
    check_stream_config(config.data, config.schedule)
    if model_dims(config.model).text_joins:
        raise ValueError(
            f"model.architecture={config.model.architecture}: needs data.mode=index, a stream does not price text"
        )
    gpu = resolve_gpu(config.cost, hardware)
    meet = resolve_meet(config, gpu, hardware)
    identity: dict[str, object] = {
        "data.mode": "stream",
        "shards": shard_names(config.data.path),
        "normalization_hash": peek_normalization(find_shards(config.data.path)[0]),
        "seed": config.seed,
        "schedule.policy": config.schedule.policy,
    }
    exponent = _STREAM_COST_EXPONENT if config.schedule.cost_exponent is None else config.schedule.cost_exponent
    schedule_config = replace(config.schedule, meet=meet, cost_exponent=exponent)
    if schedule_config.recompute == "auto":
        models = _models(config, gpu, hardware, meet, ranks, [limit_of(schedule_config)])
        schedule_config = resolve_memory(schedule_config, models, device_memory_bytes(gpu, hardware))
    resolved = replace(config, schedule=schedule_config, cost=replace(config.cost, gpu=gpu))
    return StreamSchedule(meet, identity, resolved)


def model_geometry(model: ModelConfig) -> LatentGeometry:
    """Geometry of the latents that `model` takes."""
    return LatentGeometry(model.in_channels, spatial_stride=model.spatial_stride, patch=tuple(model.patch_size))


def _models(config: RunConfig, gpu: str, hardware: Hardware, meet: str, ranks: int, seq_lens: list[int]) -> RunModels:
    """Cost and memory models of a run over samples of `seq_lens` tokens, see `build_models`."""
    return build_models(
        config,
        gpu,
        hardware,
        meet=meet,
        ranks=ranks,
        sharded_over=ranks // num_replicas(config.schedule.shard_ranks, ranks),
        seq_lens=seq_lens,
        trained_share=trained_share(config),
    )


def resolve_meet(config: RunConfig, gpu: str, hardware: Hardware) -> str:
    """Where ranks meet: as configured, or "auto": "step" where gathered weights and gradients fit, else "slot"."""
    if config.schedule.meet != "auto":
        return config.schedule.meet
    unsharded = sum(
        parameter.numel() * (_WEIGHT_BYTES + _GRADIENT_BYTES * parameter.requires_grad)
        for parameter in lay_out_model(config).parameters()
    )
    return "step" if unsharded <= _UNSHARDED_SHARE * device_memory_bytes(gpu, hardware) else "slot"


def trained_share(config: RunConfig) -> float:
    """Trained parameters over all."""
    parameters = list(lay_out_model(config).parameters())
    return sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)


def model_identity(config: RunConfig) -> dict[str, object]:
    """What a resumed run must keep of its model. Its folder may move; frozen weights are read from it again."""
    identity: dict[str, object] = {"model": json.loads(json.dumps(asdict(replace(config.model, pretrained=None))))}
    identity["lora"] = json.loads(json.dumps(asdict(config.lora)))
    return identity | frozen_identity(config)


def check_same_data(saved: dict[str, object] | None, identity: dict[str, object]) -> None:
    """Raise ValueError if the checkpoint that is resumed was trained on other samples, with what is known of both."""
    if saved is None or saved.get("data_fingerprint") == identity["data_fingerprint"]:
        return
    raise ValueError(
        "the data set has changed since the checkpoint: data_fingerprint "
        f"{saved.get('data_fingerprint')} of {saved.get('num_samples')} samples then, "
        f"{identity['data_fingerprint']} of {identity['num_samples']} samples now. Its order cannot be continued: "
        "bring the old shards, index and data.sources back, or start anew under another `name`"
    )


def check_position(schedule: Schedule, first_step: int, position: int) -> None:
    """Refuse to resume where this schedule would repeat or leave out samples.

    `balanced` never does; the paper's policies do when ranks, limits or costs change, because these decide how many
    samples a step takes.
    """
    planned = schedule.policy.plan(first_step).position
    if planned != position:
        raise ValueError(
            f"the checkpoint stands at sample {position}, but step {first_step} of this schedule begins at {planned}: "
            "with the paper's policies a resumed run must keep its number of ranks, schedule.memory_limit_tokens, "
            "schedule.slots_per_step, schedule.cost_exponent, schedule.compute_limit_factor and its cost model"
        )
