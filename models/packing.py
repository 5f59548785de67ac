"""Samples of any shapes side by side in one tensor: no padding, no loop over shapes in the model.

Legend: `B` samples, `S` tokens of one sample, `N` = sum of S, `T` text rows of one sample, `C` latent channels,
`F`, `Y`, `X` tokens along latent frames, rows, columns; `pf`, `py`, `px` the patch that makes one token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from einops import rearrange

Grid = tuple[int, int, int]
# Types by their bytes.
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def patchify(latents: torch.Tensor, patch: Grid) -> torch.Tensor:
    """Latents [C, f, h, w] as tokens [S, C*pf*py*px], the layout of every packed tensor.

    Raises:
        ValueError: If a side of `latents` is not a multiple of the patch.
    """
    if latents.ndim != 4 or any(side % size for side, size in zip(latents.shape[1:], patch, strict=True)):
        raise ValueError(f"latents {list(latents.shape)} must be [C, f, h, w] with f, h, w multiples of patch {patch}")
    pf, py, px = patch
    # Neighbours in a row stay neighbours: moved as one wider number they take a tenth of the time. An integer has no
    # gradient, and the data has none to pass on.
    wide = None if latents.requires_grad else _WIDE.get(px * latents.element_size())
    if wide is None:
        return rearrange(latents, "c (f pf) (y py) (x px) -> (f y x) (c pf py px)", pf=pf, py=py, px=px)
    moved = rearrange(latents.contiguous().view(wide), "c (f pf) (y py) x -> (f y x) (c pf py)", pf=pf, py=py)
    return moved.view(latents.dtype)


def unpatchify(tokens: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
    """Inverse of `patchify`: tokens [S, C*pf*py*px] of one sample as latents [C, F*pf, Y*py, X*px]."""
    (f, y, x), (pf, py, px) = grid, patch
    return rearrange(tokens, "(f y x) (c pf py px) -> c (f pf) (y py) (x px)", f=f, y=y, x=x, pf=pf, py=py, px=px)


@dataclass(frozen=True)
class PackedSample:
    """One training sample, ready to be packed.

    Attributes:
        key: Name of the sample in its data set.
        grid: Tokens along frames, rows, columns; S is their product.
        latents: Clean tokens [S, token_size], float32 or the 16-bit type that they are stored in.
        noise: Gaussian tokens, float32 [S, token_size].
        sigma: Noise level in [0, 1].
        text: Text embedding [T, text_dim], not padded.
        weight: w_i of the loss.
        sample_id: Row of the sample in the index; -1 where there is none.
        is_filler: Computed so that collectives match, but left out of the loss.
        clean_frames: First token frames that are given, not predicted: the model sees them clean, at timestep 0, and
            the loss leaves them out. Fewer than the grid has.
    """

    key: str
    grid: Grid
    latents: torch.Tensor
    noise: torch.Tensor
    sigma: float
    text: torch.Tensor
    weight: float = 1.0
    sample_id: int = -1
    is_filler: bool = False
    clean_frames: int = 0


def filler_sample(
    grid: Grid, token_size: int, text_dim: int, *, key: str = "filler", sample_id: int = -1
) -> PackedSample:
    """A sample of zeros, one text row among them, that keeps a rank in step with the others and counts for nothing.

    Its values are finite on purpose: the loss leaves fillers out, but a weight gradient sums over all tokens, and
    0 * NaN is NaN. Name the `key` and `sample_id` that it stands in for, if any.
    """
    zeros = torch.zeros(grid[0] * grid[1] * grid[2], token_size)
    text = torch.zeros(1, text_dim, dtype=torch.bfloat16)  # as texts are stored; beside float32 it becomes that
    sigma = 0.5
    return PackedSample(key, grid, zeros.half(), zeros, sigma, text, weight=0.0, sample_id=sample_id, is_filler=True)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch, sorted by (S, T, grid). `to` moves the values; the offsets stay on the CPU.

    Attributes:
        latents: Clean tokens of all samples side by side [N, token_size], in the samples' type: arithmetic with the
            float32 noise makes them float32, on the GPU.
        noise: Gaussian tokens, float32 [N, token_size].
        sigma: Noise level of each segment in [0, 1], float32 [num_segments]; 0 in clean ones.
        text: Text embeddings side by side, [sum of T, text_dim].
        seq_offsets: First token of each sample, and N: int32 [B + 1], CPU.
        text_offsets: First text row of each sample, and their number: int32 [B + 1], CPU.
        segment_offsets: First token of each segment, and N: int32 [num_segments + 1], CPU. A segment is a run of
            tokens that share a modulation row: a sample, or its clean frames and then the rest of it.
        is_clean: Which segments are given: no noise, and left out of the loss.
        grids: Tokens of each sample along frames, rows, columns.
        weights: w_i of the loss, float64 [B], CPU.
        keys: Names of the samples.
        sample_ids: Their rows in the index.
        is_filler: Which samples the loss leaves out.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    text: torch.Tensor
    seq_offsets: torch.Tensor
    text_offsets: torch.Tensor
    segment_offsets: torch.Tensor
    is_clean: tuple[bool, ...]
    grids: tuple[Grid, ...]
    weights: torch.Tensor
    keys: tuple[str, ...]
    sample_ids: tuple[int, ...]
    is_filler: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        """Latent tokens of all samples, fillers included; text is not counted."""
        return self.latents.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The batch with latents, noise, sigma and text on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy with latents, noise, sigma and text in page-locked memory; `DataLoader` calls this."""
        others = ("seq_offsets", "text_offsets", "segment_offsets", "weights")
        return replace(self._map(torch.Tensor.pin_memory), **{name: getattr(self, name).clone() for name in others})

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        names = ("latents", "noise", "sigma", "text")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


