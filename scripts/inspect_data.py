"""Look into a dataset: what its index holds, a picture of its shapes, decoded samples, one sample by its key.

python -m scripts.inspect_data latents/                              table of shapes and sources
python -m scripts.inspect_data latents/ --histogram shapes.png       shares of samples and tokens by shape
python -m scripts.inspect_data latents/ --contact-sheet sheet.png    one decoded sample of each shape
python -m scripts.inspect_data latents/ --key clip-1f3a-17x64x96-000 everything about one sample
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from adaptiveload.data.index import ShardIndex
from adaptiveload.data.reader import Sample, SampleError, SampleReader
from adaptiveload.scheduling.samples import SampleTable


def describe(index: ShardIndex, table: SampleTable) -> str:
    """Figures of a dataset as text."""
    tokens, counts = table.shape_tokens, np.bincount(table.shape_ids, minlength=len(table.shapes))
    total_bytes = int(index.sizes.sum())
    num_sources = len(np.unique(index.sources.codes))
    mean_kb = total_bytes / len(index) / 1e3
    captions = ", ".join(index.info.captions) or "none"
    lines = [
        f"{index.root}: {len(index)} samples of {num_sources} sources in {len(index.info.shards)} shards",
        f"{total_bytes / 1e6:.1f} MB, {mean_kb:.1f} kB a sample",
        f"codec {index.info.codec} ({index.info.normalization_hash})",
        f"text encoder {index.info.text_encoder}, further captions: {captions}",
        f"text rows: {index.text_lens.min()} to {index.text_lens.max()}, mean {index.text_lens.mean():.1f}",
        f"fingerprint {index.fingerprint}",
        "",
        f"{'shape':>16} {'tokens':>8} {'samples':>9} {'share':>7} {'of tokens':>10}",
    ]
    total = int((tokens * counts).sum())
    for i in np.argsort(tokens, kind="stable"):
        share = counts[i] * tokens[i] / total
        lines.append(
            f"{table.shapes[i]!s:>16} {tokens[i]:>8} {counts[i]:>9} {counts[i] / len(index):>7.1%} {share:>10.1%}"
        )
    return "\n".join(lines)


def find_key(index: ShardIndex, key: str) -> list[int]:
    """Rows of a key, in all shards. Raises ValueError if there is none, naming near ones."""
    keys = np.asarray(index.keys)
    rows = np.flatnonzero(keys == key)
    if not len(rows):
        near = [str(name) for name in keys if key in name][:5]
        raise ValueError(f"no sample {key!r} in {index.root}{'; there is ' + ', '.join(near) if near else ''}")
    return [int(row) for row in rows]


def describe_sample(index: ShardIndex, row: int, sample: Sample) -> str:
    """Everything about one sample as text."""
    latents = sample.latents
    return "\n".join(
        [
            f"row {row}: {sample.key} in {index.shards[row]}, bytes {index.offsets[row]}+{index.sizes[row]}",
            f"source {sample.source}, shape {index.shape(row)}, latents {list(latents.shape)}",
            f"latents: mean {latents.mean():.3f}, std {latents.std():.3f}, {latents.min():.2f} to {latents.max():.2f}",
            *(f"{name} ({len(sample.stored_texts[name])} rows): {text}" for name, text in sample.captions.items()),
            json.dumps(sample.meta, indent=1, ensure_ascii=False),
        ]
    )


def make_sheet(index: ShardIndex, rows: list[int], reader: SampleReader, vae_dir: Path | None, path: Path) -> None:
    """Write a picture of decoded samples. Raises ValueError if the codec is another one than the latents' own."""
    import torch

    from adaptiveload.training.contact_sheet import contact_sheet
    from adaptiveload.training.samples import open_codec

    codec = open_codec(index.info, vae_dir, torch.device("cpu"), "--vae-dir")
    sheets = []
    for row in rows:
        sample = reader.read(index.place(row))
        sheets.append((f"{index.shape(row)}: {sample.caption}", {"decoded": codec.decode(sample.latents)}))
    contact_sheet(f"{index.root}: {len(rows)} of {len(index)} samples", sheets).save(path)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder or URL of a dataset")
    parser.add_argument("--key", help="say everything about this sample")
    parser.add_argument("--histogram", type=Path, help="write a picture of the shapes here")
    parser.add_argument("--contact-sheet", type=Path, help="write a picture of decoded samples here")
    parser.add_argument("--num-samples", type=int, help="samples of the contact sheet (default: one of each shape)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of samples (default 0)")
    parser.add_argument("--vae-dir", type=Path, help="local folder of the VAE, where latents are wan_vae's")
    parser.add_argument("--verify", action="store_true", help="also check shards and rows")
    args = parser.parse_args(argv)
    try:
        index = ShardIndex.read(args.dataset)
        if args.verify:
            index.verify()
        table, reader = index.sample_table(index.info.geometry), SampleReader(index)
        if args.key is not None:
            rows = find_key(index, args.key)
            print("\n\n".join(describe_sample(index, row, reader.read(index.place(row))) for row in rows))
        else:
            print(describe(index, table))
            shuffled = np.random.default_rng(args.seed).permutation(len(index))
            _, first = np.unique(table.shape_ids[shuffled], return_index=True)
            rows = [int(row) for row in (shuffled[first] if args.num_samples is None else shuffled[: args.num_samples])]
        if args.histogram is not None:
            from adaptiveload.training.figures import shape_mix_figure

            counts = np.bincount(table.shape_ids, minlength=len(table.shapes)).tolist()
            figure = shape_mix_figure(dict(zip(table.shapes, counts, strict=True)), index.info.geometry)
            figure.savefig(args.histogram, dpi=110)
        if args.contact_sheet is not None:
            make_sheet(index, rows, reader, args.vae_dir, args.contact_sheet)
    except (ValueError, SampleError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
