"""Turn clips and pictures with captions into a dataset of latents that training reads.

Inputs are folders (a `.txt` or `.json` caption beside each clip or picture) and WebDataset `.tar` shards of media. What
was used and skipped, and why, is written to `report.json` in the output folder.

    python -m scripts.prepare --input media/ --output latents/ --config configs/data/quickstart.yaml
    python -m scripts.prepare --input raw-000000.tar --output latents/ --shapes "1,256,256;17,256,256"
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the preparation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="folders of media, .tar shards of media")
    parser.add_argument("--output", type=Path, required=True, help="dataset folder to make")
    parser.add_argument("--codec", choices=["dct", "wan_vae"], default="dct", help="pixels to latents (default: dct)")
    parser.add_argument("--vae-dir", type=Path, help="local folder of a diffusers AutoencoderKLWan, for wan_vae")
    parser.add_argument("--text-encoder-dir", type=Path, help="local Wan 2.1 folder with tokenizer/ and text_encoder/")
    parser.add_argument("--device", default="cpu", help="where wan_vae and the text encoder run (default: cpu)")
    parser.add_argument("--config", type=Path, help="YAML with shapes and rules for cutting, see configs/data/")
    parser.add_argument("--shapes", help='target shapes "F,H,W;F,H,W;..." in place of those in --config')
    parser.add_argument("--samples-per-shard", type=int, default=1000, help="default: 1000")
    parser.add_argument("--workers", type=int, default=1, help="processes that decode and encode (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    args = parser.parse_args(argv)
    if (args.codec == "wan_vae") != (args.vae_dir is not None):
        parser.error("--codec wan_vae and --vae-dir go together")
    if args.workers < 1 or (args.workers > 1 and args.codec != "dct"):
        parser.error(f"--workers {args.workers}: must be at least 1, and 1 for wan_vae")
    if args.samples_per_shard < 1:
        parser.error(f"--samples-per-shard {args.samples_per_shard}: must be at least 1")
    return args


def print_summary(summary: dict[str, Any], output: Path, seconds: float) -> None:
    """Say what was made."""
    for what in ("skipped", "damaged"):
        for entry in summary[what]:
            print(f"{what}: {entry['key']}: {entry['reason']}")
    print("\n".join(f"{shape:>12}  {count:5d} samples" for shape, count in summary["buckets"].items()))
    psnr, stats = summary["psnr_db"], summary["latent_stats"]["all"]
    print(
        f"{summary['num_samples']} samples of {len(summary['buckets'])} shapes from {len(summary['used'])} of "
        f"{summary['num_inputs']} inputs in {output}, {seconds:.1f} s\n"
        f"PSNR {psnr['mean']:.1f} dB ({psnr['min']:.1f} to {psnr['max']:.1f}); latents per channel: "
        f"mean {min(stats['mean']):.2f} to {max(stats['mean']):.2f}, "
        f"std {min(stats['std']):.2f} to {max(stats['std']):.2f}"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the preparation."""
    args = parse_args(argv)
    # Imported here so that --help is quick and worker processes, which import this file, load no torch.
    from adaptiveload.data.cuts import CutConfig
    from adaptiveload.data.latent_codecs import DctCodec
    from adaptiveload.data.prepare import prepare
    from adaptiveload.data.text import HashTextEncoder

    start = time.perf_counter()
    try:
        codec, text_encoder = DctCodec(), HashTextEncoder()
        if args.vae_dir is not None:
            from adaptiveload.data.wan_encoders import WanVaeCodec

            codec = WanVaeCodec(args.vae_dir, args.device)
        if args.text_encoder_dir is not None:
            from adaptiveload.data.wan_encoders import Umt5TextEncoder

            text_encoder = Umt5TextEncoder(args.text_encoder_dir, args.device)
        _, summary = prepare(
            args.input,
            args.output,
            CutConfig.load(args.config, args.shapes),
            codec,
            text_encoder,
            overwrite=args.overwrite,
            num_workers=args.workers,
            samples_per_shard=args.samples_per_shard,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    print_summary(summary, args.output, time.perf_counter() - start)


if __name__ == "__main__":
    main()
