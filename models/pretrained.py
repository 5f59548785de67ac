"""Released weights in and out: folders of safetensors that diffusers writes and opens, and original Wan checkpoints.

Weights are read slice by slice into what a rank holds of a model, sharded or not; no rank ever holds a whole model
beside it. A folder is `config.json` and `diffusion_pytorch_model*.safetensors`, one file or several with an index.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from adaptiveload.models.architectures import CONFIGS
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.sharded import local_part

_STEM = "diffusion_pytorch_model"
_INDEX = f"{_STEM}.safetensors.index.json"
# As diffusers cuts them.
MAX_FILE_BYTES = 10 * 10**9
# Names of original Wan checkpoints, and ours. The norms are swapped: norm3 is the one before the cross attention.
_ORIGINAL_NAMES = (
    (r"^(time|text)_embedding\.0\.", r"condition_embedder.\1_embedder.linear_1."),
    (r"^(time|text)_embedding\.2\.", r"condition_embedder.\1_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
    (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),
    (r"^(blocks\.\d+)\.ffn\.0\.", r"\1.ffn.net.0.proj."),
    (r"^(blocks\.\d+)\.ffn\.2\.", r"\1.ffn.net.2."),
    (r"^(blocks\.\d+)\.self_attn\.", r"\1.attn1."),
    (r"^(blocks\.\d+)\.cross_attn\.", r"\1.attn2."),
    (r"^(blocks\.\d+\.attn\d)\.([qkv])\.", r"\1.to_\2."),
    (r"^(blocks\.\d+\.attn\d)\.o\.", r"\1.to_out.0."),
)
_ORIGINAL_CONFIG = {
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_heads": "num_attention_heads",
}


def load_pretrained(model: nn.Module, path: Path | str) -> None:
    """Fill `model` from the folder at `path`: a diffusers transformer or pipeline, or an original Wan checkpoint.

    A sharded model gets this rank's slices; each rank reads for itself, so nothing is sent and nothing waits. Host
    memory grows by the largest slice of one parameter; files are mapped, so what was read stays in the page cache,
    which ranks of one machine share and the system may drop.

    Args:
        model: With `config` and `diffusers_parameters()`, in memory (not on the meta device); dtypes are its own.
        path: A folder with `config.json`, or a pipeline's with `transformer/config.json`.

    Raises:
        ValueError: If the folder is none of these or damaged, or its configuration, names or shapes are not the
            model's; what differs is named, and the model is untouched.
    """
    folder = transformer_folder(path)
    files = WeightFiles(folder)
    _check_config(folder, model.config)
    parameters: dict[str, nn.Parameter] = model.diffusers_parameters()
    _check_shapes(folder, files.shapes, {name: tuple(p.shape) for name, p in parameters.items()})
    for name, parameter in parameters.items():
        local, part = local_part(parameter)
        if local.numel():
            local.copy_(files.read(name, part))


def read_model_config(path: Path | str) -> ModelConfig:
    """Sizes of the model in the folder at `path`, which is one that `load_pretrained` reads; `pretrained` is the path.

    Raises:
        ValueError: If the folder is none of these, or of a model that is not known.
    """
    folder = transformer_folder(path)
    theirs = _read_config(folder)
    for config_class in CONFIGS.values():
        if theirs["_class_name"] == config_class.diffusers_class:
            config = config_class.from_diffusers(theirs)
            # The VAE's; no transformer folder tells. 48 channels are those of Wan 2.2 TI2V's alone.
            return replace(config, spatial_stride=16 if config.in_channels == 48 else 8, pretrained=str(path))
    raise ValueError(f"{folder}/config.json: _class_name is {theirs['_class_name']}, which no model here is")


class WeightFiles:
    """The tensors of a folder by their diffusers names; only headers are read until a part is asked for.

    Args:
        folder: Holds the safetensors files.

    Attributes:
        shapes: Of every tensor.

    Raises:
        ValueError: If there are no files, one that the index names is missing, or one cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Any, str]] = {}
        for path in _weight_paths(folder):
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            for stored in handle.keys():  # noqa: SIM118 (not a dict)
                name = _our_name(stored)
                self.shapes[name] = tuple(handle.get_slice(stored).get_shape())
                self._places[name] = (handle, stored)

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """`part` of the tensor `name`, on the CPU, in the dtype of the file."""
        handle, stored = self._places[name]
        return handle.get_slice(stored)[part]


