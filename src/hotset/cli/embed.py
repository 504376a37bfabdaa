"""`hotset embed` and `hotset rerank`: vectors of texts, and documents ranked by their answer to a query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import hotset
from hotset.cli import options
from hotset.cli.console import print_choice, print_json, print_memory, print_table, read_input, read_text
from hotset.cli.progress import ProgressBar
from hotset.cli.values import one_of
from hotset.engine.pooling import Pooling, pooling_of
from hotset.files import check_output, replacing

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.settings import LoadSettings

FORMATS = (".npy", ".jsonl")
_AT_ONCE = 64  # texts between two updates of the progress bar

TextsFile = Annotated[
    Path | None,
    options.option(
        "--file -f", "Texts, one per line; -: the standard input.", allow_dash=True, **options.FILE
    ),
]


def embed(
    model: options.ModelName,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts to embed, in addition to --file.")
    ] = None,
    file: TextsFile = None,
    pooling: Annotated[
        str | None,
        options.option(
            "--pooling",
            "How the vectors of tokens become one; none: a vector per token.",
            kind=one_of("mean", "cls", "last", "none"),
            usual="the file's",
        ),
    ] = None,
    dimensions: Annotated[
        int | None, options.option("--dimensions", "Keep only the first N values of each vector.", min=1)
    ] = None,
    output: Annotated[
        Path | None,
        options.option("--output -o", "Write the vectors to a file: .npy or .jsonl.", dir_okay=False),
    ] = None,
    json: options.Json = False,
    *,
    loading: options.ModelOptions,
) -> None:
    """Print the embedding vectors of texts: one per line, normalised to length 1."""
    if output is not None:
        check_output(output, [] if file is None else [file])
        if output.suffix not in FORMATS or (output.suffix == ".npy" and pooling == "none"):
            formats = ".jsonl" if pooling == "none" else " or ".join(FORMATS)
            raise typer.BadParameter(f"it must end in {formats}, not {output}.", param_hint="-o")
    found = _texts(texts, file, "TEXT")
    vectors: list[np.ndarray] = []
    with ProgressBar() as bar, _loaded(model, loading.settings(), bar) as loaded:
        chosen = pooling_of(loaded.gguf.metadata, pooling)
        for _, some in _in_pieces(found, bar):
            if chosen == "none":
                vectors += loaded.embed_tokens(some, dimensions=dimensions)
            else:
                vectors += list(loaded.embed(some, pooling=chosen, dimensions=dimensions))
        path = loaded.gguf.path
    if output is not None:
        _write(output, found, vectors)
    if json:
        print_json(_as_json(path, chosen, vectors))
    elif output is None:
        for vector in vectors:
            print(
                "\n".join(
                    " ".join(f"{value:.9g}" for value in row) for row in vector.reshape(-1, vector.shape[-1])
                )
            )


def rerank(
    model: options.ModelName,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Question that the documents may answer.")],
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="DOC", help="Documents to rank, in addition to --file.")
    ] = None,
    file: TextsFile = None,
    top_n: Annotated[int | None, options.option("--top-n", "Print only the N best documents.", min=1)] = None,
    json: options.Json = False,
    *,
    loading: options.ModelOptions,
) -> None:
    """Rank documents by how well they answer a query, with a reranker model."""
    found = _texts(documents, file, "DOC")
    with ProgressBar() as bar, _loaded(model, loading.settings(), bar) as loaded:
        scored = [
            replace(one, index=start + one.index)
            for start, some in _in_pieces(found, bar)
            for one in loaded.rerank(query, some)
        ]
        path = loaded.gguf.path
    ranked = sorted(scored, key=lambda one: (-one.score, one.index))[:top_n]
    if json:
        results = [{"index": one.index, "score": one.score, "document": one.document} for one in ranked]
        print_json({"model": str(path), "query": query, "results": results})
    else:
        rows = [[f"{one.score:.4f}", str(one.index), one.document] for one in ranked]
        print_table([">score", ">index", "document"], rows, tight=True)


def _in_pieces(texts: list[str], bar: ProgressBar) -> Iterator[tuple[int, list[str]]]:
    """Yield a few texts at a time, with the index of the first. The bar shows how many are done."""
    for start in range(0, len(texts), _AT_ONCE):
        if len(texts) > 1:
            bar.advance("texts", start, len(texts), "texts")
        yield start, texts[start : start + _AT_ONCE]
    if len(texts) > 1:
        bar.advance("texts", len(texts), len(texts), "texts")
    bar.clear()


def _loaded(model: str, settings: LoadSettings, bar: ProgressBar) -> Model:
    loaded = hotset.load(model, settings, progress=bar)
    print_choice(loaded)
    print_memory(loaded)
    return loaded


def _texts(given: list[str] | None, file: Path | None, name: str) -> list[str]:
    """Return the arguments and the lines of a file. Raises BadParameter without texts or for an empty one."""
    texts = list(given or [])
    if not all(texts):
        raise typer.BadParameter(f"number {texts.index('') + 1} is empty.", param_hint=name)
    if file is not None:
        text = read_input("--file") if str(file) == "-" else read_text(file, "--file")
        lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        if not all(lines):
            raise typer.BadParameter(f"line {lines.index('') + 1} is empty.", param_hint="--file")
        texts += lines
    if not texts:
        raise typer.BadParameter("give at least one, or --file.", param_hint=name)
    return texts


def _write(output: Path, texts: list[str], vectors: list[np.ndarray]) -> None:
    with replacing(output) as file:
        if output.suffix == ".npy":
            np.save(file, np.array(vectors, np.float32))
            return
        for i, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
            line = {"index": i, "text": text, "embedding": vector.tolist()}
            file.write(dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _as_json(path: Path, pooling: Pooling, vectors: list[np.ndarray]) -> dict[str, Any]:
    return {
        "model": str(path),
        "pooling": pooling,
        "dimensions": vectors[0].shape[-1],
        "embeddings": [vector.tolist() for vector in vectors],
    }
