"""Released weights in and out, against the files that diffusers itself writes, converts and opens."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptiveload.models.flow_matching import timesteps
from adaptiveload.models.packing import pack, patchify, unpatchify
from adaptiveload.models.pretrained import load_pretrained, read_model_config, save_pretrained, weights_fingerprint
from adaptiveload.models.wan import WanConfig, WanTransformer
from tests.launching import run_ranks

SIZES = {
    "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 96, "num_layers": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def diffusers_model():
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(**WanConfig(**SIZES).to_diffusers())


@pytest.fixture(params=["one file", "shards", "pipeline"])
def folder(request, tmp_path: Path, diffusers_model) -> Path:
    """As diffusers saves it, whole or in about a dozen shards with an index, or as part of a pipeline."""
    target = tmp_path / "transformer" if request.param == "pipeline" else tmp_path
    diffusers_model.save_pretrained(target, max_shard_size="5GB" if request.param == "one file" else "40KB")
    count = len(list(target.glob("*.safetensors")))
    assert count == 1 if request.param == "one file" else count > 5
    return tmp_path


def test_a_diffusers_folder_loads_bit_for_bit(folder: Path, diffusers_model) -> None:
    model = WanTransformer(WanConfig(**SIZES))
    load_pretrained(model, folder)
    state = diffusers_model.state_dict()
    assert set(model.state_dict()) == set(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def original_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of Wan2.1's `WanModel`, its names written out here by hand."""
    named = {
        "patch_embedding.weight": "patch_embedding.weight",
        "patch_embedding.bias": "patch_embedding.bias",
        "head.modulation": "scale_shift_table",
    }
    for part in ("weight", "bias"):
        for ours, theirs in (("time", "time_embedder"), ("text", "text_embedder")):
            named[f"{ours}_embedding.0.{part}"] = f"condition_embedder.{theirs}.linear_1.{part}"
            named[f"{ours}_embedding.2.{part}"] = f"condition_embedder.{theirs}.linear_2.{part}"
        named[f"time_projection.1.{part}"] = f"condition_embedder.time_proj.{part}"
        named[f"head.head.{part}"] = f"proj_out.{part}"
        for block in ("blocks.0", "blocks.1"):
            named[f"{block}.modulation"] = f"{block}.scale_shift_table"
            named[f"{block}.norm3.{part}"] = f"{block}.norm2.{part}"
            named[f"{block}.ffn.0.{part}"] = f"{block}.ffn.net.0.proj.{part}"
            named[f"{block}.ffn.2.{part}"] = f"{block}.ffn.net.2.{part}"
            for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2")):
                for letter, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")):
                    named[f"{block}.{ours}.{letter}.{part}"] = f"{block}.{theirs}.{name}.{part}"
                named[f"{block}.{ours}.norm_q.weight"] = f"{block}.{theirs}.norm_q.weight"
                named[f"{block}.{ours}.norm_k.weight"] = f"{block}.{theirs}.norm_k.weight"
    assert set(named.values()) == set(state)
    return {original: state[name] for original, name in named.items()}


ORIGINAL_CONFIG = {
    "_class_name": "WanModel", "dim": 48, "eps": 1e-06, "ffn_dim": 96, "freq_dim": 32, "in_dim": 4,
    "model_type": "t2v", "num_heads": 2, "num_layers": 2, "out_dim": 4, "text_len": 512,
}  # fmt: skip


def test_an_original_checkpoint_loads_as_diffusers_converts_it(tmp_path: Path, diffusers_model) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    state = original_names(diffusers_model.state_dict())
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    model = WanTransformer(WanConfig(**SIZES))
    load_pretrained(model, tmp_path)
    expected = convert_wan_transformer_to_diffusers(dict(state))
    assert set(model.state_dict()) == set(expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL_CONFIG | {"model_type": "i2v"}))
    with pytest.raises(ValueError, match="model_type is i2v"):
        load_pretrained(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL_CONFIG | {"num_heads": 4}))
    with pytest.raises(ValueError, match="num_attention_heads is 4, the run's model has 2"):
        load_pretrained(model, tmp_path)


def edit(folder: Path, change) -> None:
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("proj_out.bias"), r"proj_out\.bias \[16\] is missing"),
        (lambda state: state.update(extra=torch.zeros(3)), r"extra \[3\] is unknown"),
        (
            lambda state: state.update({"blocks.1.ffn.net.2.bias": torch.zeros(47)}),
            r"blocks\.1\.ffn\.net\.2\.bias is \[47\], the model has \[48\]",
        ),
    ],
)
def test_names_and_shapes_that_do_not_fit_are_named(tmp_path: Path, diffusers_model, change, message: str) -> None:
    diffusers_model.save_pretrained(tmp_path)
    edit(tmp_path, change)
    model = WanTransformer(WanConfig(**SIZES))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "half loaded"


