"""`hotset sparse profile` and `hotset sparse reorder`: how often neurons fire, and a file in that order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from hotset.api import load_opened
from hotset.cli import options
from hotset.cli.console import print_json, print_table, read_text, say, say_note
from hotset.cli.progress import ProgressBar
from hotset.convert.reorder import reorder as write_reordered
from hotset.errors import InvalidRequestError, ModelNotFoundError
from hotset.files import check_folder, check_output, missing
from hotset.formats.gguf import open_gguf
from hotset.loader.build import open_model
from hotset.report.bars import percent
from hotset.report.layers import expert_table, profile_table
from hotset.scale.profile import profile_on_ray
from hotset.sparsity.profile import Profile, collect, export_activations, import_activations, profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.storage import resolve, store
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.sparsity.profile import Profile


@dataclass(frozen=True, kw_only=True)
class CountOptions:
    """Options for the sources of a profile's counts."""

    file: Annotated[
        Path | None,
        options.option("--file -f", "Run this text through the model.", exists=True, dir_okay=False),
    ] = None
    n_tokens: Annotated[
        int | None, options.option("--tokens", "Most tokens of the text.", usual="all", min=1)
    ] = None
    ray: options.RayAddress = None
    merge: Annotated[
        list[Path] | None,
        options.option("--merge", "Add the counts of this profile; repeatable.", **options.FILE),
    ] = None
    import_from: Annotated[
        Path | None,
        options.option("--import", "Add the counts of activation_<layer>.pt.", exists=True, file_okay=False),
    ] = None

    def counted(self, model: str, path: Path, target: Path, watching: options.ObservationOptions) -> Profile:
        """Return the sum of the counts of all sources, of which there is at least one."""
        parts = [Profile.open(part) for part in self.merge or []]
        if self.import_from is not None:
            parts.append(_imported(path, self.import_from, watching))
        if self.file is not None:
            text = read_text(self.file, "-f")
            if not text.strip():
                raise InvalidRequestError(
                    f"the text in {self.file} is empty; give some to profile the model on"
                )
            if self.ray is None:
                parts.append(_run(path, text, self.n_tokens, watching))
            else:
                name = options.name_everywhere(model, path)
                parts.append(_run_on_ray(name, path, target, text, self.n_tokens, watching, self.ray))
        counted = parts[0]
        for part in parts[1:]:
            counted = counted.merge(part)
        return counted


def profile(
    model: options.ModelName,
    *,
    counts: CountOptions,
    output: Annotated[
        Path | None, options.option("--output -o", "File to write.", usual="next to the model")
    ] = None,
    export_to: Annotated[
        Path | None, options.option("--export", "Write activation_<layer>.pt into it.", file_okay=False)
    ] = None,
    json: options.Json = False,
    watching: options.ObservationOptions,
) -> None:
    """Count how often neurons fire and experts are chosen over a text; without one, show the counts."""
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
    target = output or profile_path(path)
    check_output(target, store.shards(path))
    if export_to is not None:
        check_folder(export_to)
    if counts.ray is not None and counts.file is None:
        raise typer.BadParameter("it requires -f.", param_hint="--ray")
    merged = [part.resolve() for part in counts.merge or []]
    new = counts.file is not None or counts.import_from is not None or bool(merged)
    if not new:
        if not target.exists():
            remedy = f"make one with 'hotset sparse profile {model} -f TEXT'"
            raise ModelNotFoundError(missing(target, "profile", remedy))
        counted = Profile.open(target)
        _check_model(counted, path)
    else:
        if output is None and target.exists() and target.resolve() not in merged:
            raise typer.BadParameter(
                f"{target} exists: add to it with --merge {target}, or replace it with -o {target}.",
                param_hint="-o",
            )
        counted = counts.counted(model, path, target, watching)
        _check_model(counted, path)
        counted.save(target)
    if export_to is not None:
        export_to.mkdir(parents=True, exist_ok=True)
        export_activations(counted, export_to)
    if json:
        print_json(_as_json(counted, target))
        return
    _print(counted)
    if new:
        say(f"{human_size(target.stat().st_size)} in {target}")
    if export_to is not None:
        say(f"{len(counted.counts)} files activation_<layer>.pt in {export_to}")


def _check_model(profile: Profile, path: Path) -> None:
    with open_gguf(path) as gguf:
        profile.check_model(fingerprint(gguf))


def _imported(path: Path, folder: Path, watching: options.ObservationOptions) -> Profile:
    with open_model(path, watching.settings()) as opened:
        return import_activations(folder, opened.config, fingerprint(opened.gguf))


