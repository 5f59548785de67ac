r"""Turn clips and pictures with captions into a dataset of latents that training reads.

Inputs are folders (a `.txt` or `.json` caption beside each clip or picture), WebDataset `.tar` shards of media (paths,
URLs, `pipe:COMMAND`, with {000..999} expanded), and manifests (`.csv`, `.jsonl`, `.parquet`) of paths, captions, and
perhaps parts of clips. What was used and skipped, and why, is written beside the shards. A launch that was stopped goes
on where it was when it is started again; several processes share the work, in one launch or, by --part, in several.

    python -m scripts.prepare --input media/ --output latents/ --config configs/data/quickstart.yaml
    python -m scripts.prepare --input raw-000000.tar --output latents/ --shapes "1,256,256;17,256,256"
    accelerate launch --config_file configs/accelerate/1node.yaml --num_processes 8 -m scripts.prepare \
        --input koala.csv --media-root /videos --output latents/ --config configs/data/wan_480p.yaml \
        --codec wan_vae --vae-dir wan/vae --text-encoder-dir wan --precision bf16
"""

import argparse
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "data" / "quickstart.yaml"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the preparation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help="folders (or NAME=FOLDER), .tar shards, manifests")
    parser.add_argument("--output", type=Path, required=True, help="dataset folder to make")
    parser.add_argument("--media-root", help="what relative paths of manifests are relative to (default: their folder)")
    parser.add_argument("--codec", choices=["dct", "wan_vae"], default="dct", help="pixels to latents (default: dct)")
    parser.add_argument("--vae-dir", type=Path, help="local folder of a diffusers AutoencoderKLWan, for wan_vae")
    parser.add_argument("--text-encoder-dir", type=Path, help="local Wan 2.1 folder with tokenizer/ and text_encoder/")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of wan_vae (default: fp32)")
    parser.add_argument("--device", help="where wan_vae and the text encoder run (default: this process's GPU, or cpu)")
    parser.add_argument(
        "--config", type=Path, help="YAML with shapes and rules for cutting (default: the quickstart's small shapes)"
    )
    parser.add_argument("--shapes", help='target shapes "F,H,W;F,H,W;..." in place of those in --config')
    parser.add_argument("--samples-per-shard", type=int, default=1000, help="default: 1000")
    parser.add_argument("--items-per-unit", type=int, default=256, help="files or rows done as a whole (default: 256)")
    parser.add_argument("--workers", type=int, default=1, help="threads that decode, a process (default: 1)")
    parser.add_argument("--batch-mib", type=int, default=64, help="pixels encoded at once, in MiB (default: 64)")
    parser.add_argument(
        "--part", type=parse_part, metavar="K/N", help="do part K of N (from 0) alone; the last to finish completes it"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    args = parser.parse_args(argv)
    if (args.codec == "wan_vae") != (args.vae_dir is not None):
        parser.error("--codec wan_vae and --vae-dir go together")
    if args.precision != "fp32" and args.vae_dir is None:
        parser.error(f"--precision {args.precision} goes with --codec wan_vae")
    if args.device is not None and args.vae_dir is None and args.text_encoder_dir is None:
        parser.error(f"--device {args.device} goes with --vae-dir or --text-encoder-dir: nothing else leaves the CPU")
    for name in ("workers", "samples_per_shard", "items_per_unit", "batch_mib"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def parse_part(text: str) -> tuple[int, int]:
    """`3/16` as numbers."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return int(match[1]), int(match[2])


def print_summary(summary: dict[str, Any], output: Path, seconds: float) -> None:
    """Say what was made."""
    for what in ("skipped", "damaged"):
        for entry in summary[what]:
            print(f"{what}: {entry['key']}: {entry['reason']}")
    print("\n".join(f"{shape:>12}  {count:5d} samples" for shape, count in summary["buckets"].items()))
    psnr, stats = summary["psnr_db"], summary["latent_stats"]["all"]
    print(
        f"{summary['num_samples']} samples of {len(summary['buckets'])} shapes from {summary['used']} of "
        f"{summary['num_inputs']} inputs in {output}, {seconds:.1f} s\n"
        f"PSNR {psnr['mean']:.1f} dB ({psnr['min']:.1f} to {psnr['max']:.1f}); latents per channel: "
        f"mean {min(stats['mean']):.2f} to {max(stats['mean']):.2f}, "
        f"std {min(stats['std']):.2f} to {max(stats['std']):.2f}"
    )


def make_encoders(args: argparse.Namespace, local_rank: int) -> tuple[Any, Any]:
    """The latent codec and the text encoder. Raises ValueError if their folders are not what they should be."""
    from adaptiveload.data.latent_codecs import DctCodec
    from adaptiveload.data.text import HashTextEncoder

    device = args.device
    codec: Any = DctCodec()
    text_encoder: Any = HashTextEncoder()
    if args.vae_dir is not None or args.text_encoder_dir is not None:
        import torch

        from adaptiveload.data.wan_encoders import Umt5TextEncoder, WanVaeCodec

        device = device or (f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
        if args.vae_dir is not None:
            codec = WanVaeCodec(args.vae_dir, device, args.precision)
        if args.text_encoder_dir is not None:
            text_encoder = Umt5TextEncoder(args.text_encoder_dir, device)
    return codec, text_encoder


def join_launch() -> Callable[[], None]:
    """Meet the other processes of the launch; returns a function that waits until all have called it."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.barrier


def main(argv: list[str] | None = None) -> None:
    """Run the preparation, or this process's share of it."""
    args = parse_args(argv)
    # Imported here so that --help is quick.
    from adaptiveload.data.cuts import CutConfig
    from adaptiveload.data.encode import EncodeConfig
    from adaptiveload.data.prepare import PrepareConfig, prepare
    from adaptiveload.scheduling.shapes import Shape
    from adaptiveload.training.distributed import check_launch, parent_command
    from adaptiveload.training.failures import ending_in_words
    from adaptiveload.training.figures import shape_mix_figure

    start = time.perf_counter()
    rank, world_size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    with ending_in_words("prepare"):
        check_launch(os.environ, parent_command())
        codec, text_encoder = make_encoders(args, local_rank)
        config = PrepareConfig(
            encode=EncodeConfig(
                num_threads=args.workers, batch_mib=args.batch_mib, psnr_every=1 if args.codec == "dct" else 64
            ),
            samples_per_shard=args.samples_per_shard,
            items_per_unit=args.items_per_unit,
            media_root=args.media_root,
            overwrite=args.overwrite,
        )
        if args.config is None and args.shapes is None:
            args.config = DEFAULT_CONFIG
            if rank == 0:
                print(f"neither --config nor --shapes: cutting to the small shapes of {DEFAULT_CONFIG}")
        cuts = CutConfig.load(args.config, args.shapes, codec.geometry)
        world_size = max(world_size, 1)
        part, parts = args.part or (0, 1)
        ranks = {"rank": part * world_size + rank, "world_size": parts * world_size, "all_have_begun": None}
        if args.part is None:
            ranks["all_have_begun"] = join_launch() if world_size > 1 else lambda: None

        def draw_buckets(folder: Path, report: dict[str, Any]) -> None:
            counts = {Shape(*map(int, shape.split("x"))): count for shape, count in report["buckets"].items()}
            shape_mix_figure(counts, cuts.geometry).savefig(folder / "buckets.png", dpi=110)

        done = prepare(
            args.input, args.output, cuts, codec, text_encoder, config, **ranks, before_it_appears=draw_buckets
        )
    if done is not None:
        print_summary(done[1], args.output, time.perf_counter() - start)
    elif args.part is not None:
        print(f"part {part}/{parts} is done, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
