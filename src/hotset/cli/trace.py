"""`hotset trace`: which experts the tokens of a text had, and what a cache of experts would have hit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.console import DownloadBar, print_json, print_table, read_text, say
from hotset.cli.profile import loaded_exact, sequences, token_progress
from hotset.errors import InvalidRequestError
from hotset.files import check_target
from hotset.storage import resolve, store
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.sparsity.trace import RouteTrace


def trace(
    model: options.OptionalModel = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="Run this text through the model."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", dir_okay=False, help="Where to; default: beside the model."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", dir_okay=False, help="Of this trace: hit rates of caches of any size."),
    ] = None,
    n_tokens: Annotated[int | None, typer.Option("--tokens", "-n", min=2, help="At most so many.")] = None,
    json: options.Json = False,
    *,
    watching: options.ObservationOptions,
) -> None:
    """Record which experts each token of a text has (MODEL -f TEXT), or replay a trace (--replay FILE)."""
    if replay is not None:
        if model is not None or file is not None or output is not None:
            raise typer.BadParameter("it takes a trace, and no model, -f or -o.", param_hint="--replay")
        _replay(replay, json)
        return
    if model is None or file is None:
        raise typer.BadParameter("name a model and a text (MODEL -f TEXT), or a trace (--replay FILE).")
    from hotset.sparsity.trace import default_path

    with DownloadBar() as bar:
        path = resolve(model, progress=bar)
    target = output or default_path(path)
    check_target(target, store.shards(path))
    if output is None and target.exists():
        raise typer.BadParameter(
            f"{target} exists: replay it with --replay {target}, or replace it with -o {target}.",
            param_hint="-o",
        )
    text = read_text(file, "-f")
    if not text.strip():
        raise InvalidRequestError(f"the text in {file} is empty; give some to trace the model on")
    traced = record_text(path, text, n_tokens, watching)
    traced.save(target)
    if json:
        print_json(_facts(traced) | {"path": str(target)})
        return
    say(f"{_shape(traced)}: {human_size(target.stat().st_size)} in {target}")
    say(f"Replay it with: hotset trace --replay {target}")


def record_text(
    path: Path, text: str, n_tokens: int | None, watching: options.ObservationOptions
) -> RouteTrace:
    """The routes of a text, in sequences as `profile` cuts them."""
    from hotset.sparsity.sidecar import fingerprint
    from hotset.sparsity.trace import record

    with loaded_exact(path, watching, experts_only=True) as loaded:
        tokens = sequences(loaded, text, watching.n_ctx, n_tokens)
        with token_progress() as progress:
            return record(
                loaded.tap_steps, loaded.graph, loaded.cost.expert_bytes, tokens,
                model=fingerprint(loaded.gguf), name=path.name, progress=progress,
            )  # fmt: skip


def _replay(path: Path, json: bool) -> None:
    from hotset.report.layers import replay_table
    from hotset.sparsity.replay import POLICIES, replay
    from hotset.sparsity.trace import RouteTrace

    traced = RouteTrace.open(path)
    replayed = replay(traced)
    if json:
        print_json(_facts(traced) | {"path": str(path), "policies": POLICIES} | replayed.as_dict())
        return
    print_table(*replay_table(replayed), tight=True)
    say(f"{traced.name}: {_shape(traced)}", dim=True)
    say(
        f"A token cycle is {human_size(traced.token_cycle)}, {100 * replayed.cliff:.1f}% of the experts: "
        "below it slots that all layers share hit next to nothing by LRU, since the layers come in turn.",
        dim=True,
    )
    for name, meaning in POLICIES.items():
        say(f"{name}: {meaning}", dim=True)


def _shape(traced: RouteTrace) -> str:
    return (
        f"{traced.n_tokens} tokens, {len(traced.layers)} layers of {traced.n_experts} experts, "
        f"{traced.n_used} for a token"
    )


def _facts(traced: RouteTrace) -> dict[str, Any]:
    return {
        "name": traced.name,
        "model": traced.model,
        "data": traced.data,
        "n_tokens": traced.n_tokens,
        "n_sequences": len(traced.starts),
        "layers": list(traced.layers),
        "n_experts": traced.n_experts,
        "n_used": traced.n_used,
        "expert_bytes": list(traced.expert_bytes),
        "token_cycle": traced.token_cycle,
    }
