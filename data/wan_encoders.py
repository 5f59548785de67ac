"""Wan's own VAEs and text encoder, from local folders in diffusers' layout.

Wan 2.1 and 2.2 A14B have latents of 16 channels for 8x8 pixels, Wan 2.2 TI2V of 48 channels for 16x16.
"""

import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from einops import rearrange

from adaptiveload.scheduling.shapes import LatentGeometry


class WanVaeCodec:
    """`AutoencoderKLWan`: the posterior's mean, normalised per channel by the VAE's own mean and std, in float32.

    Args:
        vae_dir: Folder with `config.json` and the weights; nothing is downloaded.
        device: Where it runs.
        precision: "fp32", or "bf16", which takes half the memory and moves latents by about 1 %.

    Raises:
        ValueError: If the folder is absent, or its constants are not one for each latent channel.
    """

    name = "wan_vae"
    # A whole frame of more pixels than such a square is decoded in tiles of it: memory grows with a frame's pixels, not
    # with the frames, which the VAE decodes four by four; 480x832 takes 7.6 GiB in float32. Encoding is never tiled:
    # seams would be trained on.
    tile_side, tile_overlap = 640, 128

    def __init__(self, vae_dir: Path, device: str = "cpu", precision: str = "fp32"):
        from diffusers import AutoencoderKLWan  # takes seconds to import

        if not (Path(vae_dir) / "config.json").is_file():
            raise ValueError(f"no VAE in {vae_dir}: config.json is missing")
        self._vae = AutoencoderKLWan.from_pretrained(str(vae_dir), torch_dtype=torch.float32, local_files_only=True)
        self.settings = precision
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        weights = _digest(self._vae.state_dict())
        self._vae.to(dtype=self._dtype).eval()
        stride = self.tile_side - self.tile_overlap
        self._vae.enable_tiling(self.tile_side, self.tile_side, stride, stride)
        self._vae.use_tiling = False
        config = self._vae.config
        if not config.z_dim == len(config.latents_mean) == len(config.latents_std):
            raise ValueError(
                f"VAE in {vae_dir}: {config.z_dim} latent channels, but {len(config.latents_mean)} means and "
                f"{len(config.latents_std)} standard deviations (latents_mean, latents_std in config.json)"
            )
        self.geometry = LatentGeometry(config.z_dim, config.scale_factor_temporal, config.scale_factor_spatial)
        constants = np.array([config.latents_mean, config.latents_std], dtype=np.float32)
        self.normalization_hash = hashlib.blake2b(
            self.name.encode() + constants.tobytes() + weights, digest_size=8
        ).hexdigest()
        self._mean, self._std = torch.from_numpy(constants)[:, :, None, None, None]  # [C, 1, 1, 1] each
        self.to(device)

    def to(self, device: str) -> None:
        """Move weights and constants."""
        self._device = device
        self._vae.to(device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    @torch.no_grad()
    def encode(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [F, H, W, 3] -> float32 [C, f, h, w]. Raises ValueError if the strides leave something over."""
        return self.encode_batch([frames])[0]

    @torch.no_grad()
    def encode_batch(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """`encode` of clips of one shape, at once."""
        count, height, width, _ = clips[0].shape
        time, space = self.geometry.temporal_stride, self.geometry.spatial_stride
        if (count - 1) % time or height % space or width % space:
            # The VAE itself drops odd frames without a word.
            raise ValueError(
                f"frames {count}x{height}x{width} must be {time}k+1 frames with sides that are multiples of {space}"
            )
        pixels = rearrange(torch.from_numpy(np.stack(clips)).to(self._device), "b f y x c -> b c f y x")
        latents = self._vae.encode((pixels.float() / 127.5 - 1).to(self._dtype)).latent_dist.mode().float()
        return list(((latents - self._mean) / self._std).cpu().numpy())

    @torch.no_grad()
    def decode(self, latents: np.ndarray) -> np.ndarray:
        """float32 [C, f, h, w] -> uint8 [F, H, W, 3]."""
        scaled = torch.from_numpy(latents).to(self._device) * self._std + self._mean
        self._vae.use_tiling = latents.shape[2] * latents.shape[3] * self.geometry.spatial_stride**2 > self.tile_side**2
        pixels = rearrange(self._vae.decode(scaled[None].to(self._dtype)).sample[0].float(), "c f y x -> f y x c")
        self._vae.use_tiling = False
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()


def _digest(weights: dict[str, torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


class Umt5TextEncoder:
    """UMT5 as Wan 2.1 uses it: cleaned caption, at most 512 tokens, rows of padding left out.

    Args:
        model_dir: Folder with `tokenizer/` and `text_encoder/`, as in a Wan 2.1 repository for diffusers.
        device: Where it runs; bfloat16 on a GPU, float32 on a CPU.

    Raises:
        ValueError: If a folder is absent.
    """

    max_len = 512

    def __init__(self, model_dir: Path, device: str = "cpu"):
        for part in ("tokenizer", "text_encoder"):
            if not (Path(model_dir) / part).is_dir():
                raise ValueError(f"no text encoder in {model_dir}: folder {part}/ is missing")
        from transformers import AutoTokenizer, UMT5EncoderModel  # takes seconds to import

        self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir / "tokenizer"), local_files_only=True)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._model = UMT5EncoderModel.from_pretrained(
            str(model_dir / "text_encoder"), dtype=dtype, local_files_only=True
        )
        self._model.to(device).eval()
        self.dim = self._model.config.d_model
        self.name = f"umt5-{self.dim}-{self.max_len}"

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[np.ndarray]:
        """One float32 [len, dim] per caption, 1 <= len <= 512, end mark included."""
        return [self._encode_one(caption) for caption in captions]

    def _encode_one(self, caption: str) -> np.ndarray:
        text = " ".join(html.unescape(html.unescape(caption)).split())
        # Alone and unpadded: equal to the padded, masked batch of Wan's pipeline, without its padding.
        tokens = self._tokenizer(text, max_length=self.max_len, truncation=True, return_tensors="pt")
        ids, mask = (tokens[name].to(self._model.device) for name in ("input_ids", "attention_mask"))
        return self._model(ids, mask).last_hidden_state[0].float().cpu().numpy()
