"""The chat page in a browser, with a server whose answers the test gives, and with the real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from byte_models import TEMPLATE, write_sparse
from cases import quick_are, quick_if
from chat_page import (
    MARKDOWN,
    act,
    answers,
    done,
    drawn,
    luminance,
    message,
    questions,
    saved,
    say,
    sent,
    until,
    violations,
)
from fake_chat_server import Drop, FakeServer, Hold, Refusal, facts, served, token
from tiny_server import MESSAGES, write_model

import hotset
from hotset.server.app import create_app
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

# ---- chatting


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop(server: FakeServer, page: Any, how: str) -> None:
    hold = Hold()
    server.replies += [["One", " two", hold], ["Three."]]
    say(page, "Count", wait=False)
    page.get_by_text("One two", exact=True).wait_for()
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    done(page)
    assert answers(page) == ["One two"]
    assert "stopped" in page.locator(".note").inner_text()
    for _ in range(200):
        if server.n_left:
            break
        page.wait_for_timeout(20)
    assert server.n_left == 1  # the server notices it
    say(page, "Go on")
    assert sent(server)[1] == ("assistant", "One two")


def test_editing_a_message_gives_a_new_answer(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."], ["C."]]
    say(page, "first")
    say(page, "second")
    page.locator(".question").first.hover()
    page.locator(".question").first.get_by_role("button", name="Edit").click()
    area = page.get_by_role("textbox", name="Edit your message")
    assert area.input_value() == "first"
    area.press("Escape")  # cancels the edit
    assert questions(page) == ["first", "second"]
    page.locator(".question").first.get_by_role("button", name="Edit").click()
    area.fill("another")
    area.press("Enter")
    page.get_by_text("C.", exact=True).wait_for()
    done(page)
    assert sent(server) == [("user", "another")]
    assert (questions(page), answers(page)) == (["another"], ["C."])


def test_an_answer_is_regenerated(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."], ["Another B."]]
    say(page, "first")
    say(page, "second")
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_text("Another B.", exact=True).wait_for()
    done(page)
    assert sent(server, 2) == sent(server, 1)
    assert answers(page) == ["A.", "Another B."]


def test_reasoning_is_shown_separately(server: FakeServer, page: Any) -> None:
    server.replies.append([("reasoning_content", "<b>Hm</b>"), "Yes."])
    say(page, "Well?")
    assert answers(page) == ["Yes."]
    page.get_by_text("Reasoning").click()
    assert page.locator(".thought").inner_text() == "<b>Hm</b>"


# ---- Markdown


def test_markdown(server: FakeServer, opened: Any) -> None:
    server.replies.append([MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)])
    page = opened(server.url, permissions=["clipboard-read", "clipboard-write"])
    say(page, "Show")
    said = page.locator(".answer .markdown")
    assert said.locator("h3").inner_text() == "Title"
    found = {
        name: said.locator(name).first.inner_text() for name in ("em", "strong", "p code", "del", "td.right")
    }
    assert found == {"em": "soft", "strong": "loud", "p code": "code", "del": "gone", "td.right": "2"}
    assert said.locator("ul > li ol > li").inner_text() == "nested"
    assert said.locator("ul > li").nth(1).inner_text() == "☑ done"
    assert said.locator("blockquote p").inner_text() == "said"
    assert said.locator("hr").count() == 1
    link = said.locator("a")
    assert link.get_attribute("href") == "https://example.org/a"
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert link.get_attribute("target") == "_blank"
    assert said.locator("pre").inner_text() == 'print("<b>&amp;</b>")'
    said.get_by_role("button", name="Copy the code").click()
    page.get_by_text("Copied").first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>&amp;</b>")'
    page.locator(".answer .acts").get_by_role("button", name="Copy").click()
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('# Title'))")


HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    "<svg onload='window.pwned = 3'><a xlink:href='javascript:window.pwned=4'>x</a></svg>",
    "<iframe srcdoc='<script>parent.pwned = 5</script>'></iframe>",
    "<style>body { display: none }</style><link rel=stylesheet href=http://evil.example/x.css>",
    "<form action=http://evil.example><button id=send>go</button></form>",
    "<base href=http://evil.example/><meta http-equiv=refresh content='0;url=http://evil.example'>",
    "[a](javascript:window.pwned=6) [b](JaVaScRiPt:window.pwned=7) [c](data:text/html,<script>x</script>)",
    "[d](vbscript:x) [e](file:///etc/passwd) [f](//evil.example/x) [g](/page/main.js)",
    "[h](java\tscript:window.pwned=8) [i](<java script:x>) [j](&#106;avascript:window.pwned=8)",
    "<javascript:window.pwned=9> <https://ok.example/?<script>>",
    "![spy](http://evil.example/?leak=1) [![spy](http://evil.example/2)](javascript:window.pwned=10)",
    "[x]: javascript:window.pwned=11\n\n[x] [y][x]",
    '[t](https://ok.example "&quot; onmouseover=&quot;window.pwned=12")',
    "| <img src=x onerror=pwned=13> |\n|---|\n| <script>window.pwned=14</script> |",
    "```<script>window.pwned=15</script>\n</code></pre><script>window.pwned=16</script>\n```",
    "# <script>window.pwned=17</script>\n\n- <details open ontoggle='window.pwned=18'>x</details>",
    "a<!-- --><math><mtext></math><template><script>window.pwned=19</script></template>",
    "\u202eevil\u202c \x00\x1b[31m &lt;script&gt;window.pwned=20&lt;/script&gt;",
]


def test_a_models_text_never_becomes_html(server: FakeServer, opened: Any) -> None:
    text = "\n\n".join(HOSTILE)
    parts: list[Any] = [token(i, text[i : i + 9], [0.5, 0.5, 0.5]) for i in range(0, len(text), 9)]
    server.replies += [[("reasoning_content", HOSTILE[0]), *parts], Refusal(400, HOSTILE[1])]
    server.model = HOSTILE[1]
    page = opened(server.url)
    say(page, HOSTILE[1])
    for name in (
        "script", "img", "svg", "iframe", "style", "form", "base", "meta", "template", "details", "math",
    ):  # fmt: skip
        assert page.locator(f".markdown {name}").count() == 0, name
    assert page.locator("img, iframe, main style, base").count() == 0
    assert page.evaluate("window.pwned") is None
    allowed = "class href target rel title start tabindex role aria-label scope type viewBox aria-hidden d"
    names = page.evaluate(
        "[...document.querySelectorAll('.markdown *')].flatMap((e) => [...e.attributes].map((a) => a.name))"
    )
    assert set(names) <= set(allowed.split())
    links = page.evaluate("[...document.querySelectorAll('#messages a')].map((a) => a.href)")
    assert links
    assert all(re.match(r"https?://(ok|evil)\.example/", link) for link in links), links
    for shown in ("window.pwned = 1", "window.pwned=14", "window.pwned=16"):
        assert shown in page.locator(".answer .markdown").inner_text()
    page.locator(".markdown").hover()
    say(page, "again")
    assert page.locator(".failed").last.inner_text() == HOSTILE[1]
    page.click("#show-history")
    assert "onerror" in page.locator("#conversations").inner_text()
    assert page.evaluate("window.pwned") is None


def test_the_browser_refuses_to_turn_text_into_html(server: FakeServer, browser: Any) -> None:
    """This protects against mistakes in the page's code."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        tries = [
            "document.body.innerHTML = '<b>x</b>'",
            "document.write('x')",
            "document.body.onclick = 1, eval('1')",
        ]
        for one in tries:
            tried = f"try {{ {one}; window.done = 'did' }} catch (e) {{ window.done = e.name }}"
            page.evaluate(f"() => {{ window.done = null; setTimeout(() => {{ {tried} }}) }}")
            until(page, "window.done !== null")
            assert page.evaluate("window.done") in ("TypeError", "EvalError")


