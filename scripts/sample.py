"""Sample videos from a run's averaged weights: an mp4 each, and a sheet beside the clips that they were asked for.

    python -m scripts.sample --run runs/quickstart --media sample_data/media

Runs on one process, with a GPU if there is one. Files go to RUN/samples.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from adaptiveload.data.corpus import Corpus, open_corpus
from adaptiveload.data.cuts import Cut
from adaptiveload.data.encode import cut_frames
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.raw import find_inputs
from adaptiveload.data.video import write_mp4
from adaptiveload.models.architectures import VideoTransformer, new_transformer
from adaptiveload.models.sampling import euler_sample
from adaptiveload.scheduling.order import held_out_mask
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.contact_sheet import contact_sheet
from adaptiveload.training.run import model_geometry
from adaptiveload.training.trained_weights import TrainedWeights

# Below this, nobody should expect more than colours and layout.
_TOY_PARAMETERS = 10e6


def load_averaged_model(run_dir: Path, config: RunConfig, device: torch.device) -> tuple[VideoTransformer, int]:
    """Model with the averaged weights of the run's latest checkpoint, and the steps it was trained for.

    Raises:
        ValueError: If the run has no checkpoint.
    """
    weights = TrainedWeights(run_dir, config, averaged=True)
    model = new_transformer(config.model)
    for name, parameter in model.diffusers_parameters().items():
        parameter.detach().copy_(weights.read([name])[name])
    return model.to(device).eval(), weights.step


def choose_samples(corpus: Corpus, config: RunConfig, count: int) -> list[int]:
    """Rows of the longest samples of different sources: training and held-out sources by turns."""
    sources = corpus.source_codes
    held_out = held_out_mask(corpus.source_names, config.data.held_out_share, config.seed)[sources]
    longest_first = np.argsort(-corpus.table.num_tokens, kind="stable")
    chosen: list[int] = []
    for take_held_out in [False, True] * count:
        used = set(sources[chosen].tolist())
        fitting = [i for i in longest_first if sources[i] not in used and held_out[i] == take_held_out]
        chosen += [int(i) for i in fitting[:1]]
    return chosen[:count]


def sample_run(run_dir: Path, media: Path | None, count: int, steps: int, guidance: float, seed: int) -> Path:
    """Sample `count` videos of the run in `run_dir`; returns the contact sheet.

    Raises:
        ValueError: If the run has no checkpoint, or its data set was made with a codec that needs weights.
    """
    config = load_config(run_dir / "config.yaml")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    geometry = model_geometry(config.model)
    corpus = open_corpus(config.data.all_sources, geometry)
    codec = DctCodec()
    if corpus.info.codec != codec.name:
        raise ValueError(f"the run trained on {corpus.info.codec} latents; this script decodes only {codec.name}")
    reader = corpus.reader()
    chosen = choose_samples(corpus, config, count)
    shapes = [corpus.place(i).served for i in chosen]
    samples = [reader.read(corpus.place(i)) for i in chosen]
    model, trained_steps = load_averaged_model(run_dir, config, device)
    latents = euler_sample(
        model,
        [tuple(geometry.token_grid(shape)) for shape in shapes],
        [torch.from_numpy(sample.text) for sample in samples],
        reader.null_text(),
        [seed + k for k in range(len(chosen))],
        num_steps=steps,
        guidance_scale=guidance,
        flow=config.objective,
    )
    items = {item.source: item for item in find_inputs([media]).items} if media else {}
    folder = run_dir / "samples"
    folder.mkdir(exist_ok=True)
    sheets = []
    for shape, sample, made in zip(shapes, samples, latents, strict=True):
        strips = {"codec": codec.decode(sample.latents), "sample": codec.decode(made.numpy())}
        if sample.source in items:
            cut = Cut(shape, sample.meta["start_frame"], tuple(sample.meta["box"]))
            strips = {"clip": cut_frames(items[sample.source], cut, sample.meta["fps"]), **strips}
        write_mp4(folder / f"{sample.key}.mp4", strips["sample"], sample.meta["fps"])
        sheets.append((f"{shape}: {sample.caption}", strips))
    if media and not any("clip" in strips for _, strips in sheets):
        print(f"{media} holds none of the sources of the data: the sheet has no clips", file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = f"{config.name}: {_minutes(run_dir):.0f} minutes of training, {trained_steps} steps, "
    title += f"{parameters / 1e6:.1f} M parameters" + (" (a toy)" if parameters < _TOY_PARAMETERS else "")
    title += f"; averaged weights, {steps} Euler steps, guidance {guidance:g}"
    path = folder / "contact_sheet.png"
    contact_sheet(title, sheets).save(path)
    return path


def _minutes(run_dir: Path) -> float:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return sum(row.get("perf/step_s", 0) for row in rows) / 60


def main() -> None:
    """Command line of the sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, for example runs/quickstart")
    parser.add_argument("--media", type=Path, help="the media that the dataset was prepared from, to show the clips")
    parser.add_argument("--num-samples", type=int, default=4, help="samples (default 4)")
    parser.add_argument("--steps", type=int, default=30, help="Euler steps (default 30)")
    parser.add_argument("--guidance", type=float, default=3.0, help="guidance scale; 1 is none (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial noise (default 0)")
    options = parser.parse_args()
    try:
        path = sample_run(
            options.run, options.media, options.num_samples, options.steps, options.guidance, options.seed
        )
        print(f"samples: {path}")
    except ValueError as error:
        sys.exit(f"sample: {error}")


if __name__ == "__main__":
    main()
