"""The appearance of answers: formulas, colored code, wide tables; and the work for a long answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_page import PROSE, answers, drawn, say, until, violations
from fake_chat_server import FakeServer

HOSTILE_MATH = [
    r"$\href{javascript:window.pwned=1}{x}$",
    r"$\includegraphics{http://evil.example/x.png}$",
    r"$\htmlId{ask}{x} \htmlStyle{color:red}{x} \class{send}{x} \data{a=b}{x}$",
    r"$$\begin{align} x \label{ask} \\ y \tag{<img src=x onerror=window.pwned=2>} \end{align}$$",
    r"$\text{<script>window.pwned=3</script>}$",
    r"$\def\a{\a\a}\a$",
    r"$\newcommand{\a}[1]{" + "#1" * 200 + r"}\a{" + "x" * 200 + "}$",  # 40,000 elements
    r"$\global\long\def\b{xx}\b$ $\let\c=x\c$",
    r"$\rule{9999999em}{9999999em}$",
    "$" + "{" * 2000 + "}" * 2000 + "$",
    r"$\unknown{x}$",
    r"$\color{url(http://evil.example/c)}x$",
]


def test_hostile_formulas_stay_harmless(server: FakeServer, page: Any) -> None:
    server.replies.append(["\n\n".join([r"$\sqrt{4}$", *HOSTILE_MATH])])
    say(page, "math")
    until(page, "document.querySelector('.answer math') !== null")
    assert page.evaluate("window.pwned") is None
    assert page.locator("#messages :is(a, img, script, [id], [href], [src], [onerror])").count() == 0
    assert page.evaluate("document.getElementById('ask').localName") == "textarea"
    assert r"\unknown{x}" in answers(page)[0]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    heights = page.evaluate("[...document.querySelectorAll('.math')].map((e) => e.clientHeight)")
    assert max(heights) < 3000
    assert page.evaluate("document.querySelectorAll('.answer math *').length") < 1000


CODE = {
    "python": 'def f(x: int) -> str:\n    # why\n    return "<b>&amp;</b>" + str(1)',
    "html": "<script>window.pwned = 1</script><p class='x'>text</p>",
    "nonsense": "no such language",
}


def test_code_is_colored_and_copied_unchanged(server: FakeServer, opened: Any) -> None:
    text = "\n\n".join(f"```{name}\n{code}\n```" for name, code in CODE.items())
    server.replies.append([text[i : i + 3] for i in range(0, len(text), 3)])
    page = opened(server.url, permissions=["clipboard-read", "clipboard-write"])
    say(page, "code")
    until(page, "document.querySelectorAll('.code-keyword').length >= 2")
    python, html, other = page.locator(".answer pre").all()
    assert python.locator(".code-keyword").all_inner_texts()[0] == "def"
    assert python.locator(".code-comment").inner_text() == "# why"
    assert python.locator(".code-string").inner_text() == '"<b>&amp;</b>"'
    until(page, "document.querySelectorAll('.answer pre')[1].querySelector('span') !== null")
    assert html.locator(".code-name").first.inner_text() == "script"
    assert other.locator("span").count() == 0
    assert [block.inner_text() for block in (python, html, other)] == list(CODE.values())
    assert page.evaluate("window.pwned") is None
    for i, code in enumerate(CODE.values()):
        page.get_by_role("button", name="Copy the code").nth(i).click()
        until(page, f"navigator.clipboard.readText().then((text) => text === {json.dumps(code)})")
    assert violations(page) == []


@pytest.mark.slow
def test_narrow_tables_scroll(server: FakeServer, opened: Any) -> None:
    row = "|" + "a cell of words|" * 8
    server.replies.append([f"{row}\n|{'-|' * 8}\n{row}\n"])
    page = opened(server.url, viewport={"width": 360, "height": 640})
    say(page, "table")
    page.locator(".answer table").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate(
        "(({scrollWidth, clientWidth}) => scrollWidth > clientWidth + 100)(document.querySelector('.wide'))"
    )


def test_formulas_are_searched_only_where_the_lexer_stops(server: FakeServer, opened: Any) -> None:
    """The lexer calls the search before each piece. A search of the whole rest would take quadratic time."""
    texts = {
        "text": ["a $x$", "` a \\(x\\)", "a", "a *b* $x$", "a\nb $x$", "a \\* $x$"],
        "paragraphs": ["a\n$$x$$", "a\nb\n  \\[x\\]", "a", "a\n\nb\n$$x$$"],
    }
    found = opened(server.url).evaluate(
        """async (texts) => {
            const [inText, inParagraph] = (await import("/page/math.js")).mathExtensions;
            return [texts.text.map((text) => inText.start(text) ?? null),
                    texts.paragraphs.map((text) => inParagraph.start(text) ?? null)];
        }""",
        texts,
    )
    assert found == [[2, 4, None, None, None, None], [1, 3, None, None]]


# ---- work per event

LONG_CODE = "```text\n" + "a line of code, and no end of it\n" * 1200
KINDS = {"prose": PROSE * 220, "code": "Look:\n\n" + LONG_CODE + "```\n\nThat is all.\n"}

# Shows a text that grows like an answer. Counts the characters that the lexer reads, and the new elements.
GROW = """async ([text, size]) => {
    const { MarkdownView } = await import("/page/markdown.js");
    const grown = document.createElement("div"), whole = document.createElement("div");
    document.querySelector("#scroll").append(grown, whole);
    const view = new MarkdownView(grown), make = document.createElement;
    let made = 0, most = 0;
    document.createElement = function (...args) { made++; return make.apply(this, args); };
    for (let end = size; end < text.length; end += size) {
        const before = made;
        view.update(text.slice(0, end));
        most = Math.max(most, made - before);
    }
    const lexed = view.lexed, growing = made;
    view.update(text, true);
    made = 0;
    new MarkdownView(whole).update(text, true);
    delete document.createElement;
    // Formulas and the colours of code come when their libraries are there: their sources are compared.
    const outline = (root) => [...root.querySelectorAll(":not(pre *, .math *)")]
        .map((e) => `${e.localName} ${e.matches(".math, pre") ? e.title || e.textContent : ""}`).join("\\n");
    const words = (root) => {
        const copy = root.cloneNode(true);
        for (const math of copy.querySelectorAll(".math")) math.textContent = math.title;
        return copy.textContent;
    };
    return { lexed, made: growing, most, needed: made, same: words(grown) === words(whole),
             nodes: outline(grown) === outline(whole) };
}"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_per_token_does_not_grow_with_the_answer(page: Any, kind: str) -> None:
    text = KINDS[kind][:40_000]
    found = page.evaluate(GROW, [text, 4])  # 10,000 tokens
    assert found["same"]
    assert found["nodes"]
    # If earlier blocks were read or drawn again, these numbers would be thousands of times larger.
    assert found["lexed"] < 60 * len(text)
    assert found["made"] < 60 * found["needed"]
    assert found["most"] < 60


