"""`hotset bench`: llama-bench's options and table, with the reached share of the memory's read rate.

Like llama-bench, it uses random tokens, no tokenizer and no sampling. The tokens pass through the engine and
its thread, just like an answer's. `pp` is the prefill of a prompt, `tg` the generation of single tokens,
`@ d` a cache with d tokens before. Generation reads every weight once per token, except the weights of
skipped neurons. So the read rate of the mapped file is its ceiling. The bench measures this rate first, and
again between the repetitions, because the ceiling of a shared machine changes.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import hotset
from hotset.backends.base import BLOCK_SIZE
from hotset.backends.cpu.processor import read_bandwidth
from hotset.backends.registry import words_with
from hotset.backends.timings import Timed
from hotset.cli import options
from hotset.cli.console import print_choice, print_json, print_memory, print_table, read_text, say
from hotset.cli.default_model import default_model
from hotset.cli.doctor import package_version
from hotset.cli.models import describe
from hotset.cli.progress import ProgressBar
from hotset.cli.values import one_of, some_of
from hotset.energy import EnergyCounters
from hotset.engine.counters import Counters
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine, ModelTraits
from hotset.engine.sampler import Sampler, SamplingParams
from hotset.engine.sequence import Sequence
from hotset.engine.step_sizes import measure_steps
from hotset.escaping import LONGEST_CELL, escaped
from hotset.formats.mapped import MappedFile
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.model.cost import kv_names
from hotset.offload.cache_stats import CacheStats
from hotset.placement.machine import processor_name
from hotset.report.bars import percent
from hotset.report.disk import disk_dict, disk_line
from hotset.report.speculation import speculation_dict, speculation_line
from hotset.storage import resolve
from hotset.units import human_count, human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.backends.base import Backend, StepStats
    from hotset.engine.engine import ThresholdedTokens
    from hotset.engine.sequence import Sequence
    from hotset.engine.speculation import Speculator
    from hotset.offload.weight_store import StoredWeights
    from hotset.settings import LoadSettings

_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL", help=f"{options.MODEL_HELP} Several make one table; also as -m MODEL,MODEL."
    ),
]
_StepTokens = Annotated[
    str | None,
    typer.Option("--step-tokens", metavar="N,...", help="Only measure the time of steps of N tokens."),
]
_FORMATS = ("md", "csv", "json", "jsonl")
_KV_TYPES = some_of(*LOAD_PARAMETERS["kv_type"].choices, listed=LOAD_PARAMETERS["kv_type"].listed)
_SEED = 0
_N_COUNTED = 32  # generated tokens whose neurons are counted


@dataclass(frozen=True)
class Test:
    """A test: n_prompt tokens at once, then n_gen one by one, after n_depth tokens that are not timed."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_ctx(self) -> int:
        return self.n_depth + self.n_prompt + self.n_gen


@dataclass(frozen=True)
class Drafted:
    """Counts of drafted tokens. steps: in which an answer got tokens. tokens: of those steps."""

    tokens: int
    steps: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, now: Counters, before: Counters) -> Drafted:
        """Return the difference between two states of an engine's counters."""
        names = ("generated_tokens", "answer_steps", "drafted_tokens", "accepted_tokens")
        return cls(*(getattr(now, name) - getattr(before, name) for name in names))


@dataclass
class Measurement:
    """The results of a test: seconds of each repetition, and bytes per second read of the mapped file.

    stats: of the generating steps of the warm-up, or of prompt steps if nothing is generated. Repetitions
    have the same tokens and counts, so that counting them would only cost time. drafted: counts of drafted
    tokens in all repetitions. disk: of each repetition under a RAM budget. joules: that the processor used in
    each repetition.
    """

    seconds: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)
    drafted: Drafted | None = None
    disk: list[CacheStats] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """Options for the tests, each of which is a number of tokens."""

    prompt: Annotated[
        str, typer.Option("--n-prompt", metavar="N,...", help="Tokens of the prompt; 0: no test of prompts.")
    ] = "512"
    gen: Annotated[
        str,
        typer.Option("--n-gen", metavar="N,...", help="Tokens to generate; 0: no test of generation."),
    ] = "128"
    both: Annotated[
        list[str] | None,
        typer.Option(
            "-pg", metavar="PP,TG", help="A prompt of PP tokens, then TG generated ones; repeatable."
        ),
    ] = None
    depth: Annotated[
        str, typer.Option("--n-depth", metavar="N,...", help="Tokens in the KV cache before the test.")
    ] = "0"

    @property
    def depths(self) -> list[int]:
        return _integers(self.depth, "--n-depth")

    def tests(self) -> list[Test]:
        """Return the tests of these options."""
        prompts, gens = _integers(self.prompt, "--n-prompt"), _integers(self.gen, "--n-gen")
        return _tests(self.depths, prompts, gens, self.both or [])


