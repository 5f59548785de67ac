r"""Sample videos: a file each, and a sheet of all, beside the clips that they were asked for.

    python -m scripts.sample --run runs/quickstart --media sample_data/media
    accelerate launch --config_file configs/accelerate/1node.yaml -m scripts.sample --run runs/wan_1_3b \
        --prompt "a dog on a beach" "a tram in the rain" --shape 81x480x832 --vae-dir wan/vae --text-encoder-dir wan
    python -m scripts.sample --model Wan2.1-T2V-1.3B-Diffusers --prompt "a dog on a beach" --shape 81x480x832 \
        --output samples

Without prompts, captions of the run's data set are sampled in their own shapes. Samples are spread over the ranks of
the launch, which hold the model together. Files go to RUN/samples, or to --output, which --model needs.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adaptiveload.data.corpus import Corpus, open_corpus
from adaptiveload.data.cuts import Cut
from adaptiveload.data.encode import cut_frames
from adaptiveload.data.latent_codecs import LatentCodec
from adaptiveload.data.media import MediaError, read_picture
from adaptiveload.data.raw import RawItem, find_inputs
from adaptiveload.data.text import TextEncoder
from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.pretrained import read_model_config
from adaptiveload.models.sampling import SCHEDULERS, SamplerConfig
from adaptiveload.scheduling.shapes import Shape
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.contact_sheet import contact_sheet, shown_frames
from adaptiveload.training.cost import Hardware, resolve_gpu
from adaptiveload.training.distributed import Ranks, finish_ranks, set_meeting, start_ranks
from adaptiveload.training.failures import ending_in_words
from adaptiveload.training.live_step import build_model
from adaptiveload.training.resume import load_weights
from adaptiveload.training.samples import (
    Strips,
    Wanted,
    choose_samples,
    fit_picture,
    make_samples,
    open_codec,
    open_text_encoder,
    open_vae,
    wanted_of_corpus,
)
from adaptiveload.training.schedule import model_geometry, resolve_meet
from adaptiveload.training.trained_weights import frozen_identity

# Below this, nobody should expect more than colours and layout.
_TOY_PARAMETERS = 10e6


@dataclass(frozen=True)
class Job:
    """What to sample, with what, and where the files go."""

    model: VideoTransformer
    config: RunConfig
    codec: LatentCodec
    wanted: list[Wanted]
    folder: Path
    title: str


def prepare_run(options: argparse.Namespace, ranks: Ranks) -> Job:
    """A run's weights, and captions of its data set or new prompts."""
    config = load_config(options.run / "config.yaml")
    config = replace(config, precision=options.precision or config.precision, compile=False)
    corpus = open_data(config)
    codec = open_codec(corpus.info, options.vae_dir, ranks.device, "--vae-dir")
    rows = choose_samples(corpus, config.data.held_out_share, config.seed, options.num_samples)
    wanted = wanted_of_corpus(corpus, rows, options.seed, ranks)
    if not wanted:
        raise ValueError(f"none of the {len(rows)} samples whose captions were chosen can be read")
    if options.prompt:
        shapes = options.shape or [wanted[0].shape]

        def open_encoder() -> TextEncoder:
            return open_text_encoder(corpus.info.text_encoder, options.text_encoder_dir, ranks.device)

        wanted = ranks.run_on_main(lambda: wanted_of_prompts(options, shapes, open_encoder(), wanted[0].fps))
    elif options.shape:
        wanted = [
            replace(one, shape=shape, key=f"{one.key}_{shape}", reference=one.reference if shape == one.shape else None)
            for one in wanted
            for shape in options.shape
        ]
    model = build_model(config, ranks, is_resumed=True)[0]
    trained_steps = load_weights(model, options.run / "checkpoints", options.weights, ranks, frozen_identity(config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = f"{config.name}: {_minutes(options.run):.0f} minutes of training, {trained_steps} steps, "
    title += f"{parameters / 1e6:.1f} M parameters{' (a toy)' if parameters < _TOY_PARAMETERS else ''}; "
    title += f"{options.weights} weights"
    return Job(model, config, codec, wanted, options.output or options.run / "samples", title)


def open_data(config: RunConfig) -> Corpus:
    """The data set of a run, by its index."""
    try:
        return open_corpus(config.data.all_sources, model_geometry(config.model))
    except ValueError as error:
        if config.data.mode != "stream":
            raise
        raise ValueError(
            f"{error}; the run was trained with data.mode=stream, without an index, but captions, codec and text "
            "encoder come from one: make it with scripts.index_shards, or export the run and sample with --model"
        ) from error


def prepare_model(options: argparse.Namespace, ranks: Ranks) -> Job:
    """A transformer or pipeline folder and new prompts."""
    for name in ("prompt", "shape", "output"):
        if not getattr(options, name):
            raise ValueError(f"--model needs --{name}")
    precision = options.precision or ("bf16" if ranks.device.type == "cuda" else "fp32")
    config = RunConfig(precision=precision, model=read_model_config(options.model))
    codec = open_vae(options.vae_dir or options.model / "vae", ranks.device)
    if codec.geometry != (geometry := model_geometry(config.model)):
        raise ValueError(f"the VAE has latents of {codec.geometry}, the model takes {geometry}")

    def prompts() -> list[Wanted]:
        from adaptiveload.data.wan_encoders import Umt5TextEncoder

        encoder = Umt5TextEncoder(options.text_encoder_dir or options.model, str(ranks.device))
        if encoder.dim != config.model.text_dim:
            raise ValueError(
                f"the text encoder's rows have {encoder.dim} dims, the model takes {config.model.text_dim}"
            )
        return wanted_of_prompts(options, options.shape, encoder, released_fps(config.model))

    wanted = ranks.run_on_main(prompts)
    model = build_model(config, ranks)[0]
    return Job(model, config, codec, wanted, options.output, str(options.model))


def released_fps(model: ModelConfig) -> float:
    """Frames per second that released models make: 24 for Wan 2.2 TI2V, whose VAE alone has stride 16, else 16."""
    return 24.0 if model.spatial_stride == 16 else 16.0


def wanted_of_prompts(
    options: argparse.Namespace, shapes: Sequence[Shape], encoder: TextEncoder, fps: float
) -> list[Wanted]:
    """Each prompt in each shape."""
    *texts, negative = map(torch.from_numpy, encoder.encode([*options.prompt, options.negative_prompt]))
    return [
        Wanted(f"prompt{number:02d}_{shape}", shape, prompt, text, negative, options.seed + number, fps)
        for number, (prompt, text) in enumerate(zip(options.prompt, texts, strict=True))
        for shape in shapes
    ]


def give_first_frame(wanted: list[Wanted], first_frame: str, codec: LatentCodec) -> list[Wanted]:
    """`wanted` with the first latent frame given: of the sample itself ("data"), or of a picture, cut to each shape."""
    if any(one.shape.frames == 1 for one in wanted):
        raise ValueError("--first-frame: of a sample of one frame nothing would be left to make")
    if first_frame == "data":
        if any(one.reference is None for one in wanted):
            raise ValueError("--first-frame data: only captions of the data set in their own shapes have one")
        return [replace(one, first_frame=one.reference[:, :1]) for one in wanted if one.reference is not None]
    try:
        picture = read_picture(Path(first_frame))
    except MediaError as error:
        raise ValueError(f"--first-frame {first_frame}: {error}") from error
    frames = {one.shape: fit_picture(picture, one.shape) for one in wanted}
    given = {shape: torch.from_numpy(codec.encode(frame)) for shape, frame in frames.items()}
    return [replace(one, first_frame=given[one.shape]) for one in wanted]


def sample(options: argparse.Namespace, ranks: Ranks) -> Path:
    """Sample what the options ask for; returns the contact sheet. Collective.

    Raises:
        ValueError: For anything that the user can get wrong.
    """
    media: dict[str, RawItem] = {}  # on rank 0, which draws the sheet
    if options.media:
        ranks.run_on_main(lambda: media.update({item.source: item for item in find_inputs([options.media]).items}))
    job = prepare_run(options, ranks) if options.run else prepare_model(options, ranks)
    geometry = model_geometry(job.config.model)
    wanted = give_first_frame(job.wanted, options.first_frame, job.codec) if options.first_frame else job.wanted
    if options.fps is not None:
        wanted = [replace(one, fps=options.fps) for one in wanted]
    for one in wanted:
        geometry.check(one.shape, "--shape")
        if len(one.text) > job.config.model.text_len:
            raise ValueError(f"{one.caption!r}: {len(one.text)} text rows, model.text_len={job.config.model.text_len}")
    # Where the gathered weights fit, gather them once and not in every step.
    hardware = Hardware.of_all(ranks)
    gpu = resolve_gpu(job.config.cost, hardware)
    set_meeting(job.model, meet=resolve_meet(job.config, gpu, hardware), is_last=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    limit = job.config.schedule.memory_limit_tokens or 0  # 0: one at a time
    made = make_samples(
        job.model, wanted, options.sampler, job.config.objective, job.codec, geometry, ranks, limit, job.folder.joinpath
    )
    path = job.folder / "contact_sheet.png"
    if ranks.is_main:
        shift = "" if options.shift is None else f", shift {options.shift:g}"
        title = f"{job.title}, {options.steps} {options.scheduler} steps, guidance {options.guidance:g}{shift}"
        clips = [media_clip(media, one.wanted) for one in made]
        if options.media and not any(clips):
            print(f"{options.media} holds none of the sources of the data: the sheet has no clips", file=sys.stderr)
        sheets = [(one.heading, clip | one.strips) for one, clip in zip(made, clips, strict=True)]
        contact_sheet(title, sheets).save(path)
    return path


def media_clip(media: Mapping[str, RawItem], wanted: Wanted) -> Strips:
    """The strip of the clip that the caption is of, cut as for training, where `media` has it and it can be read."""
    if wanted.reference is None or wanted.meta is None or wanted.source not in media:
        return {}
    cut = Cut(wanted.shape, wanted.meta["start_frame"], tuple(wanted.meta["box"]))
    try:
        return {"clip": shown_frames(cut_frames(media[wanted.source], cut, wanted.meta["fps"]))}
    except MediaError as error:
        print(f"{wanted.source}: {error}: its clip is not shown", file=sys.stderr)
        return {}


def _minutes(run_dir: Path) -> float:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = map(json.loads, (line for line in lines if line.endswith("\n")))  # the last may be cut off or half written
    return sum(row.get("perf/step_s", 0) for row in rows) / 60


def parse_shape(text: str) -> Shape:
    """FxHxW."""
    try:
        return Shape(*map(int, text.lower().split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not FRAMESxHEIGHTxWIDTH, for example 81x480x832") from None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="folder of a run, for example runs/quickstart")
    what.add_argument("--model", type=Path, help="diffusers folder of a transformer or of a pipeline")
    parser.add_argument("--weights", choices=["averaged", "last"], help="of the run's checkpoint (default averaged)")
    parser.add_argument("--media", type=Path, help="the media that the dataset was prepared from, to show the clips")
    parser.add_argument("--num-samples", type=int, help="captions of the data set (default 4)")
    parser.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="new prompts, each in each shape")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="new prompts, one a line")
    parser.add_argument("--negative-prompt", default="", help="what guidance moves away from (default: the empty one)")
    parser.add_argument("--shape", nargs="+", type=parse_shape, metavar="FxHxW", help="frames, height, width in pixels")
    parser.add_argument("--first-frame", metavar="FILE|data", help="image-to-video: a picture, or the sample's own")
    parser.add_argument("--text-encoder-dir", type=Path, help="Wan 2.1 folder with tokenizer/ and text_encoder/")
    parser.add_argument("--vae-dir", type=Path, help="folder of the VAE, where latents are wan_vae's")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="unipc", help="solver (default unipc)")
    parser.add_argument("--steps", type=int, default=30, help="model evaluations of a sample (default 30)")
    parser.add_argument("--guidance", type=float, default=3.0, help="guidance scale; 1 is none (default 3)")
    parser.add_argument("--shift", type=float, help="of the noise schedule (default: that of training, by length)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument(
        "--fps", type=float, help="of the files (default: the data's; of --model 16, or 24 for Wan 2.2 TI2V)"
    )
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="default: the run's; for --model bf16 on a GPU")
    parser.add_argument("--output", type=Path, help="folder of the files (default: RUN/samples)")
    options = parser.parse_args(argv)
    if options.prompts is not None:
        try:
            lines = [line.strip() for line in options.prompts.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--prompts {options.prompts}: {error}")
        if not lines:
            parser.error(f"--prompts {options.prompts}: no prompt there")
        options.prompt += lines
    _refuse_ignored(parser, options)
    if options.num_samples is not None and options.num_samples < 1:
        parser.error(f"--num-samples {options.num_samples}: must be at least 1")
    if options.fps is not None and not 0 < options.fps < math.inf:
        parser.error(f"--fps {options.fps}: must be positive and finite")
    try:
        options.sampler = SamplerConfig(options.scheduler, options.steps, options.guidance, options.shift)
    except ValueError as error:
        parser.error(f"--{error}")
    options.weights = options.weights or "averaged"
    options.num_samples = options.num_samples or 4
    return options


def _refuse_ignored(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An option that would change nothing is a mistake."""
    if options.model and options.weights:
        parser.error("--weights are those of a run's checkpoint; --model has its own")
    if options.model or options.prompt:
        for name, value in (("--num-samples", options.num_samples), ("--media", options.media)):
            if value is not None:
                parser.error(f"{name} goes with captions of a run's data set, not with --model or new prompts")
    elif options.negative_prompt:
        parser.error("--negative-prompt goes with new prompts; captions of the data set have the stored null text")
    elif options.text_encoder_dir:
        parser.error("--text-encoder-dir goes with new prompts; captions of the data set are embedded already")


def main() -> None:
    """Sample, on one process or on those of a launch."""
    options = parse_args()
    with ending_in_words("sample"):
        ranks = start_ranks()
        path = sample(options, ranks)
    if ranks.is_main:
        print(f"samples: {path}")
    finish_ranks(ranks)


if __name__ == "__main__":
    main()
