"""`hotset quantize`: write a GGUF file with its matrices in another type."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.console import print_json, print_table, say
from hotset.cli.progress import ProgressBar
from hotset.files import check_output
from hotset.formats import requantize
from hotset.formats.gguf import open_gguf
from hotset.formats.imatrix import ImportanceMatrix
from hotset.storage import resolve
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.requantize import PlannedTensor


@dataclass(frozen=True, kw_only=True)
class TypeOptions:
    """Options for the types of the written matrices."""

    type: Annotated[
        str | None,
        options.option(
            "--type",
            "Type of the matrices: q8_0, q6_k, q5_k_m, q5_1, q5_0, q4_k_m, q4_1, q4_0, iq4_xs, mxfp4, "
            "q3_k_m, iq3_s, iq3_xxs, q2_k, iq2_m, iq2_xxs, iq1_m, tq2_0, tq1_0, f16, bf16, f32 and more "
            "(docs/reference/gguf.md).",
            kind=options.TENSOR_TYPE,
            usual="q4_0, or with --tensor-type the file's",
        ),
    ] = None
    tensor_type: options.TensorTypes = None
    allow_requantize: Annotated[
        bool, options.option("--allow-requantize", "Quantise matrices again that are already quantised.")
    ] = False
    imatrix: Annotated[
        Path | None,
        options.option(
            "--imatrix", "Weigh errors by this file of 'hotset imatrix'.", exists=True, dir_okay=False
        ),
    ] = None


def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="The model: a path or a name.")],
    target: Annotated[
        Path | None, typer.Argument(metavar="OUT.gguf", help="The file to write; not with --dry-run.")
    ] = None,
    *,
    types: TypeOptions,
    dry_run: Annotated[bool, options.option("--dry-run", "Print types and sizes; write nothing.")] = False,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Quantise a GGUF file, plain or PowerInfer's."""
    path = resolve(source, download=False)
    if target is None and not dry_run:
        raise typer.BadParameter("name the file to write, or use --dry-run.", param_hint="OUT.gguf")
    rules, again = types.tensor_type or [], types.allow_requantize
    type = types.type or (None if rules else "q4_0")
    importance = None if types.imatrix is None else ImportanceMatrix.open(types.imatrix)
    with open_gguf(path) as gguf:
        if target is not None:
            check_output(target, gguf.paths)
        tensors = requantize.types_of(gguf, type, rules, allow_requantize=again, importance=importance)
        before, powerinfer = gguf.nbytes, gguf.dialect == "powerinfer"
    after = before + sum(planned.nbytes - planned.info.nbytes for planned in tensors)
    began = time.monotonic()
    if not dry_run:
        assert target is not None
        with ProgressBar() as bar:
            requantize.quantize(
                path, target, type, tensor_types=rules, allow_requantize=again, imatrix=types.imatrix,
                n_threads=n_threads, progress=bar,
            )  # fmt: skip
        after = target.stat().st_size
    seconds = time.monotonic() - began
    if json:
        print_json(_as_json(path, None if dry_run else target, tensors, before, after, seconds))
        return
    if dry_run:
        print_table(["tensors", ">", "shape", "from", "to", ">size", "note"], _rows(tensors), tight=True)
    n_weights = sum(planned.info.n_elements for planned in tensors)
    bits = f", {8 * after / n_weights:.2f} bits per weight" if n_weights else ""
    size = f"{human_size(after)}{bits}; {human_size(before)} before"
    say(f"It would take {size}." if dry_run else f"Wrote {target} ({size}) in {seconds:.1f} s.")
    if powerinfer and (odd := _unread_by_powerinfer(tensors)):
        say(f"PowerInfer itself reads ffn_down_t as F16 or Q4_0 only, and here it is {odd}.", dim=True)


def _unread_by_powerinfer(tensors: list[PlannedTensor]) -> str | None:
    """Return the type of a down projection that PowerInfer would misread, or None."""
    types = {p.type.name for p in tensors if p.info.name.endswith("ffn_down_t.weight")}
    return next(iter(sorted(types - {"F16", "Q4_0"})), None)


def _rows(tensors: list[PlannedTensor]) -> list[list[str]]:
    """Return one row for all equal tensors of the layers."""
    groups: dict[tuple[str, ...], list[PlannedTensor]] = {}
    for planned in tensors:
        info = planned.info
        name = re.sub(r"^blk\.\d+\.", "blk.*.", info.name)
        shape = " x ".join(str(n) for n in info.shape)
        key = (name, shape, info.type.name, planned.type.name, planned.note)
        groups.setdefault(key, []).append(planned)
    rows = []
    for (name, shape, old, new, note), group in groups.items():
        count = f"{len(group)}" if len(group) > 1 else ""
        size = human_size(sum(planned.nbytes for planned in group))
        rows.append([name, count, shape, old, "" if new == old else new, size, note])
    return rows


def _as_json(
    source: Path, target: Path | None, tensors: list[PlannedTensor], before: int, after: int, seconds: float
) -> dict[str, Any]:
    return {
        "source": str(source),
        "path": None if target is None else str(target),
        "size_before": before,
        "size": after,
        "seconds": None if target is None else seconds,
        "tensors": [
            {
                "name": planned.info.name,
                "shape": list(planned.info.shape),
                "from": planned.info.type.name,
                "type": planned.type.name,
                "size": planned.nbytes,
                "note": planned.note or None,
            }
            for planned in tensors
        ],
    }
