"""An answer to a prompt or a turn of a chat: its chunks, its closing line and its statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli.console import print_table, say
from hotset.report.bars import percent
from hotset.units import human_count, human_size, size_of

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.generation import Chunk, Timings
    from hotset.sparsity.stats import StatsSummary


def has_template(model: Model) -> bool:
    template = model.gguf.metadata.get("tokenizer.chat_template")
    return isinstance(template, str) and bool(template)


def chunks(
    model: Model, prompt: str | list[dict[str, Any]], params: dict[str, Any], *, parse_special: bool = True
) -> Iterator[Chunk]:
    """Return the chunks of the answer to a text, used unchanged, or to messages in the chat template.

    parse_special: special tokens spelled in a text are parsed.
    """
    if isinstance(prompt, str):
        return model.stream(model.encode(prompt, parse_special=parse_special), **params)
    return model.stream(model.encode_chat(prompt), **params)


def with_images(text: str, images: Sequence[Path]) -> str | list[dict[str, Any]]:
    """Return the content of a message: the text, after the images if there are any.

    It has their absolute paths, so that a saved conversation finds them again.
    """
    if not images:
        return text
    parts: list[dict[str, Any]] = [{"type": "image", "path": str(path.absolute())} for path in images]
    return [*parts, {"type": "text", "text": text}]


def bytes_touched(model: Model, timings: Timings, stats: StatsSummary | None) -> float:
    """Return the bytes of weights and cache that an average token of the answer touched."""
    depth = timings.prompt_tokens + timings.predicted_tokens / 2
    if stats is None:
        return model.cost.bytes_per_token(depth, model.kv_type)
    return stats.bytes_touched_per_token + model.cost.kv_bytes_read(depth, model.kv_type)


def closing_line(model: Model, last: Chunk) -> str:
    """Return a line with sizes and speeds of prompt and answer, bytes read, and why the answer ended."""
    timings = last.timings
    parts = [f"prompt {timings.prompt_tokens} tokens"]
    if timings.reused_tokens:
        parts[0] += f" ({timings.reused_tokens} from the cache)"
    if timings.prompt_per_second:
        parts[0] += f", {timings.prompt_per_second:.1f} t/s"
    parts.append(f"answer {timings.predicted_tokens} tokens")
    if timings.predicted_per_second:
        parts[1] += f", {timings.predicted_per_second:.1f} t/s"
    parts.append(_bytes_read(model, timings, last.answer_stats))
    if last.finish_reason is None:
        parts.append("interrupted")
    elif last.finish_reason == "length":
        full = timings.prompt_tokens + timings.predicted_tokens >= model.n_ctx
        parts.append(
            f"the context of {model.n_ctx} tokens is full"
            if full
            else f"truncated at {timings.predicted_tokens} tokens"
        )
    return "[" + " | ".join(parts) + "]"


def _bytes_read(model: Model, timings: Timings, stats: StatsSummary | None) -> str:
    read = bytes_touched(model, timings, stats)
    if stats is None:
        return f"{human_size(read)} read per token"
    whole = read - stats.bytes_touched_per_token + stats.bytes_total_per_token
    has_idle_experts = model.config.has_experts and not model.config.has_zeros
    if has_idle_experts or model.sparsity.mode == "threshold":  # no active share is counted for these
        return f"{size_of(read, whole)} read per token"
    size = human_size(read) if model.sparsity.mode == "dense" else size_of(read, whole)
    return f"{percent(stats.active_share)} of FFN neurons fired, {size} read per token"


def print_stats(stats: StatsSummary | None, model: Model) -> None:
    """Print a table with a row for each layer, and a line for the whole model, to stderr."""
    if stats is None:
        why = "the activation of this model has no zeros, so that every neuron is computed"
        device = model.decided.capabilities
        if device is not None and not device.sparse_ffn:
            why = f"{device.title} counts no neurons"
        say(f"No statistics: {why}.")
        return
    from hotset.report.layers import stats_table

    print_table(*stats_table(stats), err=True, tight=True)
    steps = f"{stats.n_tokens} tokens" + (
        f" in {stats.n_steps} steps" if stats.n_steps != stats.n_tokens else ""
    )
    times = ", ".join(f"{kind} {1e3 * seconds:.3g} ms" for kind, seconds in stats.seconds.items())
    say(
        f"[{steps} | per token: {human_count(stats.active_parameters)} parameters active, "
        f"{human_count(stats.flops)} FLOPs, {times}]",
        dim=True,
    )
    predicted = model.decided.channels  # the estimate for thresholds
    if predicted is not None and predicted.left_out is not None:
        saved = stats.bytes_total_per_token - stats.bytes_touched_per_token
        say(
            f"[zeros of thresholds | {human_size(saved)} of weights left out per token, "
            f"{human_size(predicted.left_out)} predicted]",
            dim=True,
        )