def test_text_that_a_parser_cannot_process_is_shown_unchanged(server: FakeServer, opened: Any) -> None:
    deep = ">" * 3000 + " deep"
    wide = "*a **b " * 400
    server.replies += [[deep], [wide], ["fine"]]
    page = opened(server.url)
    for text in ("deep", "wide", "fine"):
        say(page, text)
    first, second, third = answers(page)
    assert first.endswith("deep")
    assert second.count("b") == 400
    assert third == "fine"


# ---- neuron activity


def write_for_chat(path: Path) -> Path:
    return write_sparse(path, {"tokenizer.chat_template": TEMPLATE}, dialect="gguf")


@contextmanager
def real_server(path: Path, **settings: Any) -> Iterator[str]:
    def load() -> hotset.Model:
        return hotset.load(path, device="cpu", n_threads=1, max_sequences=4)

    with served(create_app(Service(load, ServerSettings(**settings), name="tiny"))) as url:
        yield url


GREEDY = {"hotset.settings": json.dumps({"temperature": 0, "max_tokens": 24})}


def kibibytes(size: float) -> str:
    return f"{int(size / 102.4 + 0.5) / 10:.1f} KiB"  # rounded as by JavaScript


def test_a_sparse_models_activity_is_shown(tmp_path: Path, opened: Any) -> None:
    path = write_for_chat(tmp_path / "sparse.gguf")
    with hotset.load(path, device="cpu", n_threads=1) as model:
        chunks = list(model.stream(model.encode_chat(MESSAGES), temperature=0, max_tokens=24))
        stats = chunks[-1].answer_stats
        assert stats is not None
        steps = [chunk.stats for chunk in chunks]
        depth = model.encode_chat(MESSAGES)
        kv = [model.cost.kv_bytes_read(len(depth) + i - 1, model.kv_type) for i in range(len(chunks))]
        text = "".join(chunk.text for chunk in chunks)
    with real_server(path) as url:
        page = opened(url, GREEDY)
        say(page, MESSAGES[0]["content"])
        assert page.locator(".answer .markdown").text_content() == text.strip() or len(text) > 0
        assert "2 layers × 96 neurons · exact" in page.locator("#model").inner_text()
        # The summary has means over the tokens after the first.
        mean_kv = sum(kv[1:]) / len(kv[1:])
        read, total = stats.bytes_touched_per_token + mean_kv, stats.bytes_total_per_token + mean_kv
        summary = message(page, "#summary")
        fired, amount = f"{100 * stats.active_share:.0f}%", f"{kibibytes(read)[:-4]} of {kibibytes(total)}"
        assert summary.startswith(f"{fired} of neurons fired; {amount} read per token; ")
        assert summary.endswith("tokens per second.")
        # The arrow keys select a cell, whose token, layer, share and bytes are shown.
        page.locator(".heat").focus()
        page.keyboard.press("Home")
        for i, step in enumerate(steps[:3]):
            assert step is not None
            for layer in step.layers:
                told = message(page, "#readout")
                n = round(layer.active_share * 96)
                assert told.startswith(f"Token {i + 1}, “")
                assert f", layer {layer.layer}" in told
                assert f"{100 * round(layer.active_share, 4):.1f}% of 96 neurons fired ({n})" in told
                assert told.endswith(f"{kibibytes(layer.bytes)} read.") or layer.bytes < 1024
                page.keyboard.press("ArrowUp")
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowRight")
        # The table has the same numbers.
        page.get_by_text("Show as tables").click()
        rows = page.locator("#tables-body table").first.locator("tbody tr").all_inner_texts()
        for row, layer in zip(rows, stats.layers, strict=True):
            cells = row.split("\t")
            assert cells[0] == str(layer.layer)
            assert float(cells[1].rstrip("%")) == pytest.approx(100 * layer.active_share, abs=0.06)
        tokens = page.locator("#tables-body table").nth(1).locator("tbody tr")
        assert tokens.count() == len(chunks)


