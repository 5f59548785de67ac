"""The weights that a run has come to, by their names in diffusers: for exports and sampling, on one process."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from adaptiveload.models.lora import adapter_parameters, merged
from adaptiveload.models.pretrained import WeightFiles, transformer_folder, weights_fingerprint
from adaptiveload.training.checkpoint_files import find_damage, latest, read_state
from adaptiveload.training.config import RunConfig
from adaptiveload.training.live_step import lay_out_model


def frozen_identity(config: RunConfig) -> dict[str, str]:
    """What the state of a checkpoint says of the frozen weights that it was trained beside; nothing if none are.

    Raises:
        ValueError: If `model.pretrained` is not to be had.
    """
    if not config.has_frozen_parts:
        return {}
    assert config.model.pretrained is not None
    return {"model.pretrained": weights_fingerprint(config.model.pretrained)}


class TrainedWeights:
    """Of a run's latest checkpoint; what the run froze comes from its `model.pretrained`. Read on demand.

    Args:
        run_dir: Folder of the run.
        config: Its configuration.
        averaged: Read the averages of what was trained instead of its last values.
        adapters_only: Only `adapters` will be called: frozen weights need not be there.

    Attributes:
        step: Steps that were trained.
        shapes: Of the model's own parameters.
        scale: alpha / rank of the adapters.
        trains_own: Whether any of the model's own parameters was trained.

    Raises:
        ValueError: If the run has no checkpoint, or its `model.pretrained` is needed and not to be had, or holds other
            weights than those that the run was trained beside.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, averaged: bool, adapters_only: bool = False) -> None:
        checkpoint = latest(run_dir / "checkpoints")
        if checkpoint is None:
            raise ValueError(f"{run_dir}/checkpoints holds no checkpoint: train first")
        if damage := find_damage(checkpoint):
            raise ValueError(f"{checkpoint} is damaged: {'; '.join(damage)}")
        self._checkpoint, self._kind = checkpoint, "ema" if averaged else "model"
        self.step = int(read_state(checkpoint, {} if adapters_only else frozen_identity(config))["step"])
        model = lay_out_model(config)
        self._stored_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._own, self._adapters = model.diffusers_parameters(), adapter_parameters(model)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._own.items()}
        self.trains_own = any(parameter.requires_grad for parameter in self._own.values())
        self.scale = config.lora.scale if config.lora.rank else 1.0
        self._frozen: WeightFiles | None = None
        if config.has_frozen_parts and not adapters_only:
            assert config.model.pretrained is not None
            self._frozen = WeightFiles(transformer_folder(config.model.pretrained))

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The model's own parameters of these names, float32 on the CPU, with adapters merged into them."""
        trained = [name for name in names if self._own[name].requires_grad]
        tensors = self._load({name: self._own[name] for name in trained})
        for name in names:
            if name not in tensors:
                assert self._frozen is not None
                tensors[name] = self._frozen.read(name, (slice(None),) * len(self.shapes[name])).float()
        layers = {name: name.removesuffix("weight") for name in names if name.endswith(".weight")}
        parts = {f"{layer}lora_{side}.weight" for layer in layers.values() for side in "AB"}
        adapters = self.adapters(sorted(parts & self._adapters.keys()))
        for name, layer in layers.items():
            if f"{layer}lora_A.weight" in adapters:
                a, b = (adapters[f"{layer}lora_{side}.weight"] for side in "AB")
                tensors[name] = merged(tensors[name], a, b, self.scale)
        return {name: tensors[name] for name in names}

    def adapters(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """The adapters' parameters of these names, or all; float32 on the CPU, alpha / rank not in them."""
        names = list(self._adapters) if names is None else names
        return self._load({name: self._adapters[name] for name in names})

    def _load(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(parameter.shape) for name, parameter in parameters.items()}
        stored = {f"{self._kind}/{self._stored_names[id(parameters[name])]}": tensors[name] for name in tensors}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as meant: one process reads all
            dcp.load(stored, checkpoint_id=self._checkpoint, no_dist=True)
        return tensors
