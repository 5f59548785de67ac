"""One item of raw media to encoded samples. Worker processes run this, so it loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from adaptiveload.data.cuts import Cut, CutConfig, plan_cuts
from adaptiveload.data.latent_codecs import LatentCodec, psnr_db
from adaptiveload.data.media import MediaError, crop_resize, iter_frames, probe_video, read_picture
from adaptiveload.data.raw import RawItem


@dataclass(frozen=True)
class EncodedSample:
    """One sample before it is written: latents fp16 [C, f, h, w], and the PSNR of what they decode to."""

    cut: Cut
    latents: np.ndarray
    psnr_db: float


@dataclass(frozen=True)
class ItemResult:
    """What became of one item: samples, or the reason for none; `damage` says what was wrong with a used one."""

    item: RawItem
    samples: list[EncodedSample]
    skipped: str | None = None
    damage: str | None = None


def encode_item(item: RawItem, config: CutConfig, codec: LatentCodec) -> ItemResult:
    """Decode one item and encode all its samples. A damaged clip is used up to the damage.

    Clips are decoded twice, once to count frames and once to cut; only frames of samples under way are in memory.
    """
    try:
        media, damage = item.open(), None
        if item.is_video:
            info = probe_video(media, config.fps)
            damage = info.damage
            num_frames, height, width = info.num_frames, info.height, info.width
        else:
            picture = read_picture(media)
            num_frames, height, width = 1, *picture.shape[:2]
        cuts, reason = plan_cuts(item.source, item.is_video, num_frames, height, width, config)
        if not cuts:
            return ItemResult(item, [], skipped=f"{reason} ({damage})" if damage else reason)
        if item.is_video:
            clips = _cut_video(item, cuts, config.fps)
        else:
            clips = ((cut, _crop(picture, cut)[None]) for cut in cuts)
        samples = [_encode(cut, frames, codec) for cut, frames in clips]
    except MediaError as error:
        return ItemResult(item, [], skipped=str(error))
    return ItemResult(item, samples, damage=damage)


def cut_frames(item: RawItem, cut: Cut, fps: float) -> np.ndarray:
    """Pixels of one sample of an item again, uint8 [F, H, W, 3]. Raises MediaError if the item cannot be read."""
    if item.is_video:
        return next(_cut_video(item, [cut], fps))[1]
    return _crop(read_picture(item.open()), cut)[None]


def _crop(rgb: np.ndarray, cut: Cut) -> np.ndarray:
    return crop_resize(rgb, cut.box, cut.shape.height, cut.shape.width)


def _cut_video(item: RawItem, cuts: list[Cut], fps: float) -> Iterator[tuple[Cut, np.ndarray]]:
    """Each cut with its uint8 [F, H, W, 3], as soon as its last frame has come by."""
    under_way: dict[Cut, list[np.ndarray]] = {}
    last = max(cut.start + cut.shape.frames for cut in cuts) - 1
    for k, picture in iter_frames(item.open(), fps):
        under_way |= {cut: [] for cut in cuts if cut.start == k}
        rgb = picture.rgb() if under_way else None
        for cut, frames in list(under_way.items()):
            frames.append(_crop(rgb, cut))
            if len(frames) == cut.shape.frames:
                yield cut, np.stack(under_way.pop(cut))
        if k == last:
            return


def _encode(cut: Cut, frames: np.ndarray, codec: LatentCodec) -> EncodedSample:
    latents = codec.encode(frames).astype(np.float16)
    assert np.isfinite(latents).all(), f"codec {codec.name} gave NaN, infinity, or values beyond fp16"
    return EncodedSample(cut, latents, psnr_db(frames, codec.decode(latents.astype(np.float32))))
