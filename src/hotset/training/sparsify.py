"""Turns a SiLU model into a ReLU one: swap the activation, then recover by distillation.

This is the first step of TurboSparse's recipe (arXiv 2406.05955), for a small machine. `calibrate` sets the
student's initial values. Then its output distribution is moved towards the teacher's:

    loss = mean over tokens of KL(teacher || student) + price * share of active neurons + guide * stray

stray is the relative squared distance of the two residual streams, mean over layers. It gives each layer its
own error, while the divergence of the output is one value for all layers; it fades out towards the end. The
price is raised while more neurons fire than requested, and lowered while fewer do (a Lagrange multiplier). So
the requested share is reached, and goes to the neurons and layers that need it. The file's weights do not
change; the trained parameters (`student.Student`) fit into adapters of some megabytes.

On a CPU the teacher is hotset's engine on the same file: its integer kernels are several times faster than a
second pass in torch, and it is exactly the model with which the student will be compared.

A run is stored in a folder: settings.json, generated.jsonl (the teacher's text), checkpoint.pt (replaced
atomically at intervals), curve.jsonl (a line per evaluation), adapters.safetensors (the latest). After a kill
it continues from there, with the same windows in the same order.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotset.backends.torch.graph import Compute, TorchGraph
from hotset.errors import InvalidRequestError
from hotset.files import appending, replacing, write_whole
from hotset.model.operations import Linear
from hotset.reporter import Reporter
from hotset.training.adapters import TrainedAdapters
from hotset.training.calibrate import calibrate, choose_targets, kernel_widths
from hotset.training.student import Activity, Student
from hotset.training.text import Mixture

if TYPE_CHECKING:
    from hotset.api import Model

_ROWS = 256  # tokens whose logits are in memory together
_CALIBRATION = 16384  # tokens; half of them suffice for choosing targets
_PRICE_STEP, _PRICE_PULL = 0.02, 4.0  # of the price, per relative error of the share: lasting, and momentary


@dataclass(frozen=True)
class SparsifySettings:
    """The settings that identify a run; it can only be resumed with the same ones.

    activation: relu or drelu. rank: of the low-rank products, 0 for full training. linear: limit of a layer's
    neurons that are retired for a linear path (relu only). idle: requested share of idle neurons. n_tokens:
    to train on, over all processes; hours: if not None, train for this time instead (the learning rate then
    falls with time). n_ctx, batch: tokens of a window, windows per step and process. lr: of the matrices;
    vector_lr: of norms, biases and scales. price: initial price of an active neuron. guide: initial weight of
    the residual streams' distance. scored: share of the positions at which a step compares the distributions
    (the rows of logits take a fifth of its time). labels: weight of the text's next token in the target,
    relative to the teacher's distribution. warmup: steps.
    """

    activation: str = "relu"
    rank: int = 32
    linear: int = 0
    idle: float = 0.72
    n_tokens: int = 1_000_000
    hours: float | None = None
    n_ctx: int = 512
    batch: int = 2
    lr: float = 1e-3
    vector_lr: float = 2e-3
    price: float = 0.5
    guide: float = 0.5
    scored: float = 1.0
    labels: float = 0.0
    warmup: int = 20
    final_lr: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.activation not in ("relu", "drelu"):
            raise InvalidRequestError(f"activation must be relu or drelu, not {self.activation!r}")
        if self.rank < 0:
            raise InvalidRequestError(f"the rank of the adapters must be at least 1, not {self.rank}")
        if self.linear < 0 or (self.linear and self.activation != "relu"):
            raise InvalidRequestError(
                "a linear path (`linear`) requires activation='relu' and a number of neurons"
            )
        if not 0 < self.idle < 1:
            raise InvalidRequestError(f"`idle` must be between 0 and 1, not {self.idle:g}")
        if self.n_tokens < 1 or self.batch < 1 or self.n_ctx < 8:
            raise InvalidRequestError("`tokens` and `batch` must be at least 1, n_ctx at least 8")
        if not 0 <= self.labels <= 1:
            raise InvalidRequestError(f"`labels` must be between 0 and 1, not {self.labels:g}")
        if not 0 < self.scored <= 1:
            raise InvalidRequestError(f"`scored` must be between 0 and 1, not {self.scored:g}")
        if not (self.lr > 0 and self.vector_lr > 0 and math.isfinite(self.lr + self.vector_lr)):
            raise InvalidRequestError("the learning rate must be a positive number")


@dataclass(frozen=True)
class Evaluation:
    """The student's results on the second half of each held-out window, as in `hotset perplexity`.

    tokens, seconds: trained so far, over all processes. ppl, teacher_ppl: perplexities. kl: mean divergence
    from the teacher, in nats. top1: how often both rank the same token first. idle: share of idle neurons,
    mean and per layer.
    """

    step: int
    tokens: int
    seconds: float
    loss: float | None
    ppl: float
    teacher_ppl: float
    kl: float
    top1: float
    idle: float
    idle_per_layer: list[float] = field(default_factory=list)


class EngineTeacher:
    """The original's residual stream, computed by hotset's CPU engine."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._names = [f"blk.{i}.out" for i in range(model.config.n_layer)]

    def stream(self, tokens: Tensor) -> list[Tensor]:
        """Return the streams after the layers, float32 [n_batch * n_tokens, n_embd].

        tokens: int64 [n_batch, n_tokens].
        """
        taps = [self.model.taps(window.tolist(), self._names) for window in tokens]
        return [torch.from_numpy(np.concatenate([tap[name] for tap in taps])) for name in self._names]


