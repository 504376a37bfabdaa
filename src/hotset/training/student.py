"""A ReLU student of a model with gated FFNs, for training: parameters in addition to the file's weights.

The file's weights never change. `Student` has, for each matrix of the layers, a low-rank product or (full
training) a difference, and for each layer the parameters of a ReLU network that replaces a SiLU one: a shift
of the gate, a scale per neuron, and a bias of the down projection. `Student.compute` computes the affected
operations of the graph (backends/torch/graph.py). Without it the graph computes the original, so teacher and
student share one set of weights. The student's FFN is

    neuron = relu(gate(x) + ffn_gate.bias) * up(x) * ffn_scale       (dReLU: relu(up(x) + ffn_up.bias))

and a neuron is idle if its value is zero. A linear path may replace some neurons (see Student).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hotset.backends.torch.functions import rms_norm
from hotset.backends.torch.graph import Compute, Step, TorchGraph
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.model import operations as ops
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Primitive
from hotset.training.adapters import MATRICES, NORMS

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.model.graph import Graph

ReluKind = Literal["relu", "drelu"]
RETIRED = -1e4  # gate bias of a neuron that never fires


@dataclass
class Activity:
    """The activity of the FFNs in one forward pass, which fills it in.

    price: of one more active neuron in the loss (see SparseGLU). width: half the width of its kernel, per
    layer. share: of active neurons, per layer (tensors of one element). deviation: standard deviation of the
    gates of neurons that are not retired, per layer, if no widths are given.
    """

    price: float = 0.0
    width: list[float] = field(default_factory=list)
    share: list[Tensor] = field(default_factory=list)
    deviation: list[Tensor] = field(default_factory=list)


class SparseGLU(torch.autograd.Function):
    """relu(gate) * up * scale, or relu(gate) * relu(up) * scale, with a gradient for being active.

    Whether a neuron fires is a step function of its gate, whose derivative is zero nearly everywhere. So
    nothing would push a neuron to be idle. As in the training of JumpReLU (Rajamanoharan et al., arXiv
    2407.14435), the step gets the derivative of a ramp: 1 / (2 width) for |gate| < width. Each value within
    it is charged `price`. All this is one function, because on a CPU its cost is the passes over memory.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, scale: Tensor, both: bool, price: float, width: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        ctx.both, ctx.price, ctx.width = both, price, width
        return gate.relu().mul_(up.relu() if both else up).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, scale = ctx.saved_tensors
        fired, lifted = gate.relu(), up.relu() if ctx.both else up
        grad_up = grad * fired
        grad_scale = (grad_up * lifted).flatten(0, -2).sum(0)
        grad_up.mul_(scale)
        # threshold_backward is the gradient of relu: it passes values whose second argument is positive.
        grad_gate = torch.ops.aten.threshold_backward((grad * lifted).mul_(scale), gate, 0)
        if ctx.both:
            grad_up = torch.ops.aten.threshold_backward(grad_up, up, 0)
        if ctx.price:
            charge = ctx.price / (2 * ctx.width)
            near = gate.abs().lt_(ctx.width)  # as floats, because adding Booleans is several times slower
            if ctx.both:  # a neuron fires if the smaller of the two is positive
                grad_gate.add_(near.mul_(gate <= up), alpha=charge)
                grad_up.add_(up.abs().lt_(ctx.width).mul_(up < gate), alpha=charge)
            else:
                grad_gate.add_(near, alpha=charge)
        return grad_gate, grad_up, grad_scale, None, None, None


