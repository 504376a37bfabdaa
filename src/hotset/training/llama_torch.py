"""A Llama-family model in torch, for training: the twin of what `model/decoder.py` describes.

It is built from a GGUF file (dequantised) and keeps its tensor names. The file's weights never change: what
is trained stands beside them. `Student` holds, for each matrix, a low-rank product or (full training) a
difference, and for each layer what a ReLU network needs to stand in for a SiLU one: a shift of the gate, a
scale per neuron and a bias of the down projection. Without a student the network is the original, so that one
set of weights serves as teacher and as student.

Values are [n_batch, n_tokens, width]. The FFN of the student is

    neuron = relu(gate(x) + ffn_gate.bias) * up(x) * ffn_scale       (dReLU: relu(up(x) + ffn_up.bias))

and a neuron is idle where its value is zero. Some neurons may have made room for a linear path (see Student).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hotset.backends.gpu.twins import rotate
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.training.adapters import MATRICES, NORMS

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.model.config import ModelConfig

ReluKind = Literal["relu", "drelu"]
RETIRED = -1e4  # gate bias of a neuron that never fires


@dataclass
class Activity:
    """What the FFNs of one forward pass did, filled in by it.

    price: what the loss pays for one more active neuron (see SparseGLU). width: half the width of its kernel,
    one per layer. share: of the neurons, those not idle, per layer (tensors of one element). deviation:
    standard deviation of the gates of neurons that are not retired, per layer, where no widths are given.
    """

    price: float = 0.0
    width: list[float] = field(default_factory=list)
    share: list[Tensor] = field(default_factory=list)
    deviation: list[Tensor] = field(default_factory=list)


class SparseGLU(torch.autograd.Function):
    """relu(gate) * up * scale, or relu(gate) * relu(up) * scale, with a gradient for being active.

    Whether a neuron fires is a step function of its gate: its derivative is zero nearly everywhere, so
    nothing would ever push a neuron to be idle. As in JumpReLU's training (Rajamanoharan et al., arXiv
    2407.14435) the step is given the derivative of a ramp: 1 / (2 width) where |gate| < width. Each value
    within it is charged `price`. All in one function, since on a CPU passes over memory are what it costs.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, scale: Tensor, both: bool, price: float, width: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        ctx.both, ctx.price, ctx.width = both, price, width
        return gate.relu().mul_(up.relu() if both else up).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up, scale = ctx.saved_tensors
        fired, lifted = gate.relu(), up.relu() if ctx.both else up
        grad_up = grad * fired
        grad_scale = (grad_up * lifted).flatten(0, -2).sum(0)
        grad_up.mul_(scale)
        # threshold_backward is the gradient of relu: it lets pass where its second argument is positive.
        grad_gate = torch.ops.aten.threshold_backward((grad * lifted).mul_(scale), gate, 0)
        if ctx.both:
            grad_up = torch.ops.aten.threshold_backward(grad_up, up, 0)
        if ctx.price:
            charge = ctx.price / (2 * ctx.width)
            near = gate.abs().lt_(ctx.width)  # as floats: adding Booleans is several times slower
            if ctx.both:  # what fires does so where the smaller of the two is positive
                grad_gate.add_(near.mul_(gate <= up), alpha=charge)
                grad_up.add_(up.abs().lt_(ctx.width).mul_(up < gate), alpha=charge)
            else:
                grad_gate.add_(near, alpha=charge)
        return grad_gate, grad_up, grad_scale, None, None, None


class LowRankLinear(torch.autograd.Function):
    """x [..., n_in] -> x @ (weight + b @ a).T + bias, the frozen weight apart from the low-rank product.

    The sums are made within the products, in the forward pass and in the backward one, rather than in
    passes of their own over memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        low = flat @ a.T
        out = F.linear(flat, weight, bias)
        ctx.save_for_backward(flat, weight, a, b, low)
        ctx.shape = x.shape
        return out.addmm_(low, b.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, b, low = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        grad_low = grad @ b
        grad_x = (grad @ weight).addmm_(grad_low, a) if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return (
            None if grad_x is None else grad_x.view(ctx.shape), None, grad_bias,
            grad_low.T @ x, grad.T @ low,
        )  # fmt: skip


class RMSNorm(torch.autograd.Function):
    """x * weight / sqrt(mean(x^2) + eps) over the last axis; torch's own takes twice as many passes on a
    CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        along = grad * unit
        grad_weight = along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (along @ weight).unsqueeze(-1) / x.shape[-1]
        grad_x = (grad * weight).sub_(unit.mul_(mean)).mul_(inverse)
        return grad_x, grad_weight, None