@pytest.mark.slow
def test_the_map_is_brighter_or_darker_where_more_neurons_fire(server: FakeServer, opened: Any) -> None:
    shares = [[0.1, 0.1, 0.1], [0.1, 0.5, 0.1], [0.1, 0.1, 0.1], [0.3, 0.1, 0.1]]
    for scheme in ("light", "dark"):
        server.replies.append([token(i, f" t{i}", row) for i, row in enumerate(shares)])
        page = opened(server.url, color_scheme=scheme)
        say(page, "map")
        assert page.locator(".heat").is_visible()
        drawn(page)
        left, top, column, row = 34, 34, 16, 22
        idle = luminance(page, left + 8, top + row + 11)
        seen = {
            (i, layer): luminance(page, left + column * i + 8, top + row * (2 - layer) + 11)
            for i in range(4)
            for layer in range(3)
        }
        sign = 1 if scheme == "dark" else -1  # in dark mode higher shares are brighter
        assert sign * (seen[1, 1] - idle) > sign * (seen[3, 0] - idle) > 20
        assert {round(seen[cell]) for cell in seen if cell not in ((1, 1), (3, 0))} == {round(idle)}
        # Pointing at a cell shows its numbers, and leaving it clears them.
        box = page.locator(".heat").bounding_box()
        page.mouse.move(box["x"] + left + column + 8, box["y"] + top + row + 11)
        assert message(page, "#readout") == (
            "Token 2, “ t1”, layer 1: 50.0% of 200 neurons fired (100), 488.3 KiB read."
        )
        assert page.locator("#tape .chosen").inner_text().strip() == "t1"
        page.mouse.move(5, 5)
        assert "Point at a cell" in message(page, "#readout")
        page.locator("#tape span").nth(3).click()
        assert message(page, "#readout") == "Token 4, “ t3”: 16.7% of all neurons fired, 1.9 of 3.8 MiB read."


