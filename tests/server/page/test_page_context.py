"""The context's fill level, and the messages that are dropped if the context is full."""

from __future__ import annotations

from typing import Any

from chat_page import done, message, questions, say, sent, until, version, violations
from fake_chat_server import FakeServer

NINE = "one two three four five six seven eight"  # a number follows


def texts(server: FakeServer) -> list[str]:
    return [content for role, content in sent(server) if role == "user"]


def test_the_oldest_turns_are_dropped_with_a_notice(server: FakeServer, opened: Any) -> None:
    server.n_ctx = 40
    server.replies += [["A."]] * 6
    page = opened(server.url)
    assert page.locator("#context").is_hidden()
    asked = [f"{NINE} {i}" for i in range(6)]
    for question in asked[:3]:
        say(page, question)
    assert message(page, "#context") == "Context: 8 of 40 tokens"
    assert texts(server) == asked[:3]
    assert page.locator(".notice, .dropped").count() == 0
    say(page, asked[3])  # 39 tokens, which leaves no room for an answer
    assert texts(server) == asked[:4]
    assert server.requests[-1]["truncation"] == "auto"
    full = "The context of 40 tokens is full. The oldest 2 messages are left out of the prompt"
    assert full in message(page, ".notice")
    assert page.locator(".past").count() == 2
    assert page.locator("li:has(> .dropped) .said").inner_text() == asked[1]
    assert violations(page) == []
    say(page, asked[4])
    assert page.locator(".past").count() == 4
    assert questions(page) == asked[:5]
    page.reload()
    until(page, "document.querySelectorAll('.past').length === 4")
    say(page, "and")
    assert texts(server) == [*asked[:5], "and"]
    assert page.locator("li:has(> .dropped) .said").inner_text() == asked[2]
    assert message(page, ".note >> nth=-1").count("1 token") == 1


def test_the_servers_refusal_of_a_too_long_message_is_shown(server: FakeServer, opened: Any) -> None:
    server.n_ctx = 40
    server.replies += [["A."], ["B."]]
    page = opened(server.url)
    say(page, "short")
    say(page, " ".join([NINE] * 9))
    assert len(texts(server)) == 2
    assert page.locator(".failed:visible").inner_text() == "too long"


def test_a_reload_shows_the_same_conversation(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."]]
    say(page, "one")
    page.reload()
    until(page, "document.querySelectorAll('.turn').length === 2")
    assert questions(page) == ["one"]
    page.click("#new-chat")
    page.reload()
    until(page, "document.querySelector('#empty-title').textContent !== ''")
    assert page.locator(".turn").count() == 0


def test_versions_of_a_question_are_visible_without_pointing(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."]]
    say(page, "one")
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit", exact=True).click()
    page.fill(".edit textarea", "two")
    page.press(".edit textarea", "Enter")
    done(page)
    page.mouse.move(1, 1)
    page.focus("#ask")
    assert version(page, "question") == ["2 / 2"]
    shown = "getComputedStyle(document.querySelector('.question .versions button')).opacity"
    assert page.evaluate(shown) == "1"
    until(page, "getComputedStyle(document.querySelector('.question .acts > .act')).opacity === '0'")


def test_a_dense_models_page_does_not_mention_neurons(server: FakeServer, opened: Any) -> None:
    server.props["hotset"]["has_zeros"] = False
    page = opened(server.url)
    until(page, "document.querySelector('#empty-text').textContent.includes('how fast')")
    assert message(page, "#empty-title") == "Ask a question."


def test_dark_mode_is_a_switch(server: FakeServer, opened: Any) -> None:
    page = opened(server.url, color_scheme="light")
    switch = page.get_by_role("switch", name="Dark mode")
    assert not switch.is_checked()
    switch.click()
    assert switch.is_checked()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_title_has_the_whole_width(server: FakeServer, opened: Any) -> None:
    server.replies += [["A."]]
    page = opened(server.url, viewport={"width": 1500, "height": 800})
    say(page, "one")
    name, row = (page.locator(f"#conversations {one}").bounding_box() for one in (".name", "li"))
    assert name["width"] > 0.9 * row["width"]
