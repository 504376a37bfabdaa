"""A report as files: plots as PNG or SVG, and one self-contained HTML page.

The page has its plots inline as SVG. Their colours become variables of the page's style sheet, so that they
follow the reader's choice of light or dark, and their text stays text. Each plot has a title, a description
for readers who cannot see it, and its numbers as a table. The page has no script and fetches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from io import BytesIO
from typing import Any, Literal

from hotset.report.plots import COLOURS, Plot

ImageType = Literal["png", "svg"]
_PNG_DPI = 160
_MANY_ROWS = 12  # a longer table is collapsed


@dataclass(frozen=True)
class PageHeading:
    """The top of the page. model: its name. notes: sentences about the counts.

    numbers: the most important ones, as (number, meaning).
    """

    model: str
    notes: Sequence[str]
    numbers: Sequence[tuple[str, str]]


def html_page(facts: PageHeading, plots: Sequence[Plot]) -> str:
    """Return the whole page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files("hotset.report") / "page.html").read_text("utf-8"))
    return template.render(
        facts=facts,
        plots=[
            {"plot": plot, "svg": _inline_svg(plot), "fold": len(plot.table[1]) > _MANY_ROWS}
            for plot in plots
        ],
        colours=COLOURS,
    )


def image(plot: Plot, kind: ImageType) -> bytes:
    """Return a plot as a file, on white."""
    return _drawn(plot, kind, "white")


def _drawn(plot: Plot, kind: ImageType, background: str) -> bytes:
    from matplotlib import rc_context

    # In SVG, text stays text and the same numbers give the same bytes.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": plot.name}
    metadata: Any = {"Title": plot.title} | ({"Date": None} if kind == "svg" else {})
    file = BytesIO()
    with rc_context(settings):
        plot.draw().savefig(file, format=kind, dpi=_PNG_DPI, facecolor=background, metadata=metadata)
    return file.getvalue()


def _inline_svg(plot: Plot) -> str:
    """Return a plot as an SVG element with unique ids, the page's colours and font, and a description."""
    text = _drawn(plot, "svg", "none").decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several drawings are in one page, where ids must be unique.
    text = re.sub(r'\bid="([^"]+)"', rf'id="{plot.name}-\1"', text)
    text = re.sub(r"url\(#", f"url(#{plot.name}-", text)
    text = re.sub(r'href="#', f'href="#{plot.name}-', text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 system-ui, sans-serif", text)
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    names = f'role="img" aria-labelledby="{plot.name}-title {plot.name}-desc"'
    head = (
        f'<svg {box[0]} {names} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{plot.name}-title">{escape(plot.title)}</title>'
        f'<desc id="{plot.name}-desc">{escape(plot.alt)}</desc>'
    )
    return head + text[text.index(">") + 1 :].replace(f"<title>{escape(plot.title)}</title>", "", 1)
