"""Images that are sent with a message: attached, pasted, dropped, drawn and opened."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

from chat_page import done, drawn, say, until
from fake_chat_server import FakeServer

SEES = {"id": "tiny", "max_model_len": 4096, "architecture": {"input_modalities": ["text", "image"]}}


def png(width: int = 8, height: int = 6, noise: bool = False) -> bytes:
    """Return a PNG file of one colour, or of noise, which does not compress."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    state, rows = 1, bytearray()
    for _ in range(height):
        rows.append(0)
        for _ in range(3 * width):
            state = state * 1103515245 + 12345 & 0x7FFFFFFF
            rows.append(state >> 16 & 255 if noise else 200)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def parts_sent(server: FakeServer) -> list[Any]:
    found: list[Any] = server.requests[-1]["messages"][0]["content"]
    return found


def test_an_attached_image_is_sent_before_the_text(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.models = [SEES]
    server.replies += [["A."], ["B."]]
    (tmp_path / "cat.png").write_bytes(png())
    page = opened(server.url)
    page.set_input_files("#attach-file", tmp_path / "cat.png")
    page.locator("#files canvas").wait_for()
    say(page, "What is this?")
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    question = {"type": "text", "text": "What is this?"}
    assert parts_sent(server) == [{"type": "image_url", "image_url": {"url": url}}, question]
    assert page.locator("#files li").count() == 0
    say(page, "And again?")
    assert server.requests[-1]["messages"][0]["content"][0]["image_url"]["url"] == url
    page.reload()  # the conversation has its image again
    page.locator(".question canvas").wait_for()


def test_an_image_is_drawn_small_and_opens(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.models = [SEES]
    server.replies.append(["A."])
    (tmp_path / "wide.png").write_bytes(png(400, 100))
    page = opened(server.url)
    page.set_input_files("#attach-file", tmp_path / "wide.png")
    page.locator("#files canvas").wait_for()
    say(page, "What?")
    width = "document.querySelector('.question canvas').width"
    until(page, f"{width} === 160")
    page.locator(".question .image summary").click()
    until(page, "[...document.querySelectorAll('.question canvas')].some((each) => each.width === 400)")


def test_a_large_image_is_made_smaller(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.models = [SEES]
    server.replies.append(["A."])
    (tmp_path / "large.png").write_bytes(png(1600, 100, noise=True))
    page = opened(server.url)
    page.set_input_files("#attach-file", tmp_path / "large.png")
    page.locator("#files canvas").wait_for()
    say(page, "What?")
    url = parts_sent(server)[0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,")
    assert len(url) < len(png(1600, 100, noise=True))


def test_images_are_pasted_dropped_and_removed(server: FakeServer, opened: Any) -> None:
    server.models = [SEES]
    page = opened(server.url)
    give = """([how, bytes]) => {
        const given = new DataTransfer();
        given.items.add(new File([Uint8Array.from(bytes)], `${how}.png`, { type: "image/png" }));
        const event = how === "drop"
            ? new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { bubbles: true, cancelable: true });
        if (how === "paste") Object.defineProperty(event, "clipboardData", { value: given });
        document.querySelector("#ask").dispatchEvent(event);
    }"""
    for n, how in enumerate(("drop", "paste"), 1):
        page.evaluate(give, [how, list(png())])
        until(page, f"document.querySelectorAll('#files canvas').length === {n}")
    page.locator("#files button").first.click()
    assert page.locator("#files canvas").count() == 1


def test_a_model_that_reads_only_text_gets_no_image(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(png())
    page = opened(server.url)
    page.set_input_files("#attach-file", tmp_path / "cat.png")
    page.locator(".notice", has_text="this model reads text only").wait_for()
    assert page.locator("#files li").count() == 0


def test_a_damaged_image_is_refused(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.models = [SEES]
    (tmp_path / "cat.png").write_bytes(png()[:40])
    page = opened(server.url)
    page.set_input_files("#attach-file", tmp_path / "cat.png")
    page.locator(".notice", has_text="cat.png cannot be read as an image").wait_for()
    server.replies.append(["A."])
    say(page, "hello")
    drawn(page)
    done(page)