def test_neurons_on_the_gpu_and_on_the_cpu(server: FakeServer, opened: Any) -> None:
    shares, cold = [0.4, 0.4, 0.2], [0.1, 0.1, 0.2]
    server.replies.append(
        [token(i, f" {i}", shares, cpu_share=cold, step_tokens=3 if i == 2 else 1) for i in range(5)]
    )
    page = opened(server.url)
    say(page, "both")
    assert "60% of the neurons that fired were hot, on the GPU" in message(page, "#summary")
    page.locator(".heat").focus()
    page.keyboard.press("End")
    assert message(page, "#readout").endswith(
        "layer 0: 40.0% of 200 neurons fired (80), 30.0% hot on the GPU and 10.0% cold on the CPU, "
        "390.6 KiB read."
    )
    drawn(page)
    x, y = 34 + 16 + 8, 34 + 2 * 22 + 11
    both = luminance(page, x, y)
    page.get_by_label("CPU, cold").check()
    drawn(page)
    assert luminance(page, x, y) > both + 20  # the CPU computes few of them
    assert page.locator("#shared").is_visible()
    assert "Other requests ran at the same time" in message(page, "#shared")
    page.get_by_text("Show as tables").click()
    assert page.locator("#tables-body tbody tr").first.inner_text().split("\t")[4] == "10.0%"


def test_a_dense_model_shows_speed_and_bytes(tmp_path: Path, opened: Any) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    with hotset.load(path, device="cpu", n_threads=1) as model:
        n_prompt = len(model.encode_chat(MESSAGES))
        read = [model.cost.bytes_per_token(n_prompt + i - 1, model.kv_type) for i in range(1, 24)]
    with real_server(path) as url:
        settings = json.dumps({"temperature": 0, "max_tokens": 24})
        page = opened(url, {"hotset.settings": settings})
        assert page.locator("#picture-title").inner_text() == "Speed"
        say(page, MESSAGES[0]["content"])
        n = int(re.search(r"(\d+) tokens", page.locator(".note").inner_text())[1])  # type: ignore[index]
        summary = message(page, "#summary")
        assert summary.startswith(
            f"{kibibytes(sum(read[: n - 1]) / (n - 1))} read per token, the whole model; "
        )
        assert "tokens per second" in summary
        assert page.locator(".speed").is_visible()
        assert page.locator(".heat").count() == 0
        assert page.locator("#legend").is_hidden()
        page.locator(".speed").focus()
        page.keyboard.press("Home")
        assert re.fullmatch(
            r"Token 2, “.+”: [\d.]+ ms, [\d.]+ KiB read, [\d.]+ K?i?B of it keys and values\.",
            message(page, "#readout"),
        )


