"""The transformers that can be trained, by the name in `model.architecture`."""

from adaptiveload.models.config import ModelConfig
from adaptiveload.models.mmdit import MMDiTConfig, VideoMMDiT
from adaptiveload.models.wan import WanConfig, WanTransformer

VideoTransformer = WanTransformer | VideoMMDiT
CONFIGS: dict[str, type[ModelConfig]] = {"wan": WanConfig, "mmdit": MMDiTConfig}


def new_transformer(config: ModelConfig) -> VideoTransformer:
    """The transformer that `config` is of, with new weights; on the meta device without any."""
    if isinstance(config, MMDiTConfig):
        return VideoMMDiT(config)
    assert isinstance(config, WanConfig)
    return WanTransformer(config)