def test_folders_that_cannot_be_loaded_say_why(tmp_path: Path, diffusers_model) -> None:
    model = WanTransformer(WanConfig(**SIZES))
    with pytest.raises(ValueError, match=r"model\.pretrained=.*no config\.json"):
        load_pretrained(model, tmp_path / "absent")
    for part in ("transformer", "transformer_2"):
        diffusers_model.save_pretrained(tmp_path / "two" / part)
    for read in (read_model_config, weights_fingerprint, lambda path: load_pretrained(model, path)):
        with pytest.raises(ValueError, match=r"model\.pretrained=.*two transformers"):
            read(tmp_path / "two")
        read(tmp_path / "two" / "transformer_2")
    diffusers_model.save_pretrained(tmp_path, max_shard_size="40KB")
    with pytest.raises(ValueError, match="num_layers is 2, the run's model has 3"):
        load_pretrained(WanTransformer(WanConfig(**SIZES | {"num_layers": 3})), tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{shard.name} cannot be read"):
        load_pretrained(model, tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=f"names {shard.name}, which the folder lacks"):
        load_pretrained(model, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("WanTransformer3DModel", "SomeOtherModel"))
    shutil.copy(sorted(tmp_path.glob("*.safetensors"))[0], shard)
    with pytest.raises(ValueError, match="_class_name is SomeOtherModel"):
        load_pretrained(model, tmp_path)


@pytest.mark.parametrize("max_file_bytes", [10**9, 50_000])
def test_what_is_saved_opens_in_diffusers_with_equal_outputs(tmp_path: Path, make_wan, samples, max_file_bytes) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    model = make_wan()
    state = model.state_dict()
    names = [name for name, _ in model.diffusers_parameters().items()]
    shapes = {name: tuple(state[name].shape) for name in names}
    content = {"_class_name": "WanTransformer3DModel", **model.config.to_diffusers()}
    save_pretrained(tmp_path / "out", content, shapes, lambda part: {n: state[n] for n in part}, max_file_bytes)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_file_bytes < 10**9)
    opened = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, state[name]) for name, tensor in opened.state_dict().items())
    sample = samples[1]
    text = torch.zeros(1, model.config.text_len, sample.text.shape[1])
    text[0, : len(sample.text)] = sample.text
    latents = unpatchify(sample.latents, sample.grid, (1, 2, 2)).unsqueeze(0)
    expected = opened(latents, torch.tensor([1000 * sample.sigma]), text, return_dict=False)[0][0]
    batch = pack([sample])
    velocity = model(batch.latents, timesteps(batch), batch)
    torch.testing.assert_close(velocity, patchify(expected, (1, 2, 2)), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="not empty"):
        save_pretrained(tmp_path / "out", content, shapes, lambda part: {n: state[n] for n in part})


# The rest runs on two processes: under pytest it starts them, as a script it is one of them.

WORLD_SIZE = 2
LARGE = {**SIZES, "attention_head_dim": 384, "ffn_dim": 3072, "num_layers": 4}  # 46 M parameters, 185 MB


def test_two_ranks_read_their_shards_and_hold_no_more(tmp_path: Path) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(**WanConfig(**LARGE).to_diffusers())
    model.save_pretrained(tmp_path / "weights", max_shard_size="50MB")
    outputs = run_ranks(__file__, tmp_path, ranks=WORLD_SIZE)
    expected = model.state_dict()
    parts = [torch.load(tmp_path / f"part-{rank}.pt") for rank in range(WORLD_SIZE)]
    for name, tensor in expected.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor), name
    whole = sum(4 * tensor.numel() for tensor in expected.values())
    for kind in ("pretrained", "drawn"):
        for rank, output in enumerate(outputs):
            grown = int(output.split(f"{kind} grew to ")[1].split()[0])
            # Half of the model, and one matrix of 9 MB more while it is read or drawn. Measured: 0.44 (where memory of
            # the first model is used again) to 0.56.
            assert grown < 0.65 * whole, f"rank {rank}, {kind}: {grown / whole:.2f} of the model"


def anonymous_bytes() -> int:
    """Memory of this process, mapped files left out: those are the page cache's."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def worker(folder: Path, rank: int) -> None:
    from adaptiveload.models.wan import diffusers_name
    from adaptiveload.training.config import RunConfig
    from adaptiveload.training.distributed import Ranks, finish_ranks
    from adaptiveload.training.live_step import build_model

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE)
    ranks = Ranks(rank, WORLD_SIZE, torch.device("cpu"), torch.distributed.group.WORLD)
    build_model(RunConfig(model=WanConfig(**SIZES)), ranks)  # what first calls allocate for themselves
    for kind, path in (("drawn", None), ("pretrained", str(folder / "weights"))):
        peak, is_done = [], threading.Event()

        def watch(peak=peak, is_done=is_done) -> None:
            while not is_done.is_set():
                peak.append(anonymous_bytes())
                time.sleep(0.001)

        before = anonymous_bytes()
        watcher = threading.Thread(target=watch)
        watcher.start()
        model, _, _ = build_model(RunConfig(model=WanConfig(**LARGE, pretrained=path)), ranks)
        is_done.set()
        watcher.join()
        print(f"{kind} grew to {max(peak) - before} bytes ({len(peak)} looks)", flush=True)
        if path:
            parts = {diffusers_name(name): p.detach().to_local() for name, p in model.named_parameters()}
            torch.save(parts, folder / f"part-{rank}.pt")
        del model
    finish_ranks(ranks)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]))