class TorchTeacher:
    """The original's residual stream, computed by the network that the student shares."""

    def __init__(self, base: TorchGraph) -> None:
        self.base = base

    @torch.no_grad()
    def stream(self, tokens: Tensor) -> list[Tensor]:
        """Return the stream after each layer like EngineTeacher, on the network's device."""
        return self.base.streams(tokens)[1:]


class _Divergence(torch.autograd.Function):
    """Mean KL(teacher || student) over tokens, and its gradient, without storing rows of logits.

    hidden, wanted: inputs of the output matrix, of student and teacher, [n, n_embd]; output [n_vocab,
    n_embd]; following: the text's next tokens, [n]. The gradient is of (1 - labels) KL + labels *
    cross-entropy; the value is only the divergence.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, wanted: Tensor, output: Tensor, following: Tensor, labels: float
    ) -> Tensor:
        grad = torch.empty_like(hidden)
        total = hidden.new_zeros(())
        n = len(hidden)
        for i in range(0, n, _ROWS):
            got = F.log_softmax(F.linear(hidden[i : i + _ROWS], output), -1)
            aim = F.log_softmax(F.linear(wanted[i : i + _ROWS], output), -1)
            p = aim.exp()
            total += (p * aim.sub_(got)).sum()
            slope = got.exp_().sub_(p, alpha=1 - labels)
            slope[torch.arange(len(slope)), following[i : i + _ROWS]] -= labels
            grad[i : i + _ROWS] = slope @ output
        ctx.save_for_backward(grad.div_(n))
        return total / n

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * scale, None, None, None, None


def _stray(stream: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Return the relative squared distance of the student's residual stream, mean over layers and tokens."""
    parts = [
        ((x - y).square().sum(-1) / y.square().sum(-1)).mean() for x, y in zip(stream, wanted, strict=True)
    ]
    return torch.stack(parts).mean()


@dataclass(frozen=True)
class TrainingTexts:
    """The texts of a run. mixture: to train on. held_out: windows for evaluation, int64 [n, n_ctx]."""

    mixture: Mixture
    held_out: Tensor


