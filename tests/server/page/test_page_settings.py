"""Settings of a conversation, and presets."""

from __future__ import annotations

from typing import Any

import pytest
from chat_page import say, sent, violations
from fake_chat_server import FakeServer

LATER = {"hotset.settings": '{"temperature": 0.5, "system": "Be kind."}'}


def set_(page: Any, **values: str) -> None:
    for label, value in values.items():
        field = page.get_by_label(label.replace("_", " "), exact=True)
        field.clear()  # in Firefox playwright appends to a number instead of replacing it
        field.fill(value)


def shown(page: Any, label: str) -> str:
    value: str = page.get_by_label(label, exact=True).input_value()
    return value


def test_a_conversation_has_its_own_settings(server: FakeServer, opened: Any) -> None:
    server.replies += [["a"], ["b"], ["c"]]
    page = opened(server.url, LATER)
    page.click("#show-settings")
    page.get_by_label("Only for this conversation").check()
    assert (shown(page, "Temperature"), shown(page, "System prompt")) == ("0.5", "Be kind.")
    set_(page, Temperature="0", System_prompt="Be strict.")
    assert violations(page) == []
    page.keyboard.press("Escape")
    say(page, "own")
    assert server.requests[-1]["temperature"] == 0
    assert sent(server)[0] == ("system", "Be strict.")
    page.click("#new-chat")
    say(page, "shared")
    assert server.requests[-1]["temperature"] == 0.5
    assert sent(server)[0] == ("system", "Be kind.")
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="own", exact=True).click()
    page.click("#show-settings")
    assert page.get_by_label("Only for this conversation").is_checked()
    assert shown(page, "Temperature") == "0"
    page.get_by_label("Only for this conversation").uncheck()
    assert shown(page, "Temperature") == "0.5"
    page.keyboard.press("Escape")
    say(page, "again")
    assert server.requests[-1]["temperature"] == 0.5


@pytest.mark.slow
def test_presets(server: FakeServer, opened: Any) -> None:
    server.replies += [["a"], ["b"]]
    page = opened(server.url, LATER)
    page.click("#show-settings")
    presets = page.get_by_label("Preset", exact=True)
    assert presets.is_disabled()
    page.get_by_label("Save these settings as a preset").fill("kind")
    page.keyboard.press("Enter")
    set_(page, Temperature="1.5", System_prompt="")
    page.get_by_label("Save these settings as a preset").fill("wild")
    page.get_by_role("button", name="Save", exact=True).click()
    page.keyboard.press("Escape")
    say(page, "wild")
    assert (server.requests[-1]["temperature"], len(sent(server))) == (1.5, 1)
    page.reload()
    page.click("#show-settings")
    presets.select_option("kind")
    assert (shown(page, "Temperature"), shown(page, "System prompt")) == ("0.5", "Be kind.")
    page.keyboard.press("Escape")
    say(page, "kind")
    assert (server.requests[-1]["temperature"], sent(server)[0]) == (0.5, ("system", "Be kind."))
    page.click("#show-settings")
    presets.select_option("wild")
    set_(page, Temperature="1.1")  # later changes do not affect a preset
    presets.select_option("kind")
    presets.select_option("wild")
    assert shown(page, "Temperature") == "1.5"
    page.get_by_role("button", name="Delete", exact=True).click()
    assert presets.locator("option").all_inner_texts() == ["Choose one", "kind"]
    assert shown(page, "Temperature") == "1.5"