def weights_fingerprint(path: Path | str) -> str:
    """Tells weights apart without reading them whole: of names, sizes, headers and 64 KiB in 64 places of the files.

    Raises:
        ValueError: If `path` is no folder of weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in _weight_paths(transformer_folder(path)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for place in range(64):
                content.seek(size * place // 64)
                digest.update(content.read(1024))
    return digest.hexdigest()


def save_pretrained(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write float32 weights as a folder that diffusers opens, file by file: memory holds one file's tensors at a time.

    Args:
        folder: Created; must be empty.
        config: Content of `config.json`, with `_class_name`.
        shapes: Of the tensors, by diffusers name, in the order in which they are written.
        read: Gives the tensors of some of these names, float32 on the CPU.
        max_file_bytes: Files are cut before they grow beyond it; a tensor is never cut.

    Raises:
        ValueError: If `folder` has files already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = 4 * prod(shape)
        if not groups or size > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size
    weight_map = {}
    for number, names in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"{_STEM}{part}.safetensors"
        save_file(dict(read(names)), folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(4 * prod(shape) for shape in shapes.values())
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", {**config, "_diffusers_version": version("diffusers")})


def transformer_folder(path: Path | str) -> Path:
    """The folder with the transformer's `config.json`: `path`, or a pipeline's `transformer/` in it.

    Raises:
        ValueError: If there is neither, or a pipeline has a second transformer.
    """
    if (Path(path) / "transformer_2" / "config.json").is_file():
        raise ValueError(
            f"model.pretrained={path}: a pipeline of two transformers (Wan 2.2 A14B: one for high noise, one for low); "
            f"one model alone is not what it samples with. To train one of the two, name its folder: {path}/transformer"
        )
    for folder in (Path(path), Path(path) / "transformer"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"model.pretrained={path}: no config.json there nor in its transformer/; download it first")


def _weight_paths(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder}: {_INDEX} names {', '.join(missing)}, which the folder lacks")
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder}: no *.safetensors file; other formats are not read")
    return paths


def _our_name(stored: str) -> str:
    for pattern, ours in _ORIGINAL_NAMES:
        stored = re.sub(pattern, ours, stored)
    return stored


def _check_config(folder: Path, config: Any) -> None:
    """Raise ValueError unless the folder's `config.json` agrees with the model's configuration on all keys of both."""
    theirs = _read_config(folder)
    class_name = theirs["_class_name"]
    if class_name != config.diffusers_class:
        raise ValueError(f"{folder}/config.json: _class_name is {class_name}, the model's is {config.diffusers_class}")
    ours = json.loads(json.dumps(config.to_diffusers()))
    config.from_diffusers(theirs)  # has a word on what the model cannot do
    differing = [key for key, value in ours.items() if key in theirs and theirs[key] != value]
    if differing:
        pairs = "; ".join(f"{key} is {theirs[key]}, the run's model has {ours[key]}" for key in differing)
        raise ValueError(f"{folder}/config.json: {pairs}. Set the run's model to the folder's sizes, or take another")


def _read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json` with the keys of diffusers."""
    theirs = {"_class_name": None, **json.loads((folder / "config.json").read_text())}
    if theirs["_class_name"] == "WanModel":
        return _from_original_config(folder, theirs) | {"_class_name": "WanTransformer3DModel"}
    return theirs


def _from_original_config(folder: Path, original: dict[str, Any]) -> dict[str, Any]:
    if original.get("model_type") not in ("t2v", "ti2v"):
        raise ValueError(f"{folder}/config.json: model_type is {original.get('model_type')}, not t2v or ti2v")
    config = {_ORIGINAL_CONFIG.get(key, key): value for key, value in original.items()}
    return config | {"attention_head_dim": config["dim"] // config["num_attention_heads"]}


def _check_shapes(folder: Path, theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    problems = [f"{name} {list(ours[name])} is missing" for name in ours if name not in theirs]
    problems += [f"{name} {list(theirs[name])} is unknown to the model" for name in theirs if name not in ours]
    problems += [
        f"{name} is {list(theirs[name])}, the model has {list(shape)}"
        for name, shape in ours.items()
        if name in theirs and theirs[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ValueError(f"{folder}: {'; '.join(problems[:5])}{more}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