@dataclass(frozen=True, kw_only=True)
class TestRunOptions:
    """Options for running each test."""

    threads: Annotated[str, options.load_option("n_threads", kind=None, metavar="N,...")] = ""
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Runs of each test.")] = 5
    batch: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Tokens of a prompt per step.")] = (
        2048
    )
    kv_type: Annotated[str, options.load_option("kv_type", "", usual="", kind=_KV_TYPES)] = "f16"
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            exists=True,
            dir_okay=False,
            help="Text for depth and prompt, continued by the likeliest tokens.",
            show_default="random tokens",
        ),
    ] = None

    @property
    def n_threads(self) -> list[int] | list[None]:
        return _integers(self.threads, "-t", minimum=1) if self.threads else [None]

    @property
    def kv_types(self) -> list[str]:
        return self.kv_type.split(",")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options for the measurements and their output."""

    energy: Annotated[
        bool,
        typer.Option(
            "--energy", help="Also measure joules per token, if the processor's counters can be read."
        ),
    ] = False
    timings: Annotated[
        bool,
        typer.Option(
            "--timings", help="After each test, run it again and print the device's time by operation."
        ),
    ] = False
    format: Annotated[str, options.option("--format", "Format of the results.", kind=one_of(*_FORMATS))] = (
        "md"
    )
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False

    @property
    def chosen_format(self) -> str:
        return "json" if self.json else self.format


def bench(
    models: _Models = None,
    *,
    of: TestOptions,
    runs: TestRunOptions,
    step_tokens: _StepTokens = None,
    results: ResultOptions,
    loading: options.BenchOptions,
) -> None:
    """Measure speed with llama-bench's tests, and the reached share of the memory bandwidth."""
    format, energy, file = results.chosen_format, results.energy, runs.file
    depths, names = of.depths, _names(models or [default_model()])
    n_threads, kv_types = runs.n_threads, runs.kv_types
    if step_tokens is not None:
        refused = "--energy" if energy else "--speculate" if loading.asks_for_drafts else "MODEL"
        if refused != "MODEL" or len(names) > 1:
            raise typer.BadParameter(
                "it cannot be combined with --step-tokens, which measures one model.", param_hint=refused
            )
        sizes = _integers(step_tokens, "--step-tokens", minimum=1)
        options_of_one = {"n_threads": n_threads[0], "kv_type": kv_types[0], "max_batch": max(512, *sizes)}
        loading_one = partial(loading.settings, n_ctx=depths[0] + max(sizes), **options_of_one)
        _bench_steps(
            names[0], loading_one, sizes, depths[0], runs.repetitions, as_json=format in ("json", "jsonl")
        )
        return
    tests = of.tests()
    if loading.asks_for_drafts and file is None:
        raise typer.BadParameter(
            "random tokens say nothing about drafts: give a text with -f.", param_hint="--speculate"
        )
    with ProgressBar() as bar:
        settings = loading.settings(n_ctx=max(test.n_ctx for test in tests), progress=bar)
        paths = [resolve(name, progress=bar) for name in names]
    printer = _PRINTERS[format]()
    printer.shows_sparsity = len(paths) > 1
    counters = _energy_counters() if energy else None
    for i, (path, n, kv) in enumerate(product(paths, n_threads, kv_types)):
        with hotset.load(path, settings, n_threads=n, kv_type=kv) as loaded:
            read = _bandwidth_reader(loaded, path, loaded.backend.n_threads or 1)
            if i % (len(n_threads) * len(kv_types)) == 0:
                print_choice(loaded)
                print_memory(loaded)
            if not i:
                measured = statistics.median(read() for _ in range(3))
                printer.bandwidth(measured, loaded.backend.n_threads or 1)
            engine = loaded.engine
            conditions = Conditions(
                runs.repetitions, runs.batch, engine.collect_stats, engine.thresholded, engine.speculator,
                _tokens_of(loaded, file, max(test.n_depth + test.n_prompt for test in tests)), counters,
            )  # fmt: skip
            facts = _facts(loaded, path, runs.batch) | ({"joules_per_token": None} if energy else {})
            _bench_tests(loaded, facts, tests, conditions, read, printer, timings=results.timings)
    printer.end()


