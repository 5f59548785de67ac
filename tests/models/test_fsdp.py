"""The Wan transformer under FSDP2 on two gloo processes: same numbers as unsharded, fp32 where it must be.

Run as a script it is one of the two processes; under pytest it starts them.
"""

import sys
import warnings
from dataclasses import replace

from tests.launching import run_ranks

WORLD_SIZE = 2


def test_two_processes_agree_with_the_unsharded_model(tmp_path):
    for output in run_ranks(__file__, tmp_path / "rendezvous", ranks=WORLD_SIZE):
        assert output.count("checked:") == len(CHECKS), output


def shard(model, dtype):
    """Wrap with the trainer's own function; on a GPU machine too with CPU ranks: the oracle is the CPU's."""
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), WORLD_SIZE, torch.device("cpu"), dist.group.WORLD)
    shard_model(model, ranks, "bf16" if dtype == torch.bfloat16 else "fp32")
    return model


def loss_of(model, samples, **options):
    batch = pack(samples)
    return weighted_losses(batch, model(noisy_latents(batch), timesteps(batch), batch, **options)).sum()


def full_grads(model) -> dict:
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def relative(actual, expected) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def check_fp32_gradients_equal_those_of_one_process(rank: int) -> None:
    """Ranks hold different samples of different shapes; FSDP's mean over ranks times their number is the sum."""
    model, samples = make_model(), make_samples(make_config())
    loss_of(model, samples).backward()
    sharded = shard(make_model(), None)
    (WORLD_SIZE * loss_of(sharded, samples[rank::WORLD_SIZE])).backward()
    grads = full_grads(sharded)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, grad in grads.items():
        # Float32 sums in another order; the worst is a bias whose gradient nearly cancels.
        assert relative(grad, expected[name]) < 1e-5, name
    flat, expected = (torch.cat([part[name].flatten() for name in grads]) for part in (grads, expected))
    assert relative(flat, expected) < 1e-6


def check_bf16_forward_and_gradients_equal_the_unsharded_model(rank: int) -> None:
    """The oracle has its weights rounded by hand, outside the fp32 unit alone. Equal means bit for bit."""
    samples = make_samples(make_config())
    model = make_model()
    for module in (model.patch_embedding, model.condition_embedder["text_embedder"], model.blocks):
        module.bfloat16()
    sharded = shard(make_model(), torch.bfloat16)
    loss, expected_loss = loss_of(sharded, samples), loss_of(model, samples)
    assert torch.equal(loss, expected_loss)
    loss.backward()
    expected_loss.backward()
    expected = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    for name, grad in full_grads(sharded).items():
        assert grad.dtype == torch.float32
        if "text_embedder" in name:
            # FSDP adds up the context's bfloat16 gradients block by block, autograd alone one by one.
            assert relative(grad, expected[name]) < 1e-2, name
        else:
            # Both ranks have the same samples, so the mean over ranks is the gradient of each, exactly.
            assert torch.equal(grad, expected[name]), name


def check_precision_inside(rank: int) -> None:
    """What reaches the modules, looked at in the forward pass of the sharded bf16 model."""
    model = shard(make_model(), torch.bfloat16)
    embedder, block = model.condition_embedder, model.blocks[1]
    seen = {}

    def note_weights(module, inputs, output) -> None:
        seen["tables"] = {table.dtype for table in (*module.blocks, module.head)}
        seen["modulation"] = {rows.dtype for rows in (*output[0], output[1])}

    embedder["time_embedder"].register_forward_pre_hook(lambda _, inputs: seen.update(timestep=inputs[0].clone()))
    embedder["time_proj"].register_forward_pre_hook(lambda module, _: seen.update(time_proj=module.weight.dtype))
    model.modulation.register_forward_hook(note_weights)
    block.attn1.register_forward_pre_hook(
        lambda module, inputs: seen.update(h=inputs[0], to_q=module.to_q.weight.dtype)
    )
    block.register_forward_pre_hook(lambda _, inputs: seen.update(block=inputs))
    batch = pack(make_samples(make_config()))
    sent = timesteps(batch)
    sent[0] = 998.39  # 1000 in bfloat16
    velocity = model(noisy_latents(batch), sent, batch)
    assert seen["timestep"].dtype == torch.float32
    assert torch.equal(seen["timestep"], sent)
    assert seen["tables"] == seen["modulation"] == {seen["time_proj"]} == {torch.float32}
    x, y, gate, modulation, context, rotary, _ = seen["block"]
    assert x.dtype == gate.dtype == velocity.dtype == torch.float32
    assert {rows.dtype for rows in modulation} == {torch.float32}
    assert rotary.dtype == torch.complex64
    assert y.dtype == context.dtype == seen["h"].dtype == seen["to_q"] == torch.bfloat16


