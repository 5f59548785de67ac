"""Previews: samples of the averaged weights while a run goes on, made by all ranks together."""

from dataclasses import dataclass
from pathlib import Path

from adaptiveload.data.corpus import Corpus
from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.models.sampling import SamplerConfig
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.contact_sheet import contact_sheet
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.samples import choose_samples, make_samples, open_codec, wanted_of_corpus


@dataclass
class PreviewConfig:
    """Samples in `RUN/previews` and in wandb, of the longest clips' captions: training and held-out ones by turns.

    Attributes:
        every_steps: Steps between previews; 0 makes none. The last step is always followed by one.
        num_samples: Samples of each; a rank makes several or none where they do not divide.
        steps: Model evaluations per sample.
        guidance: Guidance scale; 1 is none.
        scheduler: Solver: "unipc" or "euler".
        vae_dir: Folder of the VAE that decodes; `dct` latents need none.
    """

    every_steps: int = 0
    num_samples: int = 4
    steps: int = 30
    guidance: float = 5.0
    scheduler: str = "unipc"
    vae_dir: str | None = None

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        if self.every_steps < 0 or self.num_samples < 1:
            raise ValueError(
                f"previews: every_steps={self.every_steps}, num_samples={self.num_samples} must be at least 0 and 1"
            )
        try:
            self.sampler()
        except ValueError as error:
            raise ValueError(f"previews: {error}") from error

    def sampler(self) -> SamplerConfig:
        """How they are sampled."""
        return SamplerConfig(self.scheduler, self.steps, self.guidance)


class Previews:
    """Makes them; the same noise and texts every time, so that only the weights differ.

    Args:
        config: With `every_steps` above 0.
        flow: The run's objective, for the shift.
        corpus: Whose captions are sampled.
        held_out_share: Of the run, to tell held-out captions, as `seed`.
        seed: Of the run; of the noise, too.
        geometry: Of the latents.
        ranks: All of them, here and at each preview.
        memory_limit_tokens: Most tokens that a rank samples at once.
        run_dir: Folder of the run.

    Raises:
        ValueError: If the latents cannot be decoded, on all ranks.
    """

    def __init__(
        self,
        config: PreviewConfig,
        flow: FlowMatchingConfig,
        corpus: Corpus,
        held_out_share: float,
        seed: int,
        geometry: LatentGeometry,
        ranks: Ranks,
        memory_limit_tokens: int,
        run_dir: Path,
    ) -> None:
        self.config, self.flow, self.geometry, self.ranks = config, flow, geometry, ranks
        self.memory_limit_tokens, self.run_dir = memory_limit_tokens, run_dir
        # On the GPU only while previews are made: the memory is training's.
        self.codec = open_codec(corpus.info, config.vae_dir, "cpu", "previews.vae_dir")
        rows = choose_samples(corpus, held_out_share, seed, config.num_samples)
        self.wanted = wanted_of_corpus(corpus, rows, seed, ranks)

    def make(self, model: VideoTransformer, step: int) -> tuple[Path, list[Path]] | None:
        """Sample with the weights that `model` holds after `step` steps. Collective.

        Returns:
            The sheet and the single files; None if no caption could be read.
        """
        folder = self.run_dir / "previews"
        folder.mkdir(exist_ok=True, parents=True)
        name = f"step_{step:08d}"
        self.codec.to(str(self.ranks.device))
        made = make_samples(
            model,
            self.wanted,
            self.config.sampler(),
            self.flow,
            self.codec,
            self.geometry,
            self.ranks,
            self.memory_limit_tokens,
            lambda key: folder / f"{name}_{key}",
        )
        self.codec.to("cpu")
        if not made:
            return None
        sheet = folder / f"{name}.png"
        if self.ranks.is_main:
            title = f"{self.run_dir.name}: step {step}, averaged weights, "
            title += f"{self.config.steps} {self.config.scheduler} steps, guidance {self.config.guidance:g}"
            contact_sheet(title, [(one.heading, one.strips) for one in made]).save(sheet)
        return sheet, [one.path for one in made]
