"""Numbers of answers after a reload; drafted tokens."""

from __future__ import annotations

from typing import Any

from chat_page import message, say, until, violations
from fake_chat_server import FakeServer, token


def test_numbers_survive_a_reload(server: FakeServer, opened: Any) -> None:
    sparse = [token(i, f" {i}", [0.1 * i, 0.2, 0.3], cpu_share=[0.05, 0.1, 0.1]) for i in range(5)]
    dense = [
        {name: one[name] for name in ("token", "text", "seconds", "bytes_kv", "bytes_touched", "bytes_total")}
        for one in sparse
    ]
    server.replies += [sparse, dense]
    page = opened(server.url)
    say(page, "one")
    sparse_summary = message(page, "#summary")
    page.locator(".heat").focus()
    page.keyboard.press("End")
    cell = message(page, "#readout")
    say(page, "two")
    dense_summary = message(page, "#summary")
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="one", exact=True).click()
    until(page, "document.querySelectorAll('.thread:not([hidden])').length === 2")
    assert message(page, "#summary") == dense_summary
    page.get_by_role("button", name="Show the activity of this answer").first.click()
    assert message(page, "#summary") == sparse_summary
    page.locator(".heat").focus()
    page.keyboard.press("End")
    assert message(page, "#readout") == cell
    # Edited answers and deleted conversations have no numbers.
    page.get_by_role("button", name="Edit this answer").first.click()
    page.get_by_role("textbox", name="Edit the answer").fill("other")
    page.get_by_role("button", name="Save", exact=True).click()
    assert page.locator(".thread").first.is_hidden()
    count = """new Promise((found) => { indexedDB.open("hotset.figures").onsuccess = (event) => {
        const base = event.target.result;
        base.transaction("answers").objectStore("answers").count().onsuccess = (event) => {
            base.close(); found(event.target.result); }; }; })"""
    until(page, f"{count}.then((n) => n === 1)")
    page.evaluate("localStorage.clear()")
    page.reload()
    until(page, f"{count}.then((n) => n === 0)")


def test_drafted_tokens_are_coloured(server: FakeServer, opened: Any) -> None:
    more: list[dict[str, Any]] = [{}, {"drafted": True}, {"drafted": True}, {}]
    server.replies += [
        [token(i, f" t{i}", [0.1] * 3, **one) for i, one in enumerate(more)],
        [token(0, "x", [0.1] * 3)],
    ]
    page = opened(server.url)
    say(page, "drafts")
    assert page.locator("#tape .drafted").all_inner_texts() == [" t1", " t2"]
    assert "50% of tokens were drafted" in message(page, "#summary")
    assert page.locator("#drafted").is_visible()
    page.locator("#tape span").nth(1).click()
    assert "drafted: from the same step as the one before" in message(page, "#readout")
    assert violations(page) == []
    say(page, "none")
    assert page.locator("#drafted").is_hidden()