def check_recomputation_under_fsdp(rank: int) -> None:
    samples = make_samples(make_config())[rank::WORLD_SIZE]
    grads = []
    for recompute in ("none", "full"):
        model = shard(make_model(), torch.bfloat16)
        loss_of(model, samples, recompute=recompute).backward()
        grads.append(full_grads(model))
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def check_a_rank_of_fillers_runs_along(rank: int) -> None:
    samples = make_samples(make_config())
    model = make_model()
    loss_of(model, samples).backward()
    sharded = shard(make_model(), None)
    mine = samples if rank == 0 else [filler_sample((1, 1, 1), token_size=16, text_dim=16)]
    (WORLD_SIZE * loss_of(sharded, mine)).backward()
    for name, grad in full_grads(sharded).items():
        # As above; most are equal bit for bit, since two over two is one.
        assert relative(grad, dict(model.named_parameters())[name].grad) < 1e-6, name


def check_mmdit_gradients_equal_those_of_one_process(rank: int) -> None:
    """Other samples, texts and numbers of groups on each rank; given frames, and one rank with fillers besides."""
    samples = make_samples(make_config())
    samples[1] = replace(samples[1], clean_frames=1)
    model = make_mmdit_model()
    loss_of(model, samples).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    fillers = [filler_sample((1, 1, 1), token_size=16, text_dim=16)] * rank
    for recompute in ("none", "full"):
        sharded = shard(make_mmdit_model(), None)
        (WORLD_SIZE * loss_of(sharded, [*samples[rank::WORLD_SIZE], *fillers], recompute=recompute)).backward()
        for name, parameter in sharded.named_parameters():
            if parameter.grad is None:
                assert expected[name] is None, name
            elif expected[name].norm() == 0:
                assert parameter.grad.full_tensor().norm() == 0, name
            else:
                assert relative(parameter.grad.full_tensor(), expected[name]) < 1e-5, name  # sums in another order


def check_mmdit_bf16_equals_the_unsharded_model(rank: int) -> None:
    """The oracle has its weights rounded by hand, outside the fp32 unit and the head alone. Bit for bit."""
    samples = make_samples(make_config())
    model = make_mmdit_model()
    for module in (model.img_in, model.txt_in, model.txt_norm, model.transformer_blocks):
        module.bfloat16()
    assert torch.equal(loss_of(shard(make_mmdit_model(), torch.bfloat16), samples), loss_of(model, samples))


def check_full_state_dict_has_diffusers_names(rank: int) -> None:
    model = shard(make_model(), torch.bfloat16)
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    plain = make_model()
    torch.nn.init.zeros_(plain.modulation.blocks[1])
    plain.load_state_dict(state, strict=True)
    for name, tensor in make_model().state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]


def main(rendezvous: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    # FSDP warns when a wrapped module returns a view, whose pre-backward hook an in-place op would lose.
    warnings.filterwarnings("error", message=".*returned a view.*")
    for check in CHECKS:
        check(rank)
        print(f"checked: {check.__name__}", flush=True)
    finish_ranks(Ranks(rank, WORLD_SIZE, torch.device("cpu"), torch.distributed.group.WORLD))


if __name__ == "__main__":
    import torch
    from conftest import make_config, make_mmdit_model, make_model, make_samples

    from adaptiveload.models.flow_matching import noisy_latents, timesteps, weighted_losses
    from adaptiveload.models.packing import filler_sample, pack
    from adaptiveload.training.distributed import Ranks, finish_ranks, shard_model

    main(sys.argv[1], int(sys.argv[2]))
