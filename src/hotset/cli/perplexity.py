"""`hotset perplexity`: llama-perplexity's protocol.

It measures one model, or compares several modes and files (cli/compare.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import hotset
from hotset.cli import options
from hotset.cli.compare import Side, names_of, says_threshold, sides_of, table_of
from hotset.cli.console import print_choice, print_json, print_memory, print_table, read_text, say
from hotset.cli.progress import ProgressBar
from hotset.report.bars import percent
from hotset.storage import resolve

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.engine.perplexity import PerplexityResult

_COMPARE_HELP = (
    "Compare MODEL with this: a mode, a predictor, thresholds or a file (exact, svd:256, "
    "thresholds=FILE, OTHER.gguf,exact). If repeated, compare these instead, each with the first."
)


def perplexity(
    model: options.ModelName,
    file: Annotated[
        Path, options.option("--file -f", "The text to measure on.", exists=True, dir_okay=False)
    ],
    compare: Annotated[list[str] | None, options.option("--compare", _COMPARE_HELP, metavar="WHAT")] = None,
    n_ctx: Annotated[int, options.option("--ctx-size -c", "Tokens of a chunk.", min=4)] = 512,
    chunks: Annotated[int | None, options.option("--chunks", "How many chunks.", usual="all", min=1)] = None,
    json: options.Json = False,
    *,
    loading: options.ComparedOptions,
) -> None:
    """Measure perplexity on a text: chunks of -c tokens, the second half of each scored."""
    text = read_text(file, "-f")
    thresholds = loading.thresholds
    if compare and loading.sparsity != "threshold" and says_threshold(compare):
        settings = loading.settings(n_ctx=n_ctx, thresholds=None)  # another side has them
    else:
        settings = loading.settings(n_ctx=n_ctx)
    sides = sides_of(model, settings, compare, thresholds) if compare else [Side(model, settings)]
    models: list[Model] = []
    with ProgressBar() as bar, ExitStack() as opened:
        paths = [resolve(side.model, progress=bar) for side in sides]
        for path, side in zip(paths, sides, strict=True):
            loaded = hotset.load(path, side.settings, progress=bar)
            models.append(opened.enter_context(loaded))
            print_choice(loaded)
            print_memory(loaded)
        results = _follow(hotset.compare_chunks(models, text, n_ctx=n_ctx, chunks=chunks), bar)
    names = names_of(sides, models)
    if json and compare:
        facts = [_as_json(*side) for side in zip(models, results, strict=True)]
        sides_json = [{"name": name, **fact} for name, fact in zip(names, facts, strict=True)]
        print_json({**_protocol(results[0], n_ctx), "sides": sides_json})
    elif json:
        print_json(_as_json(models[0], results[0]) | _protocol(results[0], n_ctx))
    else:
        _print(names, results, n_ctx)


def _protocol(result: PerplexityResult, n_ctx: int) -> dict[str, Any]:
    return {"chunks": result.n_chunks, "n_ctx": n_ctx, "scored": result.n_scored}


def _as_json(model: Model, result: PerplexityResult) -> dict[str, Any]:
    spec = model.sparsity.spec
    facts = {
        "ppl": result.ppl,
        "error": result.error,
        "sparsity": model.sparsity.mode,
        "predictor": str(spec) if spec else None,
        "active_share": result.active_share,
        "selected_share": result.selected_share,
        "tokens_per_second": result.tokens_per_second,
        "model": str(model.gguf.path),
    }
    return facts | {"divergence": asdict(result.divergence)} if result.divergence else facts


def _print(names: Sequence[str], results: Sequence[PerplexityResult], n_ctx: int) -> None:
    final = results[0]
    parts = [f"{final.n_chunks} chunks of {n_ctx} tokens", f"{final.n_scored} tokens scored"]
    if len(results) > 1:
        print_table(*table_of(names, results), tight=True)
        parts += ["KL in nats, of each against the first", "t/s of chunks; 'hotset bench' times decoding"]
    else:
        print(f"PPL = {final.ppl:.4f} ± {final.error:.5f}")
        if final.active_share is not None:
            parts.append(f"{names[0]}: {percent(final.active_share)} of FFN neurons active")
    say("[" + " | ".join(parts) + "]", dim=True)


def _follow(
    results: Iterable[tuple[PerplexityResult, ...]], bar: ProgressBar
) -> tuple[PerplexityResult, ...]:
    """Run through the chunks and return the last results; the bar shows the perplexities so far."""
    sides: tuple[PerplexityResult, ...] = ()
    for sides in results:
        each = ", ".join(f"{side.ppl:.3f}" for side in sides)
        bar.detail = f"PPL {each} ± {sides[0].error:.3f}"
    return sides
