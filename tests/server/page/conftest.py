"""The chat page in a real browser, connected to a server whose answers the test gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from browser import CHROMIUM, FIREFOX, context_options, launched
from cases import quick_are
from chat_page import WAIT, until
from fake_chat_server import FakeServer, served


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over both browsers.

    In Firefox `make test` runs only tests marked `every_browser`.
    """
    if "browser" not in metafunc.fixturenames:
        return
    marked = metafunc.definition.get_closest_marker
    browsers = (CHROMIUM,) if marked("chromium_only") else (CHROMIUM, FIREFOX)
    quick = browsers if marked("every_browser") else (CHROMIUM,)
    metafunc.parametrize("browser", quick_are(quick, browsers), indirect=True, scope="module")


@pytest.fixture(scope="module")  # playwright's event loop would disturb other tests
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    with launched(request.param) as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with served(fake.app) as fake.url:
        yield fake


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens the page at an address.

    Unexpected errors in the page fail the test. stored: localStorage at the beginning. ready: wait for the
    model's name. Other arguments are for the browser's context.
    """
    faults: list[str] = []
    with ExitStack() as stack:

        def open_page(
            url: str, stored: dict[str, str] | None = None, *, ready: bool = True, **how: Any
        ) -> Any:
            how = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | how
            if browser.browser_type.name == FIREFOX and how.get("color_scheme") == "dark":
                stored = {"hotset.theme": "dark"} | (stored or {})  # Firefox's preference is light
            context = browser.new_context(**context_options(browser, **how))
            stack.callback(context.close)
            context.set_default_timeout(WAIT)
            if stored:
                # Only once, because values that the page stores must survive a reload. An empty page
                # cannot store anything.
                context.add_init_script(
                    "if (location.protocol === 'http:' && !sessionStorage.getItem('began')) {"
                    "sessionStorage.setItem('began', '1');"
                    f"Object.assign(localStorage, {json.dumps(stored)}); }}"
                )
            page = context.new_page()
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", lambda dialog: (faults.append("a dialog: " + dialog.message), dialog.dismiss()))
            page.on("console", lambda message: _note_fault(message, faults))
            page.on("request", lambda asked: _note_request(asked.url, url, faults))
            page.goto(url)
            if ready:
                until(page, "document.querySelector('#model').textContent !== ''")
            return page

        yield open_page
    assert not faults


@pytest.fixture
def page(server: FakeServer, opened: Callable[..., Any]) -> Any:
    """Return the page of `server`, whose replies a test may still add."""
    return opened(server.url)


def _note_fault(message: Any, faults: list[str]) -> None:
    if message.type == "error" and not message.text.startswith(
        "Failed to load resource"
    ):  # an HTTP error, or no connection
        faults.append(message.text)


def _note_request(asked: str, url: str, faults: list[str]) -> None:
    if not asked.startswith((url, "data:", "blob:")):
        faults.append(f"it asked {asked}")
