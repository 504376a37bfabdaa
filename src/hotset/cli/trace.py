"""`hotset sparse trace`: the experts or neurons that a text needs, and the hit rates of caches for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.api import load_opened
from hotset.cli import options
from hotset.cli.console import print_json, print_table, read_text, say
from hotset.cli.profile import sequences
from hotset.cli.progress import ProgressBar
from hotset.cli.values import SIZE
from hotset.errors import InvalidRequestError
from hotset.files import check_output
from hotset.loader.build import open_model
from hotset.report.layers import replay_table
from hotset.report.replay import SHARES, policies, replay
from hotset.sparsity.recorder import record
from hotset.sparsity.sidecar import fingerprint
from hotset.sparsity.trace import RouteTrace, open_trace, trace_path
from hotset.storage import resolve, store
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.sparsity.trace import Trace


def trace(
    model: options.OptionalModel = None,
    file: Annotated[
        Path | None,
        options.option("--file -f", "Run this text through the model.", exists=True, dir_okay=False),
    ] = None,
    output: Annotated[
        Path | None,
        options.option("--output -o", "File to write.", usual="next to the model", dir_okay=False),
    ] = None,
    replay: Annotated[
        Path | None,
        options.option(
            "--replay", "Print the hit rates of caches of any size for this trace.", **options.FILE
        ),
    ] = None,
    rows: Annotated[
        list[float] | None,
        options.option("--rows", "With --replay: caches of this size; repeatable.", kind=SIZE),
    ] = None,
    n_tokens: Annotated[
        int | None, options.option("--tokens", "Most tokens of the text.", usual="all", min=2)
    ] = None,
    json: options.Json = False,
    *,
    watching: options.TraceOptions,
) -> None:
    """Record which experts or neurons the tokens of a text need (MODEL -f TEXT), or replay it (--replay)."""
    if replay is not None:
        if model is not None or file is not None or output is not None:
            raise typer.BadParameter("it cannot be combined with MODEL, -f or -o.", param_hint="--replay")
        _replay(replay, rows or [], json)
        return
    if rows:
        raise typer.BadParameter("it requires --replay.", param_hint="--rows")
    if model is None or file is None:
        raise typer.BadParameter("name a model and a text (MODEL -f TEXT), or a trace (--replay FILE).")
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
    target = output or trace_path(path)
    check_output(target, store.shards(path))
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
    say(f"Replay it with: hotset sparse trace --replay {target}")


def record_text(path: Path, text: str, n_tokens: int | None, watching: options.TraceOptions) -> Trace:
    """Return the trace of a text in the mode that `run` would choose, in sequences as `profile` has them."""
    with ProgressBar() as bar:
        opened = open_model(path, watching.settings(progress=bar))
        with load_opened(opened) as loaded:
            if loaded.sparsity.mode == "dense" and not loaded.config.has_experts:
                raise InvalidRequestError(
                    f"every token needs every neuron ({loaded.sparsity.reason}), and there are no experts: "
                    "there is nothing to trace"
                )
            tokens = sequences(loaded, text, watching.n_ctx, n_tokens)
            return record(
                loaded.tap_steps, loaded.graph, loaded.weights, tokens,
                model=fingerprint(loaded.gguf), name=path.name, progress=bar.counting("trace", "tokens"),
            )  # fmt: skip


def _replay(path: Path, rows: list[float], json: bool) -> None:
    traced = open_trace(path)
    replayed = replay(traced, () if rows else SHARES, sizes=[int(one * 2**30) for one in rows])
    meanings = policies(traced)
    if json:
        print_json(_facts(traced) | {"path": str(path), "policies": meanings} | replayed.as_dict())
        return
    print_table(*replay_table(replayed, traced.what), tight=True)
    say(f"{traced.name}: {_shape(traced)}", dim=True)
    say(
        f"A token cycle is {human_size(traced.token_cycle)}, {100 * replayed.cliff:.1f}% of the {traced.what}"
        ": below it slots that all layers share hit next to nothing by LRU, since the layers come in turn.",
        dim=True,
    )
    for name, meaning in meanings.items():
        say(f"{name}: {meaning}", dim=True)


def _shape(traced: Trace) -> str:
    fewest, most = min(traced.sizes), max(traced.sizes)
    each = str(most) if fewest == most else f"{fewest} to {most}"
    layers = f"{len(traced.layers)} layers of {each} {traced.what}"
    return f"{traced.n_tokens} tokens, {layers}, {round(traced.cycle / len(traced.layers))} for a token"


def _facts(traced: Trace) -> dict[str, Any]:
    facts = {
        "name": traced.name,
        "model": traced.model,
        "data": traced.data,
        "n_tokens": traced.n_tokens,
        "n_sequences": len(traced.starts),
        "layers": list(traced.layers),
        "token_cycle": traced.token_cycle,
    }
    if isinstance(traced, RouteTrace):
        return facts | {
            "n_experts": traced.n_experts,
            "n_used": traced.n_used,
            "expert_bytes": list(traced.expert_bytes),
        }
    return facts | {
        "n_neurons": list(traced.sizes),
        "n_used": traced.cycle / len(traced.layers),
        "neuron_bytes": list(traced.entry_bytes),
    }
