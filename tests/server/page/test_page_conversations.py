"""The list of conversations: search, titles, pins, folders; after reloads, in files, on wide screens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_page import act, saved, say, until, violations
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
    assert page.locator("#conversations").inner_text() == "No conversation has these words."
    page.fill("#search", "")
    assert len(names(page)) == 3


def test_titles_and_pins_last(server: FakeServer, opened: Any) -> None:
    server.replies.append(["More."])
    page = opened(server.url, STORED)
    page.click("#show-history")
    act(page, "Rename", "about fish").click()
    title = page.get_by_role("textbox", name="Title of about fish")
    assert title.input_value() == "about fish"
    title.fill("nothing")
    title.press("Escape")
    assert names(page) == ["My trees", "about birds", "about fish"]
    act(page, "Rename", "about fish").click()
    title.fill("  Fish & chips ")
    title.press("Enter")
    assert names(page) == ["My trees", "about birds", "Fish & chips"]  # its position is unchanged
    assert page.evaluate("document.activeElement.textContent") == "Fish & chips"
    act(page, "Pin", "Fish & chips").click()
    assert names(page) == ["Fish & chips", "My trees", "about birds"]
    assert page.evaluate("document.activeElement.ariaLabel") == "Unpin: Fish & chips"
    assert violations(page) == []
    page.get_by_role("button", name="Fish & chips", exact=True).click()
    say(page, "more of them")
    page.reload()
    page.click("#show-history")
    assert names(page) == ["Fish & chips", "My trees", "about birds"]
    act(page, "Unpin", "Fish & chips").click()
    # An empty title restores the first message as the title, also for the open conversation.
    page.get_by_role("button", name="Fish & chips", exact=True).click()
    page.click("#show-history")
    act(page, "Rename", "Fish & chips").click()
    page.get_by_role("textbox", name="Title of Fish & chips").fill("")
    page.keyboard.press("Enter")
    assert names(page) == ["about fish", "My trees", "about birds"]


@pytest.mark.slow
def test_files_keep_titles_pins_and_branches(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.replies += [["A."], ["B."]]
    page = opened(server.url, STORED, accept_downloads=True)
    page.click("#show-history")
    act(page, "Pin", "My trees").click()
    page.get_by_role("button", name="My trees", exact=True).click()
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("A.", exact=True).wait_for()
    until(page, "document.querySelector('#stop').hidden")
    page.click("#show-history")
    file = tmp_path / "all.json"
    file.write_text(saved(page.get_by_role("button", name="Export all"))[1])
    before = {one["id"]: one for one in json.loads(file.read_text())["conversations"]}
    assert (before["03"]["title"], before["03"]["pinned"], len(before["03"]["messages"])) == (
        "My trees",
        True,
        3,
    )
    other = opened(server.url)
    other.click("#show-history")
    other.set_input_files("#import-file", file)
    other.get_by_text("3 conversations were imported.").wait_for()
    assert names(other) == ["My trees", "about birds", "about fish"]
    other.get_by_role("button", name="My trees", exact=True).click()
    assert other.locator(".versions span").inner_text() == "2 / 2"


@pytest.mark.slow
def test_the_list_is_a_column_on_a_wide_screen(server: FakeServer, opened: Any) -> None:
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


# ---- folders


def shown(page: Any) -> dict[str, list[str]]:
    """Return the shown titles by folder; "" means outside of folders."""
    found: dict[str, list[str]] = page.evaluate(
        """() => {
            const names = (root) => [...root.querySelectorAll(":scope > li > .name")]
                .filter((e) => e.checkVisibility()).map((e) => e.textContent);
            const root = document.querySelector("#conversations");
            const folders = [...root.querySelectorAll(".folder")]
                .map((e) => [e.querySelector(".folder-name span").textContent, names(e.querySelector("ul"))]);
            return Object.fromEntries([...folders, ["", names(root)]]);
        }"""
    )
    return found


def focused(page: Any) -> str:
    found: str = page.evaluate(
        "document.activeElement.ariaLabel || document.activeElement.querySelector('span')?.textContent"
        " || document.activeElement.textContent"
    )
    return found


def test_folders_by_keyboard(server: FakeServer, opened: Any) -> None:
    page = opened(server.url, STORED)
    page.click("#show-history")
    # Make a folder and name it.
    page.locator("#new-folder").focus()
    page.keyboard.press("Enter")
    assert focused(page) == "Name of the folder New folder"
    page.keyboard.type("Work")
    page.keyboard.press("Enter")
    assert focused(page) == "Work"
    assert shown(page) == {"Work": [], "": ["My trees", "about birds", "about fish"]}
    # Move a conversation to it, and another one to a new folder.
    act(page, "Move", "about fish").focus()
    page.keyboard.press("Enter")
    assert violations(page) == []
    page.locator("#folder-list").get_by_role("button", name="Work").focus()
    page.keyboard.press("Enter")
    assert focused(page) == "about fish"
    act(page, "Move", "My trees").focus()
    page.keyboard.press("Enter")
    page.fill("#folder-name", "Garden")
    page.keyboard.press("Enter")
    assert shown(page) == {"Garden": ["My trees"], "Work": ["about fish"], "": ["about birds"]}
    # A folder stays closed, and a search finds its conversations.
    page.locator(".folder-name", has_text="Work").focus()
    page.keyboard.press("Enter")
    assert focused(page) == "Work"
    assert violations(page) == []
    page.reload()
    page.click("#show-history")
    assert shown(page) == {"Garden": ["My trees"], "Work": [], "": ["about birds"]}
    page.fill("#search", "gills")
    assert names(page) == ["about fish"]
    page.fill("#search", "")
    act(page, "Move", "about birds").press("Enter")
    page.keyboard.press("Escape")
    assert focused(page) == "Move: about birds"
    assert page.locator("#history").is_visible()


def test_a_folder_is_renamed_and_deleted(server: FakeServer, opened: Any) -> None:
    fish, birds = (
        conversation("01", "", "about fish", "Gills.", folder="Animals"),
        conversation("02", "", "about birds", "Wings.", folder="Animals"),
    )
    server.replies.append(["More."])
    page = opened(server.url, dict([fish, birds]))
    page.click("#show-history")
    page.get_by_role("button", name="about fish", exact=True).click()  # the open conversation is moved too
    page.click("#show-history")
    page.get_by_role("button", name="Rename the folder: Animals").click()
    page.keyboard.type(" <b>Beasts</b> ")
    page.keyboard.press("Enter")
    assert shown(page) == {"<b>Beasts</b>": ["about birds", "about fish"], "": []}
    page.get_by_role("button", name="Rename the folder: <b>Beasts</b>").click()
    page.keyboard.type("other")
    page.keyboard.press("Escape")
    page.click("#hide-history")
    say(page, "go on")
    page.click("#show-history")
    assert shown(page) == {"<b>Beasts</b>": ["about fish", "about birds"], "": []}
    page.get_by_role("button", name="Delete the folder: <b>Beasts</b>").click()
    assert shown(page) == {"": ["about fish", "about birds"]}
    page.get_by_role("button", name="Undo").click()
    assert shown(page) == {"<b>Beasts</b>": ["about fish", "about birds"], "": []}
    page.get_by_role("button", name="Delete the folder: <b>Beasts</b>").click()
    page.reload()
    page.click("#show-history")
    assert shown(page) == {"": ["about fish", "about birds"]}
    page.get_by_role("button", name="about fish", exact=True).click()
    assert page.locator(".turn").count() == 4


def test_files_keep_folders(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    stored = dict([conversation("01", "", "about fish", folder="Work"), conversation("02", "", "birds")])
    page = opened(
        server.url, stored | {"hotset.folders": '[["Empty", true], ["Work", true], 7]'}, accept_downloads=True
    )
    page.click("#show-history")
    assert shown(page) == {
        "Work": ["about fish"],
        "": ["birds"],
    }  # the list is damaged: folders that conversations name remain
    page.click("#new-folder")
    page.keyboard.type("Empty")
    page.keyboard.press("Enter")
    file = tmp_path / "all.json"
    file.write_text(saved(page.get_by_role("button", name="Export all"))[1])
    other = opened(server.url, {"hotset.folders": '[["Other", false], ["Work", true]]'})
    other.click("#show-history")
    other.set_input_files("#import-file", file)
    other.get_by_text("2 conversations were imported.").wait_for()
    assert shown(other) == {"Empty": [], "Other": [], "Work": [], "": ["birds"]}
    other.locator(".folder-name", has_text="Work").click()
    assert shown(other)["Work"] == ["about fish"]


def test_files_of_many_folders(server: FakeServer, opened: Any) -> None:
    """The number of folders and the length of their names are limited, because the list is drawn often."""
    names = [f"Folder {i:05}" for i in range(50_000)]
    conversations = [
        json.loads(conversation(f"{i + 1:x}", "", f"number {i}", folder=names[i])[1]) for i in range(300)
    ]
    conversations[1]["folder"] = "x" * 100_000
    exported = json.dumps({"folders": names, "conversations": conversations})
    page = opened(server.url, {"hotset.folders": '[["Mine", false]]'})
    page.click("#show-history")
    page.set_input_files(
        "#import-file", {"name": "a.json", "mimeType": "application/json", "buffer": exported.encode()}
    )
    page.get_by_text(
        "300 conversations were imported. 49746 folders were left out: 256 folders are the limit"
    ).wait_for()
    found = shown(page)
    assert len(found) == 256 + 1
    assert found["Folder 00000"] == ["number 0"]
    assert max(map(len, found)) == 60
    assert len(found[""]) == 300 - 255