class Student(nn.Module):
    """What is trained. Parameters are named as the tensors they belong to, with "." replaced by "/".

    blk/N/attn_q/a [rank, n_in] and /b [n_out, rank]: the matrix becomes weight + b @ a; with rank 0,
    blk/N/attn_q/delta [n_out, n_in]: weight + delta. blk/N/attn_norm, ...: the norms' weights themselves.
    blk/N/ffn_gate/bias, ffn_up/bias (dReLU), ffn_scale [n_ff]; blk/N/ffn_down/bias [n_embd].
    blk/N/ffn_linear/a [k, n_embd], /b [n_embd, k], where a layer has a linear path beside its neurons: k of
    them are retired (scale 0, gate far below zero), and in a file their places are taken by neurons whose
    gate is always 1, with a in ffn_up and b in ffn_down.
    """

    def __init__(self, base: Llama, activation: ReluKind, rank: int, *, seed: int = 0) -> None:
        super().__init__()
        config = base.config
        self.activation: ReluKind = activation
        self.rank = rank
        self.values = nn.ParameterDict()
        generator = torch.Generator().manual_seed(seed)

        def add(name: str, value: Tensor) -> None:
            self.values[name.replace(".", "/")] = nn.Parameter(value.to(base.device))

        add("output_norm", base.weight("output_norm").cpu().clone())
        for i in range(config.n_layer):
            blk = f"blk.{i}"
            for name in NORMS:
                add(f"{blk}.{name}", base.weight(f"{blk}.{name}").cpu().clone())
            for name in MATRICES:
                n_out, n_in = base.weight(f"{blk}.{name}").shape
                if rank:
                    a = torch.randn(rank, n_in, generator=generator) / math.sqrt(n_in)
                    add(f"{blk}.{name}.a", a)
                    add(f"{blk}.{name}.b", torch.zeros(n_out, rank))
                else:
                    add(f"{blk}.{name}.delta", torch.zeros(n_out, n_in))
            add(f"{blk}.ffn_gate.bias", base.bias(f"{blk}.ffn_gate", config.n_ff[i]))
            if activation == "drelu":
                add(f"{blk}.ffn_up.bias", base.bias(f"{blk}.ffn_up", config.n_ff[i]))
            add(f"{blk}.ffn_scale", torch.ones(config.n_ff[i]))
            add(f"{blk}.ffn_down.bias", base.bias(f"{blk}.ffn_down", config.n_embd))

    def set_linear(self, layer: int, a: Tensor, b: Tensor) -> None:
        """Gives a layer a linear path, a [k, n_embd] and b [n_embd, k]; as many neurons are retired."""
        for name, value in (("a", a), ("b", b)):
            self.values[f"blk/{layer}/ffn_linear/{name}"] = nn.Parameter(
                value.clone(memory_format=torch.contiguous_format)
            )

    def get(self, name: str) -> nn.Parameter | None:
        """The parameter of a tensor, such as "blk.0.ffn_gate.bias"; None where none is trained."""
        key = name.replace(".", "/")
        return self.values[key] if key in self.values else None  # noqa: SIM401 - it has no get

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Takes values by their dotted names. Low-rank products of a smaller rank become the first part of
        this student's, and linear paths are taken as they are. Raises InvalidRequestError where they are not
        this student's."""
        device = next(iter(self.values.values())).device
        for name, a in values.items():
            if name.endswith(".ffn_linear.a") and (b := values.get(f"{name[:-1]}b")) is not None:
                self.set_linear(int(name.split(".")[1]), a.to(device), b.to(device))
        own = dict(self.named_values())
        for name in [*(own.keys() - values.keys()), *(values.keys() - own.keys())]:
            raise InvalidRequestError(
                f"the adapters do not fit: {name} is missing in them or in the student; "
                "use the activation, the rank and the model that they were trained with"
            )
        for name, value in values.items():
            place: Tensor = own[name]
            if name.endswith(".a"):
                place = place[: len(value)]
            elif name.endswith(".b"):  # the rest of it is zero still
                place = place[:, : value.shape[-1]]
            if value.shape != place.shape:
                raise InvalidRequestError(
                    f"the adapters do not fit: {name} is {list(value.shape)}, not {list(own[name].shape)}; "
                    "use the activation and the model that they were trained with, and no smaller rank"
                )
            place.copy_(value)

    def named_values(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names with dots, and parameters."""
        for name, value in self.values.items():
            yield name.replace("/", "."), value


class Llama(nn.Module):
    """The network over the frozen weights of a file."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.weights = weights
        self.student: Student | None = None
        rope = config.layers[0].rope
        assert rope is not None
        self._rope = rope
        self._freq = torch.tensor(rope.freq, dtype=torch.float64)
        self._turns: Tensor | None = None  # [2, n_tokens, n_rot / 2]: cosines and sines of the last length

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights["token_embd.weight"].device

    def weight(self, name: str) -> Tensor:
        """The frozen weight of a tensor."""
        return self.weights[f"{name}.weight"]

    def bias(self, name: str, width: int) -> Tensor:
        """A copy of the frozen bias of a tensor, zeros where it has none; on the CPU."""
        bias = self.weights.get(f"{name}.bias")
        return torch.zeros(width) if bias is None else bias.cpu().clone()

    @property
    def output(self) -> Tensor:
        """The matrix [n_vocab, n_embd] that turns the last hidden state into logits."""
        return self.weights.get("output.weight", self.weights["token_embd.weight"])

    def linear(self, x: Tensor, name: str, student: Student | None) -> Tensor:
        weight, bias = self.weight(name), self.weights.get(f"{name}.bias")
        if student is None:
            return F.linear(x, weight, bias)
        own = student.get(f"{name}.bias")
        bias = bias if own is None else own
        if (delta := student.get(f"{name}.delta")) is not None:
            return F.linear(x, weight + delta, bias)
        a, b = student.get(f"{name}.a"), student.get(f"{name}.b")
        assert a is not None
        assert b is not None
        out: Tensor = LowRankLinear.apply(x, weight, bias, a, b)
        return out

    def norm(self, x: Tensor, name: str, student: Student | None) -> Tensor:
        own = None if student is None else student.get(name)
        weight = self.weight(name) if own is None else own
        out: Tensor = RMSNorm.apply(x, weight, self.config.norm_eps)
        return out

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of x [n_batch, n_tokens, n_head, head_dim] at positions 0, 1, ..."""
        rope = self._rope
        n_batch, n_tokens, n_head, _ = x.shape
        if self._turns is None or self._turns.shape[1] != n_tokens:
            angle = torch.outer(torch.arange(n_tokens, dtype=torch.float64), self._freq)
            self._turns = (torch.stack((angle.cos(), angle.sin())) * rope.magnitude).to(x)
        turns = self._turns.repeat(1, n_batch, 1)
        return rotate(x.reshape(n_batch * n_tokens, -1), turns, n_head=n_head, kind=rope.kind).view(x.shape)

    def attention(self, x: Tensor, blk: str, student: Student | None) -> Tensor:
        config = self.config
        n_batch, n_tokens, _ = x.shape

        def heads(name: str, n: int, width: int) -> Tensor:
            return self.linear(x, f"{blk}.{name}", student).view(n_batch, n_tokens, n, width)

        q = heads("attn_q", config.n_head, config.head_dim)
        k = heads("attn_k", config.n_head_kv, config.head_dim)
        v = heads("attn_v", config.n_head_kv, config.head_dim_v)
        if config.layers[0].qk_norm:
            q, k = self.norm(q, f"{blk}.attn_q_norm", None), self.norm(k, f"{blk}.attn_k_norm", None)
        q, k, v = (each.transpose(1, 2) for each in (self.rotate(q), self.rotate(k), v))
        n = config.n_head // config.n_head_kv
        if n > 1:
            k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=config.layers[0].attention_scale)
        return self.linear(out.transpose(1, 2).reshape(n_batch, n_tokens, -1), f"{blk}.attn_output", student)

    def activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The neurons of the original."""
        activation = self.config.activation
        return _F[activation.gate](gate) * (up if activation.up is None else _F[activation.up](up))

    def ffn(self, x: Tensor, layer: int, student: Student | None, activity: Activity | None) -> Tensor:
        blk = f"blk.{layer}"
        gate = self.linear(x, f"{blk}.ffn_gate", student)
        up = self.linear(x, f"{blk}.ffn_up", student)
        if student is None:
            return self.linear(self.activated(gate, up), f"{blk}.ffn_down", None)
        both = student.activation == "drelu"
        price = activity.price if activity else 0.0
        width = activity.width[layer] if activity and activity.width else 1.0
        scale = student.get(f"{blk}.ffn_scale")
        assert scale is not None
        neurons: Tensor = SparseGLU.apply(gate, up, scale, both, price, width)
        if activity is not None:
            with torch.no_grad():
                if not activity.width:  # it is from the deviations that the widths are made
                    activity.deviation.append(gate[gate > RETIRED / 2].std())
                n_linear = 0 if (a := student.get(f"{blk}.ffn_linear.a")) is None else len(a)
                share = neurons.count_nonzero() / neurons.numel() + n_linear / neurons.shape[-1]
                activity.share.append(share)
        return self.ffn_out(neurons, x, layer, student)

    def ffn_out(self, neurons: Tensor, x: Tensor, layer: int, student: Student) -> Tensor:
        """What the student's neurons, and its linear path from the FFN's input x, add to the stream."""
        blk = f"blk.{layer}"
        out = self.linear(neurons, f"{blk}.ffn_down", student)
        a, b = student.get(f"{blk}.ffn_linear.a"), student.get(f"{blk}.ffn_linear.b")
        return out if a is None or b is None else out + F.linear(F.linear(x, a), b)

    def layer(self, x: Tensor, i: int, student: Student | None, activity: Activity | None = None) -> Tensor:
        """The residual stream after layer i."""
        blk = f"blk.{i}"
        x = x + self.attention(self.norm(x, f"{blk}.attn_norm", student), blk, student)
        return x + self.ffn(self.norm(x, f"{blk}.ffn_norm", student), i, student, activity)

    def forward(
        self,
        tokens: Tensor,
        student: Student | None = None,
        activity: Activity | None = None,
        stream: list[Tensor] | None = None,
    ) -> Tensor:
        """What the output matrix reads, float32 [n_batch, n_tokens, n_embd], of token ids [n_batch,
        n_tokens]."""
        x = F.embedding(tokens, self.weights["token_embd.weight"])
        for i in range(self.config.n_layer):
            x = self.layer(x, i, student, activity)
            if stream is not None:
                stream.append(x)
        return self.norm(x, "output_norm", student)

    def logits(self, tokens: Tensor, student: Student | None = None) -> Tensor:
        """Logits, float32 [n_batch, n_tokens, n_vocab]."""
        return F.linear(self.forward(tokens, student), self.output, self.weights.get("output.bias"))


_F: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def load_llama(gguf: GGUFFile, device: str | torch.device = "cpu") -> Llama:
    """The network of a file, its weights as float32.

    Raises UnsupportedModelError for what is not of the Llama family: it must have RMS norms, RoPE, a gated
    FFN that reads the residual stream after attention, separate q, k and v, and full attention.
    """
    config = config_from_gguf(gguf)
    describe(config, gguf.tensors)  # checks that every tensor is there, in its shape
    reason = _unsupported(config, gguf)
    if reason:
        raise UnsupportedModelError(
            f"sparsify trains models of the Llama family, and {gguf.path.name} ({config.architecture}) "
            f"{reason}"
        )
    weights = {
        name: torch.from_numpy(dequantize(gguf.data(name), info.type, info.shape)).to(device)
        for name, info in gguf.tensors.items()
        if name != "rope_freqs.weight"
    }
    return Llama(config, weights)


def _unsupported(config: ModelConfig, gguf: GGUFFile) -> str | None:
    if config.has_experts:
        return "is a mixture of experts"
    if config.latent is not None:
        return "has latent attention"
    if config.masked:
        return "has predictors whose mask is part of it"
    if config.norm != "rms":
        return "has layer norms"
    if config.n_recurrent:
        return "has layers without attention"
    layer = config.layers[0]
    if not layer.gated:
        return "has an FFN without a gate"
    if layer.parallel:
        return "has attention and FFN side by side"
    if any(one.rope is None for one in config.layers):
        return "has layers without rotary positions"
    if any(one.window for one in config.layers):
        return "has sliding windows"
    if any(replace(one, n_ff=layer.n_ff) != layer for one in config.layers):
        return "has layers of several kinds"
    if layer.post_norm:
        return "has norms behind attention and FFN"
    scales = config.embedding_scale, config.residual_scale, config.logit_scale
    if set(scales) != {1.0} or layer.attention_softcap or config.logit_softcap:
        return "scales or caps its embedding, residuals or logits"
    if config.long_rope is not None:
        return "has a rotation for long contexts of its own"
    if gguf.dialect != "gguf" or "blk.0.ffn_down.weight" not in gguf.tensors:
        return "is stored in PowerInfer's format"
    if "blk.0.attn_qkv.weight" in gguf.tensors:
        return "has q, k and v in one matrix"
    if "blk.0.ffn_gate.weight" not in gguf.tensors:
        return "has gate and up in one matrix"
    if config.activation.gate == "fatrelu":
        return "has the activation FATReLU"
    return None
