"""Files that are sent with a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chat_page import message, say, sent
from fake_chat_server import FakeServer


def pdf_of(*pages: str) -> bytes:
    """Return a PDF with a line on each page, and with a script that would run when it is opened."""
    numbers = range(4, 4 + 2 * len(pages), 2)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R /OpenAction << /S /JavaScript /JS (window.pwned = 1) >> >>",
        f"<< /Type /Pages /Kids [{' '.join(f'{n} 0 R' for n in numbers)}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for n, text in zip(numbers, pages, strict=True):
        drawn = f"BT /F1 12 Tf 50 700 Td ({text}) Tj 0 -20 Td ({text and 'second line'}) Tj ET".encode(
            "cp1252"
        )
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {n + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
    written, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer << /Root 1 0 R /Size %d >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        len(written),
    )
    return written + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + trailer


def test_the_text_of_a_pdf(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    server.replies.append(["A."])
    (tmp_path / "paper.pdf").write_bytes(pdf_of("Grün is green", "page two"))
    page = opened(server.url)
    page.set_input_files("#attach-file", tmp_path / "paper.pdf")
    page.locator("#files li", has_text="paper.pdf").get_by_text("tokens").wait_for()
    say(page, "Read")
    text = "Grün is green\nsecond line\n\npage two\nsecond line"
    assert sent(server) == [("user", f"File paper.pdf:\n```\n{text}\n```\n\nRead")]
    assert page.evaluate("window.pwned") is None


def test_files_that_are_not_text_are_refused(server: FakeServer, opened: Any, tmp_path: Path) -> None:
    files = {
        "paper.pdf": (b"%PDF-1.7 ...", "paper.pdf cannot be read as a PDF."),
        "scanned.pdf": (pdf_of(""), "scanned.pdf has no text: its pages may be images."),
        "photo.png": (b"\x89PNG\r\n\x1a\n\0\0", "photo.png is neither text in UTF-8 or UTF-16 nor a PDF"),
        "latin.csv": ("Grün".encode("latin-1"), "latin.csv is neither text in UTF-8 or UTF-16"),
        "large.txt": (b"x" * ((1 << 20) + 1), "large.txt has 1.0 MiB, and the limit is 1.0 MiB"),
        "empty.txt": (b" \n", "empty.txt is empty."),
    }
    page = opened(server.url)
    for name, (content, why) in files.items():
        (tmp_path / name).write_bytes(content)
        page.set_input_files("#attach-file", [tmp_path / name])
        page.locator(".notice", has_text=why).wait_for()
    assert page.locator("#files li").count() == 0


def test_files_are_dropped_pasted_and_removed(server: FakeServer, opened: Any) -> None:
    server.models = [{"id": "tiny", "max_model_len": 8}]
    page = opened(server.url)
    give = """(how) => {
        const given = new DataTransfer();
        given.items.add(new File(["a b c"], `${how}.txt`));
        const event = how === "drop"
            ? new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { bubbles: true, cancelable: true });
        // Firefox gives an event that a script makes no files.
        if (how === "paste") Object.defineProperty(event, "clipboardData", { value: given });
        document.querySelector(how === "drop" ? "#messages" : "#ask").dispatchEvent(event);
    }"""
    page.evaluate(give, "drop")
    page.locator("#files li", has_text="drop.txt").get_by_text("7 tokens").wait_for()
    page.evaluate(give, "paste")
    page.get_by_text("There is no room for 14 tokens: the context has 8.").wait_for()
    page.get_by_role("button", name="Remove drop.txt").click()
    assert message(page, "#files").startswith("paste.txt")
    assert page.locator("#files .problem").count() == 0
    assert page.evaluate("document.activeElement.id") == "ask"