def pack(samples: Sequence[PackedSample]) -> PackedBatch:
    """Put samples side by side, sorted by (S, T, grid) so that those of equal length are neighbours.

    The sort is stable: samples of equal S, T and grid keep their order. `sample_ids` says who went where.

    Raises:
        ValueError: If there are no samples, or the tensors of one do not fit its grid or the other samples.
    """
    if not samples:
        raise ValueError("cannot pack a micro-batch without samples; use filler_sample()")
    for sample in samples:
        _check(sample, samples[0])
    samples = sorted(samples, key=lambda sample: (len(sample.latents), len(sample.text), sample.grid))
    segments = [segment for sample in samples for segment in _segments(sample)]
    return PackedBatch(
        latents=torch.cat([sample.latents for sample in samples]),
        noise=torch.cat([sample.noise for sample in samples]),
        sigma=torch.tensor([sigma for _, sigma, _ in segments], dtype=torch.float32),
        text=torch.cat([sample.text for sample in samples]),
        seq_offsets=_offsets([len(sample.latents) for sample in samples]),
        text_offsets=_offsets([len(sample.text) for sample in samples]),
        segment_offsets=_offsets([length for length, _, _ in segments]),
        is_clean=tuple(is_clean for _, _, is_clean in segments),
        grids=tuple(tuple(sample.grid) for sample in samples),
        weights=torch.tensor([sample.weight for sample in samples], dtype=torch.float64),
        keys=tuple(sample.key for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples),
        is_filler=tuple(sample.is_filler for sample in samples),
    )


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on `device`, without waiting for the work that is queued there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def pad_text(batch: PackedBatch, text_len: int, dtype: torch.dtype) -> torch.Tensor:
    """Text of every sample in `dtype`, padded with rows of zeros: [B * text_len, text_dim].

    The zeros go through the text embedder and are attended. Wan was trained so; leaving them out changes its output.

    Raises:
        ValueError: If a text has more than `text_len` rows.
    """
    lengths = batch.text_offsets.diff()
    longest = int(lengths.argmax())
    if lengths[longest] > text_len:
        raise ValueError(f"sample {batch.keys[longest]}: {int(lengths[longest])} text rows, text_len is {text_len}")
    padding = torch.arange(len(batch), dtype=torch.int32) * text_len - batch.text_offsets[:-1]
    rows = torch.arange(len(batch.text)) + padding.repeat_interleave(lengths)
    text = batch.text.to(dtype)
    padded = text.new_zeros(len(batch) * text_len, text.shape[1])
    return padded.index_copy_(0, to_device(rows, padded.device), text)


def _check(sample: PackedSample, first: PackedSample) -> None:
    expected = (sample.grid[0] * sample.grid[1] * sample.grid[2], first.latents.shape[-1])
    for name in ("latents", "noise"):
        tensor = getattr(sample, name)
        types = (torch.float32,) if name == "noise" else (torch.float32, torch.float16, torch.bfloat16)
        if tuple(tensor.shape) != expected or tensor.dtype not in types:
            raise ValueError(
                f"sample {sample.key}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected float32 {list(expected)} for token grid {tuple(sample.grid)}"
            )
    if sample.text.ndim != 2 or sample.text.shape[1] != first.text.shape[1]:
        raise ValueError(f"sample {sample.key}: text is {list(sample.text.shape)}, expected [T, {first.text.shape[1]}]")
    if not 0 <= sample.clean_frames < sample.grid[0]:
        raise ValueError(
            f"sample {sample.key}: {sample.clean_frames} clean frames of {sample.grid[0]}: none is left to predict"
        )


def _segments(sample: PackedSample) -> list[tuple[int, float, bool]]:
    """Tokens, noise level and whether they are given, of each segment of a sample."""
    given = sample.clean_frames * sample.grid[1] * sample.grid[2]
    noisy = (len(sample.latents) - given, sample.sigma, False)
    return [(given, 0.0, True), noisy] if given else [noisy]


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
