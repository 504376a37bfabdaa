"""`hotset batch`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hotset
from hotset.cli import options
from hotset.cli.console import print_choice, print_memory, say, warn
from hotset.cli.default_model import default_model
from hotset.cli.progress import ProgressBar
from hotset.cli.serve import check_installed, model_name
from hotset.storage import resolve

if TYPE_CHECKING:
    from hotset.api import Model


def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            help="Requests, one per line, in OpenAI's batch format.", show_default=False, **options.FILE
        ),
    ],
    output: Annotated[
        Path, options.option("--output -o", "File to which answers are appended.", dir_okay=False)
    ],
    model: Annotated[str | None, options.option("--model -m", options.MODEL_HELP)] = None,
    alias: options.Alias = None,
    ray: options.RayAddress = None,
    replicas: Annotated[
        int | None,
        options.scale_option(
            "--replicas", "Copies of the model.", show_default="one a machine of --ray", min=1
        ),
    ] = None,
    *,
    loading: options.BatchOptions,
) -> None:
    """Answer a file of requests; after an interruption, run it again to continue."""
    check_installed()
    settings = loading.settings()
    if ray is not None:
        from hotset.scale.batch import batch_on_ray

        name = model or default_model()
        options.check_not_created(name, "--ray")
        with ProgressBar() as bar:
            path = resolve(name, progress=bar)
        names = (*(alias or ()), model_name(path))
        with ProgressBar() as steps:
            n, n_failed = batch_on_ray(
                requests, output, options.name_everywhere(name, path), settings, names, ray, replicas, steps
            )
        _say_done(output, n, n_failed)
        return
    if replicas is not None:
        raise typer.BadParameter("it requires --ray.", param_hint="--replicas")

    from hotset.server.batch import SETTINGS, BatchRun
    from hotset.server.service import Service

    with BatchRun(requests, output, SETTINGS.max_nesting) as work:
        if work.file.rejected:
            first = next(iter(work.file.rejected.values()))
            warn(
                f"{len(work.file.rejected)} of {len(work.file)} lines of {requests} have an error record in "
                f"{output} instead of an answer; line {first.number}: {first.message}"
            )
        if work.n_done:
            say(f"{output} has {work.n_done} of {len(work.file)} answers")
        if work.n_left:
            name = model or default_model()
            with ProgressBar() as bar:
                path = resolve(name, progress=bar)
            names = (*(alias or ()), model_name(path, name))

            def load() -> Model:
                with bar:
                    loaded = hotset.load(options.loaded_by(name, path), settings, progress=bar)
                print_choice(loaded)
                print_memory(loaded)
                return loaded

            with ProgressBar() as steps:
                asyncio.run(work.run(Service(load, SETTINGS, name=names[0], aliases=names[1:]), steps))
        _say_done(output, len(work.file), work.n_failed)


def _say_done(output: Path, n: int, n_failed: int) -> None:
    failed = f", {n_failed} of them error records, refusals or failures" if n_failed else ""
    say(f"{output} has all {n} answers{failed}")