def _run(path: Path, text: str, n_tokens: int | None, watching: options.ObservationOptions) -> Profile:
    with loaded_exact(path, watching) as loaded:
        for note in loaded.notes:
            say_note(note)
        tokens = sequences(loaded, text, watching.n_ctx, n_tokens)
        with ProgressBar() as bar:
            return collect(
                loaded.tap_steps, loaded.config, tokens, model=fingerprint(loaded.gguf),
                progress=bar.counting("profile", "tokens"),
            )  # fmt: skip


def _run_on_ray(
    name: str,
    path: Path,
    target: Path,
    text: str,
    n_tokens: int | None,
    watching: options.ObservationOptions,
    address: str,
) -> Profile:
    """Return the profile that a Ray cluster's machines count. name: each machine finds the model by it."""
    with loaded_exact(path, watching) as loaded:
        tokens = sequences(loaded, text, watching.n_ctx, n_tokens)
        settings, mark = loaded.decided.settings, fingerprint(loaded.gguf)
        settings = replace(settings, n_ctx=loaded.n_ctx)  # equal on all machines, whatever memory they have
    with ProgressBar() as bar:
        progress = bar.counting("profile", "tokens")
        return profile_on_ray(target, tokens, name, settings, mark, address, progress)


@contextmanager
def loaded_exact(path: Path, watching: options.ObservationOptions) -> Iterator[Model]:
    """Yield a model that computes the neurons that really fire, not a predictor's choice.

    Raises InvalidRequestError if the model has no experts and every neuron fires for every token.
    """
    with ProgressBar() as bar:
        opened = open_model(path, watching.settings(progress=bar))
        if not opened.config.has_zeros and opened.config.has_experts:
            opened = opened.with_settings(sparsity=None)
        with load_opened(opened) as loaded:
            yield loaded


def sequences(model: Model, text: str, n_ctx: int | None, n_tokens: int | None) -> np.ndarray:
    """Return the text as rows of n_ctx tokens, int32 [n, n_ctx].

    n_ctx None: as the model allows, at most options.LONGEST. Each row begins like a text. A shorter text
    becomes one row, int32 [n_tokens].
    """
    n_ctx = n_ctx or min(options.LONGEST, model.n_ctx)
    tokens = model.tokenizer.encode(text, add_special=True)[:n_tokens]
    return np.array(tokens, np.int32) if len(tokens) < n_ctx else model.tokenizer.rows(tokens, n_ctx)


def mean_share(profile: Profile) -> float:
    counts = sum(float(count.sum()) for count in profile.counts)
    return counts / max(profile.n_tokens * sum(map(len, profile.counts)), 1)


def _as_json(profile: Profile, path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "model": profile.model,
        "data": list(profile.data),
        "n_tokens": profile.n_tokens,
        "active_share": mean_share(profile),
        "layers": [layer.as_dict() for layer in profile.summary()],
    }


def _print(profile: Profile) -> None:
    print_table(*profile_table(profile.summary()), tight=True)
    if profile.experts:
        print_table(*expert_table(profile.summary()), tight=True)
    texts = len(profile.data)
    say(
        f"[{profile.n_tokens} tokens of {texts} text{'s' if texts != 1 else ''} | "
        f"{percent(mean_share(profile))} of the neurons fire for a token, mean]",
        dim=True,
    )


def reorder(
    source: Annotated[str, typer.Argument(metavar="IN", help="The model: a path or a name.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    profile: Annotated[
        Path | None, options.option("--profile", "Its profile.", usual="next to the model", **options.FILE)
    ] = None,
    bundle: Annotated[
        bool,
        options.option(
            "--bundle", "Store each neuron or expert as one read, for --ram-budget; needs no profile."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Write a model with its neurons sorted by how often they fire, for faster sparse decode."""
    path = resolve(source, download=False)
    check_output(target)
    place = profile or profile_path(path)
    in_order = place.is_file()
    if not in_order and not bundle:
        remedy = f"make one with 'hotset sparse profile {source} -f TEXT'"
        raise ModelNotFoundError(missing(place, "profile", remedy))
    with ProgressBar() as bar:
        hotness = Profile.open(place) if in_order else None
        written = write_reordered(path, target, hotness, bundle=bundle, progress=bar)
    if json:
        print_json(
            {
                "path": str(target),
                "size": written.n_bytes,
                "profile": str(place) if in_order else None,
                "bundled": bundle,
                "n_always": list(written.n_always),
                "files": [str(file) for file in written.files],
            }
        )
        return
    say(f"Wrote {target} ({human_size(written.n_bytes)}). Run it with: hotset run {target}")
    if not in_order:
        say("Its neurons keep their order; 'hotset sparse profile' says which are hot.", dim=True)
        return
    fewest, most = min(written.n_always), max(written.n_always)
    head = str(most) if fewest == most else f"{fewest} to {most}"
    say(f"The first {head} neurons of each layer are computed always, without prediction.", dim=True)
