"""The tables and the chart of `headline.py`, made of its JSON: pure functions, which measure nothing."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from peers import Comparison, interval, percent, ratio, table

PEERS = ("llama.cpp", "ik_llama.cpp", "PowerInfer")
COLOURS = dict(zip(PEERS, ("#3b82c4", "#d9822b", "#4a9d6e"), strict=True))  # on a light or a dark page
GREY = "#808890"
JSON, CHART = Path("docs/benchmarks/headline.json"), Path("docs/images/headline.svg")
BLOCKS = {
    "README.md": ("summary", "sparse-summary", "facts"),
    "docs/benchmarks/results.md": ("facts", "models", "server", "sparse", "planted", "synthetic"),
}
NOT_YET = "Not measured yet: run `python bench/headline.py`."

Row = dict[str, Any]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write the results, one row a line, so that an interruption leaves the old or the new file."""
    facts = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in data["rows"])
    part = path.with_suffix(".part")
    part.write_text(f'{facts[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', "utf-8")
    part.replace(path)


def comparison(row: Row) -> Comparison:
    return Comparison(**row["found"])


def modes(row: Row) -> list[str]:
    """Return the names of hotset's runs: "hotset", or one per mode, such as "hotset exact"."""
    return [name for name in row["found"]["speeds"] if name.startswith("hotset")]


def facts(data: dict[str, Any]) -> str:
    """Return one line: machine, commit, date and versions."""
    machine, versions = data["machine"], data["versions"]
    size = f"{machine['memory'] / 1e9:.0f} GB"
    programs = ", ".join(f"{name} {versions[name]}" for name in PEERS if name in versions)
    return (
        f"Machine: {machine['processor']}, {machine['cores']} cores, {size}, {data['threads']} threads. "
        f"hotset at {data['commit']}, {data['date'][:10]}; "
        f"{programs or 'no other program'}. "
        f"Medians of {data['runs']} runs, by `python bench/headline.py`."
    )


# -- tables --------------------------------------------------------------------------------------


def against(row: Row, peer: str, ours: str | None = None, *, brief: bool = False) -> str:
    """Return the cell of a peer: the ratio, "failed" or "not measured", or "" if it is not compared."""
    found = comparison(row)
    if peer in found.speeds:
        ratios = found.ratios(peer, ours)
        return f"{statistics.median(ratios):.2f}×" if brief else ratio(ratios)
    if peer in found.failed:
        return "failed"
    return "not measured" if peer in row["peers"] else ""


def spread(speeds: Sequence[float]) -> str:
    digits = 0 if min(speeds) >= 100 else 1
    text = f"{statistics.median(speeds):,.{digits}f}"
    return text if len(speeds) == 1 else f"{text} ({min(speeds):,.{digits}f} to {max(speeds):,.{digits}f})"


def shares(row: Row) -> str:
    """Return the shares of the read rate: of hotset and of each measured peer."""
    found = comparison(row)
    known = [found.share(name) for name in found.speeds if name in (found.ours, *PEERS[:2])]
    return ", ".join(percent(share) for share in known if share is not None)


def label(row: Row) -> str:
    return row["model"] + (", synthetic" if row["synthetic"] else "")


def models_table(rows: list[Row]) -> str:
    """Return the table of runs without modes: every test with medians, ranges and intervals."""
    peers = PEERS[:2]
    headers = ["model", "test", "hotset, t/s", *(f"÷ {peer}" for peer in peers)]
    headers += ["of the read rate: " + ", ".join(["hotset", *peers])]
    lines = []
    for row in rows:
        speeds = comparison(row).speeds["hotset"]
        cells = [label(row), row["test"], spread(speeds), *(against(row, peer) for peer in peers)]
        lines.append([*cells, shares(row)])
    if not any(line[-1] for line in lines):
        headers, lines = headers[:-1], [line[:-1] for line in lines]
    return table(headers, lines)


def modes_table(rows: list[Row], *, brief: bool = False) -> str:
    """Return the table of decode by mode; the first mode of a row is its base."""
    peers = [peer for peer in PEERS if any(peer in row["peers"] for row in rows)]
    headers = ["model", "mode", "hotset, t/s", "÷ first mode", *(f"÷ {peer}" for peer in peers)]
    lines = []
    for row in rows:
        found, names = comparison(row), modes(row)
        for name in names:
            speeds = found.speeds[name]
            first = statistics.median(found.ratios(names[0], name))
            cells = [label(row) if name == names[0] else "", name.removeprefix("hotset ")]
            cells += [f"{statistics.median(speeds):.1f}" if brief else spread(speeds)]
            cells += ["" if name == names[0] else f"{first:.2f}×"]
            cells += [against(row, peer, name, brief=brief) for peer in peers]
            lines.append(cells if brief else [*cells, percent(found.share(name))])
    return table(headers if brief else [*headers, "of the read rate"], lines)


