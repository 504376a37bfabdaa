"""`hotset sparse report`: plots of a profile and of a text's activity on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.console import print_json, read_text, say
from hotset.cli.profile import loaded_exact, mean_share, sequences
from hotset.cli.progress import ProgressBar
from hotset.cli.values import one_of
from hotset.errors import InvalidRequestError, ModelNotFoundError
from hotset.files import check_output, missing, write_whole
from hotset.loader.build import open_model
from hotset.report.activity import GRID, PUBLISHED, Observer, curves_of, median
from hotset.report.bars import percent
from hotset.report.experts import drift_of, hotness_of
from hotset.report.page import PageHeading, html_page, image
from hotset.report.plots import plots_of, plots_of_experts, require_matplotlib
from hotset.sparsity.profile import HOT_MASS, Counter, Profile, profile_path
from hotset.sparsity.recorder import record
from hotset.sparsity.sidecar import fingerprint, stem_of
from hotset.sparsity.taps import over
from hotset.sparsity.trace import RouteTrace
from hotset.storage import resolve, store
from hotset.units import human_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from hotset.model.config import ModelConfig
    from hotset.report.activity import LayerCurves, TextActivity
    from hotset.report.experts import ExpertDrift, ExpertHotness
    from hotset.report.page import PageHeading
    from hotset.sparsity.profile import Profile
    from hotset.sparsity.trace import RouteTrace

_TOKENS = 4096  # default tokens of the text: enough for smooth plots


def report(
    model: options.ModelName,
    file: Annotated[
        Path | None,
        options.option("--file -f", "Text for overlap and co-activation.", exists=True, dir_okay=False),
    ] = None,
    profile: Annotated[
        Path | None, options.option("--profile", "Its profile.", usual="next to the model", **options.FILE)
    ] = None,
    output: Annotated[
        Path | None,
        options.option("--output -o", "The page to write.", usual="NAME.report.html", dir_okay=False),
    ] = None,
    images: Annotated[
        list[str] | None,
        options.option("--images", "Write the plots as images too; repeatable.", kind=one_of("png", "svg")),
    ] = None,
    n_tokens: Annotated[int, options.option("--tokens", "Most tokens of the text.", min=2)] = _TOKENS,
    json: options.Json = False,
    *,
    watching: options.ObservationOptions,
) -> None:
    """Draw which neurons fire and which experts are chosen, as one HTML page."""
    kinds = list(dict.fromkeys(images or []))
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"it must end with .html, not {output}.", param_hint="-o")
    drawn = not json or output is not None or bool(kinds)
    if drawn:
        require_matplotlib()  # before the work, not after it
    text = None if file is None else read_text(file, "-f")
    if text is not None and not text.strip():
        raise InvalidRequestError(f"the text in {file} is empty; give some to run through the model")

    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
    target = output or Path(f"{stem_of(path)}.report.html")
    if drawn:
        check_output(target, store.shards(path))
    config, counted, source = _open(path, profile, watching, needed=text is None)
    run: TextActivity | None = None
    trace: RouteTrace | None = None
    if text is not None:
        if config.has_experts:
            counts, trace = _run_experts(path, text, n_tokens, watching)
        else:
            counts, run = _run(path, text, counted, n_tokens, watching)
        if counted is None:
            counted, source = counts, str(file)
    assert counted is not None  # _open raises if there is neither profile nor text

    curves = curves_of(counted) if config.has_zeros else []
    seen = _Seen(path, config, counted, source, curves, run, trace)
    written = _write(seen, target, kinds) if drawn else []
    if json:
        print_json(_as_json(seen, written))
        return
    for place in written:
        say(f"Wrote {place} ({human_size(place.stat().st_size)}).")
    if text is None:
        say("Without a text (-f) there is no overlap and no co-activation or drift in it.", dim=True)


def _open(
    path: Path, profile: Path | None, watching: options.ObservationOptions, *, needed: bool
) -> tuple[ModelConfig, Profile | None, str]:
    """Return the model's configuration, its profile, and the profile's source. Raises InvalidRequestError."""
    with open_model(path, watching.settings()) as opened:
        config = opened.config
        if not config.has_zeros and not config.has_experts:
            raise InvalidRequestError(
                f"the activation of {path.name} is {config.activation.gate}, which has no zeros: every "
                "neuron fires for every token, and there is nothing to draw; if the file is a ReLU model "
                "that does not say so, name its activation (--activation relu)"
            )
        place = profile or profile_path(path)
        if not place.is_file():
            if profile is not None or needed:
                remedy = f"make one with 'hotset sparse profile {path} -f TEXT', or give a text here with -f"
                raise ModelNotFoundError(missing(place, "profile", remedy))
            return config, None, ""
        counted = Profile.open(place)
        counted.check_model(fingerprint(opened.gguf), config.n_ff)
        return config, counted, str(place)


def _run(
    path: Path, text: str, profile: Profile | None, n_tokens: int, watching: options.ObservationOptions
) -> tuple[Profile, TextActivity]:
    """Return the counts over a text, and the activity that only a run shows."""
    with loaded_exact(path, watching) as loaded:
        tokens = sequences(loaded, text, watching.n_ctx, n_tokens)
        pilot = None
        if profile is not None:
            pilot = [profile.frequencies(i) for i in range(loaded.config.n_layer)]
        observer = Observer(loaded.config.n_ff, pilot=pilot)
        with ProgressBar() as bar:
            progress = bar.counting("report", "tokens")
            for begins, values in over(loaded.tap_steps, tokens, observer.names, progress=progress):
                if begins:
                    observer.start()
                observer.add(values)
        counts = Profile(observer.counts, observer.n_tokens, fingerprint(loaded.gguf), ())
    return counts, observer.result()


def _run_experts(
    path: Path, text: str, n_tokens: int, watching: options.ObservationOptions
) -> tuple[Profile, RouteTrace]:
    """Return a profile over a text, and the trace of its experts."""
    with loaded_exact(path, watching) as loaded:
        counter = Counter(loaded.config)

        def steps(ids: Sequence[int] | np.ndarray, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
            for values in loaded.tap_steps(ids, tuple(dict.fromkeys((*names, *counter.names)))):
                counter.add(values)
                yield values

        tokens = sequences(loaded, text, watching.n_ctx, n_tokens)
        model = fingerprint(loaded.gguf)
        with ProgressBar() as bar:
            trace = record(
                steps, loaded.graph, loaded.weights, tokens,
                model=model, name=path.name, progress=bar.counting("report", "tokens"),
            )  # fmt: skip
    assert isinstance(trace, RouteTrace), "the model has experts"
    return counter.profile(model), trace


@dataclass(frozen=True)
class _Seen:
    """The data of a page: a model, its profile with the source, and the activity over a text.

    For an MoE model the activity is the experts of each token, otherwise the neurons that fire together.
    curves: empty if every neuron fires.
    """

    path: Path
    config: ModelConfig
    profile: Profile
    source: str
    curves: list[LayerCurves]
    run: TextActivity | None
    trace: RouteTrace | None

    @property
    def hotness(self) -> ExpertHotness | None:
        """Return the counts of experts; None if there are no counted experts."""
        used = [layer.experts.n_used for layer in self.config.layers if layer.experts is not None]
        return hotness_of(self.profile, used[0]) if used and self.profile.experts else None

    @property
    def drift(self) -> ExpertDrift | None:
        return None if self.trace is None else drift_of(self.trace)


def _write(seen: _Seen, target: Path, kinds: list[str]) -> list[Path]:
    plots = plots_of(seen.curves, seen.run) if seen.curves else []
    if (hotness := seen.hotness) is not None:
        plots += plots_of_experts(hotness, seen.drift)
    contents = {target: html_page(_facts(seen), plots).encode()}
    for kind in kinds:
        for plot in plots:
            contents[target.with_name(f"{target.stem}-{plot.name}.{kind}")] = image(plot, kind)  # type: ignore[arg-type]
    write_whole(contents, "choose another place with -o")
    return list(contents)


def _facts(seen: _Seen) -> PageHeading:
    """Return the heading of the page."""
    path, config, profile, curves, run = seen.path, seen.config, seen.profile, seen.curves, seen.run
    n_ff = sorted(set(config.n_ff) - {0})
    neurons = str(n_ff[0]) if len(n_ff) == 1 else f"{n_ff[0]} to {n_ff[-1]}"
    own = sum(map(bool, config.n_ff))
    layers = f"{own} layers" if own == config.n_layer else f"{config.n_layer} layers, {own} of them"
    notes = [
        f"{path.name}: {config.architecture}, {layers} of {neurons} neurons, activation "
        f"{config.activation.gate or config.activation.up}.",
        f"How often neurons fire was counted over {profile.n_tokens} tokens ({Path(seen.source).name}).",
    ]
    numbers = [(percent(mean_share(profile)), "of the neurons fire for a token, mean")]
    if curves:
        hot = median([one.summary.hot_share for one in curves])
        numbers.append(
            (percent(hot), f"of a layer's neurons make {percent(HOT_MASS)} of its activations, median layer")
        )
    if profile.experts:
        hot = median([one.experts.hot_share for one in profile.summary() if one.experts is not None])
        numbers.append(
            (percent(hot), f"of a layer's experts get {percent(HOT_MASS)} of its choices, median layer")
        )
    if seen.trace is not None and (drift := seen.drift) is not None:
        notes.append(f"Overlap and drift of experts are those of {drift.n_tokens} tokens of a text.")
        overlap = median(drift.overlap[:, 0])
        numbers.append((percent(overlap), "of a token's experts are those of the token before, median layer"))
    if run is not None:
        notes.append(
            f"Overlap and co-activation are those of {run.n_tokens} tokens of a text, in {run.n_sequences} "
            f"sequence{'s' if run.n_sequences != 1 else ''}."
        )
        overlap = median([layer.overlap[0] for layer in run.layers])
        numbers.append((percent(overlap), "of a token's neurons fired for the token before, median layer"))
        together = median([layer.coactivation for layer in run.layers])
        numbers.append((f"{together:.3f}", "mean correlation |φ| of sampled neurons, median layer"))
    return PageHeading(path.name.removesuffix(".gguf"), notes, numbers)


def _as_json(seen: _Seen, written: list[Path]) -> dict[str, Any]:
    hotness, drift = seen.hotness, seen.drift
    return {
        "model": str(seen.path),
        "architecture": seen.config.architecture,
        "counted": seen.source,
        "n_tokens": seen.profile.n_tokens,
        "active_share": mean_share(seen.profile),
        "published_hot_share": PUBLISHED,
        "grid": GRID.tolist(),
        "layers": [one.as_dict() for one in seen.curves],
        "run": None if seen.run is None else seen.run.as_dict(),
        "experts": None if hotness is None else hotness.as_dict(),
        "drift": None if drift is None else drift.as_dict(),
        "files": [str(place) for place in written],
    }
