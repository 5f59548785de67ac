"""Samples to look at: what to make, dealt to the ranks, decoded where it was made, written as clips and as one sheet.

`scripts.sample` and the previews of a run both come here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from adaptiveload.data.corpus import Corpus
from adaptiveload.data.index import DatasetInfo
from adaptiveload.data.latent_codecs import DctCodec, LatentCodec
from adaptiveload.data.reader import SampleError
from adaptiveload.data.text import HashTextEncoder, TextEncoder
from adaptiveload.data.video import write_mp4
from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.models.sampling import SamplerConfig, SampleRequest, sample_latents
from adaptiveload.scheduling.order import held_out_mask
from adaptiveload.scheduling.planner import plan_step
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.contact_sheet import shown_frames
from adaptiveload.training.distributed import Ranks, reshard

# Of one sample on a sheet: a strip of frames by label, uint8 [F, H, W, 3] each.
Strips = dict[str, np.ndarray]


@dataclass(frozen=True)
class Wanted:
    """One sample to make.

    Attributes:
        key: Name of its file.
        shape: Pixel shape.
        caption: Shown above it.
        text: Text embedding [T, text_dim].
        negative_text: What guidance moves away from [T, text_dim].
        seed: Of the noise.
        fps: Frames per second of the file.
        reference: Stored latents of the sample that the text is of, to be decoded and shown beside it.
        first_frame: First latent frame [C, 1, h, w], where it is given.
        source: Media file that `reference` is of, and `meta` how it was cut from it.
        meta: See `source`.
    """

    key: str
    shape: Shape
    caption: str
    text: torch.Tensor
    negative_text: torch.Tensor
    seed: int
    fps: float
    reference: torch.Tensor | None = None
    first_frame: torch.Tensor | None = None
    source: str = ""
    meta: dict | None = None


@dataclass(frozen=True)
class Made:
    """One sample that was made: its heading on a sheet, its strips there, and its file."""

    wanted: Wanted
    strips: Strips
    path: Path

    @property
    def heading(self) -> str:
        """Shape and caption."""
        return f"{self.wanted.shape}: {self.wanted.caption}"


def choose_samples(corpus: Corpus, held_out_share: float, seed: int, count: int) -> list[int]:
    """Rows of the longest samples of different sources: training and held-out sources by turns."""
    sources = corpus.source_codes
    held_out = held_out_mask(corpus.source_names, held_out_share, seed)[sources]
    longest_first = np.argsort(-corpus.table.num_tokens, kind="stable")
    chosen: list[int] = []
    for take_held_out in [False, True] * count:
        fits = (held_out == take_held_out) & ~np.isin(sources, sources[chosen])
        chosen += longest_first[fits[longest_first]][:1].tolist()
        if len(chosen) == count:
            break
    return chosen


def wanted_of_corpus(corpus: Corpus, rows: Sequence[int], seed: int, ranks: Ranks) -> list[Wanted]:
    """Samples to be made from the texts of these rows, in their shapes; one that cannot be read is left out, said so.

    Rank 0 reads and tells the others, so that all of them want the same. Collective.
    """

    def read() -> list[Wanted]:
        reader = corpus.reader()
        null_text, wanted = reader.null_text(), []
        for number, row in enumerate(rows):
            place = corpus.place(row)
            try:
                sample = reader.read(place)
            except SampleError as error:
                print(f"{error}: it is not sampled")
                continue
            wanted.append(
                Wanted(
                    key=place.name,
                    shape=place.served,
                    caption=sample.caption,
                    text=torch.from_numpy(sample.text),
                    negative_text=null_text,
                    seed=seed + number,
                    fps=float(sample.meta["fps"]),
                    reference=sample.stored_latents,
                    source=sample.source,
                    meta=sample.meta,
                )
            )
        return wanted

    return ranks.run_on_main(read)


def open_codec(info: DatasetInfo, vae_dir: Path | str | None, device: torch.device | str, option: str) -> LatentCodec:
    """The codec that decodes a dataset's latents.

    Args:
        info: Of the dataset.
        vae_dir: Folder of the VAE, where `info.codec` is "wan_vae".
        device: Where it runs.
        option: How the user names `vae_dir`, for messages.

    Raises:
        ValueError: If there is no such codec, its normalisation is not that of the latents, or it needs no folder.
    """
    codec: LatentCodec
    if info.codec == DctCodec.name:
        if vae_dir is not None:
            raise ValueError(f"{option}={vae_dir}, but the latents are {info.codec}'s, which no VAE decodes")
        codec = DctCodec()
    elif vae_dir is None:
        raise ValueError(f"the latents are {info.codec}'s: name the folder of its VAE with {option}")
    else:
        codec = open_vae(vae_dir, device)
    if (codec.name, codec.normalization_hash) != (info.codec, info.normalization_hash):
        raise ValueError(
            f"the latents are of {info.codec} ({info.normalization_hash}), "
            f"{option}={vae_dir} is {codec.name} ({codec.normalization_hash})"
        )
    return codec


def open_vae(vae_dir: Path | str, device: torch.device | str) -> LatentCodec:
    """The VAE in a local folder."""
    from adaptiveload.data.wan_encoders import WanVaeCodec  # takes seconds to import

    return WanVaeCodec(Path(vae_dir), str(device))


def open_text_encoder(name: str, folder: Path | None, device: torch.device) -> TextEncoder:
    """The text encoder called `name` in a dataset.

    Raises:
        ValueError: If it needs a folder and none is given, needs none and one is, or the folder holds another one.
    """
    kind, *sizes = name.split("-")
    encoder: TextEncoder
    if kind == "hash":
        if folder is not None:
            raise ValueError(f"--text-encoder-dir {folder}, but the texts are embedded by {name}, which needs none")
        return HashTextEncoder(*map(int, sizes))
    if folder is None:
        raise ValueError(f"the texts are embedded by {name}: name its folder with --text-encoder-dir")
    from adaptiveload.data.wan_encoders import Umt5TextEncoder

    encoder = Umt5TextEncoder(folder, str(device))
    if encoder.name != name:
        raise ValueError(f"the texts are embedded by {name}, but {folder} holds {encoder.name}")
    return encoder


def fit_picture(picture: np.ndarray, shape: Shape) -> np.ndarray:
    """The middle of uint8 [H, W, 3], cut and scaled to one frame of `shape`: uint8 [1, height, width, 3]."""
    from adaptiveload.data.media import crop_resize  # brings FFmpeg, which a run without such a picture does not need

    rows, columns = picture.shape[:2]
    scale = min(rows / shape.height, columns / shape.width)
    height, width = shape.height * scale, shape.width * scale
    left, top = (columns - width) / 2, (rows - height) / 2
    return crop_resize(picture, (left, top, left + width, top + height), shape.height, shape.width)[None]


def make_samples(
    model: VideoTransformer,
    wanted: Sequence[Wanted],
    config: SamplerConfig,
    flow: FlowMatchingConfig,
    codec: LatentCodec,
    geometry: LatentGeometry,
    ranks: Ranks,
    memory_limit_tokens: int,
    path_of: Callable[[str], Path],
) -> list[Made]:
    """Sample, decode and write what is wanted, each rank a part; all of it is told to every rank. Collective.

    Ranks run the model equally often, those without a sample on next to nothing, so no collective lacks a peer.

    Args:
        model: Sharded.
        wanted: Equal on all ranks.
        config: How to sample.
        flow: Training's objective, for the shift.
        codec: Decodes.
        geometry: Of the latents.
        ranks: All of them.
        memory_limit_tokens: Most tokens that a rank samples at once; a longer sample runs alone.
        path_of: File without suffix, of a key; folders must exist on every rank's disk.
    """
    latents: dict[int, torch.Tensor] = {}
    reshard(model)  # gathered copies may be of other weights than those swapped in or trained on
    for numbers in deal(wanted, config, geometry, model.config.hidden_size, ranks, memory_limit_tokens):
        requests = [
            SampleRequest(
                tuple(geometry.token_grid(wanted[i].shape)),
                wanted[i].text,
                wanted[i].negative_text,
                wanted[i].seed,
                wanted[i].first_frame,
            )
            for i in numbers
        ]
        latents |= dict(zip(numbers, sample_latents(model, requests, config, flow), strict=True))
    reshard(model)  # nor may training go on with the copies gathered here
    written = {i: _write(wanted[i], made, codec, path_of) for i, made in latents.items()}
    by_number = {i: strips_and_path for part in ranks.gather_objects(written) for i, strips_and_path in part.items()}
    return [Made(one, *by_number[i]) for i, one in enumerate(wanted)]


def deal(
    wanted: Sequence[Wanted],
    config: SamplerConfig,
    geometry: LatentGeometry,
    hidden_size: int,
    ranks: Ranks,
    memory_limit_tokens: int,
) -> list[list[int]]:
    """Numbers of the samples that this rank makes at once, round after round; all ranks have as many rounds."""
    if not wanted:
        return []
    passes = 1 if config.guidance_scale == 1 else 2
    tokens = [geometry.num_tokens(one.shape) + len(one.text) for one in wanted]
    # Of a transformer block, attention costs as much as the rest at six times the hidden size.
    costs = [count * (count + 6 * hidden_size) for count in tokens]
    sizes = [passes * count for count in tokens]
    plan = plan_step(costs, sizes, ranks.world_size, max(memory_limit_tokens, *sizes))
    return [list(slot[ranks.rank] or ()) for slot in plan.slots]


def _write(
    wanted: Wanted, latents: torch.Tensor, codec: LatentCodec, path_of: Callable[[str], Path]
) -> tuple[Strips, Path]:
    frames = codec.decode(latents.numpy())
    path = path_of(wanted.key.replace("/", "_"))
    if len(frames) > 1:
        path = path.with_name(f"{path.name}.mp4")
        write_mp4(path, frames, wanted.fps)
    else:
        path = path.with_name(f"{path.name}.png")
        Image.fromarray(frames[0]).save(path)
    strips = {} if wanted.reference is None else {"codec": codec.decode(wanted.reference.float().numpy())}
    strips["sample"] = frames
    return {label: shown_frames(strip) for label, strip in strips.items()}, path