def summary_table(rows: list[Row]) -> str:
    """Return a line per model and a column per test; a cell has the ratio to each of two peers."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        ratios = [against(row, peer, brief=True).replace("not measured", "–") for peer in PEERS[:2]]
        cells.setdefault(label(row), {})[row["test"]] = ", ".join(text for text in ratios if text)
    lines = [[model, *(of.get(test, "") for test in tests)] for model, of in cells.items()]
    return table(["model", *tests], lines)


def blocks(data: dict[str, Any]) -> dict[str, str]:
    """Return the generated text of each block of the documents, by name."""
    rows = data["rows"]
    of = {
        name: [row for row in rows if (row["group"] in groups) and row["synthetic"] == synthetic]
        for name, groups, synthetic in (
            ("models", ("decode", "prefill", "depth"), False),
            ("server", ("server",), False),
            ("sparse", ("sparse",), False),
            ("planted", ("7b",), True),
            ("synthetic", ("moe", "decode", "prefill", "depth", "server"), True),
        )
    }
    plain, by_mode = [*of["models"], *of["server"], *of["synthetic"]], [*of["sparse"], *of["planted"]]
    texts = {"summary": summary_table(plain) if plain else "", "facts": facts(data)}
    texts["sparse-summary"] = modes_table(by_mode, brief=True) if by_mode else ""
    for name, found in of.items():
        made = modes_table if name in ("sparse", "planted") else models_table
        texts[name] = made(found) if found else ""
    return {name: text or NOT_YET for name, text in texts.items()}


def filled(text: str, texts: dict[str, str], names: Sequence[str]) -> str:
    """Return a document with its blocks filled: between `<!-- headline NAME -->` and `<!-- end -->`."""
    for name in names:
        pattern = rf"(<!-- headline {name} -->\n).*?(\n<!-- end -->)"
        text, n = re.subn(pattern, lambda m: f"{m[1]}\n{texts[name]}\n{m[2]}", text, flags=re.DOTALL)  # noqa: B023
        if n != 1:
            raise SystemExit(f"A document must have one block '<!-- headline {name} -->', not {n}.")
    return text


def documents(data: dict[str, Any], root: Path) -> dict[Path, str]:
    """Return the documents and the chart that show these results: path from the root → text."""
    texts = blocks(data)
    pages = {Path(name): filled((root / name).read_text("utf-8"), texts, of) for name, of in BLOCKS.items()}
    return pages | {CHART: chart(data)}


# -- the chart -----------------------------------------------------------------------------------


def bars(data: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, list[float]]]]]:
    """Yield each group of bars: its label, and the ratios to each measured peer."""
    for row in sorted(data["rows"], key=lambda row: row["synthetic"]):
        found = comparison(row)
        for name in modes(row):
            known = [(peer, found.ratios(peer, name)) for peer in PEERS if peer in found.speeds]
            if known:
                yield f"{label(row)}: {row['test']}{name.removeprefix('hotset')}", known


def chart(data: dict[str, Any]) -> str:
    """Return an SVG of ratios to each peer, as bars with their intervals; the page's background shows."""
    groups = list(bars(data))
    left, width, bar, gap = 460, 440, 8, 8
    most = max([2.0, *(interval(ratios)[1] for _, known in groups for _, ratios in known)])
    scale = width / most
    parts, y = [], 52
    for text, known in groups:
        middle = y + bar * len(known) / 2 + 4
        parts.append(f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(text)}</text>')
        for peer, ratios in known:
            median, (low, high) = statistics.median(ratios), interval(ratios)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{median * scale:.1f}" height="{bar - 1}" '
                f'fill="{COLOURS[peer]}">'
                f"<title>{escape(text)}: {median:.2f} times {peer}</title></rect>"
            )
            parts.append(
                f'<path d="M{left + low * scale:.1f} {y + bar / 2 - 0.5}H{left + high * scale:.1f}" '
                f'stroke="{GREY}" stroke-width="2"/>'
            )
            y += bar
        y += gap
    for tick in range(int(most) + 1):
        x = left + tick * scale
        dash = "" if tick == 1 else ' stroke-dasharray="2 4"'
        parts.append(f'<path d="M{x:.1f} 44V{y}" stroke="{GREY}"{dash}/>')
        parts.append(f'<text x="{x:.1f}" y="40" text-anchor="middle">{tick}×</text>')
    x = left
    for peer in PEERS:
        parts.append(f'<rect x="{x}" y="10" width="10" height="10" fill="{COLOURS[peer]}"/>')
        parts.append(f'<text x="{x + 15}" y="19">÷ {peer}</text>')
        x += 120
    title = "hotset's speed divided by the speed of other programs; the lines are intervals of the median"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {y + 10}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}">\n<title>{title}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
