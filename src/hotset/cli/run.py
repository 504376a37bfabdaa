"""`hotset run`: one answer, or a chat. The answer goes to stdout and everything else to stderr."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.answer import (
    bytes_touched,
    chunks,
    closing_line,
    has_template,
    print_stats,
    with_images,
)
from hotset.cli.console import (
    input_waits,
    print_choice,
    print_json,
    print_memory,
    print_table,
    read_input,
    read_text,
    say,
)
from hotset.cli.default_model import agrees, ask, default_model
from hotset.cli.progress import ProgressBar
from hotset.cli.terminal import AnswerWriter
from hotset.errors import HotsetError, ModelNotFoundError
from hotset.files import check_output, expanded
from hotset.storage import catalogue, on_this_machine, resolve, store
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.cli.session import Session
    from hotset.generation import Chunk, Timings
    from hotset.offload.cache_stats import CacheStats
    from hotset.sparsity.stats import StatsSummary
    from hotset.storage.store import StoredModel

# A loaded model has hundreds of thousands of objects without cycles. By default, Python's garbage collector
# scans them again and again, which takes a tenth of the time to the first token.
_COLLECTED = 100_000
_WITHOUT_ANSWERS = ("embedding", "reranker")  # kinds of models
_QUALITY_TOKENS = 128  # tokens on which --stats measures a predictor


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options for the prompt of an answer, and for the conversation before it."""

    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="The same as PROMPT.")] = None
    file: options.File = None
    image: Annotated[
        list[Path] | None,
        options.option("--image", "An image for the prompt; repeatable.", exists=True, dir_okay=False),
    ] = None
    system: options.System = None
    raw: options.Raw = False
    parse_special: options.ParseSpecial = True
    session: options.Session = None

    def check(self) -> None:
        """Raise BadParameter for options that exclude one another, and for a session that cannot be kept."""
        if self.image and self.raw:
            raise typer.BadParameter("it cannot be combined with --raw.", param_hint="--image")
        if self.session is not None:
            check_session(self.session)


def run(
    model: options.OptionalModel = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; without one a terminal opens a chat.")
    ] = None,
    *,
    asking: PromptOptions,
    json: options.JsonAnswer = False,
    stats: options.Stats = False,
    loading: options.AnswerOptions,
    sampling: options.SamplingOptions,
    scale: options.ScaleOptions,
) -> None:
    """Answer a prompt, or chat."""
    gc.set_threshold(_COLLECTED)
    name, text = _arguments(model, prompt, asking.prompt_option, asking.file)
    asking.check()
    params = sampling.params()
    loading.check_cache_disk()
    settings = loading.settings(max_sequences=1)
    interactive = text is None
    if interactive and json:
        raise typer.BadParameter("it requires a prompt.", param_hint="--json")
    bar = ProgressBar()
    path = _find(name, interactive, bar)

    with bar:
        loaded = scale.load(name or str(path), path, settings, bar)
    with loaded:
        params = {**loaded.decided.sampling, **params}
        print_choice(loaded)
        print_memory(loaded)
        kept = None if asking.session is None else _open_session(loaded, asking.session)
        if text is None:
            from hotset.cli.chat import chat

            def another(name: str) -> Model:
                with bar:
                    return scale.load(name, resolve(name, download=False), settings, bar)

            chat(
                loaded, system=asking.system, raw=asking.raw, params=params,
                parse_special=asking.parse_special, session=kept, another=another, images=asking.image or (),
            )  # fmt: skip
            return
        asked = _messages(loaded, asking.system, text, asking.raw, asking.image or ())
        if kept is not None:
            asked = kept.with_question(asked)
        answer = _answer(loaded, asked, params, json, stats, parse_special=asking.parse_special)
        if kept is not None:
            said = [] if isinstance(asked, str) else [*asked, {"role": "assistant", "content": answer}]
            kept.save(said)


def check_session(path: Path) -> None:
    """Raise BadParameter if a session could not be written at the end."""
    check_output(expanded(path))
    folder = expanded(path).absolute().parent
    if not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"nothing may be written in the folder {folder}.", param_hint="--session")


def _open_session(model: Model, path: Path) -> Session:
    from hotset.cli.session import Session

    return Session(model, path)


