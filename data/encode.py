"""Items of raw media to encoded samples: threads decode and cut, one thread encodes batches of equal shape.

Frames that wait to be encoded are bounded in bytes, whatever the length of a clip. Decoding releases the interpreter
lock, so that threads suffice; more processes come from the launcher.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue

import numpy as np

from adaptiveload.data.cuts import Cut, CutConfig, plan_cuts
from adaptiveload.data.latent_codecs import LatentCodec, psnr_db
from adaptiveload.data.media import MediaError, crop_resize, iter_frames, probe_video, read_picture
from adaptiveload.data.raw import RawItem
from adaptiveload.scheduling.shapes import Shape

# Clips of one item that wait for the encoder; a thread that is ahead stops here.
_QUEUED_CLIPS = 2


@dataclass(frozen=True)
class EncodedSample:
    """One sample before it is written: latents fp16 [C, f, h, w], and the PSNR of what they decode to, if measured."""

    cut: Cut
    latents: np.ndarray
    psnr_db: float | None


@dataclass
class ItemResult:
    """What became of one item: samples, or the reason for none; `damage` says what was wrong with a used one."""

    item: RawItem
    samples: list[EncodedSample] = field(default_factory=list)
    skipped: str | None = None
    damage: str | None = None
    source_hash: str = ""


@dataclass(frozen=True)
class EncodeConfig:
    """How items are encoded.

    Attributes:
        num_threads: Threads that decode and cut.
        batch_mib: Most pixels, as bytes, that are encoded at once; at least one sample is.
        waiting_mib: Most bytes of frames that wait for others of their shape.
        psnr_every: PSNR is measured for one sample in so many; decoding costs about twice as much as encoding.
    """

    num_threads: int = 1
    batch_mib: int = 64
    waiting_mib: int = 512
    psnr_every: int = 1


def encode_items(
    items: Iterable[RawItem], cuts: CutConfig, codec: LatentCodec, config: EncodeConfig
) -> Iterator[ItemResult]:
    """Results of all items, in their order; the same whatever the number of threads."""
    with _Stopping(ThreadPoolExecutor(config.num_threads)) as pool:
        encoder = _BatchEncoder(codec, config)
        unfinished: deque[ItemResult] = deque()
        for decoded in pool.decode_ahead(items, cuts, config.num_threads):
            result = ItemResult(decoded.item)
            unfinished.append(result)
            for cut, frames in decoded.clips():
                encoder.add(result, cut, frames)
            result.skipped, result.damage, result.source_hash = decoded.skipped, decoded.damage, decoded.source_hash
            if decoded.skipped:
                encoder.forget(result)
            while unfinished and not encoder.is_waiting(unfinished[0]):
                yield unfinished.popleft()
        encoder.flush()
        yield from unfinished


def cut_frames(item: RawItem, cut: Cut, fps: float) -> np.ndarray:
    """Pixels of one sample of an item again, uint8 [F, H, W, 3]. Raises MediaError if the item cannot be read."""
    if item.is_video:
        return next(_cut_video(item, [cut], fps))[1]
    return _crop(read_picture(item.open()), cut)[None]


class _DecodedItem:
    """One item on its way: a thread puts clips, the encoder takes them."""

    def __init__(self, item: RawItem, stop: threading.Event) -> None:
        self.item = item
        self.skipped: str | None = None
        self.damage: str | None = None
        self.source_hash = ""
        self.future: Future[None] | None = None
        self._stop = stop
        self._queue: Queue[tuple[Cut, np.ndarray] | None] = Queue()
        self._room = threading.Semaphore(_QUEUED_CLIPS)

    def clips(self) -> Iterator[tuple[Cut, np.ndarray]]:
        """Cuts with their uint8 [F, H, W, 3]; at the end, `skipped` and `damage` are known."""
        while (clip := self._queue.get()) is not None:
            self._room.release()
            yield clip
        assert self.future is not None
        self.future.result()  # raises what the thread raised

    def decode(self, config: CutConfig) -> None:
        """Run in a thread."""
        try:
            for clip in self._decode(config):
                self._room.acquire()
                if self._stop.is_set():
                    return
                self._queue.put(clip)
        except MediaError as error:
            self.skipped = str(error)
        finally:
            self._queue.put(None)

    def _decode(self, config: CutConfig) -> Iterator[tuple[Cut, np.ndarray]]:
        """A clip is decoded twice, once to count frames and once to cut; a damaged one is used up to the damage."""
        item = self.item
        self.source_hash = item.content_hash()
        if item.is_video:
            info = probe_video(item.open(), config.fps, item.start_s, item.end_s)
            damage, num_frames, height, width = info.damage, info.num_frames, info.height, info.width
        else:
            picture, damage = read_picture(item.open()), None
            num_frames, height, width = 1, *picture.shape[:2]
        cuts, reason = plan_cuts(item.name, item.is_video, num_frames, height, width, config)
        if not cuts:
            self.skipped = f"{reason} ({damage})" if damage else reason
            return
        self.damage = damage
        if item.is_video:
            yield from _cut_video(item, cuts, config.fps)
        else:
            yield from ((cut, _crop(picture, cut)[None]) for cut in cuts)


class _Stopping:
    """A pool of decoding threads that ends at once when its user fails."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._stop = threading.Event()
        self._decoded: deque[_DecodedItem] = deque()

    def __enter__(self) -> "_Stopping":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for decoded in self._decoded:
            decoded._room.release(2**20)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def decode_ahead(self, items: Iterable[RawItem], config: CutConfig, count: int) -> Iterator[_DecodedItem]:
        """Items in order; `count` more than the one in hand are under way."""
        for item in items:
            decoded = _DecodedItem(item, self._stop)
            decoded.future = self._pool.submit(decoded.decode, config)
            self._decoded.append(decoded)
            if len(self._decoded) > count:
                yield self._decoded[0]
                self._decoded.popleft()
        while self._decoded:
            yield self._decoded[0]
            self._decoded.popleft()


