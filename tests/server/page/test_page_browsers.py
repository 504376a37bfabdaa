"""One test of each kind for both browsers.

In Firefox, `make test` runs only these. They share a file because Firefox needs some seconds to start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_page import answers, done, message, questions, say, sent, until, version, violations
from fake_chat_server import FakeServer, Hold, token

pytestmark = pytest.mark.every_browser


def test_an_answer_streams_and_the_next_request_contains_the_conversation(
    server: FakeServer, page: Any
) -> None:
    hold = Hold()
    server.replies += [["Good", " day", hold, ", you."], ["Again."]]
    say(page, "Hello", wait=False)
    page.get_by_text("Good day", exact=True).wait_for()
    assert page.locator("#stop").is_visible()
    assert page.locator("#send").is_hidden()
    hold.go_on.set()
    done(page)
    assert answers(page) == ["Good day, you."]
    assert sent(server) == [("user", "Hello")]
    assert server.requests[0]["model"] == "tiny"
    assert server.requests[0]["stream"] is True
    assert server.requests[0]["stream_options"] == {"include_usage": True, "include_activity": True}
    say(page, "line one\nline two")
    assert sent(server) == [
        ("user", "Hello"),
        ("assistant", "Good day, you."),
        ("user", "line one\nline two"),
    ]
    assert questions(page) == ["Hello", "line one\nline two"]
    assert "3 tokens" in page.locator(".note").first.inner_text()


def test_settings_reach_the_request(server: FakeServer, opened: Any) -> None:
    server.props["default_generation_settings"] = {"params": {"temperature": 0.8, "top_k": 40}}
    server.replies += [["a"], ["b"], ["c"]]
    page = opened(server.url)
    say(page, "plain")
    bare = set(server.requests[0])
    assert bare == {
        "model",
        "messages",
        "stream",
        "stream_options",
        "truncation",
    }  # only changed settings are sent
    page.click("#show-settings")
    assert page.get_by_label("Temperature", exact=True).get_attribute("placeholder") == "0.8"
    values = {
        "Temperature": "0.3", "Top-p": "0.5", "Top-k": "7", "Min-p": "0.1", "Maximum answer length": "99",
        "Seed": "12", "Repetition penalty": "1.1", "Frequency penalty": "-0.5", "Presence penalty": "0.25",
        "System prompt": "Be brief.", "Stop at": "END\nSTOP",
    }  # fmt: skip
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Top-k", exact=True).fill("7.5")
    assert page.locator(".problem", has_text="a whole number").is_visible()
    page.get_by_role("button", name="Close").locator("visible=true").click()
    page.reload()
    page.click("#new-chat")
    say(page, "set")
    body = server.requests[1]
    expected = {
        "temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 99, "seed": 12,
        "repetition_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": 0.25,
        "stop": ["END", "STOP"],
    }  # fmt: skip
    assert {name: body[name] for name in set(body) - bare} == expected
    assert sent(server) == [("system", "Be brief."), ("user", "set")]
    page.click("#show-settings")
    page.get_by_role("slider", name="Temperature").fill("1.5")
    assert page.get_by_label("Temperature", exact=True).input_value() == "1.5"
    page.get_by_role("button", name="Reset to the server's defaults").click()
    page.keyboard.press("Escape")
    say(page, "reset")
    assert set(server.requests[2]) == bare
    assert sent(server)[0] == ("system", "Be brief.")


def test_a_regenerated_answer_keeps_the_earlier_one(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["Another A."], ["B."], ["C."]]
    say(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Another A.", exact=True).wait_for()
    done(page)
    assert version(page, "answer") == ["2 / 2"]
    say(page, "second")
    assert sent(server) == [("user", "first"), ("assistant", "Another A."), ("user", "second")]
    page.get_by_role("button", name="Previous version").click()
    assert (questions(page), answers(page)) == (["first"], ["A."])
    assert page.evaluate("document.activeElement.ariaLabel") == "Next version"
    say(page, "other")
    assert sent(server) == [("user", "first"), ("assistant", "A."), ("user", "other")]
    page.get_by_role("button", name="Next version").click()
    assert (questions(page), answers(page)) == (["first", "second"], ["Another A.", "B."])
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="first", exact=True).click()
    assert answers(page) == ["Another A.", "B."]  # the branch that was shown before
    assert violations(page) == []


def test_files_are_sent_before_the_message(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.replies += [["A."], ["B."], ["C."]]
    server.models = [{"id": "tiny", "max_model_len": 40}]
    table, notes = tmp_path / "table.csv", tmp_path / "notes of me.md"
    table.write_bytes("\ufeffname;n\r\nä;1\r\n".encode())
    notes.write_text("Some words.\n\n```\ncode\n```\n", "utf-16")
    page = opened(server.url)
    page.set_input_files("#attach-file", [table, notes])
    page.locator("#files li", has_text="table.csv").get_by_text("6 tokens").wait_for()
    page.locator("#files li", has_text="notes of me.md").get_by_text("11 tokens").wait_for()
    assert violations(page) == []
    say(page, "Sum up")
    expected = (
        "File table.csv:\n```csv\nname;n\nä;1\n```\n\n"
        "File notes of me.md:\n````md\nSome words.\n\n```\ncode\n```\n````\n\nSum up"
    )
    assert sent(server) == [("user", expected)]
    assert questions(page) == ["Sum up"]
    assert page.locator("#files").is_hidden()
    page.get_by_text("table.csv").click()
    assert page.locator(".question pre").first.inner_text() == "name;n\nä;1\n"
    assert violations(page) == []
    # They stay with the question, after a reload and when it is edited.
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="Sum up", exact=True).click()
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_role("textbox", name="Edit your message").fill("Sum it up")
    page.keyboard.press("Enter")
    page.get_by_text("B.", exact=True).wait_for()
    assert sent(server) == [("user", expected.replace("Sum up", "Sum it up"))]
    # A file can be sent without text.
    page.click("#new-chat")
    page.set_input_files("#attach-file", [table])
    page.locator("#files li", has_text="table.csv").get_by_text("6 tokens").wait_for()  # the file was read
    say(page, "")
    assert sent(server) == [("user", expected.split("\n\nFile notes")[0])]


MATH = r"""Inline $a^2+b_1$, \(x<y\), and $$e=mc^2$$ in a line.