SEEN = """[...document.querySelectorAll('.answer .part > *')]
    .filter((e) => e.checkVisibility({ contentVisibilityAuto: true })).length"""
AT_END = """(({ scrollTop, clientHeight, scrollHeight }) => scrollTop + clientHeight > scrollHeight - 2)(
    document.querySelector('#scroll'))"""


def test_only_visible_blocks_are_laid_out(server: FakeServer, page: Any) -> None:
    text = PROSE * 200
    server.replies.append([text[i : i + 2000] for i in range(0, len(text), 2000)])
    say(page, "Go on")
    blocks = page.locator(".answer .part > *")
    until(page, f"{SEEN} < 200")
    assert blocks.count() > 1300
    assert page.evaluate(SEEN) > 10
    assert page.evaluate(AT_END)
    # An earlier conversation scrolls to the bottom, although the heights of invisible blocks are unknown.
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="Go on", exact=True).click()
    until(page, f"{AT_END} && {SEEN} > 10")
    drawn(page)
    assert page.evaluate(AT_END)
    assert page.evaluate(SEEN) < 200
    page.keyboard.press("Escape")
    page.locator("#scroll").evaluate("(box) => box.scrollTo(0, 0)")
    until(
        page, "document.querySelector('.answer .part > *').checkVisibility({ contentVisibilityAuto: true })"
    )
    drawn(page)
    assert page.evaluate("document.querySelector('#scroll').scrollTop") == 0, "it scrolled to the end"


