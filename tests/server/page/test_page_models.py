"""Several models on the page: choosing, progress of a load, and two models side by side."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from chat_page import answers, done, message, say, sent, until, violations
from fake_chat_server import FakeServer, Hold, Refusal, token

WARM = {"value": "loaded", "memory": 9_000_000, "weights": 5_000_000, "cache": 4_000_000}


@pytest.fixture
def several(server: FakeServer) -> FakeServer:
    """Return a server of two models; the second is loaded."""
    server.models = [
        {
            "id": "lab/cold.gguf",
            "max_model_len": 512,
            "status": {"value": "unloaded"},
            "meta": {
                "size": 5_000_000,
                "has_zeros": True,
                "n_ctx_train": 8192,
                "needs": {"memory": 9_000_000, "weights": 5_000_000, "cache": 4_000_000},
            },
        },
        {"id": "warm", "max_model_len": 4096, "status": WARM},
    ]
    return server


def test_another_model_is_chosen_and_loaded(several: FakeServer, opened: Any) -> None:
    several.replies += [["warm"], ["cold"], ["cold again"], ["warm again"]]
    page = opened(several.url)
    until(page, "document.querySelector('#model').textContent.startsWith('warm · 3 layers')")
    say(page, "one")
    page.click("#choose-model")
    assert violations(page) == []
    rows = page.locator("#model-list li")
    cold = message(page, "#model-list li >> nth=0")
    assert "not loaded · sparse: idle neurons are skipped · reserves 8.6 MiB: " in cold
    assert "weights 4.8 MiB, cache 3.8 MiB · context of 512 tokens" in cold
    assert "loaded · 8.6 MiB reserved: weights 4.8 MiB, cache 3.8 MiB · context of 4,096 tokens" in message(
        page, "#model-list li >> nth=1"
    )
    n_asked = len(several.asked_props)
    page.get_by_role("radio", name="cold").check()
    until(page, "document.querySelector('#model').textContent === 'cold · not loaded'")
    several.set_state("lab/cold.gguf", value="queued", waiting=1)
    page.get_by_text("cold: waiting to be loaded.").wait_for()
    progress = {"label": "weights", "done": 43, "total": 100}
    several.set_state("lab/cold.gguf", value="loading", progress=progress)
    page.get_by_text("cold: loading, 43%.").wait_for()
    assert page.locator("#load").get_attribute("value") == "0.43"
    assert float(rows.first.locator("progress").get_attribute("value")) == 0.43
    assert violations(page) == []
    assert several.managed == [("load", "lab/cold.gguf")]
    assert len(several.asked_props) == n_asked  # a request for an unloaded model's facts would load it
    several.set_state("lab/cold.gguf", value="loaded", memory=5_000_000)
    until(page, "document.querySelector('#model').textContent.startsWith('cold · 3 layers')")
    assert page.locator(".notice, #load:not([hidden])").count() == 0
    page.get_by_role("button", name="Unload warm").click()
    until(page, "document.activeElement.ariaLabel === 'Unload warm'")
    assert several.managed[-1] == ("unload", "warm")
    page.keyboard.press("Escape")
    say(page, "two")
    assert several.requests[-1]["model"] == "lab/cold.gguf"
    assert page.locator(".who").all_inner_texts() == ["You", "warm", "You", "cold"]
    # A new conversation gets the model that was chosen last; this one keeps its own.
    page.reload()
    until(page, "document.querySelector('#model').textContent.startsWith('cold')")
    page.click("#new-chat")
    page.click("#choose-model")
    page.get_by_role("radio", name="warm").check()
    page.keyboard.press("Escape")
    page.click("#show-history")
    page.get_by_role("button", name="one", exact=True).click()
    say(page, "three")
    assert several.requests[-1]["model"] == "lab/cold.gguf"
    page.click("#new-chat")
    say(page, "four")
    assert several.requests[-1]["model"] == "warm"


def test_an_adapter_is_listed_while_its_model_is_loaded(several: FakeServer, opened: Any) -> None:
    """Facts, tokens and loads use the model's name; only answers use the adapter's."""
    several.models[1:] = [
        several.models[1],
        several.models[1] | {"id": "warm:poet", "root": "poet", "parent": "warm"},
    ]
    several.replies += [["in verse"], ["again"]]
    page = opened(several.url)
    page.click("#choose-model")
    page.get_by_role("radio", name="warm:poet").check()
    until(page, "document.querySelector('#model').textContent.startsWith('warm:poet · 3 layers')")
    assert page.get_by_role("button", name="Unload warm", exact=True).count() == 1
    assert page.get_by_role("button", name="Unload warm:poet").count() == 0
    page.keyboard.press("Escape")
    say(page, "one")
    assert several.requests[-1]["model"] == "warm:poet"
    assert set(several.asked_props) == {"warm"}
    several.models.pop()
    several.set_state("warm", value="unloaded")
    page.reload()
    until(page, "document.querySelector('#model').textContent === 'warm:poet · not loaded'")
    page.click("#new-chat")
    page.click("#choose-model")
    page.get_by_role("radio", name="cold").check()
    page.keyboard.press("Escape")
    page.click("#show-history")
    page.get_by_role("button", name="one", exact=True).click()
    until(page, "document.querySelector('#model').textContent === 'warm:poet · not loaded'")
    loaded = {"value": "loaded", "memory": 9_000_000}
    several.models.append(several.models[1] | {"id": "warm:poet", "parent": "warm", "status": loaded})
    several.set_state("warm", **loaded)
    until(page, "document.querySelector('#model').textContent.startsWith('warm:poet · 3 layers')")
    say(page, "two")
    assert several.requests[-1]["model"] == "warm:poet"
    assert set(several.asked_props) == {"warm"}


def test_a_failed_load_is_explained(several: FakeServer, opened: Any) -> None:
    page = opened(several.url)
    page.click("#choose-model")
    several.key = "other"  # a key that may manage models
    page.get_by_role("button", name="Load cold").click()
    page.locator("#model-problem", has_text="an API key is needed").wait_for()
    several.key = None
    several.set_state("lab/cold.gguf", value="unloaded", failed=True, error="it needs 9.0 GB")
    page.locator("#model-list .problem", has_text="it needs 9.0 GB").wait_for()
    assert "could not be loaded" in message(page, "#model-list li >> nth=0")


def test_a_model_is_added_while_the_page_is_open(several: FakeServer, opened: Any) -> None:
    page = opened(several.url)
    page.click("#choose-model")
    assert several.models is not None
    several.models.append({"id": "new", "status": {"value": "loading"}})
    several.set_state("new", value="loading")
    page.locator("#model-list li", has_text="new").wait_for()


@pytest.mark.slow
def test_two_models_answer_side_by_side(several: FakeServer, opened: Any) -> None:
    hold = Hold()
    several.replies_of = {
        "warm": deque(
            [[token(0, "Warm", [0.5] * 3), token(1, " one", [0.5] * 3), hold], ["Warm two."], ["W."]]
        ),
        "lab/cold.gguf": deque([["Cold one."], Refusal(500, "it broke")]),
    }
    page = opened(several.url, viewport={"width": 1440, "height": 800})
    page.click("#choose-model")
    page.get_by_label("side by side").check()
    assert page.get_by_label("Second model").input_value() == "lab/cold.gguf"
    assert violations(page) == []
    page.keyboard.press("Escape")
    assert page.locator("#model").inner_text() == "warm and cold"
    say(page, "one", wait=False)
    for text in ("Cold one.", "Warm one"):
        page.locator(".answer").get_by_text(text, exact=True).wait_for()
    hold.go_on.set()
    done(page)
    left, right = page.locator(".versus .answer").all()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    assert left.bounding_box()["x"] < right.bounding_box()["x"]
    assert page.locator(".who").all_inner_texts() == ["You", "warm", "cold"]
    assert "50% of neurons fired" in message(page, "#summary")
    assert violations(page) == []
    # The conversation continues with the chosen model.
    page.get_by_role("button", name="Continue with this").click()
    assert answers(page) == ["Warm one", "Cold one."]
    say(page, "two")
    assert sent(several) == [("user", "one"), ("assistant", "Cold one."), ("user", "two")]
    assert page.locator(".failed", has_text="it broke").is_visible()
    page.click("#choose-model")
    page.get_by_label("side by side").uncheck()
    page.keyboard.press("Escape")
    say(page, "three")
    assert sent(several)[2:] == [("user", "two"), ("assistant", "Warm two."), ("user", "three")]
    page.reload()  # at this width the list of conversations is a column
    page.get_by_role("button", name="one", exact=True).click()
    assert page.locator(".versus").count() == 2
    assert answers(page)[:2] == ["Warm one", "Cold one."]


@pytest.mark.slow
def test_one_model_is_compared_with_other_settings(server: FakeServer, opened: Any) -> None:
    server.replies += [["a"], ["b"]]
    page = opened(
        server.url, {"hotset.presets": '{"calm": {"temperature": 0}}', "hotset.settings": '{"top_k": 7}'}
    )
    page.click("#choose-model")
    page.get_by_label("side by side").check()
    page.get_by_label("Its preset", exact=True).select_option("calm")
    page.keyboard.press("Escape")
    say(page, "same?")
    asked = [(body.get("temperature"), body.get("top_k")) for body in server.requests]
    assert sorted(asked, key=str) == [(0, None), (None, 7)]
    assert page.locator(".who").all_inner_texts() == ["You", "tiny", "tiny · calm"]


def test_a_model_is_loaded_with_a_requested_context(several: FakeServer, opened: Any) -> None:
    page = opened(several.url)
    page.click("#choose-model")
    context = page.get_by_label("Context of cold, in tokens")
    assert context.get_attribute("placeholder") == "512"
    context.fill("2048")
    context.press("Enter")
    until(page, "document.activeElement.ariaLabel !== null")
    page.get_by_role("button", name="Load cold").click()
    until(page, "document.querySelector('#models').open")
    assert several.managed == [("load", "lab/cold.gguf")] * 2
    assert several.asked_n_ctx == [2048, 2048]


def test_a_model_of_the_catalogue_is_downloaded(several: FakeServer, opened: Any) -> None:
    several.catalogue = [
        {"id": "ember-1b", "size": 2_000_000, "has_zeros": True, "needs": "2 GB of memory"},
        {"id": "frost-1b", "size": None, "has_zeros": False, "needs": ""},
    ]
    hold = Hold()
    several.pulls.append(
        [
            {"status": "pulling manifest"},
            {"status": "x", "completed": 1, "total": 4},
            hold,
            {"status": "success"},
        ]
    )
    several.pulls.append([{"error": "the disk is full"}])
    page = opened(several.url)
    page.click("#choose-model")
    page.get_by_text("Download another model").click()
    page.get_by_role("button", name="Download frost-1b").wait_for()
    page.fill("#catalogue-search", "ember")
    until(page, "document.querySelectorAll('#catalogue-list li').length === 1")
    assert "sparse: idle neurons are skipped · 1.9 MiB · 2 GB of memory" in message(
        page, "#catalogue-list li"
    )
    page.get_by_role("button", name="Download ember-1b").click()
    until(page, "document.querySelector('#catalogue-list progress')?.value === 0.25")
    assert violations(page) == []
    several.models = [*(several.models or ()), {"id": "ember-1b", "status": {"value": "unloaded"}}]
    hold.go_on.set()
    page.locator("#catalogue-list").get_by_text("downloaded", exact=True).wait_for()
    page.get_by_role("radio", name="ember-1b").wait_for()
    page.fill("#catalogue-search", "frost")
    page.get_by_role("button", name="Download frost-1b").click()
    page.get_by_text("the disk is full").wait_for()
