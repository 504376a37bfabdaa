"""`hotset perplexity`: llama-perplexity's protocol, with a bar that says how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli import options
from hotset.cli.console import DownloadBar, print_json, read_text, say, tell_choice
from hotset.report.bars import percent

if TYPE_CHECKING:
    from hotset.engine.perplexity import PerplexityResult


def perplexity(
    model: options.ModelName,
    file: Annotated[Path, typer.Option("--file", "-f", help="The text.", exists=True, dir_okay=False)],
    n_ctx: Annotated[int, typer.Option("--ctx-size", "-c", min=4, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[
        int | None, typer.Option("--chunks", min=1, help="How many chunks; default: all.")
    ] = None,
    threads: options.Threads = None,
    cache_type: options.CacheType = "f16",
    activation: options.Activation = None,
    sparsity: options.Sparsity = None,
    predictor: options.Predictor = None,
    profile: options.ProfileFile = None,
    backend: options.BackendName = "cpu",
    json: options.Json = False,
) -> None:
    """Measure perplexity on a text: chunks of n_ctx tokens, the second half of each scored."""
    import hotset
    from hotset.storage import store

    text = read_text(file, "-f")
    bar = DownloadBar()
    with bar:
        path = store.resolve(model, progress=bar)
    with hotset.load(
        path,
        n_ctx=n_ctx,
        n_threads=threads,
        kv_type=cache_type,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        activation=activation,
        sparsity=sparsity,
        predictor=predictor,
        profile=profile,
        progress=bar,
    ) as loaded:
        tell_choice(loaded)
        mode, spec = loaded.sparsity.mode, loaded.sparsity.spec
        final = _follow(loaded.perplexity_chunks(text, n_ctx=n_ctx, chunks=chunks))
    if json:
        print_json(
            {
                "ppl": final.ppl,
                "error": final.error,
                "chunks": final.n_chunks,
                "n_ctx": n_ctx,
                "scored": final.n_scored,
                "sparsity": mode,
                "predictor": str(spec) if spec else None,
                "active_share": final.active_share,
                "model": str(path),
            }
        )
    else:
        print(f"PPL = {final.ppl:.4f} ± {final.error:.5f}")
        parts = [f"{final.n_chunks} chunks of {n_ctx} tokens", f"{final.n_scored} tokens scored"]
        if final.active_share is not None:
            parts.append(f"{spec or mode}: {percent(final.active_share)} of FFN neurons active")
        say("[" + " | ".join(parts) + "]", dim=True)


def _follow(results: Iterable[PerplexityResult]) -> PerplexityResult:
    """Runs through the chunks, with a bar on a terminal and a line now and then elsewhere."""
    result: PerplexityResult | None = None
    if not sys.stderr.isatty():
        for result in results:
            if result.chunk % 10 == 0 or result.chunk == result.n_chunks:
                say(f"chunk {result.chunk} of {result.n_chunks}: PPL {result.ppl:.4f}")
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("perplexity", total=None)
            for result in results:
                progress.update(
                    task,
                    total=result.n_chunks,
                    completed=result.chunk,
                    description=f"perplexity {result.ppl:.3f} ± {result.error:.3f}",
                )
    assert result is not None  # perplexity_chunks refuses a text that is too short for one
    return result