class LowRankLinear(torch.autograd.Function):
    """x [..., n_in] -> x @ (weight + b @ a).T + bias, with a separate, trained low-rank product.

    The sums are computed within the products, forward and backward, instead of in separate passes over
    memory.
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        grad_low = grad @ b
        grad_x = (grad @ weight).addmm_(grad_low, a) if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return (
            None if grad_x is None else grad_x.view(ctx.shape), None, grad_bias,
            grad_low.T @ x, grad.T @ low,
        )  # fmt: skip


class Student(nn.Module):
    """The trained parameters. They have the names of their tensors, with "." replaced by "/".

    blk/N/attn_q/a [rank, n_in] and /b [n_out, rank]: the matrix becomes weight + b @ a; with rank 0,
    blk/N/attn_q/delta [n_out, n_in]: weight + delta. blk/N/attn_norm, ...: replace the norms' weights.
    blk/N/ffn_gate/bias, ffn_up/bias (dReLU), ffn_scale [n_ff]; blk/N/ffn_down/bias [n_embd].
    blk/N/ffn_linear/a [k, n_embd], /b [n_embd, k], if a layer has a linear path: k neurons are retired (scale
    0, gate far below zero). In a file, neurons with a constant gate of 1 replace them, with a in ffn_up and b
    in ffn_down.
    """

    def __init__(self, base: TorchGraph, activation: ReluKind, rank: int, *, seed: int = 0) -> None:
        super().__init__()
        self.base, self.activation, self.rank = base, activation, rank
        self.values = nn.ParameterDict()
        generator = torch.Generator().manual_seed(seed)

        def add(name: str, value: Tensor) -> None:
            self.values[name.replace(".", "/")] = nn.Parameter(value.to(base.device))

        def bias(name: str, width: int) -> None:
            own = f"{name}.bias"
            add(own, base.weight(own).clone() if own in base.weights.tensors else torch.zeros(width))

        add("output_norm", base.weight("output_norm.weight").clone())
        for i, ffn in enumerate(base.graph.ffns):
            blk = f"blk.{i}"
            for name in NORMS:
                add(f"{blk}.{name}", base.weight(f"{blk}.{name}.weight").clone())
            for name in MATRICES:
                n_out, n_in = base.weight(f"{blk}.{name}.weight").shape
                if rank:
                    a = torch.randn(rank, n_in, generator=generator) / math.sqrt(n_in)
                    add(f"{blk}.{name}.a", a)
                    add(f"{blk}.{name}.b", torch.zeros(n_out, rank))
                else:
                    add(f"{blk}.{name}.delta", torch.zeros(n_out, n_in))
            bias(f"{blk}.ffn_gate", ffn.n_ff)
            if activation == "drelu":
                bias(f"{blk}.ffn_up", ffn.n_ff)
            add(f"{blk}.ffn_scale", torch.ones(ffn.n_ff))
            bias(f"{blk}.ffn_down", ffn.out.width)

    def compute(self, activity: Activity | None = None) -> Compute:
        """Return a function that computes the graph with the trained parameters. activity: filled in."""

        def compute(op: Primitive, step: Step) -> Tensor:
            ffn = self.base.graph.ffns[op.layer] if op.part == "ffn" else None
            match op:
                case ops.RMSNorm() if (own := self.get(_stem(op.weight))) is not None:
                    return rms_norm(step[op.x], own, op.eps, op.n_head)
                case ops.Linear() if ffn is not None and op is ffn.down:
                    return self.ffn_out(ffn, step[op.x], step[ffn.up.x])
                case ops.Linear():
                    return self.linear(op, step[op.x])
                case ops.Activate():  # included in the product of gate and up
                    return step[op.x]
                case ops.Multiply() if ffn is not None:
                    return self._neurons(ffn, step, activity)
            return self.base.compute(op, step)

        return compute

    def linear(self, op: Primitive, x: Tensor) -> Tensor:
        """Compute a product by the student's matrix and bias."""
        assert isinstance(op, ops.Linear)
        name = _stem(op.weight)
        weight, bias = self.base.rows_of(op)
        own = self.get(f"{name}.bias")
        bias = bias if own is None else own
        if (delta := self.get(f"{name}.delta")) is not None:
            return F.linear(x, weight + delta, bias)
        a, b = self.get(f"{name}.a"), self.get(f"{name}.b")
        if a is None or b is None:
            return F.linear(x, weight, bias)
        out: Tensor = LowRankLinear.apply(x, weight, bias, a, b)  # type: ignore[no-untyped-call]
        return out

    def ffn_out(self, ffn: ops.Ffn, neurons: Tensor, x: Tensor) -> Tensor:
        """Return the contribution of neurons, and of the linear path from the input x, to the stream."""
        out = self.linear(ffn.down, neurons)
        a, b = (self.get(f"blk.{ffn.layer}.ffn_linear.{name}") for name in "ab")
        return out if a is None or b is None else out + F.linear(F.linear(x, a), b)

    def _neurons(self, ffn: ops.Ffn, step: Step, activity: Activity | None) -> Tensor:
        assert ffn.gate is not None
        layer, gate, up = ffn.layer, step[ffn.gate.out], step[ffn.up.out]
        price = activity.price if activity else 0.0
        width = activity.width[layer] if activity and activity.width else 1.0
        scale = self.get(f"blk.{layer}.ffn_scale")
        both = self.activation == "drelu"
        neurons: Tensor = SparseGLU.apply(gate, up, scale, both, price, width)  # type: ignore[no-untyped-call]
        if activity is not None:
            with torch.no_grad():
                if not activity.width:  # the widths are computed from the deviations
                    activity.deviation.append(gate[gate > RETIRED / 2].std())
                n_linear = 0 if (a := self.get(f"blk.{layer}.ffn_linear.a")) is None else len(a)
                share = neurons.count_nonzero() / neurons.numel() + n_linear / neurons.shape[-1]
                activity.share.append(share)
        return neurons

    def set_linear(self, layer: int, a: Tensor, b: Tensor) -> None:
        """Give a layer a linear path, a [k, n_embd] and b [n_embd, k]; the caller retires as many neurons."""
        for name, value in (("a", a), ("b", b)):
            self.values[f"blk/{layer}/ffn_linear/{name}"] = nn.Parameter(
                value.clone(memory_format=torch.contiguous_format)
            )

    def get(self, name: str) -> nn.Parameter | None:
        """Return the parameter of a tensor, such as "blk.0.ffn_gate.bias"; None if it is not trained."""
        key = name.replace(".", "/")
        return self.values[key] if key in self.values else None  # noqa: SIM401 - it has no get

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load values by their dotted names.

        Low-rank products of a smaller rank become the first part of this student's; linear paths are loaded
        unchanged. Raises InvalidRequestError if the values do not fit this student.
        """
        device = next(iter(self.values.values())).device
        for name, a in values.items():
            if name.endswith(".ffn_linear.a") and (b := values.get(f"{name[:-1]}b")) is not None:
                self.set_linear(int(name.split(".")[1]), a.to(device), b.to(device))
        own = dict(self.named_values())
        for name in [*(own.keys() - values.keys()), *(values.keys() - own.keys())]:
            raise InvalidRequestError(
                f"the adapters do not fit: {name} is missing in them or in the student; "
                "use the activation, rank and model with which they were trained"
            )
        for name, value in values.items():
            place: Tensor = own[name]
            if name.endswith(".a"):
                place = place[: len(value)]
            elif name.endswith(".b"):  # the rest is still zero
                place = place[:, : value.shape[-1]]
            if value.shape != place.shape:
                raise InvalidRequestError(
                    f"the adapters do not fit: {name} has the shape {list(value.shape)}, not "
                    f"{list(own[name].shape)}; use the activation and model with which they were trained, "
                    "and no smaller rank"
                )
            place.copy_(value)

    def named_values(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield dotted names and parameters."""
        for name, value in self.values.items():
            yield name.replace("/", "."), value


