"""Wan's VAE, text encoder and tokenizer with random weights, small enough for a test."""

from pathlib import Path

import torch

TEXT_DIM = 16


def new_vae():
    """`AutoencoderKLWan` of Wan 2.1's geometry."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def new_text_encoder():
    """`UMT5EncoderModel` and a tokenizer of letters and two words."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from tokenizers.pre_tokenizers import Metaspace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz&", "▁cat", "▁dog"]
    tokenizer = Tokenizer(Unigram([(piece, -float(i > 2)) for i, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=len(pieces), d_model=TEXT_DIM, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return UMT5EncoderModel(config), fast


def save_pipeline(folder: Path, transformer) -> Path:
    """A `WanPipeline` with the given transformer, as released ones are laid out."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    text_encoder, tokenizer = new_text_encoder()
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    WanPipeline(tokenizer, text_encoder, new_vae(), scheduler, transformer).save_pretrained(folder)
    return folder