def test_an_answer_does_not_depend_on_its_pieces(server: FakeServer, opened: Any) -> None:
    """A growing text has the same blocks as the whole text."""
    odd = (
        "[x]: https://example.org/x\n\nA [link][x] and [late].\n\n1. a\n\n   b\n2. c\n\ntext\n===\n\n"
        "    indented\n\n    more\n\n~~~\ntilde ``` inside\n~~~~\n\n````md\n```\nnested\n```\n````\n\n"
        "- a\n\n\n- b\n\n<div>html\n\ntext</div>\n\n\\[\nx\n\n+ y\n\\]\n\n```\nopen\n\n[late]: https://example.org/late"
    )
    page = opened(server.url)
    for size in (1, 3, 7):
        found = page.evaluate(GROW, [odd, size])
        assert found["same"], size
        assert found["nodes"], size
    # The same with Windows' line ends.
    assert page.evaluate(GROW, [odd.replace("\n", "\r\n"), 5])["same"]


ACTIVITY = """async () => {
    const { Activity } = await import("/page/activity.js");
    const activity = new Activity(null), n = 10000;
    const shares = (i) => [((i * 37) % 100) / 250, ((i * 11) % 100) / 100];
    const tokens = Array.from({ length: n }, (_, i) => ({
        token: i, text: "x", seconds: i / 10, bytes_touched: 1000 + i, bytes_total: 9000, bytes_kv: i,
        step_tokens: 1 + (i % 3), active_share: shares(i)[0],
        layers: { active_share: shares(i), bytes: [i, 2 * i] },
    }));
    let read = 0;
    activity.add(tokens.slice(0, n - 1));
    activity.tokens = new Proxy(activity.tokens, {
        get: (list, name) => { read += /^\\d+$/.test(String(name)); return list[name]; },
    });
    activity.add(tokens.slice(n - 1));
    activity.summary(), activity.line(), activity.scale, activity.layerShares("cpu");
    const weights = tokens.slice(1).reduce((sum, token) => sum + token.step_tokens, 0);
    const sum = (of) => tokens.slice(1).reduce((sum, token) => sum + of(token) * token.step_tokens, 0);
    const mean = (of) => sum(of) / weights;
    const cells = tokens.flatMap((token) => token.layers.active_share).sort((a, b) => a - b);
    const near = (a, b) => Math.abs(a - b) < 1e-9 * Math.max(1, Math.abs(b));
    return { read, share: near(activity.mean("share"), mean((token) => token.active_share)),
             touched: near(activity.mean("touched"), mean((token) => token.bytes_touched + token.bytes_kv)),
             layer: near(activity.layerShares()[1], mean((token) => token.layers.active_share[1])),
             bytes: near(activity.layerBytes(1), mean((token) => token.layers.bytes[1])),
             scale: activity.scale, quantile: cells[Math.ceil(0.97 * (cells.length - 1))] };
}"""


@pytest.mark.slow
def test_means_of_a_long_answer_are_updated_incrementally(server: FakeServer, opened: Any) -> None:
    found = opened(server.url).evaluate(ACTIVITY)
    assert found["read"] <= 20  # of 10,000 tokens
    assert all(found[name] for name in ("share", "touched", "layer", "bytes"))
    assert found["scale"] == 1
    assert 0.8 < found["quantile"] <= found["scale"]
