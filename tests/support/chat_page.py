"""Actions on the server's chat page for its tests: send, wait, read."""

from __future__ import annotations

import json
import re
from typing import Any

from browser import CHROMIUM
from fake_chat_server import FakeServer
from waiting import WATCHDOG

WAIT = int(1000 * WATCHDOG)  # milliseconds


def until(page: Any, condition: str) -> None:
    """Wait until an expression is true. Playwright's own function needs `eval`, which is forbidden."""
    for _ in range(WAIT // 10):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"it did not become true: {condition}")


def drawn(page: Any) -> None:
    """Wait until pending drawing is done."""
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def say(page: Any, text: str, wait: bool = True) -> None:
    page.fill("#ask", text)
    page.press("#ask", "Enter")
    if wait:
        done(page)


def done(page: Any) -> None:
    until(page, "document.querySelector('#stop').hidden && document.querySelector('.answer') !== null")
    drawn(page)  # text that is not drawn yet is hidden by `content-visibility`


# The texts of answers, rendered even when out of sight.
ANSWERS = """() => [...document.querySelectorAll(".answer .markdown")].map((answer) => {
    const parts = [...answer.querySelectorAll(".part")];
    for (const part of parts) part.style.contentVisibility = "visible";
    const text = answer.innerText.trim();
    for (const part of parts) part.style.contentVisibility = "";
    return text;
})"""


def answers(page: Any) -> list[str]:
    found: list[str] = page.evaluate(ANSWERS)
    return found


def questions(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(".question .said").all_inner_texts()]


def act(page: Any, what: str, title: str) -> Any:
    """Return the button for an action on a conversation in the list."""
    more = page.get_by_role("button", name=f"More: {title}")
    if more.count() and more.get_attribute("aria-expanded") == "false":
        more.click()
    return page.get_by_role("button", name=f"{what}: {title}")


def version(page: Any, which: str) -> list[str]:
    """Return the version labels of questions or answers, such as 1 / 2."""
    found: list[str] = page.locator(f".{which} .versions span").all_inner_texts()
    return found


def sent(server: FakeServer, i: int = -1) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in server.requests[i]["messages"]]


# With WebDriver BiDi playwright has no downloads in Firefox: there the data is read before it is saved.
SAVED = """() => {
    const make = URL.createObjectURL, { click } = HTMLAnchorElement.prototype;
    window.saved = new Promise((found) => {
        let text = null;
        URL.createObjectURL = (blob) => { text = blob.text(); return make.call(URL, blob); };
        HTMLAnchorElement.prototype.click = async function () {
            URL.createObjectURL = make;
            HTMLAnchorElement.prototype.click = click;
            found([this.download, await text]);
        };
    });
}"""


def saved(button: Any) -> tuple[str, str]:
    """Return the name and the text of the file that a button saves."""
    page = button.page
    if page.context.browser.browser_type.name == CHROMIUM:
        with page.expect_download() as got:
            button.click()
        return got.value.suggested_filename, got.value.path().read_text("utf-8")
    page.evaluate(SAVED)
    button.click()
    name, text = page.evaluate("window.saved")
    return name, text


def luminance(page: Any, x: float, y: float) -> float:
    """Return the luminance of the heat map's canvas at a point."""
    red, green, blue = page.evaluate(
        """([x, y]) => {
            const canvas = document.querySelector(".heat canvas"), ratio = devicePixelRatio;
            return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data.slice(0, 3)];
        }""",
        [x, y],
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def message(page: Any, selector: str) -> str:
    return re.sub(r"\s+", " ", page.locator(selector).inner_text()).strip()


def violations(page: Any) -> list[str]:
    """Return axe's findings about the current page."""
    from axe_playwright_python.base import AXE_SCRIPT

    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes']]}"
        for one in found["violations"]
    ]


MARKDOWN = """# Title

A *soft* and **loud** line, `code`, ~~gone~~ and [a link](https://example.org/a).

- one
  1. nested
- [x] done

| a | b |
|---|--:|
| 1 | 2 |

> said

```python
print("<b>&amp;</b>")
```

---
last line
"""

# A long answer, repeated: each kind of block.
PROSE = (
    "## A heading\n\nWords with **weight** and `code` and [a link](https://example.org).\n\n"
    "- one\n- two\n  - three\n\n```python\nprint('a line')\nprint('another')\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n> quoted\n\n$$x^2$$\n\n"
)  # fmt: skip


def stored(page: Any) -> dict[str, Any]:
    """Return the only conversation that this browser has stored."""
    (text,) = page.evaluate(
        "Object.entries(localStorage).filter(([key]) => key.startsWith('hotset.chat.'))"
        ".map(([, text]) => text)"
    )
    found: dict[str, Any] = json.loads(text)
    return found