class _BatchEncoder:
    """Collects clips of each shape and encodes them together."""

    def __init__(self, codec: LatentCodec, config: EncodeConfig) -> None:
        self._codec, self._config = codec, config
        self._waiting: dict[Shape, list[tuple[ItemResult, Cut, np.ndarray]]] = {}
        self._num_bytes = 0
        self._num_encoded = 0

    def add(self, result: ItemResult, cut: Cut, frames: np.ndarray) -> None:
        """Take one clip; encodes what has become enough."""
        batch = self._waiting.setdefault(cut.shape, [])
        batch.append((result, cut, frames))
        self._num_bytes += frames.nbytes
        if (len(batch) + 1) * frames.nbytes > self._config.batch_mib * 2**20:
            self._encode(cut.shape)
        elif self._num_bytes > self._config.waiting_mib * 2**20:
            self.flush()

    def forget(self, result: ItemResult) -> None:
        """Drop the clips of an item that turned out to be unusable."""
        result.samples.clear()
        for batch in self._waiting.values():
            self._num_bytes -= sum(frames.nbytes for owner, _, frames in batch if owner is result)
            batch[:] = [entry for entry in batch if entry[0] is not result]

    def is_waiting(self, result: ItemResult) -> bool:
        """Whether clips of an item are not encoded yet."""
        return any(entry[0] is result for batch in self._waiting.values() for entry in batch)

    def flush(self) -> None:
        """Encode everything."""
        for shape in list(self._waiting):
            self._encode(shape)

    def _encode(self, shape: Shape) -> None:
        batch = self._waiting.pop(shape)
        if not batch:
            return
        frames = [entry[2] for entry in batch]
        self._num_bytes -= sum(array.nbytes for array in frames)
        for (result, cut, pixels), values in zip(batch, self._codec.encode_batch(frames), strict=True):
            latents = values.astype(np.float16)
            assert np.isfinite(latents).all(), f"codec {self._codec.name} gave NaN, infinity, or values beyond fp16"
            quality = None
            if self._num_encoded % self._config.psnr_every == 0:
                quality = psnr_db(pixels, self._codec.decode(latents.astype(np.float32)))
            self._num_encoded += 1
            result.samples.append(EncodedSample(cut, latents, quality))


def _crop(rgb: np.ndarray, cut: Cut) -> np.ndarray:
    return crop_resize(rgb, cut.box, cut.shape.height, cut.shape.width)


def _cut_video(item: RawItem, cuts: list[Cut], fps: float) -> Iterator[tuple[Cut, np.ndarray]]:
    """Each cut with its uint8 [F, H, W, 3], as soon as its last frame has come by."""
    under_way: dict[Cut, list[np.ndarray]] = {}
    last = max(cut.start + cut.shape.frames for cut in cuts) - 1
    for k, picture in iter_frames(item.open(), fps, item.start_s, item.end_s):
        under_way |= {cut: [] for cut in cuts if cut.start == k}
        rgb = picture.rgb() if under_way else None
        for cut, frames in list(under_way.items()):
            frames.append(_crop(rgb, cut))
            if len(frames) == cut.shape.frames:
                yield cut, np.stack(under_way.pop(cut))
        if k == last:
            return