@pytest.mark.slow
def test_the_activity_of_an_earlier_answer(server: FakeServer, page: Any) -> None:
    server.replies += [
        [token(i, f" {i}", [0.9, 0.9, 0.9]) for i in range(3)],
        [token(i, f" {i}", [0.1, 0.1, 0.1]) for i in range(3)],
    ]
    say(page, "one")
    say(page, "two")
    assert message(page, "#summary").startswith("10% of neurons")
    page.get_by_role("button", name="Show the activity of this answer").first.click()
    assert message(page, "#summary").startswith("90% of neurons")


# ---- appearance


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_light_and_dark(server: FakeServer, opened: Any) -> None:
    page = opened(server.url, color_scheme="light")
    light = background(page)
    page.click("#theme")
    dark = background(page)
    assert light != dark
    page.reload()
    assert background(page) == dark
    page.click("#theme")
    assert background(page) == light


@pytest.mark.chromium_only  # in Firefox playwright cannot change the system's preference
def test_the_systems_theme(server: FakeServer, opened: Any) -> None:
    page = opened(server.url, color_scheme="light")
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.click("#theme")  # different from the system
    assert background(page) == light
    page.reload()
    assert background(page) == light
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert background(page) == dark


@pytest.mark.chromium_only  # as above
def test_nothing_moves_if_reduced_motion_is_preferred(server: FakeServer, page: Any) -> None:
    hold = Hold()
    server.replies.append(["a", hold])
    say(page, "x", wait=False)
    page.get_by_text("a", exact=True).wait_for()
    dot = "getComputedStyle(document.querySelector('.running .who'), '::after').animationName"
    assert page.evaluate(dot) == "none"
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(dot) == "breathe"
    hold.go_on.set()
    done(page)


# ---- accessibility


def test_a_screen_reader_gets_the_beginning_and_the_end(server: FakeServer, page: Any) -> None:
    server.replies.append([token(i, f" {i}", [0.2, 0.3, 0.4]) for i in range(60)])
    page.evaluate(
        "window.heard = []; new MutationObserver(() => {"
        "const text = document.querySelector('#live').textContent; if (text) heard.push(text); })"
        ".observe(document.querySelector('#live'), { childList: true })"
    )
    say(page, "speak")
    until(page, "heard.length >= 1 && heard.at(-1).startsWith('The answer is complete')")
    heard = page.evaluate("heard")
    assert len(heard) <= 2
    assert "30% fired" in heard[-1]
    live = "[...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')]"
    assert page.evaluate(f"{live}.every((e) => !e.querySelector('#messages') && !e.closest('#messages'))")
    assert page.locator(".answer").get_attribute("aria-busy") == "false"
    page.locator(".heat").focus()
    page.keyboard.press("ArrowLeft")
    until(page, "heard.at(-1).startsWith('Token 59')")


@pytest.mark.parametrize(
    ("scheme", "width"),
    quick_if(lambda scheme, width: (scheme == "dark") == (width > 360), ["light", "dark"], [1280, 360]),
)
def test_axe_finds_nothing(server: FakeServer, opened: Any, scheme: str, width: int) -> None:
    parts = [token(i, f" {i}", [0.2, 0.3, 0.4], cpu_share=[0.1] * 3, step_tokens=2) for i in range(5)]
    server.replies += [[("reasoning_content", "hm"), *parts, "\n\n" + MARKDOWN], Refusal(400, "No.")]
    page = opened(server.url, color_scheme=scheme, viewport={"width": width, "height": 800})
    if scheme == "light":
        assert violations(page) == []
    say(page, "show")
    say(page, "fail")
    page.get_by_role("button", name="Show the activity of this answer").evaluate("(thread) => thread.click()")
    page.get_by_text("Show as tables").click()
    assert violations(page) == []
    if width < 1000:
        page.click("#hide-picture")
        page.click("#show-history")
        assert violations(page) == []
        page.click("#hide-history")
    page.click("#show-settings")
    assert violations(page) == []


# ---- keys, errors, connections


