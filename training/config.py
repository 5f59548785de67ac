"""The run's configuration: dataclass defaults, then one YAML file, then `key=value` from the command line.

Each part's dataclass stands beside the part; this file joins them. Only this file imports omegaconf.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import II, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adaptiveload.models.architectures import CONFIGS
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.models.lora import LoraConfig
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.choices import check_choice
from adaptiveload.scheduling.policies import POLICIES, ScheduleConfig
from adaptiveload.training.checkpoint import CheckpointConfig
from adaptiveload.training.cost import CostConfig
from adaptiveload.training.ema import EmaConfig
from adaptiveload.training.evaluation import EvaluationConfig
from adaptiveload.training.feed import DataConfig
from adaptiveload.training.group_watch import WatchConfig
from adaptiveload.training.optimizer import OptimizerConfig
from adaptiveload.training.previews import PreviewConfig
from adaptiveload.training.profiling import ProfileConfig
from adaptiveload.training.stream import check_stream_config
from adaptiveload.training.tracker import TrackingConfig

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"


@dataclass
class RunConfig:
    """Everything that decides a run. Saved, resolved, as `config.yaml` in the run's folder.

    Attributes:
        name: The run's folder is `output_dir/name`.
        output_dir: Folder of all runs.
        seed: Of the initial weights, the data order, noise, timesteps and caption dropout.
        max_steps: Optimizer steps.
        precision: "bf16" computes matmuls and attention in bf16 over fp32 master weights; "fp32" computes all in fp32.
        compile: Run the blocks through `torch.compile` in training, attention apart. One compilation serves all shapes;
            a handful of variants follow in the first steps, and their seconds are in no figure but `perf/compile_s`.
    """

    name: str = "run"
    output_dir: str = "runs"
    seed: int = 0
    max_steps: int = 1000
    precision: str = "bf16"
    compile: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=WanConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    objective: FlowMatchingConfig = field(default_factory=FlowMatchingConfig)
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(seed=cast(int, II("seed"))))
    cost: CostConfig = field(default_factory=CostConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    previews: PreviewConfig = field(default_factory=PreviewConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    @property
    def run_dir(self) -> Path:
        """Folder of the run's metrics, checkpoints and report."""
        return Path(self.output_dir) / self.name

    @property
    def has_frozen_parts(self) -> bool:
        """Whether only a part of the parameters is trained."""
        return bool(self.lora.rank or self.model.trainable is not None or self.model.frozen)

    def describe_trained(self) -> str:
        """Which parameters are trained, for a reader and for cost files."""
        if not self.has_frozen_parts:
            return "all"
        adapters = f"adapters of rank {self.lora.rank} on {', '.join(self.lora.targets)}" if self.lora.rank else ""
        own = "" if self.model.trainable is None and self.lora.rank else f"trainable {self.model.trainable or 'all'}"
        frozen = f"frozen {self.model.frozen}" if self.model.frozen else ""
        return "; ".join(filter(None, (adapters, own, frozen)))

    def check(self) -> None:
        """Raise ValueError for a value that no part can work with, naming the key."""
        check_choice("precision", self.precision, ("bf16", "fp32"))
        self.previews.check()
        if self.profile.steps and self.profile.steps[0] >= self.max_steps:
            raise ValueError(
                f"profile.steps={self.profile.steps}: the run ends with step {self.max_steps - 1}, counted from 0"
            )
        if self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps} must be at least 1")
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(f"name={self.name!r} must be a folder name")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")
        for part in (
            self.data,
            self.lora,
            self.schedule,
            self.cost,
            self.optimizer,
            self.ema,
            self.checkpoint,
            self.evaluation,
            self.tracking,
            self.profile,
            self.watch,
        ):
            part.check()
        if self.data.mode == "stream":
            check_stream_config(self.data, self.schedule)
        elif self.schedule.policy not in POLICIES:
            raise ValueError(
                f"schedule.policy={self.schedule.policy!r} needs data.mode=stream; with an index use "
                f"{', '.join(POLICIES)}"
            )
        if self.model.pretrained is None and self.has_frozen_parts:
            raise ValueError(
                "lora.rank, model.trainable and model.frozen need model.pretrained: what is frozen is read from there, "
                "checkpoints hold what is trained alone"
            )


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Defaults, then the YAML file at `path` (None: the quickstart), then `overrides` such as `optimizer.lr=1e-4`.

    Raises:
        ValueError: If the file is missing, not YAML or not a mapping, a key is unknown (the nearest one is named), or
            a value has the wrong type or cannot be worked with.
    """
    path = Path(path) if path is not None else DEFAULT_CONFIG
    if not path.is_file():
        raise ValueError(f"{path}: no such configuration file")
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: a configuration file is a mapping of keys, this one holds a {type(content).__name__}"
        )
    for override in overrides:
        if "=" not in override or override.startswith("-"):
            raise ValueError(
                f"{override!r} is not an override: write key=value, for example optimizer.lr=1e-4, and quote lists "
                "for the shell: 'key=[a, b]'"
            )
        try:
            OmegaConf.from_dotlist([override])
        except yaml.YAMLError as error:
            key = override.partition("=")[0]
            raise ValueError(
                f"{override!r} is not YAML; perhaps the shell took the quotes away: '{key}=[\"*.bias\"]'"
            ) from error
    command_line = OmegaConf.from_dotlist(list(overrides))
    schema = OmegaConf.structured(
        RunConfig(model=CONFIGS[_architecture(content, OmegaConf.to_container(command_line))]())
    )
    known = [key for key, _ in _flatten(OmegaConf.to_container(schema, resolve=False))]
    for where, layer in ((str(path), content), ("command line", OmegaConf.to_container(command_line))):
        for key, value in _flatten(layer):
            _check_known(where, key, value, known)
    return _merge(schema, (str(path), OmegaConf.create(content)), ("command line", command_line))


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config`, resolved, as YAML that `load_config` reads back to an equal object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))


def _architecture(*layers: Any) -> str:
    """`model.architecture`, which decides what other keys `model` has."""
    name = RunConfig().model.architecture
    for layer in layers:
        if isinstance(group := layer.get("model"), dict):
            name = group.get("architecture", name)
    if name not in CONFIGS:
        raise ValueError(f"model.architecture={name!r}: use {' or '.join(CONFIGS)}")
    return str(name)


def _merge(schema: DictConfig, *layers: tuple[str, DictConfig]) -> RunConfig:
    merged = schema
    for where, layer in layers:
        try:
            merged = cast(DictConfig, OmegaConf.merge(merged, layer))
        except OmegaConfBaseException as error:
            reason = str(error.msg or error).splitlines()[0]
            raise ValueError(f"{where}: {error.full_key or ''}: {reason}") from error
    try:
        config = cast(RunConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or ''}: {str(error).splitlines()[0]}") from error
    config.check()
    return config


def _check_known(where: str, key: str, value: Any, known: Sequence[str]) -> None:
    if key in known:
        return
    if any(name.startswith(key + ".") for name in known):
        if value:  # an empty group stands for its defaults
            raise ValueError(f"{where}: `{key}` is a group of keys, not a value: write {key}.KEY={value}")
        return
    # A list's elements (`optimizer.betas.0`) are addressed below a known key.
    if any(key.startswith(name + ".") and name.count(".") >= 1 for name in known):
        raise ValueError(f"{where}: {key}: a list is replaced whole, write {key.rsplit('.', 1)[0]}=[...]")
    last = key.rsplit(".", 1)[-1]
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    near += [by_last[name] for name in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.5)]
    hint = f"; the nearest key is `{near[0]}`" if near else ""
    raise ValueError(f"{where}: unknown key `{key}`{hint}")


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, name + ".")
        else:
            yield name, value