def _names(given: list[str]) -> list[str]:
    """Return the models of an argument such as a.gguf,b.gguf; a file may have a comma in its name."""
    names = [name for one in given for name in ([one] if Path(one).exists() else one.split(",")) if name]
    if not names:
        raise typer.BadParameter("it must name a model.", param_hint="MODEL")
    return names


def _energy_counters() -> EnergyCounters | None:
    """Return the energy counters. If they cannot be read, print the reason and return None."""
    try:
        return EnergyCounters()
    except OSError as error:
        say(f"energy is not measured: {error}")
        return None


def _tests(depths: list[int], prompts: list[int], gens: list[int], both: list[str]) -> list[Test]:
    plain = [(p, 0) for p in prompts] + [(0, n) for n in gens]
    pairs = [pair for pair in [*plain, *map(_pair, both)] if any(pair)]
    if not pairs:
        raise typer.BadParameter("there is nothing to measure: give --n-prompt or --n-gen.")
    return [Test(p, n, d) for d in depths for p, n in pairs]


def _bench_tests(
    model: Model,
    facts: dict[str, Any],
    tests: list[Test],
    conditions: Conditions,
    read: Callable[[], float],
    printer: Any,
    *,
    timings: bool = False,
) -> None:
    """Print a row for each test. Nothing is drawn while a repetition runs."""
    progress = ProgressBar(transient=True, auto_refresh=False)
    for test in tests:
        on_run = progress.counting(test.name, "runs")
        result = measure(model.backend, test, conditions, read, stored=model.stored, on_run=on_run)
        progress.clear()
        entry = _entry(facts, test, result, *_touched(model, test, result))
        of_operations = {"operations": _operations(model.backend, test, conditions)} if timings else {}
        printer.row(entry | _drafts(model, result) | _disk(model, test, result) | of_operations)


def _operations(backend: Backend, test: Test, conditions: Conditions) -> list[dict[str, Any]]:
    """Run the test once more, and return the times of its most frequent steps on each device.

    Writing timestamps takes time, so this run is not one of the test's. Wrong usage without such a device.
    """
    if not isinstance(backend, Timed) or not backend.start_timing():
        devices = " or ".join(words_with("timings")) or "of a backend that measures its operations"
        raise typer.BadParameter(f"it requires --device {devices}.", param_hint="--timings")
    try:
        measure(backend, test, replace(conditions, repetitions=1, collect_stats=False), lambda: math.nan)
    finally:
        taken = backend.end_timing()
    taken.sort(key=lambda one: (one.n_steps, one.n_tokens))
    return [asdict(one) for one in {one.device: one for one in taken}.values()]


def _bench_steps(
    name: str,
    loading: Callable[..., LoadSettings],
    sizes: list[int],
    depth: int,
    repetitions: int,
    *,
    as_json: bool,
) -> None:
    """Print the times of steps of these numbers of tokens of one sequence."""
    with ProgressBar() as bar:
        settings = loading(progress=bar)
        path = resolve(name, progress=bar)
    with hotset.load(path, settings) as model:
        print_choice(model)
        print_memory(model)
        found = measure_steps(
            model.backend, sizes, depth=depth, repetitions=repetitions,
            thresholded=model.engine.thresholded != "none",
        )  # fmt: skip
    if as_json:
        print_json([time._asdict() for time in found])
        return
    one = found[0]
    print_table(
        [">tokens", ">ms", f">÷ {one.n_tokens}", ">ms per token"],
        [[str(n), f"{ms:.2f}", f"{ms / one.ms:.2f}", f"{ms / n:.2f}"] for n, ms in found],
    )


def _integers(text: str, option: str, minimum: int = 0) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < minimum:
        raise typer.BadParameter(
            f"'{text}' is not a list of numbers such as 128 or 128,512.", param_hint=option
        )
    return numbers