@pytest.mark.parametrize("keep", quick_are((True,), [False, True]))
def test_a_server_that_needs_a_key(server: FakeServer, opened: Any, keep: bool) -> None:
    server.key = "secret-1"
    server.replies += [["hi"], ["again"]]
    page = opened(server.url, ready=False)
    dialog = page.locator("#key")
    dialog.wait_for()
    assert violations(page) == []
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    dialog.get_by_text("this API key is not known").wait_for()
    dialog.get_by_label("API key").fill("secret-1")
    if keep:
        dialog.get_by_label("Remember it in this browser").check()
    page.keyboard.press("Enter") if not keep else dialog.get_by_role("button", name="Use this key").click()
    page.get_by_text("tiny · 3 layers").wait_for()
    assert dialog.is_hidden()
    say(page, "hello")
    assert server.headers[0]["authorization"] == "Bearer secret-1"
    assert "cookie" not in server.headers[0]
    stored = "[sessionStorage.getItem('hotset.key'), localStorage.getItem('hotset.key')]"
    assert page.evaluate(stored) == ["secret-1", "secret-1" if keep else None]
    # The server's key changes.
    server.key = "secret-2"
    say(page, "more", wait=False)
    dialog.wait_for()
    dialog.get_by_label("API key").fill("secret-2")
    page.keyboard.press("Enter")
    page.get_by_text("again", exact=True).wait_for()
    done(page)
    assert sent(server)[-1] == ("user", "more")
    # After a cancelled dialog, the page says that the key is missing and how to enter it.
    server.key = "secret-3"
    page.reload()
    dialog.wait_for()
    page.keyboard.press("Escape")
    assert "Without a key" in page.locator(".notice").inner_text()
    page.get_by_role("button", name="Enter a key").click()
    dialog.wait_for()


def test_the_real_server_with_a_key(tmp_path: Path, opened: Any) -> None:
    with real_server(write_for_chat(tmp_path / "sparse.gguf"), api_keys=("abc",)) as url:
        page = opened(url, GREEDY, ready=False)
        page.get_by_label("API key", exact=True).fill("abc")
        page.keyboard.press("Enter")
        page.get_by_text("tiny · 2 layers").wait_for()
        say(page, "hello")
        assert page.locator(".failed").is_hidden()
        assert page.locator("#tape span").count() > 0


def test_a_refusal_is_shown_and_the_conversation_continues(server: FakeServer, page: Any) -> None:
    server.replies += [
        Refusal(400, "the prompt has 9 tokens and the context 8: shorten it"),
        Refusal(429, "64 answers wait already", {"Retry-After": "2.4"}),
        ["Half", {"error": {"message": "the step failed"}}],
        ["Whole."],
        Refusal(400, "too long"),
        ["Short."],
    ]
    say(page, "long")
    assert page.locator(".failed").inner_text() == "the prompt has 9 tokens and the context 8: shorten it"
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".failed", has_text="64 answers wait already. Try again in 3 s.").wait_for()
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".failed", has_text="the step failed").wait_for()
    assert answers(page) == ["Half"]
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Whole.", exact=True).wait_for()
    done(page)
    assert page.locator(".failed").is_hidden()
    assert sent(server) == [("user", "long")]
    say(page, "too long")
    # The unanswered question is not sent again: many templates refuse two consecutive questions.
    say(page, "short")
    assert sent(server) == [("user", "long"), ("assistant", "Whole."), ("user", "short")]


def test_a_connection_that_breaks_and_is_restored(server: FakeServer, page: Any) -> None:
    hold = Hold()
    server.replies += [["So far", hold, Drop()], ["Whole."]]
    say(page, "talk", wait=False)
    page.get_by_text("So far", exact=True).wait_for()
    hold.go_on.set()
    done(page)
    assert answers(page) == ["So far"]
    assert page.locator(".failed").inner_text() == "The connection broke in the middle of the answer."
    assert page.locator(".notice").is_visible()
    page.locator(".notice").wait_for(state="hidden")  # the page reconnects
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Whole.", exact=True).wait_for()


def test_a_server_that_is_loading_its_model(server: FakeServer, opened: Any) -> None:
    server.health = 503
    server.replies.append(["Now."])
    page = opened(server.url, ready=False)
    page.get_by_text("The model is being loaded.").wait_for()
    server.health = 200
    page.get_by_text("tiny · 3 layers").wait_for()
    assert page.locator(".notice").count() == 0
    say(page, "hello")
    assert answers(page) == ["Now."]


def test_a_server_that_does_not_answer(opened: Any) -> None:
    fake = FakeServer()
    with served(fake.app) as url:
        page = opened(url)
    say(page, "anyone?")
    assert page.locator(".failed").inner_text() == "The server does not answer."
    assert "Trying again" in page.locator(".notice").inner_text()


