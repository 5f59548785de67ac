"""Make the index of a folder of latent shards that has none, or whose shards have changed.

Reads tar headers and small members only. Nothing is written if a shard is damaged or a sample unusable, unless
--skip-damaged is given; every problem is named either way. An index that is damaged itself is named and made again.

    python -m scripts.index_shards latents/
"""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    """Index a dataset folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset_dir", type=Path, help="folder with *.tar and null_text.safetensors")
    parser.add_argument("--skip-damaged", action="store_true", help="index what is usable, leave out the rest")
    args = parser.parse_args(argv)
    from adaptiveload.data.index import INDEX_NAME, write_index  # here, so that --help is quick
    from adaptiveload.data.indexer import index_shards

    try:
        index, problems = index_shards(args.dataset_dir)
        for problem in problems:
            print(f"problem: {problem.key}: {problem.reason}", file=sys.stderr)
        losses = sum(problem.key != INDEX_NAME for problem in problems)  # an index can be made again without one
        if losses and not args.skip_damaged:
            sys.exit(f"error: {losses} problems; nothing written (--skip-damaged indexes the rest)")
        index.verify()
        write_index(index)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{len(index)} samples in {len(index.info.shards)} shards of {args.dataset_dir}, {len(problems)} problems")


if __name__ == "__main__":
    main()