def _pair(text: str) -> tuple[int, int]:
    numbers = _integers(text, "-pg")
    if len(numbers) != 2:
        raise typer.BadParameter(f"'{text}' is not PP,TG such as 512,128.", param_hint="-pg")
    return numbers[0], numbers[1]


def _mean_depth(test: Test) -> float:
    """Return the number of tokens in the cache before an average generated one."""
    return test.n_depth + test.n_prompt + max(test.n_gen - 1, 0) / 2


# -- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """The conditions of a test.

    batch: most tokens of a step. collect_stats: the warm-up generates some more tokens, and counts which
    neurons fire. speculator: drafts tokens. text: tokens for depth and prompt, whose likeliest continuation
    is the answer; None: random tokens. energy: counters to read.
    """

    repetitions: int
    batch: int
    collect_stats: bool = False
    thresholded: ThresholdedTokens = "none"
    speculator: Speculator | None = None
    text: list[int] | None = None
    energy: EnergyCounters | None = None


def measure(
    backend: Backend,
    test: Test,
    conditions: Conditions,
    read_bandwidth: Callable[[], float],
    *,
    stored: StoredWeights | None = None,
    on_run: Callable[[int, int], None] = lambda *_: None,
) -> Measurement:
    """Run the test after a warm-up, and return the results. The warm-up computes the depth for the cache.

    stored: weights under a RAM budget. on_run: called with the number of finished runs, and of all runs.
    """
    repetitions, collect_stats = conditions.repetitions, conditions.collect_stats
    on_run(0, repetitions + 1)
    with closing(_Requests(backend, test, conditions)) as run:
        run.engine.collect_stats = collect_stats
        run.once(min(test.n_gen, _N_COUNTED if collect_stats else 2))
        result = Measurement(stats=run.stats)
        on_run(1, repetitions + 1)
        run.engine.collect_stats, run.engine.step_stats = False, None
        counted = run.engine.counters()
        for i in range(repetitions):
            if test.n_gen:
                result.bandwidth.append(read_bandwidth())
            before = stored.counts() if stored else None
            result.seconds.append(run.once(test.n_gen))
            result.joules += run.joules
            if stored is not None and before is not None:
                result.disk.append(stored.counts() - before)
            on_run(i + 2, repetitions + 1)
        if conditions.speculator is not None:
            result.drafted = Drafted.of(run.engine.counters(), counted)
    if not result.bandwidth:
        result.bandwidth.append(read_bandwidth())
    return result


class _Requests:
    """Requests of random tokens or of a text, one after the other, to an engine that its thread drives.

    The time is measured between events of the engine. No thread waits for each token: on two cores, waking
    one for each token takes 2 to 4% of the speed from the next step (decision 021). Benchmarks of other
    engines have no such reader either.
    """

    def __init__(self, backend: Backend, test: Test, conditions: Conditions) -> None:
        self.test, self._text = test, conditions.text
        self.n_vocab = backend.n_vocab
        n_ctx = min(max(test.n_ctx, 1) + 2, backend.n_blocks * BLOCK_SIZE)
        self.engine = Engine(
            backend, n_ctx, 1, max_batch=conditions.batch, prompt_seconds=math.inf,
            traits=ModelTraits(thresholded=conditions.thresholded), speculator=conditions.speculator,
        )  # fmt: skip
        self.stats: list[StepStats] = []  # of the steps of the latest request
        self.joules: list[float] = []  # of its timed part; empty if they are not counted
        self._energy = conditions.energy
        self._thread = EngineThread(self.engine)
        self._random = np.random.default_rng(_SEED)
        self._depth = self._draw(test.n_depth) if self._text is None else self._text[: test.n_depth]

    def close(self) -> None:
        self._thread.close()

    def once(self, n_gen: int) -> float:
        """Return the seconds of the prompt and of n_gen tokens after it."""
        test = self.test
        if self._text is not None:
            tokens = self._text[: max(test.n_depth + test.n_prompt, 1)]
        else:
            tokens = [*self._depth, *self._draw(test.n_prompt)] or self._draw(1)
        sequence = self._sequence(tokens, n_gen)
        started = time.perf_counter()
        if self._energy is not None:
            self._energy.joules()
        self._thread.submit(sequence)
        self._thread.wait_for_end(sequence)
        joules = 0.0 if self._energy is None else self._energy.joules()
        watts = joules / (time.perf_counter() - started)
        events = [self._thread.next_event(sequence)]
        while events[-1].finish_reason is None:
            events.append(self._thread.next_event(sequence))
        if sequence.error is not None:
            raise sequence.error
        self.stats = sequence.step_stats[1:] or [s for s in (self.engine.step_stats,) if s is not None]
        seconds = 0.0
        if test.n_prompt:  # includes the end of the depth: it fills no KV block, and is computed again
            seconds = events[0].time - sequence.started
            seconds *= test.n_prompt / (sequence.n_prompt - sequence.n_reused)
        if n_gen:
            # The prompt gave the first token, so one more is generated, unless the cache is full before.
            start = events[0].time if len(events) > 1 else sequence.started
            seconds += n_gen * (events[-1].time - start) / max(len(events) - 1, 1)
        if self._energy is not None:
            self.joules = [watts * seconds]
        return seconds

    def _sequence(self, tokens: list[int], n_gen: int) -> Sequence:
        class Drawn(Sampler):
            """A sampler that draws random tokens, like llama-bench."""

            left = iter(self._draw(n_gen + 1))

            def take(self, token: int) -> int:  # noqa: ARG002
                return next(self.left)

        reuse = self.test.n_depth > 0 and not (self._text and self.test.n_prompt)
        if not n_gen:
            return self.engine.prepare_score(
                tokens, lambda *_: None, first=len(tokens) - 1, reuse_prefix=reuse
            )
        params = SamplingParams(temperature=0, max_tokens=n_gen + 1)
        sequence = self.engine.prepare(tokens, params, reuse_prefix=reuse)
        if self._text is None:
            sequence.sampler = Drawn(params, self.n_vocab)
        return sequence

    def _draw(self, n: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, self.n_vocab, n).tolist()
        return tokens


def _bandwidth_reader(model: Model, path: Path, n_threads: int) -> Callable[[], float]:
    """Return a function that reads the file and returns bytes per second, the best of three runs.

    It reads the mapped file (at most 2 GB of it), or the resident part. An interruption is not a ceiling.
    """
    if model.stored is not None:
        resident = model.stored.resident
        return lambda: max(read_bandwidth(resident, n_threads) for _ in range(3))
    with path.open("rb") as file:
        mapped = np.frombuffer(MappedFile(path, file.fileno()), np.uint8)[: 2 << 30]
    return lambda: max(read_bandwidth(mapped, n_threads) for _ in range(3))


# -- reporting -----------------------------------------------------------------------------------


def _touched(model: Model, test: Test, result: Measurement) -> tuple[float, float | None]:
    """Return the bytes that a generated token touched, and the share of neurons that fired for a token."""
    summary = model.summary(result.stats)
    depth = _mean_depth(test)
    if summary is None:
        return model.cost.bytes_per_token(depth, model.kv_type), None
    if not test.n_gen:
        return model.cost.bytes_per_token(depth, model.kv_type), summary.active_share
    n_bytes = summary.bytes_touched_per_token + model.cost.kv_bytes_read(depth, model.kv_type)
    return n_bytes, summary.active_share


def _drafts(model: Model, result: Measurement) -> dict[str, Any]:
    """Return the counts of drafted tokens; {} without speculation."""
    found, speculator = result.drafted, model.engine.speculator
    if found is None or speculator is None:
        return {}
    facts = speculation_dict(
        speculator.drafter.name, found.drafted, found.accepted, speculator.step_times.measured
    )
    return {"tokens_per_step": found.tokens / max(found.steps, 1), "speculation": facts}


def _tokens_of(model: Model, file: Path | None, n: int) -> list[int] | None:
    """Return the first tokens of a text. Wrong usage if it has fewer than n."""
    if file is None:
        return None
    tokens = model.tokenizer.encode(read_text(file, "-f")[: 64 * max(n, 1)])[: max(n, 1)]
    if len(tokens) < n:
        raise typer.BadParameter(
            f"it has {len(tokens)} tokens, and {n} are needed for --n-depth and --n-prompt.", param_hint="-f"
        )
    return tokens


def _disk(model: Model, test: Test, result: Measurement) -> dict[str, Any]:
    """Return the bytes read from the disk in all repetitions; {} if files are mapped."""
    if model.ram is None or not result.disk:
        return {}
    total = sum(result.disk, CacheStats())
    timed = test.n_prompt + test.n_gen
    counted = timed + (test.n_prompt == 0)  # includes the first generated token, which is not timed
    return disk_dict(total, counted * len(result.seconds), sum(result.seconds) * counted / timed, model.ram)


def _facts(model: Model, path: Path, batch: int) -> dict[str, Any]:
    """Return the fields that all entries of a model share, under llama-bench's names."""
    facts = describe(model.gguf, path)
    main_type = next(iter(facts["types"]))
    type_k, type_v = kv_names(model.kv_type)
    return {
        "build_commit": f"hotset {package_version('hotset') or '(source)'}",
        "cpu_info": processor_name(),
        "gpu_info": ", ".join(model.placement.devices) if model.placement else "",
        "n_gpu_layers": _n_gpu_layers(model),
        "backends": model.backend.name.upper(),
        "model_filename": str(path),
        "model_type": f"{facts['architecture']} {human_count(facts['parameters'])} {main_type}",
        "model_size": sum(kind["bytes"] for kind in facts["types"].values()),  # of tensors, not the file
        "model_n_params": facts["parameters"],
        "n_batch": batch,
        "n_ubatch": min(batch, model.backend.max_batch),
        "n_threads": model.backend.n_threads or 1,
        "type_k": type_k,
        "type_v": type_v,
        "sparsity": model.sparsity.mode,
        "predictor": str(model.sparsity.spec) if model.sparsity.spec else None,
    }