class Training:
    """A run: `run` trains to the end, from the state in its folder if there is one.

    model: digest of the file (adapters.digest). start: values of earlier adapters. processes: number of this
    process, and how many share the work (processes.torchrun_processes); only process 0 writes.
    """

    def __init__(
        self,
        base: TorchGraph,
        teacher: EngineTeacher | TorchTeacher,
        texts: TrainingTexts,
        folder: Path,
        settings: SparsifySettings,
        *,
        model: str = "",
        start: dict[str, Tensor] | None = None,
        processes: tuple[int, int] = (0, 1),
    ) -> None:
        self.base, self.teacher, self.texts = base, teacher, texts
        self.folder, self.settings = folder, settings
        self.process, self.n_processes = processes
        self.student = Student(base, settings.activation, settings.rank, seed=settings.seed)  # type: ignore[arg-type]
        output = base.graph.ops[-1]
        assert isinstance(output, Linear)  # load_base rejects others
        self._output = output
        self._adamw: torch.optim.Optimizer | None = None
        self.step = 0
        self.seconds = 0.0
        self.price = settings.price
        self.loss: float | None = None
        self.widths: list[float] = []
        self._start = start
        self._model = model
        self._share = 0.0  # of active neurons in the latest step

    # ---- state ----

    @property
    def tokens(self) -> int:
        """Return the tokens trained so far, by all processes."""
        return self.step * self.settings.batch * self.settings.n_ctx * self.n_processes

    @property
    def progress(self) -> float:
        """Return the progress, from 0 at the start to 1 at the end."""
        if self.settings.hours is not None:
            return self.seconds / (3600 * self.settings.hours)
        return self.tokens / self.settings.n_tokens

    def prepare(self, progress: Reporter | None = None) -> None:
        """Resume from the folder, or calibrate."""
        progress = progress or Reporter()
        if self.resume():
            progress.say(f"resumed after {self.tokens} tokens")
            return
        if self._start is not None:
            self.student.load(self._start)
            tokens = torch.from_numpy(self.texts.mixture.window(0)[None]).long()
            self.widths = kernel_widths(self.base, self.student, tokens)
            return
        if self.process == 0:
            self._calibrate(progress)
        if self.n_processes > 1:
            self._take_start()

    def _calibrate(self, progress: Reporter) -> None:
        settings, n_layer = self.settings, self.base.graph.n_layer
        n = max(1, _CALIBRATION // settings.n_ctx)
        tokens = torch.from_numpy(np.stack([self.texts.mixture.window(i) for i in range(n)])).long()

        def progress_of(label: str) -> Callable[[int], None]:
            progress.advance(label, 0, n_layer, "layers")
            return lambda layer: progress.advance(label, layer + 1, n_layer, "layers")

        targets = choose_targets(
            self.base,
            tokens[: max(1, n // 2)],
            1 - settings.idle,
            settings.linear,
            both=settings.activation == "drelu",
            on_layer=progress_of("choosing layers"),
        )
        ranks = [target.n_linear for target in targets]
        if any(ranks):
            progress.say(
                f"{sum(ranks) / len(ranks):.0f} neurons of a layer, on average, become a linear path"
            )
        calibrate(self.base, self.student, tokens, targets, progress_of("calibrating layers"))
        self.widths = kernel_widths(self.base, self.student, tokens[:2])

    def _take_start(self) -> None:
        """Send the first process's calibration to all: the last bits of two calibrations may differ."""
        from torch import distributed

        sent: list[Any] = [{name: value.shape for name, value in self.student.named_values()}, self.widths]
        distributed.broadcast_object_list(sent)
        shapes, self.widths = sent
        own = dict(self.student.named_values())
        values = {
            name: torch.empty(shape, device=self.base.device) if self.process else own[name].detach()
            for name, shape in shapes.items()
        }
        for value in values.values():
            distributed.broadcast(value, 0)
        if self.process:
            self.student.load(values)

    def save(self) -> None:
        """Replace the checkpoint and the adapters."""
        if self.process:
            return
        state = {
            "settings": asdict(self.settings),
            "values": {name: value.detach().cpu() for name, value in self.student.named_values()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "price": self.price,
            "share": self._share,
            "loss": self.loss,
            "widths": self.widths,
            "n_processes": self.n_processes,
        }
        with replacing(self.folder / "checkpoint.pt") as file:
            torch.save(state, file)
        self.adapters().save(self.folder / "adapters.safetensors")

    def adapters(self) -> TrainedAdapters:
        """Return the parameters learned so far."""
        values = {name: value.detach().cpu().numpy() for name, value in self.student.named_values()}
        return TrainedAdapters(values, self.settings.activation, self.settings.rank, self._model)

    def resume(self) -> bool:
        """Load the folder's checkpoint and return True, if there is one.

        Raises InvalidRequestError if its settings differ.
        """
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["settings"] != asdict(self.settings) or state["n_processes"] != self.n_processes:
            changed = [k for k, v in asdict(self.settings).items() if state["settings"].get(k) != v]
            raise InvalidRequestError(
                f"the training in {self.folder} was started with other settings "
                f"({', '.join(changed) or 'number of processes'}); use these, or another folder with `work`"
            )
        self.student.load(state["values"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.price = state["step"], state["seconds"], state["price"]
        self.widths, self._share, self.loss = state["widths"], state["share"], state["loss"]
        curve = self.folder / "curve.jsonl"
        if curve.exists() and not self.process:  # evaluations after the checkpoint will be repeated
            lines = [line for line in read_curve(curve) if line["step"] <= self.step]
            write_whole({curve: "".join(json.dumps(line) + "\n" for line in lines)})
        return True

    # ---- one step ----

    def train_step(self) -> float:
        """Run one step of the optimizer; return the mean divergence, in nats per token."""
        started = time.perf_counter()
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")  # bfloat16 products, where the processor has them
        try:
            report = self._optimize()
        finally:
            torch.set_float32_matmul_precision(precision)
        elapsed = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        if self.n_processes > 1:  # all processes must end, and lower the learning rate, at the same step
            torch.distributed.all_reduce(elapsed, torch.distributed.ReduceOp.MAX)
        self.seconds += float(elapsed)
        return float(report[0])

    def _optimize(self) -> Tensor:
        """Change the parameters once; return the mean divergence and the share of active neurons, [2]."""
        settings = self.settings
        tokens = self.windows()
        wanted = [x.to(self.base.device) for x in self.teacher.stream(tokens)]
        activity = Activity(width=self.widths)
        share_wanted = 1 - settings.idle
        error = (self._share - share_wanted) / share_wanted if self.step else 0.0
        n_values = tokens.numel() * sum(ffn.n_ff for ffn in self.base.graph.ffns)
        activity.price = self.price * math.exp(_PRICE_PULL * error) / n_values
        lr_factor = self._lr_factor()
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * lr_factor
        stream = self.base.streams(tokens, self.student.compute(activity))
        hidden = self._hidden(tokens, stream[-1], self.student.compute())
        aim = self._hidden(tokens, wanted[-1])
        scored = self.scored_positions(tokens[:, :-1].numel())
        loss: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
            hidden[:, :-1].flatten(0, 1)[scored],
            aim[:, :-1].flatten(0, 1)[scored],
            self.base.weight(self._output.weight),
            tokens[:, 1:].flatten().to(self.base.device)[scored],
            settings.labels,
        )
        stray = _stray(stream[1:], wanted)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + settings.guide * max(0.0, 1 - self.progress) * stray).backward()
        share = torch.stack(activity.share).mean()
        report = torch.stack([loss.detach(), share])
        if self.n_processes > 1:
            self._all_reduce(report)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self._share = float(report[1])
        self.price *= math.exp(_PRICE_STEP * (self._share - share_wanted) / share_wanted)
        self.step += 1
        return report

    def _hidden(self, tokens: Tensor, stream: Tensor, compute: Compute | None = None) -> Tensor:
        """Return the output matrix's input, float32 [n_batch, n_tokens, n_embd], from the last stream."""
        step = self.base.run(self.base.parts[-1], tokens, stream, compute, until=self._output.x)
        return step.by_text(self._output.x)

    def scored_positions(self, n: int) -> Tensor:
        """Return the positions, of n, at which the divergence is computed, drawn again for each step."""
        rng = np.random.default_rng([self.settings.seed, self.step, self.process])
        chosen = rng.permutation(n)[: max(1, round(n * self.settings.scored))]
        return torch.from_numpy(np.sort(chosen)).to(self.base.device)

    def windows(self) -> Tensor:
        """Return this process's windows in this step, int64 [batch, n_tokens + 1]."""
        first = (self.step * self.n_processes + self.process) * self.settings.batch
        windows = [self.texts.mixture.window(first + i) for i in range(self.settings.batch)]
        return torch.from_numpy(np.stack(windows)).long()

    def _lr_factor(self) -> float:
        settings = self.settings
        cosine = 0.5 * (1 + math.cos(math.pi * min(self.progress, 1.0)))
        falling = settings.final_lr + (1 - settings.final_lr) * cosine
        return falling * min(1.0, (self.step + 1) / settings.warmup) if settings.warmup else falling

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer, made on first use, because the closed form may add parameters."""
        if self._adamw is None:
            self._adamw = self._optimizer()
        return self._adamw

    def _optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.student.parameters() if p.ndim == 2]
        vectors = [p for p in self.student.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "lr": self.settings.lr, "base_lr": self.settings.lr},
            {"params": vectors, "lr": self.settings.vector_lr, "base_lr": self.settings.vector_lr},
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def _all_reduce(self, report: Tensor) -> None:
        """Average the gradients and the report over the processes."""
        from torch import distributed

        parameters = list(self.student.parameters())
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([report, *(grad.flatten() for grad in grads)])
        distributed.all_reduce(flat)
        flat /= self.n_processes
        report.copy_(flat[:2])
        first = 2
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = flat[first : first + grad.numel()].view_as(grad)
            first += grad.numel()

    # ---- evaluation ----

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Compare the student with the teacher on the held-out windows."""
        n_ctx = self.texts.held_out.shape[1]
        first = n_ctx // 2 - 1  # the first position whose logits are scored
        nll = teacher_nll = kl = top1 = 0.0
        n = 0
        shares = []
        for window in self.texts.held_out:
            tokens, output, activity = window[None], self.base.weight(self._output.weight), Activity()
            aim = self._hidden(tokens, self.teacher.stream(tokens)[-1].to(self.base.device))
            wanted = F.log_softmax(F.linear(aim[0, first:-1], output), -1)
            compute = self.student.compute(activity)
            hidden = self._hidden(tokens, self.base.streams(tokens, compute)[-1], compute)
            got = F.log_softmax(F.linear(hidden[0, first:-1], output), -1)
            targets = window[first + 1 :, None].to(self.base.device)
            nll -= float(got.gather(1, targets).sum())
            teacher_nll -= float(wanted.gather(1, targets).sum())
            kl += float((wanted.exp() * (wanted - got)).sum())
            top1 += float((wanted.argmax(-1) == got.argmax(-1)).sum())
            n += len(targets)
            shares.append(torch.stack(activity.share))
        idle = (1 - torch.stack(shares).mean(0)).tolist()
        return Evaluation(
            step=self.step,
            tokens=self.tokens,
            seconds=round(self.seconds, 1),
            loss=self.loss,
            ppl=math.exp(min(nll / n, 700)),
            teacher_ppl=math.exp(min(teacher_nll / n, 700)),
            kl=kl / n,
            top1=top1 / n,
            idle=sum(idle) / len(idle),
            idle_per_layer=[round(v, 4) for v in idle],
        )

    # ---- the run ----

    def run(
        self,
        *,
        eval_every: int = 50,
        save_every: int = 25,
        on_step: Callable[[Training], None] = lambda _: None,
        on_eval: Callable[[Evaluation], None] = lambda _: None,
    ) -> None:
        """Train to the end. eval_every, save_every: steps."""
        if self.step == 0:
            self._evaluate(on_eval)
            self.save()
        while self.progress < 1:
            loss = self.train_step()
            self.loss = loss if self.loss is None else 0.95 * self.loss + 0.05 * loss
            on_step(self)
            ends = self.progress >= 1
            if ends or self.step % eval_every == 0:
                self._evaluate(on_eval)
            if ends or self.step % save_every == 0:
                self.save()

    def _evaluate(self, on_eval: Callable[[Evaluation], None]) -> None:
        if self.process == 0:
            evaluation = self.evaluate()
            with appending(self.folder / "curve.jsonl") as file:
                file.write(json.dumps(asdict(evaluation)).encode() + b"\n")
            on_eval(evaluation)


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a curve, up to an incomplete one."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
