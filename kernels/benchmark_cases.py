"""What the kernels are measured on: inputs of one site, larger than the L2 cache, and other ways to compute it.

Read by `scripts/benchmark_kernels.py` and `scripts/benchmark_dtile.py`.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)

from adaptiveload.kernels.adaln import adaln
from adaptiveload.kernels.qk_norm_rope import qk_norm_rope

STREAMS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Row:
    """One measurement."""

    site: str
    stream: str
    hidden_size: int
    num_tokens: int
    direction: str
    implementation: str
    ms: float
    floor_ratio: float
    gb_per_s: float
    launch: str = ""
    saved_bytes_per_element: float | None = None


class Case:
    """Inputs of one site in enough copies that none is in the L2 cache when it is read."""

    forward_bytes: int
    backward_bytes: int

    def __init__(self, site: str, stream: str, hidden_size: int, num_tokens: int, device: str = "cuda"):
        self.site, self.stream, self.hidden_size, self.num_tokens = site, stream, hidden_size, num_tokens
        self.dtype, self.device = STREAMS[stream], device
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def num_copies(self) -> int:
        """Of the inputs."""
        return max(2, -(-400_000_000 // self.forward_bytes)) if self.device == "cuda" else 1

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gaussian numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def row(self, direction: str, implementation: str, ms: float, bandwidth: float, launch: str = "") -> Row:
        """A measurement of this case."""
        num_bytes = self.forward_bytes if direction == "forward" else self.backward_bytes
        ratio, rate = ms / 1e3 * bandwidth / num_bytes, num_bytes / ms / 1e6
        where = (self.site, self.stream, self.hidden_size, self.num_tokens)
        return Row(*where, direction, implementation, ms, ratio, rate, launch)


class NormCase(Case):
    """A modulated norm, behind a gated residual add if the site is "gated"."""

    def __init__(self, *key, **options):
        super().__init__(*key, **options)
        num_elements, width = self.num_tokens * self.hidden_size, self.dtype.itemsize
        is_gated = self.site == "gated"
        # x and h; with the gate y and x_out too. Backward: x, dh, dx; with the gate y, dx_out, dy too.
        self.forward_bytes = num_elements * (width + 2 + is_gated * (2 + width))
        self.backward_bytes = num_elements * (2 * width + 2 + is_gated * (2 + width + 2))
        self.num_elements = num_elements
        tokens, random, copies = (self.num_tokens, self.hidden_size), self.random, range(self.num_copies)
        self.x = [random(*tokens, dtype=self.dtype) for _ in copies]
        self.y = [random(*tokens, dtype=torch.bfloat16) if is_gated else None for _ in copies]
        self.dh = [random(*tokens, dtype=torch.bfloat16) for _ in copies]
        self.dx_out = [random(*tokens, dtype=self.dtype) if is_gated else None for _ in copies]
        self.gate = random(1, self.hidden_size) if is_gated else None
        self.scale, self.shift = random(1, self.hidden_size), random(1, self.hidden_size)
        self.offsets = torch.tensor([0, self.num_tokens], dtype=torch.int32)

    # The kernels themselves, without autograd.

    def call_forward(self, i: int) -> tuple[torch.Tensor, ...]:
        """Forward on copy i."""
        return torch.ops.adaptiveload.adaln(
            self.x[i], self.y[i], self.gate, self.scale, self.shift, None, None, self.offsets, 1e-6, torch.bfloat16
        )

    def call_backward(self, i: int, mean: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Backward on copy i, of which x is taken as what was normalised."""
        wanted = [self.gate is not None, self.gate is not None, True, True, False, False]
        return torch.ops.adaptiveload.adaln_backward(
            self.dh[i], self.dx_out[i], self.x[i], self.y[i], self.gate, self.scale, self.shift, None, None,
            mean, rstd, self.offsets, wanted, torch.bfloat16,
        )  # fmt: skip

    def statistics(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Mean and reciprocal deviation of every copy."""
        with torch.no_grad():
            results = []
            for i in range(self.num_copies):
                wide = self.x[i].float()
                results.append((wide.mean(1), (wide.var(1, correction=0) + 1e-6).rsqrt()))
            return results

    # For other implementations: functions of x, y, gate, scale, shift that return h and x_out.

    def arguments(self, i: int) -> tuple[torch.Tensor | None, ...]:
        """Of copy i."""
        return self.x[i], self.y[i], self.gate, self.scale, self.shift

    def sent(self, i: int, results: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results with a gradient, and their gradients."""
        if self.y[i] is None:
            return [results[0]], [self.dh[i].to(results[0].dtype)]
        return list(results), [self.dh[i].to(results[0].dtype), self.dx_out[i]]

    def ours(self, x, y, gate, scale, shift):
        """As other implementations."""
        parts = {"y": y, "gate": gate, "scale": scale, "shift": shift, "segment_offsets": self.offsets}
        return adaln(x, **parts, out_dtype=torch.bfloat16)


class QkCase(Case):
    """RMSNorm of queries and keys over all heads of 128 dims, and their rotation."""

    def __init__(self, *key, **options):
        super().__init__(*key, **options)
        self.num_elements = 2 * self.num_tokens * self.hidden_size
        # q and k, read and written; backward reads their gradients too. Beside that: 0.5 KB of turns a token.
        self.forward_bytes = self.num_elements * 2 * self.dtype.itemsize
        self.backward_bytes = self.num_elements * 3 * self.dtype.itemsize
        shape = (self.num_tokens, self.hidden_size // 128, 128)
        copies = range(self.num_copies)
        self.q, self.k, self.dq, self.dk = ([self.random(*shape, dtype=self.dtype) for _ in copies] for _ in range(4))
        self.q_weight, self.k_weight = (1 + 0.1 * self.random(self.hidden_size) for _ in range(2))
        angles = self.random(self.num_tokens, 64)
        self.rotary = torch.polar(torch.ones_like(angles), angles)
        self.turns = torch.view_as_real(self.rotary)

    def call_forward(self, i: int) -> tuple[torch.Tensor, ...]:
        """Forward on copy i."""
        return torch.ops.adaptiveload.qk_norm_rope(self.q[i], self.k[i], self.q_weight, self.k_weight, self.turns, 1e-6)

    def call_backward(self, i: int, q_rstd: torch.Tensor, k_rstd: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Backward on copy i."""
        return torch.ops.adaptiveload.qk_norm_rope_backward(
            self.dq[i], self.dk[i], self.q[i], self.k[i], self.q_weight, self.k_weight, self.turns, q_rstd, k_rstd, True
        )

    def statistics(self) -> list[tuple[torch.Tensor, ...]]:
        """Reciprocal root mean squares of every copy."""
        with torch.no_grad():
            return [
                tuple((t.float().square().mean((1, 2)) + 1e-6).rsqrt().unsqueeze(1) for t in (self.q[i], self.k[i]))
                for i in range(self.num_copies)
            ]

    # For other implementations: functions of q, k, q_weight, k_weight, rotary that return both.

    def arguments(self, i: int) -> tuple[torch.Tensor, ...]:
        """Of copy i."""
        return self.q[i], self.k[i], self.q_weight, self.k_weight, self.rotary

    def sent(self, i: int, results: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results with a gradient, and their gradients."""
        return list(results), [self.dq[i], self.dk[i]]

    def ours(self, *arguments):
        """As other implementations."""
        return qk_norm_rope(*arguments)


def make_case(site: str, *key, **options) -> Case:
    """The case of a site."""
    return (QkCase if site == "qk" else NormCase)(site, *key, **options)


# ---- other ways ------------------------------------------------------------------------------------------------------


def diffusers_form(x, y, gate, scale, shift):
    """As `WanTransformerBlock` writes it."""
    if y is not None:
        x = (x.float() + y * gate).type_as(x)
    h = F.layer_norm(x.float(), x.shape[-1:], eps=1e-6)
    return (h * (1 + scale) + shift).to(torch.bfloat16), x


def bf16_form(x, y, gate, scale, shift):
    """Norm and modulation in the dtype of x."""
    if y is not None:
        x = x + (y * gate.to(y.dtype)).to(x.dtype)
    h = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    return (h * (1 + scale.to(x.dtype)) + shift.to(x.dtype)).to(torch.bfloat16), x


def native_affine(x, y, gate, scale, shift):
    """One affine LayerNorm, which is not the same operation: what PyTorch's own kernel reaches."""
    return F.layer_norm(x, x.shape[-1:], scale[0], shift[0], 1e-6), x


def diffusers_qk(q, k, q_weight, k_weight, rotary):
    """As `WanAttnProcessor` writes it."""
    cosine, sine = rotary.real.unsqueeze(1), rotary.imag.unsqueeze(1)
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = F.rms_norm(x.flatten(1), weight.shape, weight.to(x.dtype), 1e-6).view(x.shape)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.empty_like(x)
        out[..., 0::2] = first * cosine - second * sine
        out[..., 1::2] = first * sine + second * cosine
        results.append(out)
    return tuple(results)


def complex_qk(q, k, q_weight, k_weight, rotary):
    """RMSNorm by PyTorch, rotation as a complex product: the Qwen-Image form, over all heads."""
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = F.rms_norm(x.flatten(1), weight.shape, weight.to(x.dtype), 1e-6).view(x.shape)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotary.unsqueeze(1)
        results.append(torch.view_as_real(pairs).flatten(-2).to(x.dtype))
    return tuple(results)


def leaves_of(case: Case, i: int, name: str) -> list[torch.Tensor | None]:
    """Arguments of copy i with gradients, in the dtype that the implementation `name` takes."""
    first, second, *rest = case.arguments(i)
    if name == "native_affine":
        rest = [part if part is None else part.to(case.dtype) for part in rest]
    return [
        part if part is None or part.is_complex() else part.detach().clone().requires_grad_()
        for part in (first, second, *rest)
    ]
