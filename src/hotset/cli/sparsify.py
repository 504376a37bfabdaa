"""`hotset sparse make`: turn a SiLU model into a ReLU model by distillation, or merge finished adapters."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hotset
from hotset.api import load_opened
from hotset.backends.torch.devices import is_gpu, own_device, torch_device
from hotset.cli import options
from hotset.cli.console import print_json, read_text, say
from hotset.cli.progress import ProgressBar
from hotset.cli.values import DURATION, one_of
from hotset.convert.hf import convert_hf
from hotset.cores import usable_cores
from hotset.errors import HotsetError, InvalidRequestError, ModelNotFoundError, install_command
from hotset.files import check_folder, check_output, missing
from hotset.formats.gguf import open_gguf
from hotset.formats.imatrix import ImportanceMatrix
from hotset.formats.recommended import KEYS
from hotset.loader.build import open_model
from hotset.report.bars import percent
from hotset.sampling_parameters import PARAMETERS
from hotset.settings import LoadSettings
from hotset.storage import resolve
from hotset.training import generate as writing
from hotset.training.adapters import MERGED_TYPES, TrainedAdapters, digest, merge
from hotset.training.generate import read_documents
from hotset.training.text import Mixture, WeightedText, joined, parse_amount, parse_text, split_held_out
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.training.sparsify import Evaluation, SparsifySettings, Training
    from hotset.training.text import WeightedText

_TRAINING, _TEXT, _RUN = "Training", "Text", "Run"
_LINEAR = 8  # neurons per linear neuron
_FULL_LR = 20  # whole matrices have a learning rate smaller by this factor than low-rank factors have


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options for the trained adapters and the training."""

    activation: Annotated[
        str,
        options.option(
            "--activation", "Activation of the trained model.", _TRAINING, kind=one_of("relu", "drelu")
        ),
    ] = "relu"
    idle: Annotated[float, options.option("--idle", "Share of neurons to be idle.", _TRAINING)] = 0.72
    lora: Annotated[
        int | None, options.option("--lora", "Rank of low-rank adapters.", _TRAINING, usual="full")
    ] = None
    linear: Annotated[
        int | None,
        options.option(
            "--linear",
            "Neurons of a layer that may become a linear path, at most.",
            _TRAINING,
            usual="an eighth",
        ),
    ] = None
    tokens: Annotated[int, options.option("--tokens", "Tokens to train on.", _TRAINING)] = 1_000_000
    time: Annotated[
        float | None,
        options.option("--time", "Train for this time, instead of --tokens.", _TRAINING, kind=DURATION),
    ] = None
    hours: Annotated[float | None, options.option("--hours", "--time in hours.", hidden=True)] = None
    n_ctx: Annotated[int, options.option("--ctx-size -c", "Tokens of a window.", _TRAINING)] = 512
    batch: Annotated[int, options.option("--batch", "Windows per step.", _TRAINING)] = 2
    lr: Annotated[float | None, options.option("--lr", "Learning rate.", _TRAINING)] = None
    labels: Annotated[
        float, options.option("--labels", "Weight of the text's own next token.", _TRAINING)
    ] = 0.0
    scored: Annotated[
        float, options.option("--scored", "Share of positions whose logits count.", _TRAINING)
    ] = 1.0
    guide: Annotated[
        float,
        options.option(
            "--guide", "Weight, at the start, of the residual streams' distance.", _TRAINING, min=0
        ),
    ] = 0.5
    seed: Annotated[int, options.option("--seed -s", "Seed of everything random.")] = 0
    start: Annotated[
        Path | None,
        options.option("--from-adapters", "Start from these adapters.", _TRAINING, **options.FILE),
    ] = None

    def settings(self, n_ff: int) -> SparsifySettings:
        """Return the settings of the training. n_ff: neurons of the smallest layer."""
        from hotset.training.sparsify import SparsifySettings

        lr, vector_lr = self.lr, SparsifySettings.vector_lr
        if lr is None:
            lr = SparsifySettings.lr if self.lora else SparsifySettings.lr / _FULL_LR
        if self.lora:
            vector_lr = 2 * lr
        hours, linear = self.hours if self.time is None else self.time / 3600, self.linear
        if linear is None:
            linear = n_ff // _LINEAR if self.activation == "relu" else 0
        return SparsifySettings(
            activation=self.activation, rank=self.lora or 0, linear=linear, idle=self.idle,
            n_tokens=self.tokens, hours=hours, n_ctx=self.n_ctx, batch=self.batch, lr=lr,
            vector_lr=vector_lr, labels=self.labels, scored=self.scored, guide=self.guide, seed=self.seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options for the texts to train on."""

    text: Annotated[list[str] | None, options.option("--text", "FILE[:WEIGHT]; repeatable.", _TEXT)] = None
    generate: Annotated[
        str | None,
        options.option("--generate", "Tokens that the teacher writes.", _TEXT, metavar="N[:WEIGHT]"),
    ] = None
    on_policy: Annotated[
        str | None,
        options.option(
            "--on-policy", "Tokens that the student of --from-adapters writes.", _TEXT, metavar="N[:WEIGHT]"
        ),
    ] = None
    chat: Annotated[
        float, options.option("--chat", "Share of answers in generated text.", _TEXT, min=0, max=1)
    ] = 0.4
    held_out: Annotated[
        Path | None,
        options.option(
            "--held-out", "Text to evaluate on.", _TEXT, usual="the end of a text", **options.FILE
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Options for the written model."""

    type: Annotated[
        str,
        options.option(
            "--type", "Type of the matrices that change; same: the original's.", kind=one_of(*MERGED_TYPES)
        ),
    ] = "same"
    imatrix: Annotated[
        Path | None,
        options.option(
            "--imatrix",
            "Importance matrix of the ReLU model (hotset imatrix), which weights errors.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    sampling: Annotated[
        list[str] | None,
        options.option(
            "--sampling",
            "Sampling parameter that the file recommends; repeatable.",
            usual="repetition_penalty=1.1",
            metavar="NAME=VALUE",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainingRunOptions:
    """Options for the run of a training, which can be continued."""

    work: Annotated[
        Path | None, options.option("--work", "Folder of the run.", _RUN, usual="OUT.sparsify")
    ] = None
    eval_every: Annotated[int, options.option("--eval-every", "Steps between evaluations.", _RUN, min=1)] = 50
    save_every: Annotated[int, options.option("--save-every", "Steps between checkpoints.", _RUN, min=1)] = 25
    device: options.DeviceNames = "auto"
    n_threads: options.Threads = None


def sparsify(
    model: options.ModelName,
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The ReLU model to write.")],
    adapters: Annotated[
        Path | None, options.option("--adapters", "Only merge these finished adapters.", **options.FILE)
    ] = None,
    *,
    merging: MergeOptions,
    training: AdapterOptions,
    texts: TextOptions,
    runs: TrainingRunOptions,
    json: options.Json = False,
) -> None:
    """Turn a SiLU model into a ReLU one by distillation, or merge adapters that did."""
    check_output(target)
    recommends = _sampling(merging.sampling or ["repetition_penalty=1.1"])
    folder = runs.work or target.with_suffix(".sparsify")
    check_folder(folder)
    if adapters is None:
        _check(training, texts)
    last: Evaluation | None = None
    is_first = True
    with contextlib.ExitStack() as stack:
        path = _source(model, folder, stack)
        if adapters is None:
            device = runs.device or "auto"
            run, is_first = _open(path, folder, stack, training, texts, device, runs.n_threads)
            last = _train(run, runs.eval_every, runs.save_every, show=is_first)
            adapters = folder / "adapters.safetensors"
        if is_first:
            _merge(path, adapters, target, merging.type, recommends, merging.imatrix)
            if json:
                print_json(
                    {
                        "path": str(target),
                        "size": target.stat().st_size,
                        "adapters": str(adapters),
                        "evaluation": asdict(last) if last else None,
                    }
                )
            else:
                say(f"Wrote {target} ({human_size(target.stat().st_size)}). Run it with: hotset run {target}")


def _check(training: AdapterOptions, texts: TextOptions) -> None:
    """Raise for wrong options of a training, before the model is looked for."""
    if training.lora is not None and training.lora < 1:
        raise InvalidRequestError(f"the rank of --lora must be at least 1, not {training.lora}")
    if not texts.text and texts.generate is None and texts.on_policy is None:
        raise InvalidRequestError(
            "there is no text to train on: name files with --text, or let the teacher write some with "
            "--generate"
        )
    if texts.on_policy is not None and training.start is None:
        raise InvalidRequestError(
            "what --on-policy asks for is written by a student that has learnt to write; name its adapters "
            "with --from-adapters"
        )
    for file, _ in map(parse_text, texts.text or []):
        if not file.exists():
            raise ModelNotFoundError(missing(file))
    _torch()
    training.settings(n_ff=_LINEAR)


def _source(model: str, folder: Path, stack: contextlib.ExitStack) -> Path:
    """Return the GGUF file to start from. A Hugging Face checkpoint is first converted into the folder."""
    if Path(model).is_dir() and (Path(model) / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        converted = folder / "original.gguf"
        if not converted.exists():
            say(f"converting {model}")
            with ProgressBar() as bar:
                convert_hf(model, converted, "f32", progress=bar)
        return converted
    return resolve(model, progress=stack.enter_context(ProgressBar()))


def _open(
    path: Path,
    folder: Path,
    stack: contextlib.ExitStack,
    training: AdapterOptions,
    texts: TextOptions,
    device: str,
    threads: int | None,
) -> tuple[Training, bool]:
    """Return a run that is ready to train, and whether this process is the first of its processes."""
    torch = _torch()

    from hotset.training.processes import torchrun_processes
    from hotset.training.sparsify import EngineTeacher, TorchTeacher, Training, TrainingTexts
    from hotset.training.student import load_base

    n_threads = threads or usable_cores()
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(n_threads)
    stack.callback(torch.set_flush_denormal, False)  # it is the thread's: later logits would differ
    torch.set_flush_denormal(True)  # small adapters times small gradients give denormals
    where = torch_device(device)
    on_gpu = is_gpu(where)
    process, n_processes = stack.enter_context(torchrun_processes(on_gpu=on_gpu))
    where = own_device(where)
    folder.mkdir(parents=True, exist_ok=True)

    gguf = stack.enter_context(open_gguf(path))
    base = load_base(gguf, where)
    engine = stack.enter_context(  # on the CPU: the GPU is for training
        hotset.load(path, n_ctx=training.n_ctx, n_threads=n_threads, device="cpu")
    )
    sources, held = _texts(engine, path, folder, training, texts, n_threads, process, n_processes)
    values = None
    if training.start is not None:
        opened = TrainedAdapters.open(training.start)
        if opened.model != digest(gguf):
            raise InvalidRequestError(
                f"the adapters {training.start} were trained on other weights than {path.name}"
            )
        opened.check(engine.config)
        values = {name: torch.from_numpy(value) for name, value in opened.values.items()}
    run = Training(
        base,
        TorchTeacher(base) if on_gpu else EngineTeacher(engine),
        TrainingTexts(Mixture(sources, training.n_ctx, training.seed), torch.tensor(held).long()),
        folder,
        training.settings(min(engine.config.n_ff)),
        model=digest(gguf),
        start=values,
        processes=(process, n_processes),
    )
    return run, process == 0


def _texts(
    engine: Model,
    path: Path,
    folder: Path,
    training: AdapterOptions,
    texts: TextOptions,
    n_threads: int,
    process: int,
    n_processes: int,
) -> tuple[list[WeightedText], list[list[int]]]:
    """Return the texts to train on, from files and from the models, and the windows to evaluate on."""
    from hotset.training.processes import wait_for_all

    n_ctx, held_out = training.n_ctx, texts.held_out
    sources: list[WeightedText] = []
    held: list[list[int]] = []
    if held_out is not None:
        ids = engine.tokenizer.encode(read_text(held_out, "--held-out"))
        held = split_held_out(ids, n_ctx, whole=True)[1]
    for file, weight in map(parse_text, texts.text or []):
        ids = engine.tokenizer.encode(read_text(file, "--text"), add_special=True)
        kept, rest = (ids, []) if held_out is not None else split_held_out(ids, n_ctx)
        sources.append(WeightedText(str(file), joined([kept]), weight))
        held.extend(rest)
    openings = [source.tokens.tolist() for source in sources]
    asked = (("generate", texts.generate, None), ("on-policy", texts.on_policy, training.start))
    for option, value, adapters in asked:
        if value is None:
            continue
        amount, weight = parse_amount(value, f"--{option}")
        written = folder / ("generated.jsonl" if adapters is None else "on_policy.jsonl")
        if process == 0:
            seed = training.seed
            _write(path, adapters, written, amount, openings, chat=texts.chat, seed=seed, n_threads=n_threads)
        wait_for_all(n_processes)
        ids = joined(read_documents(written)).tolist()
        kept, rest = (ids, []) if held else split_held_out(ids, n_ctx)
        sources.append(WeightedText(f"--{option}", joined([kept]), weight))
        held.extend(rest)
    return sources, held


def _write(
    path: Path,
    adapters: Path | None,
    written: Path,
    n_tokens: int,
    openings: list[list[int]],
    *,
    chat: float,
    seed: int,
    n_threads: int,
) -> None:
    """Write text of the model, or of the student that the adapters make from it."""
    if sum(map(len, writing.read_documents(written))) >= n_tokens:
        return
    with contextlib.ExitStack() as stack:
        if adapters is not None:  # a folder for the student and the files that hotset.load puts next to it
            place = stack.enter_context(tempfile.TemporaryDirectory(dir=written.parent))
            student = Path(place) / "student.gguf"
            _merge(path, adapters, student, "q8_0")
            path = student
        settings = LoadSettings(n_threads=n_threads, device="cpu", n_seqs=writing.N_SEQUENCES)
        opened = stack.enter_context(open_model(path, settings))
        opened = opened.with_settings(n_ctx=writing.longest(opened.config))
        engine = stack.enter_context(load_opened(opened))
        bar = stack.enter_context(ProgressBar())
        writing.generate(engine, written, n_tokens, texts=openings, chat=chat, seed=seed, progress=bar)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise HotsetError(f"training needs PyTorch; install it with: {install_command('train')}") from None
    return torch


def _train(run: Training, eval_every: int, save_every: int, *, show: bool) -> Evaluation | None:
    last: list[Evaluation] = []
    with ProgressBar() as bar:

        def report(evaluation: Evaluation) -> None:
            last.append(evaluation)
            layers = evaluation.idle_per_layer
            bar.say(
                f"{evaluation.tokens:9d} tokens, {evaluation.seconds / 60:5.1f} min: "
                f"PPL {evaluation.ppl:.2f} (teacher {evaluation.teacher_ppl:.2f}), KL {evaluation.kl:.3f}, "
                f"top-1 {percent(evaluation.top1)}, idle {percent(evaluation.idle)} "
                f"({percent(min(layers))} to {percent(max(layers))})"
            )

        def stepped(run: Training) -> None:
            if not show:
                return
            if run.settings.hours is None:
                n_tokens = run.settings.n_tokens
                bar.advance("training", min(run.tokens, n_tokens), n_tokens, "tokens")
            else:
                seconds = round(3600 * run.settings.hours)
                bar.advance("training", min(round(run.seconds), seconds), seconds, "seconds")

        run.prepare(bar if show else None)
        stepped(run)
        run.run(eval_every=eval_every, save_every=save_every, on_step=stepped, on_eval=report)
    return last[-1] if last else None


def _merge(
    path: Path,
    adapters: Path,
    target: Path,
    type: str,
    sampling: Mapping[str, Any] | None = None,
    imatrix: Path | None = None,
) -> None:
    opened = TrainedAdapters.open(adapters)
    importance = None if imatrix is None else ImportanceMatrix.open(imatrix)
    with open_gguf(path) as gguf, ProgressBar() as bar:
        merge(gguf, opened, target, MERGED_TYPES[type], bar, sampling, importance)


def _sampling(texts: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of NAME=VALUE. Raises BadParameter."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in KEYS.values():
            known = ", ".join(sorted(KEYS.values()))
            raise typer.BadParameter(f"'{name}' must be one of {known}.", param_hint="--sampling")
        try:
            found[name] = PARAMETERS[name].checked(float(value) if "." in value else int(value))
        except ValueError:  # InvalidRequestError is one
            raise typer.BadParameter(
                f"'{value}' is not a value of {name}.", param_hint="--sampling"
            ) from None
    return found