def _arguments(
    model: str | None, prompt: str | None, prompt_option: str | None, file: Path | None
) -> tuple[str | None, str | None]:
    """Return the given model and prompt; None for the prompt means a chat.

    A file follows a prompt, and without a file the standard input does, unless it is a terminal.
    """
    if model is not None and prompt is None and _is_message(model):
        model, prompt = None, model  # hotset run "Why is the sky blue?"
    if prompt is not None and prompt_option is not None:
        raise typer.BadParameter("the prompt is given twice.", param_hint="-p")
    prompt = prompt_option if prompt is None else prompt
    parts = [] if prompt is None else [prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")]
    if file is not None and str(file) != "-":
        parts.append(_of_a_line(read_text(file, "-f")))
    elif file is not None or (not sys.stdin.isatty() and (not parts or input_waits())):
        parts.append(_of_a_line(read_input("PROMPT")))
    elif not parts:
        return model, None
    kept = [part for part in parts if part.strip()]
    if not kept and prompt is None:
        raise typer.BadParameter(
            f"there is no prompt{f' for the model {model!r}' if model else ''}: give one, or run it in a "
            "terminal to chat.",
            param_hint="PROMPT",
        )
    return model, "\n\n".join(kept or parts[:1])


def _is_message(text: str) -> bool:
    return bool(re.search(r"\s", text.strip())) and not os.path.exists(text)  # a long text cannot be a path


def _of_a_line(text: str) -> str:
    """Return a prompt without the newline that an editor or `echo` adds."""
    return text.removesuffix("\n").removesuffix("\r")


# -- which model ---------------------------------------------------------------------------------


def _find(name: str | None, interactive: bool, bar: ProgressBar) -> Path:
    if name is None:
        name = _choose() if interactive else default_model()
    with bar:
        return resolve(name, progress=bar)


def _choose() -> str:
    """Ask which model to chat with: local models first, then ReLU models, then by size.

    A model that is not here is fetched only after a yes.
    """
    memory = store.usable_memory()
    local = on_this_machine()
    here = {model.name for model in local}
    choices = [(model.name, model.size, model.relu, True) for model in local if _chats(model)]
    choices += [
        (entry.name, entry.size, entry.relu, False)
        for entry in catalogue.ENTRIES
        if entry.name not in here
        and not entry.unsupported
        and entry.size
        and catalogue.kind_of(entry.name) not in _WITHOUT_ANSWERS
    ]
    choices.sort(key=lambda choice: (not choice[3], not choice[2], choice[1]))
    print_table(
        [">", "model", ">size", "fits in memory", "kind", "where"],
        [
            [
                str(i),
                name,
                human_size(size),
                "yes" if store.fits(size, memory) else "no",
                catalogue.kind_of(name, relu=relu),
                "here" if is_here else "to be fetched",
            ]
            for i, (name, size, relu, is_here) in enumerate(choices, 1)
        ],
        err=True,
    )
    sizes = {name: size for name, size, _, _ in choices}
    usual = next((name for name, _, _, is_here in choices if is_here), catalogue.default_for(memory).name)
    while True:
        answer = ask(f"Which one? [{usual}] ").strip() or usual
        if answer.isdecimal() and not 1 <= int(answer) <= len(choices):
            say(f"A number from 1 to {len(choices)}, please.")
            continue
        name = choices[int(answer) - 1][0] if answer.isdecimal() else answer
        if not _is_fetched(name) or agrees(f"Fetch {name}{_of_size(sizes.get(name))}? [y/N] "):
            return name


def _chats(model: StoredModel) -> bool:
    """Return whether a model answers, by its name and its file: no embedding or reranking model does."""
    if catalogue.kind_of(model.name) in _WITHOUT_ANSWERS:
        return False
    from hotset.formats.gguf import open_gguf

    try:
        with open_gguf(model.path) as gguf:
            return f"{gguf.architecture}.pooling_type" not in gguf.metadata
    except HotsetError:  # running it raises this error
        return True


def _is_fetched(name: str) -> bool:
    """Return whether running a model would fetch it."""
    try:
        resolve(name, download=False)
    except ModelNotFoundError:
        return catalogue.find(name) is not None or catalogue.canonical(name).startswith("hf:")
    except HotsetError:  # running it raises this error
        return False
    return False


def _of_size(size: int | None) -> str:
    return f" ({human_size(size)})" if size else ""


# -- one answer ----------------------------------------------------------------------------------


def _messages(
    model: Model, system: str | None, text: str, raw: bool, images: Sequence[Path]
) -> str | list[dict[str, Any]]:
    """Return the conversation of one prompt, or the bare text if no chat template is applied.

    Images always need a template; a file without one gets the format that its vocabulary suggests.
    """
    if (raw or not has_template(model)) and not images:
        if system:
            raise typer.BadParameter(
                "it cannot be combined with --raw."
                if raw
                else "it requires a chat template, and this file has none.",
                param_hint="--system",
            )
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": with_images(text, images)}]


def _answer(
    model: Model,
    prompt: str | list[dict[str, Any]],
    params: dict[str, Any],
    as_json: bool,
    with_stats: bool,
    *,
    parse_special: bool,
) -> str:
    """Print the answer, and return it."""
    pieces: list[str] = []
    tokens: list[int] = []
    last: Chunk | None = None
    interrupted = False
    try:
        with (
            AnswerWriter() as out,
            closing(chunks(model, prompt, params, parse_special=parse_special)) as stream,  # type: ignore[type-var]
        ):
            for last in stream:
                pieces.append(last.text)
                tokens += last.tokens
                if not as_json:
                    out.write(last.text)
    except KeyboardInterrupt:
        interrupted = True
    if as_json and last is not None and not interrupted:
        result = _result(model, "".join(pieces), tokens, last)
        if with_stats:
            stats = _with_quality(model, last.answer_stats, prompt, tokens, parse_special)
            result["stats"] = stats.as_dict() if stats else None
        print_json(result)
    elif last is not None:
        if pieces and not "".join(pieces[-2:]).endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        say(closing_line(model, last), dim=True)
        if counts := _expert_counts(model):
            from hotset.report.experts import experts_line

            say(f"[{experts_line(counts)}]", dim=True)
        if with_stats and not interrupted:
            stats = _with_quality(model, last.answer_stats, prompt, tokens, parse_special)
            print_stats(stats, model)
            if facts := _speculation(model, last.timings):
                from hotset.report.speculation import speculation_line

                say(f"[{speculation_line(facts['speculation'], last.timings.tokens_per_step)}]", dim=True)
            if facts := _disk(model, last.timings):
                from hotset.report.disk import disk_line

                say(f"[prompt and answer: {disk_line(facts)}]", dim=True)
    if interrupted:
        raise KeyboardInterrupt
    return "".join(pieces)


def _result(model: Model, text: str, tokens: list[int], last: Chunk) -> dict[str, Any]:
    timings, stats, choice = last.timings, last.answer_stats, model.sparsity
    return (
        {
            "text": text,
            "tokens": tokens,
            "prompt_tokens": timings.prompt_tokens,
            "prompt_per_second": timings.prompt_per_second,
            "predicted_per_second": timings.predicted_per_second,
            "tokens_per_step": timings.tokens_per_step,
            "finish_reason": last.finish_reason,
            "bytes_per_token": round(bytes_touched(model, timings, stats)),
            "sparsity": {
                "mode": choice.mode,
                "predictor": str(choice.spec) if choice.spec else None,
                "reason": choice.reason,
                "notes": model.notes,
            },
            "active_share": stats.active_share if stats else None,
            "model": str(model.gguf.path),
        }
        | _speculation(model, timings)
        | _placement(model)
        | _disk(model, timings)
        | _experts(model)
    )


def _speculation(model: Model, timings: Timings) -> dict[str, Any]:
    """Return the counts of drafted tokens for JSON; {} without speculation."""
    speculator = model.engine.speculator
    if speculator is None:
        return {}
    from hotset.report.speculation import speculation_dict

    drafted = timings.drafted_tokens, timings.accepted_tokens
    return {
        "speculation": speculation_dict(speculator.drafter.name, *drafted, speculator.step_times.measured)
    }


def _expert_counts(model: Model) -> CacheStats | None:
    """Return the counts of an MoE model's experts, None without a cache of experts."""
    if not model.config.has_experts:
        return None
    from hotset.report.experts import expert_counts

    return expert_counts(model.decided.graph, model.backend, model.stored)


def _experts(model: Model) -> dict[str, Any]:
    """Return the counts of experts for JSON."""
    counts = _expert_counts(model)
    if counts is None:
        return {}
    from hotset.report.experts import experts_dict

    return {"experts": experts_dict(counts)}


def _placement(model: Model) -> dict[str, Any]:
    """Return the placement on devices, with planned and measured bytes; {} without devices."""
    if model.placement is None:
        return {}
    from hotset.report.placement import memory_dict, placement_dict

    return {"placement": placement_dict(model.placement), "memory": memory_dict(model.device_memory())}


def _disk(model: Model, timings: Timings) -> dict[str, Any]:
    """Return the disk reads since the model was loaded; {} if files are mapped."""
    if model.ram is None or model.stored is None:
        return {}
    from hotset.report.disk import disk_dict

    n_prompt = timings.prompt_tokens - timings.reused_tokens
    seconds = n_prompt / timings.prompt_per_second if timings.prompt_per_second else 0.0
    if timings.predicted_per_second:
        seconds += (timings.predicted_tokens - 1) / timings.predicted_per_second
    counts = model.stored.counts()
    return disk_dict(counts, n_prompt + timings.predicted_tokens - 1, seconds, model.ram)


# -- statistics ----------------------------------------------------------------------------------


def _with_quality(
    model: Model,
    stats: StatsSummary | None,
    prompt: str | list[dict[str, Any]],
    tokens: list[int],
    parse_special: bool,
) -> StatsSummary | None:
    """Return the statistics with the predictor's recall and precision at the start of the conversation."""
    if stats is None or model.sparsity.mode != "predicted" or model.stored is not None:
        return stats  # under a RAM budget the values inside an FFN are not available
    if isinstance(prompt, str):
        ids = model.encode(prompt, parse_special=parse_special)
    else:
        ids = model.encode_chat(prompt)
    return stats.with_quality(model.measure_predictor([*ids, *tokens][:_QUALITY_TOKENS]))
