"""Branches of a conversation: versions of questions and answers; single messages edited and deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_page import answers, done, questions, say, sent, stored, until, version
from fake_chat_server import FakeServer, Hold, Refusal


@pytest.mark.slow
def test_editing_a_question_keeps_the_earlier_version(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."], ["C."]]
    say(page, "first")
    say(page, "second")
    page.locator(".question").nth(1).get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit your message").fill("changed")
    page.keyboard.press("Enter")
    page.get_by_text("C.", exact=True).wait_for()
    done(page)
    assert sent(server) == [("user", "first"), ("assistant", "A."), ("user", "changed")]
    assert version(page, "question") == ["2 / 2"]
    page.locator(".question").nth(1).get_by_role("button", name="Previous version").click()
    assert (questions(page), answers(page)) == (["first", "second"], ["A.", "B."])
    assert len(stored(page)["messages"]) == 6


def test_an_answer_is_continued(server: FakeServer, page: Any) -> None:
    hold = Hold()
    server.replies += [["One", " two", hold], [" three", "."], Refusal(400, "no more room"), [" Four."]]
    say(page, "Count", wait=False)
    page.get_by_text("One two", exact=True).wait_for()
    page.click("#stop")
    done(page)
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("One two three.", exact=True).wait_for()
    done(page)
    assert sent(server) == [("user", "Count"), ("assistant", "One two")]
    assert version(page, "answer") == []
    page.get_by_role("button", name="Continue").click()
    page.locator(".failed", has_text="no more room").wait_for()
    assert answers(page) == ["One two three."]
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("One two three. Four.", exact=True).wait_for()
    done(page)
    assert page.locator(".failed").is_hidden()


def test_an_answer_is_edited(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."], ["C."]]
    say(page, "first")
    say(page, "second")
    page.get_by_role("button", name="Edit this answer").first.click()
    area = page.get_by_role("textbox", name="Edit the answer")
    area.fill("An **edited**\nanswer")
    page.get_by_role("button", name="Save", exact=True).click()
    assert answers(page) == ["An edited\nanswer", "B."]
    page.locator(".answer strong", has_text="edited").wait_for()
    assert page.locator(".note").first.inner_text() == "edited"
    say(page, "third")
    assert sent(server)[1] == ("assistant", "An **edited**\nanswer")
    assert len(sent(server)) == 5


@pytest.mark.slow
def test_a_message_is_deleted_and_restored(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["B."], ["C."]]
    say(page, "first")
    say(page, "second")
    page.get_by_role("button", name="Delete this answer").first.click()
    assert (questions(page), answers(page)) == (["first", "second"], ["B."])
    page.get_by_role("button", name="Undo").click()
    assert answers(page) == ["A.", "B."]
    page.get_by_role("button", name="Delete this answer").first.click()
    say(page, "third")  # two consecutive questions are joined: many templates refuse them
    assert sent(server) == [("user", "first\n\nsecond"), ("assistant", "B."), ("user", "third")]
    assert page.locator(".notice").count() == 0
    page.locator(".question").last.get_by_role("button", name="Delete your message").click()
    assert (questions(page), answers(page)) == (["first", "second"], ["B.", "C."])
    page.get_by_role("button", name="Delete this answer").last.click()
    assert [message["content"] for message in stored(page)["messages"]] == ["first", "second", "B."]


def test_one_of_several_versions_is_deleted(server: FakeServer, page: Any) -> None:
    server.replies += [["A."], ["Another A."]]
    say(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Another A.", exact=True).wait_for()
    done(page)
    page.get_by_role("button", name="Delete this answer").click()
    assert answers(page) == ["A."]
    assert version(page, "answer") == []


def test_a_conversation_stored_by_an_older_page_is_read(server: FakeServer, opened: Any) -> None:
    old = {
        "id": "0a", "updated": 1,
        "messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "answer"}],
    }  # fmt: skip
    circle = {
        "id": "0b", "leaf": 1,
        "messages": [{"id": 1, "parent": 2, "role": "user", "content": "x"},
                     {"id": 2, "parent": 1, "role": "assistant", "content": "y"}],
    }  # fmt: skip
    server.replies.append(["new"])
    kept = {"hotset.chat.0a": json.dumps(old), "hotset.chat.0b": json.dumps(circle)}
    page = opened(server.url, kept)
    page.click("#show-history")
    assert page.locator("#conversations .name").all_inner_texts() == [
        "old"
    ]  # the other stored value is not a conversation
    page.get_by_role("button", name="old", exact=True).click()
    say(page, "more")
    assert sent(server) == [("user", "old"), ("assistant", "answer"), ("user", "more")]
    until(page, "JSON.parse(localStorage.getItem('hotset.chat.0a')).leaf === 4")