$$
\frac{1}{2} \sum_{i=1}^n i
$$

\[ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \]

- of a list: $\sqrt{2}$

It costs $5 to $10, or 3 $, `$code$`, $ 1 $ and \$2 \$.
"""


def math_is_drawn(page: Any, n: int) -> None:
    until(page, f"document.querySelectorAll('.answer math').length === {n}")


def test_formulas_become_mathml(server: FakeServer, page: Any) -> None:
    server.replies.append([MATH[i : i + 5] for i in range(0, len(MATH), 5)])
    say(page, "math")
    math_is_drawn(page, 6)
    assert page.locator(".math.display math").count() == 3
    assert page.locator("math[display=block] mfrac").count() == 1
    assert page.locator("math mtr").count() == 2
    assert page.locator("li math msqrt").count() == 1
    assert "It costs $5 to $10, or 3 $, $code$, $ 1 $ and $2 $." in answers(page)[0]
    assert page.locator(".math").first.get_attribute("title") == "a^2+b_1"
    assert violations(page) == []


def has_touch(page: Any) -> bool:
    """Return whether a tap is a click, which it is not with Firefox's WebDriver BiDi."""
    return bool(page.evaluate("navigator.maxTouchPoints > 0"))


def tap(page: Any, selector: str) -> None:
    page.tap(selector) if has_touch(page) else page.click(selector)


def test_360_pixels_are_wide_enough(server: FakeServer, opened: Any) -> None:
    server.replies.append(
        [
            *(token(i, f" {i}", [0.2, 0.3, 0.4]) for i in range(300)),
            "\n\n```\n"
            + "x" * 300
            + "\n```\n\n|"
            + "a long cell|" * 20
            + "\n"
            + "|-" * 20
            + "|\n\n"
            + "w" * 200,
        ]
    )
    server.model = "a-model-with-a-name-that-is-much-too-long-for-any-phone"
    page = opened(server.url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)

    def fits() -> None:
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        outside = """[...document.querySelectorAll('button, input, textarea, h2')].filter((e) =>
            e.checkVisibility({ visibilityProperty: true }) && !e.closest('.hidden, .skip') &&
            (e.getBoundingClientRect().right > 361 || e.getBoundingClientRect().left < -1))
            .map((e) => e.outerHTML)"""
        assert page.evaluate(outside) == []

    fits()
    say(page, "q" * 200)
    fits()
    assert page.locator("#picture").is_hidden()
    assert "fired" in page.locator("#strip-text").inner_text()
    tap(page, "#show-picture")
    page.locator("#picture").wait_for()
    fits()
    assert page.locator(".heat").is_visible()
    box = page.locator(".scroller").bounding_box()
    where = box["x"] + 20, box["y"] + 20
    page.touchscreen.tap(*where) if has_touch(page) else page.mouse.click(*where)
    assert message(page, "#readout").startswith("Token ")
    page.keyboard.press("Escape")
    assert page.locator("#picture").is_hidden()
    tap(page, "#show-history")
    fits()
    tap(page, "#hide-history")
    tap(page, "#show-settings")
    fits()


def test_everything_works_by_keyboard(server: FakeServer, page: Any) -> None:
    server.replies += [[token(i, f" {i}", [0.2, 0.3, 0.4]) for i in range(4)], ["B."], ["C."]]
    from_the_top(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the message"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "ask"
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    done(page)
    assert sent(server) == [("user", "hello\nthere")]
    assert page.evaluate("document.activeElement.id") == "ask"
    assert focus_until(page, "Edit", back=True)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    assert page.evaluate("getComputedStyle(document.activeElement).opacity") == "1"
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("edited")
    page.keyboard.press("Enter")
    page.get_by_text("B.", exact=True).wait_for()
    done(page)
    assert sent(server) == [("user", "edited")]
    assert focus_until(page, "Regenerate", back=True)
    page.keyboard.press("Enter")
    page.get_by_text("C.", exact=True).wait_for()
    done(page)
    from_the_top(page)
    assert focus_until(page, "Settings")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog').id") == "settings"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "show-settings"  # the focus returns
    assert focus_until(page, "Conversations", back=True)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "hide-history"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "show-history"


def from_the_top(page: Any) -> None:
    """Let the next Tab focus the first element of the page."""
    page.evaluate(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )


def focus_until(page: Any, name: str, back: bool = False) -> bool:
    """Press Tab until the focused element has this name."""
    for _ in range(40):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == name:
            return True
    return False