def _stem(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def load_base(gguf: GGUFFile, device: str | torch.device = "cpu") -> TorchGraph:
    """Return the graph of a file with its weights as float32 in memory.

    Raises UnsupportedModelError if no student of the model can be trained: see `unsupported_operations`.
    """
    config = config_from_gguf(gguf)
    graph = describe(config, gguf.tensors)
    reason = unsupported_operations(graph)
    if config.long_rope is not None:
        reason = "has a separate rotation for long contexts"
    if reason:
        raise UnsupportedModelError(
            f"sparsify trains models of the Llama family, but {gguf.path.name} ({config.architecture}) "
            f"{reason}"
        )
    base = TorchGraph(gguf, graph, room=math.inf, device=device)
    for op in graph.primitives:
        for tensor in op.weights_read:
            base.weight(tensor.name)
    return base


def unsupported_operations(graph: Graph) -> str | None:
    """Return why no student can be trained; None if it can.

    Layers must have the matrices and norms of adapters, and add the FFN's result to the stream that the FFN
    reads.
    """
    if graph.is_encoder:
        return "is an embedding model"
    if not isinstance(graph.ops[-1], ops.Linear):
        return "scales or caps its logits"
    if any(isinstance(op, ops.LayerNorm) for op in graph.primitives):
        return "has layer norms"
    if any(ffn.sub_norm is not None for ffn in graph.ffns):
        return "has norms before its down projections"
    for i, ffn in enumerate(graph.ffns):
        operations = [op for op in graph.primitives if op.layer == i]
        expected = {f"blk.{i}.{name}.weight" for name in (*MATRICES, *NORMS)}
        matrices = {tensor for op in operations for tensor in op.matrices}
        norms = {op.weight for op in operations if isinstance(op, ops.RMSNorm)}
        for name in sorted(matrices - expected):
            return f"has the matrix {name}"
        for name in sorted(expected - matrices - norms):
            return f"has no {name}"
        last = operations[-1]
        if not isinstance(last, ops.Add) or (last.a, last.b) != (ffn.x, ffn.out):
            return "has norms after its FFNs, or scales their results"
    return None
