"""The list of conversations: search, titles, pins; over a reload, in files, beside the chat on a wide
screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_page import say, until, violations
from fake_chat_server import FakeServer


def conversation(id: str, title: str, *contents: str, **more: Any) -> tuple[str, str]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return f"hotset.chat.{id}", json.dumps(
        {"id": id, "title": title, "updated": int(id, 16), "messages": messages} | more
    )


STORED = dict([
    conversation("01", "", "about fish", "Fish have gills."),
    conversation("02", "", "about birds", "Birds have feathers, and <b>wings</b>."),
    conversation("03", "My trees", "about trees", "Trees have leaves.", titled=True),
])  # fmt: skip


def names(page: Any) -> list[str]:
    found: list[str] = page.locator("#conversations .name").all_inner_texts()
    return found


def test_search(server: FakeServer, opened: Any) -> None:
    page = opened(server.url, STORED)
    page.click("#show-history")
    assert names(page) == ["My trees", "about birds", "about fish"]
    page.fill("#search", "HAVE")
    assert len(names(page)) == 3
    page.fill("#search", "wings")
    assert names(page) == ["about birds"]
    assert page.locator(".where").inner_text() == "Birds have feathers, and <b>wings</b>."
    page.fill("#search", "my TREES")
    assert names(page) == ["My trees"]
    assert page.locator(".where").count() == 0
    assert violations(page) == []
    page.fill("#search", "whales")
    assert page.locator("#conversations").inner_text() == "None has these words."
    page.fill("#search", "")
    assert len(names(page)) == 3


def test_titles_and_pins_last(server: FakeServer, opened: Any) -> None:
    server.replies.append(["More."])
    page = opened(server.url, STORED)
    page.click("#show-history")
    page.get_by_role("button", name="Rename: about fish").click()
    title = page.get_by_role("textbox", name="Title of about fish")
    assert title.input_value() == "about fish"
    title.fill("nothing")
    title.press("Escape")
    assert names(page) == ["My trees", "about birds", "about fish"]
    page.get_by_role("button", name="Rename: about fish").click()
    title.fill("  Fish & chips ")
    title.press("Enter")
    assert names(page) == ["My trees", "about birds", "Fish & chips"]  # in its place
    assert page.evaluate("document.activeElement.textContent") == "Fish & chips"
    page.get_by_role("button", name="Pin: Fish & chips").click()
    assert names(page) == ["Fish & chips", "My trees", "about birds"]
    assert page.evaluate("document.activeElement.ariaLabel") == "Unpin: Fish & chips"
    assert violations(page) == []
    page.get_by_role("button", name="Fish & chips", exact=True).click()
    say(page, "more of them")
    page.reload()
    page.click("#show-history")
    assert names(page) == ["Fish & chips", "My trees", "about birds"]
    page.get_by_role("button", name="Unpin: Fish & chips").click()
    # An empty title is the first message again; the one that is open is renamed, too.
    page.get_by_role("button", name="Fish & chips", exact=True).click()
    page.click("#show-history")
    page.get_by_role("button", name="Rename: Fish & chips").click()
    page.get_by_role("textbox", name="Title of Fish & chips").fill("")
    page.keyboard.press("Enter")
    assert names(page) == ["about fish", "My trees", "about birds"]


@pytest.mark.slow
def test_files_keep_titles_pins_and_branches(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.replies += [["A."], ["B."]]
    page = opened(server.url, STORED, accept_downloads=True)
    page.click("#show-history")
    page.get_by_role("button", name="Pin: My trees").click()
    page.get_by_role("button", name="My trees", exact=True).click()
    page.get_by_role("button", name="Again").click()
    page.get_by_text("A.", exact=True).wait_for()
    until(page, "document.querySelector('#stop').hidden")
    page.click("#show-history")
    with page.expect_download() as got:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "all.json"
    got.value.save_as(file)
    before = {one["id"]: one for one in json.loads(file.read_text())["conversations"]}
    assert (before["03"]["title"], before["03"]["pinned"], len(before["03"]["messages"])) == (
        "My trees",
        True,
        3,
    )
    other = opened(server.url)
    other.click("#show-history")
    other.set_input_files("#import-file", file)
    other.get_by_text("3 conversations came in.").wait_for()
    assert names(other) == ["My trees", "about birds", "about fish"]
    other.get_by_role("button", name="My trees", exact=True).click()
    assert other.locator(".versions span").inner_text() == "2 / 2"


@pytest.mark.slow
def test_beside_the_chat_where_there_is_room(server: FakeServer, opened: Any) -> None:
    page = opened(server.url, STORED, viewport={"width": 1600, "height": 800})
    history, chat, picture = (page.locator(name) for name in ("#history", "#chat", "#picture"))
    assert history.is_visible()
    boxes = [part.bounding_box() for part in (history, chat, picture)]
    assert [round(box["x"] + box["width"]) for box in boxes[:2]] == [round(box["x"]) for box in boxes[1:]]
    assert violations(page) == []
    page.get_by_role("button", name="about birds", exact=True).click()
    assert history.is_visible()
    page.keyboard.press("Escape")
    assert history.is_visible()
    page.click("#show-history")
    assert history.is_hidden()
    assert page.locator("#show-history").get_attribute("aria-expanded") == "false"
    assert chat.bounding_box()["x"] == 0
    page.reload()
    assert history.is_hidden()
    page.click("#show-history")
    assert history.is_visible()
    page.set_viewport_size({"width": 1000, "height": 800})
    assert history.is_hidden()