def _n_gpu_layers(model: Model) -> int:
    return len(model.placement.layers) - model.placement.n_cpu_layers if model.placement else 0


def _entry(
    facts: dict[str, Any],
    test: Test,
    result: Measurement,
    bytes_per_token: float,
    active_share: float | None = None,
) -> dict[str, Any]:
    """Return one line of the table. ts: tokens per second; ns: nanoseconds of a repetition."""
    n = test.n_prompt + test.n_gen
    speeds = [n / seconds for seconds in result.seconds]
    nanoseconds = [int(seconds * 1e9) for seconds in result.seconds]
    bandwidth = statistics.median(result.bandwidth)
    average = statistics.fmean(speeds)
    if result.joules:
        facts = facts | {"joules_per_token": statistics.median(result.joules) / n}
    return facts | {
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": int(statistics.fmean(nanoseconds)),
        "stddev_ns": int(_deviation(nanoseconds)),
        "avg_ts": average,
        "stddev_ts": _deviation(speeds),
        "samples_ns": nanoseconds,
        "samples_ts": speeds,
        "read_bandwidth": bandwidth,
        "bytes_per_token": int(bytes_per_token),
        "active_share": active_share,
        # The rate of this machine's memory limits no token that a device computes.
        "bandwidth_share": average * bytes_per_token / bandwidth
        if test.n_gen and not test.n_prompt and facts["backends"] == "CPU"
        else None,
    }