# ---- conversations


def test_conversations_are_stored(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.replies += [["A."], ["B."], ["C."]]
    stored = {"hotset.chat.00": "{broken", "hotset.chat.01": '{"id": "02", "messages": []}', "other": "x"}
    page = opened(server.url, stored, accept_downloads=True)
    say(page, "about fish")
    page.click("#new-chat")
    assert page.locator("#messages li").count() == 0
    say(page, "about birds")
    page.reload()
    page.click("#show-history")
    assert page.locator("#conversations .name").all_inner_texts() == ["about birds", "about fish"]
    page.get_by_role("button", name="about fish", exact=True).click()
    assert (questions(page), answers(page)) == (["about fish"], ["A."])
    say(page, "more")
    assert sent(server) == [("user", "about fish"), ("assistant", "A."), ("user", "more")]
    page.click("#show-history")
    name, text = saved(act(page, "Save as text", "about birds"))
    assert name == "about birds.md"
    assert text.startswith("# about birds\n\n**You**\n\nabout birds\n")
    file = tmp_path / "all.json"
    file.write_text(saved(page.get_by_role("button", name="Export all"))[1])
    assert [one["title"] for one in json.loads(file.read_text())["conversations"]] == [
        "about fish",
        "about birds",
    ]
    act(page, "Delete", "about birds").click()
    assert page.locator("#conversations .name").all_inner_texts() == ["about fish"]
    page.get_by_role("button", name="Undo").click()
    assert sorted(page.locator("#conversations .name").all_inner_texts()) == ["about birds", "about fish"]
    act(page, "Delete", "about birds").click()
    page.set_input_files("#import-file", file)
    page.get_by_text("2 conversations were imported.").wait_for()
    assert sorted(page.locator("#conversations .name").all_inner_texts()) == ["about birds", "about fish"]
    bad = tmp_path / "bad.json"
    for content in ("{", "[]", '{"conversations": [{"id": "../x", "messages": []}]}'):
        bad.write_text(content)
        page.set_input_files("#import-file", bad)
        page.locator(".notice.alarm[data-about=import]").wait_for()
        page.locator(".notice[data-about=import]").get_by_role("button", name="Dismiss").click()


def test_another_conversation_can_be_opened_during_an_answer(server: FakeServer, opened: Any) -> None:
    holds = Hold(), Hold()
    server.replies += [["First", holds[0], " lost"], ["Second."], ["Third", holds[1]]]
    page = opened(server.url)
    say(page, "one", wait=False)
    page.get_by_text("First", exact=True).wait_for()
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    until(page, "document.querySelector('#stop').hidden")
    assert page.locator(".turn").count() == 0
    say(page, "two")
    assert (questions(page), answers(page)) == (["two"], ["Second."])
    page.click("#show-history")
    page.get_by_role("button", name="one", exact=True).click()
    assert answers(page) == ["First"]
    # A conversation that is deleted during an answer stays deleted.
    say(page, "more", wait=False)
    page.get_by_text("Third", exact=True).wait_for()
    page.click("#show-history")
    act(page, "Delete", "one").click()
    until(page, "document.querySelector('#stop').hidden")
    assert page.locator("#conversations .name").all_inner_texts() == ["two"]


def test_a_full_browser_storage_is_reported(server: FakeServer, page: Any) -> None:
    server.replies.append(["A."])
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') } }"
    )
    say(page, "hello")
    assert answers(page) == ["A."]
    assert "no room for more conversations" in page.locator(".notice").inner_text()


def test_dense_mode_of_a_model_that_could_be_sparse(server: FakeServer, opened: Any) -> None:
    server.props["hotset"] = facts(mode="dense")
    server.replies.append([token(i, " a", [0.3] * 3, bytes_touched=3_999_000) for i in range(3)])
    page = opened(server.url)
    assert "dense mode reads their weights, too" in message(page, "#about-text")
    say(page, "hello")
    assert message(page, "#summary").startswith("30% of neurons fired; 3.8 MiB read per token")
    assert page.locator("#amount").is_hidden()
