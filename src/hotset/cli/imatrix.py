"""`hotset imatrix`: the importance of the inputs of a model's matrices, for `hotset quantize --imatrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from hotset.api import load_opened
from hotset.cli import options
from hotset.cli.console import print_json, read_text, say
from hotset.cli.progress import ProgressBar
from hotset.engine.importance import collect
from hotset.errors import InvalidRequestError
from hotset.files import check_output
from hotset.formats.imatrix import ImportanceMatrix
from hotset.loader.build import open_model
from hotset.storage import resolve, store
from hotset.units import human_size


def imatrix(
    model: options.ModelName,
    file: Annotated[
        Path, options.option("--file -f", "The text to run through the model.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, options.option("--output -o", "The file to write (GGUF).", dir_okay=False)],
    chunks: Annotated[
        int | None, options.option("--chunks", "How many chunks of -c tokens.", usual="all", min=1)
    ] = None,
    merge: Annotated[
        list[Path] | None,
        options.option("--merge", "Add the sums of this file; repeatable.", exists=True, dir_okay=False),
    ] = None,
    process_output: Annotated[
        bool, options.option("--process-output", "Collect for the output matrix too.")
    ] = False,
    json: options.Json = False,
    *,
    watching: options.ObservationOptions,
) -> None:
    """Collect an importance matrix over a text, for quantize --imatrix."""
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
    check_output(output, store.shards(path))
    before = [ImportanceMatrix.open(part) for part in merge or []]
    text = read_text(file, "-f")
    with ProgressBar() as bar:
        opened = open_model(path, watching.settings(progress=bar)).with_settings(sparsity="dense")
        with load_opened(opened) as loaded:
            n_ctx = watching.n_ctx or min(options.LONGEST, loaded.n_ctx)
            tokens = loaded.tokenizer.encode(text, add_special=True)
            rows = loaded.tokenizer.rows(tokens, n_ctx)[:chunks]
            if not len(rows):
                raise InvalidRequestError(
                    f"the text in {file} has {len(tokens)} tokens, fewer than a chunk of {n_ctx}; give a "
                    "longer one, or shorter chunks with -c"
                )
            found = collect(
                loaded.tap_steps, loaded.graph, rows, dataset=str(file), output=process_output,
                progress=bar.counting("imatrix", "tokens"),
            )  # fmt: skip
    for part in before:
        found = found.merged(part)
    found.save(output)
    unused = {
        name: int((one.counts == 0).sum()) for name, one in found.inputs.items() if (one.counts == 0).any()
    }
    if json:
        print_json(_as_json(found, output, unused))
        return
    n_tokens, size = found.n_chunks * found.chunk_size, human_size(output.stat().st_size)
    say(f"{len(found.inputs)} matrices over {n_tokens} tokens: {size} in {output}")
    if unused:
        name = max(unused, key=lambda name: unused[name])
        say(f"Some experts met no token ({unused[name]} of {name}): a longer text reaches more.", dim=True)
    say(f"Use it with: hotset quantize {model} OUT.gguf --type q4_k_m --imatrix {output}")


def _as_json(found: ImportanceMatrix, path: Path, unused: dict[str, int]) -> dict[str, Any]:
    return {
        "path": str(path),
        "matrices": len(found.inputs),
        "chunks": found.n_chunks,
        "n_ctx": found.chunk_size,
        "datasets": list(found.datasets),
        "experts_without_tokens": unused,
    }