def _deviation(values: list[float] | list[int]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


class _Markdown:
    """A table like llama-bench's with more columns.

    They are the share of the read bandwidth that generation reached and, if neurons are skipped, the mode and
    the active share.
    """

    columns: tuple[str, ...] = (
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "cache",
        "test",
        "t/s",
        "of read",
    )
    widths: tuple[int, ...] = (22, 10, 8, 7, 7, 9, 14, 16, 7)
    sparse_columns = ("sparsity", "active")
    sparse_widths = (13, 6)
    energy_column = "J per token"

    shows_sparsity = False

    def __init__(self) -> None:
        self._started = False
        self._timed: list[tuple[str, dict[str, Any]]] = []  # the test, and times of its steps

    def bandwidth(self, measured: float, n_threads: int) -> None:
        plural = "s" if n_threads != 1 else ""
        print(
            f"read bandwidth of the mapped file: {measured / 1e9:.1f} GB/s with {n_threads} thread{plural}\n"
        )

    def row(self, entry: dict[str, Any]) -> None:
        if not self._started:
            self.shows_sparsity |= entry["sparsity"] != "dense"
            if self.shows_sparsity:
                self.columns += self.sparse_columns
                self.widths += self.sparse_widths
            if "joules_per_token" in entry:
                self.columns += (self.energy_column,)
                self.widths += (len(self.energy_column),)
            self._line(self.columns)
            rules = ["-" * width for width in self.widths]
            print(
                "| " + " | ".join(rule if i == 0 else rule[:-1] + ":" for i, rule in enumerate(rules)) + " |"
            )
            self._started = True
        size, share = entry["model_size"], entry["bandwidth_share"]
        cells: tuple[str, ...] = (
            entry["model_type"],
            human_size(size),
            human_count(entry["model_n_params"]),
            entry["backends"],
            str(entry["n_threads"]),
            "/".join(dict.fromkeys((entry["type_k"], entry["type_v"]))),
            Test(entry["n_prompt"], entry["n_gen"], entry["n_depth"]).name,
            f"{entry['avg_ts']:.2f} ± {entry['stddev_ts']:.2f}",
            f"{100 * share:.0f}%" if share is not None else "",
        )
        if self.shows_sparsity:
            cells += (entry["predictor"] or entry["sparsity"], percent(entry["active_share"]))
        if "joules_per_token" in entry:
            joules = entry["joules_per_token"]
            cells += ("" if joules is None else f"{joules:.3g}",)
        self._line(cells)
        if "speculation" in entry:
            say(speculation_line(entry["speculation"], entry["tokens_per_step"]), dim=True)
        if "disk_bytes_per_token" in entry:
            say(disk_line(entry), dim=True)
        self._timed += [(cells[6], times) for times in entry.get("operations", ())]

    def _line(self, cells: tuple[str, ...]) -> None:
        cells = tuple(escaped(cell, LONGEST_CELL).replace("|", "\\|") for cell in cells)
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self.widths, strict=True))
        ]
        print("| " + " | ".join(padded) + " |", flush=True)

    def end(self) -> None:
        for name, times in self._timed:
            _print_operations(name, times)


