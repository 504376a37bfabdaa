"""A report as files: plots as PNG or SVG, and one HTML page that needs nothing but itself.

The page has its plots inline as SVG, whose colours become variables of the page's style sheet, so that they
follow the reader's choice of light or dark; text in them stays text. Each plot has its title and description
for those who do not see it, and its numbers as a table. There is no script and nothing is fetched.
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
_MANY_ROWS = 12  # a longer table is folded


@dataclass(frozen=True)
class PageHeading:
    """What stands at the top of the page. model: its name. notes: sentences on what was counted.

    numbers: the few that matter, as (number, what it is).
    """

    model: str
    notes: Sequence[str]
    numbers: Sequence[tuple[str, str]]


def html_page(facts: PageHeading, plots: Sequence[Plot]) -> str:
    """The whole page."""
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
    """A plot as a file, on white."""
    return _drawn(plot, kind, "white")


def _drawn(plot: Plot, kind: ImageType, background: str) -> bytes:
    from matplotlib import rc_context

    # Text stays text in SVG, and the same numbers give the same bytes.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": plot.name}
    metadata: Any = {"Title": plot.title} | ({"Date": None} if kind == "svg" else {})
    file = BytesIO()
    with rc_context(settings):
        plot.draw().savefig(file, format=kind, dpi=_PNG_DPI, facecolor=background, metadata=metadata)
    return file.getvalue()


def _inline_svg(plot: Plot) -> str:
    """The plot as an element of a page: its own names, the page's colours and font, a description."""
    text = _drawn(plot, "svg", "none").decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several drawings share one page, and so one space of names.
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