def _print_operations(test: str, times: dict[str, Any]) -> None:
    """Print a table of the operations of a test's steps (DeviceTimes)."""
    n_tokens, total, operations = times["n_tokens"], times["on_device"], times["operations"]
    n = sum(one["dispatches"] for one in operations)
    plural = "s" if n_tokens != 1 else ""
    print(
        f"\n{test}: a step of {n_tokens} token{plural} on {escaped(times['device'])}, "
        f"the mean of {times['n_steps']}: "
        f"{1e3 * total:.3f} ms on the device, {1e3 * times['on_host']:.3f} ms for the host; "
        f"{n} dispatches in {times['groups']} groups\n"
    )
    rows = []
    for one in operations:
        rate = one["weight_bytes"] / one["seconds"] / 1e9 if one["seconds"] else 0.0
        rows.append([
            one["operation"], one["kernel"], str(one["dispatches"]),
            f"{1e6 * one['seconds'] / max(one['dispatches'], 1):.2f}", f"{1e6 * one['seconds']:.1f}",
            percent(one["seconds"] / total if total else None), f"{rate:.0f}" if rate else "",
        ])  # fmt: skip
    columns = ["operation", "kernel", ">dispatches", ">µs each", ">µs", ">share", ">GB/s of weights"]
    print_table(columns, rows)


class _Json:
    shows_sparsity = True

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def bandwidth(self, measured: float, n_threads: int) -> None:
        say(f"read bandwidth of the mapped file: {measured / 1e9:.1f} GB/s, {n_threads} threads", dim=True)

    def row(self, entry: dict[str, Any]) -> None:
        self._entries.append(entry)

    def end(self) -> None:
        print_json(self._entries)


class _JsonLines(_Json):
    def row(self, entry: dict[str, Any]) -> None:
        import json

        print(json.dumps(entry), flush=True)

    def end(self) -> None:
        pass


class _Csv(_Json):
    def row(self, entry: dict[str, Any]) -> None:
        flat = {
            key: escaped(value) if isinstance(value, str) else value
            for key, value in entry.items()
            if not key.startswith("samples") and not isinstance(value, dict | list)
        }
        names = self._entries[0] if self._entries else flat
        writer = csv.DictWriter(sys.stdout, names, "", "ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
        if not self._entries:
            writer.writeheader()
        writer.writerow(flat)
        sys.stdout.flush()
        super().row(flat)

    def end(self) -> None:
        pass


_PRINTERS: dict[str, Any] = dict(zip(_FORMATS, (_Markdown, _Csv, _Json, _JsonLines), strict=True))
