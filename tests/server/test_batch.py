"""`hotset batch`: every request gets exactly one answer, even if earlier runs were killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hotset
from hotset.reporter import Reporter
from hotset.server import batch as batch_module
from hotset.server.batch import BatchRun
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
URL = "/v1/chat/completions"


def chat(i: int, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"number {i}"}]} | GREEDY | more
    return {"custom_id": f"request-{i}", "method": "POST", "url": URL, "body": body}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return answers by custom_id. Assert that each exists once, in a complete line."""
    text = path.read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    answers = {line["custom_id"]: line for line in lines}
    assert len(answers) == len(lines)
    return answers


class Heard(Reporter):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
        self.steps.append((done, total))


def service(path: Path) -> Service:
    settings = ServerSettings(max_queue=1 << 20)
    return Service(
        lambda: hotset.load(path, device="cpu", n_threads=1, max_sequences=3), settings, name="tiny"
    )


def run(path: Path, requests: Path, answers: Path, progress: Reporter | None = None) -> BatchRun:
    with BatchRun(requests, answers, 64) as batch:
        asyncio.run(batch.run(service(path), progress or Reporter()))
    return batch


def text_of(line: dict[str, Any]) -> str:
    return str(line["response"]["body"]["choices"][0]["message"]["content"])


def test_answers_are_the_models_own(path: Path, tmp_path: Path):
    lines = [chat(i) for i in range(12)]
    lines[3] = {
        "custom_id": "a completion", "method": "POST", "url": "/v1/completions",
        "body": {"prompt": "abc", "n": 2, "seed": 4, "max_tokens": 5},
    }  # fmt: skip
    requests, heard = write(tmp_path / "in.jsonl", lines), Heard()
    batch = run(path, requests, tmp_path / "out.jsonl", heard)
    assert (batch.n_done, batch.n_failed, batch.n_left) == (12, 0, 0)
    assert heard.steps == [(i, 12) for i in range(13)]
    answers = read(tmp_path / "out.jsonl")
    assert answers.keys() == {line["custom_id"] for line in lines}
    with hotset.load(path, device="cpu", n_threads=1) as model:
        for line in lines:
            answer = answers[line["custom_id"]]
            assert answer["error"] is None
            assert answer["id"].startswith("batch_req_")
            assert answer["response"]["status_code"] == 200
            body = answer["response"]["body"]
            if line["url"] == URL:
                assert text_of(answer) == model.chat(line["body"]["messages"], **GREEDY).content
            else:
                assert len(body["choices"]) == 2
                own = model.generate("abc", seed=4, max_tokens=5).text
                assert body["choices"][0]["text"] == own
            assert body["usage"]["completion_tokens"] > 0


def test_refusals_are_written_as_answers(path: Path, tmp_path: Path):
    lines = [
        chat(0),
        chat(1, made_up=3, n=99),
        chat(2, messages=[]),
        chat(3, stream=True),
        chat(4, messages=[{"role": "user", "content": "x" * 3000}]),
        chat(5, messages="\ud800"),
    ]
    batch = run(path, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    answers = read(tmp_path / "out.jsonl")
    status = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert status == {f"request-{i}": code for i, code in enumerate((200, 400, 400, 400, 400, 400))}
    error = answers["request-1"]["response"]["body"]["error"]
    assert error["param"] == "n"
    assert answers["request-4"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert batch.n_failed == 5


def test_a_run_resumes_where_the_last_one_ended(path: Path, tmp_path: Path):
    lines = [chat(i) for i in range(9)]
    requests, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run(path, requests, out)
    whole = read(out)
    text = out.read_bytes()
    starts = [0] + [i + 1 for i, byte in enumerate(text) if byte == 10]
    for end in (starts[4], starts[4] + 7, starts[5] - 1, 3, 0):  # between two lines, and within a line
        out.write_bytes(text[:end])
        with BatchRun(requests, out, 64) as batch:
            assert batch.n_done == sum(start <= end for start in starts[1:])
            n_done = batch.n_done
        run(path, requests, out)
        again = read(out)
        assert {name: text_of(line) for name, line in again.items()} == {
            name: text_of(line) for name, line in whole.items()
        }
        assert out.read_bytes()[: starts[n_done]] == text[: starts[n_done]]
    with BatchRun(requests, out, 64) as done:
        assert (done.n_left, done.n_done) == (0, 9)


BODY = '{"messages": [{"role": "user", "content": "number 9"}], "max_tokens": 2, "seed": %s}'
# Lines that are not requests: the line, the code of its record, and a part of the message.
BAD: dict[str, tuple[bytes, str, str]] = {
    "a bracket": (b"{", "invalid_json_line", "is not JSON"),
    "a list": (b"[]", "invalid_request", "is not a request"),
    "a number": (b"3", "invalid_request", "is not a request"),
    "null": (b"null", "invalid_request", "is not a request"),
    "no body": (b'{"custom_id": "a"}', "invalid_request", "is not a request"),
    "a body that is a list": (b'{"custom_id": "a", "body": []}', "invalid_request", "is not a request"),
    "no custom_id": (b'{"url": "/v1/completions", "body": {}}', "invalid_request", "no custom_id"),
    "a custom_id that is a number": (
        b'{"custom_id": 3, "url": "/v1/completions", "body": {}}',
        "invalid_request",
        "no custom_id",
    ),
    "another url": (
        b'{"custom_id": "a", "url": "/v1/messages", "body": {}}',
        "invalid_request",
        "/v1/messages",
    ),
    "a url that is a list": (b'{"custom_id": "a", "url": [], "body": {}}', "invalid_request", r"\[\]"),
    "another method": (
        b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}',
        "invalid_request",
        "GET",
    ),
    "a custom_id twice": (
        b'{"custom_id": "request-0", "url": "/v1/completions", "body": {}}',
        "duplicate_custom_id",
        "the custom_id of line 1",
    ),
    "deep nesting": (b'{"custom_id": "a", "body": ' + b"[" * 100_000, "invalid_json_line", "nested"),
    "deep nesting that is closed": (
        b'{"custom_id": "a", "body": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        "invalid_json_line",
        "nested",
    ),
    "Latin-1": (json.dumps(chat(7)).encode()[:-1] + b', "x": "\xe9"}', "invalid_json_line", "not JSON"),
    "UTF-16": (json.dumps(chat(7)).encode("utf-16-le"), "invalid_json_line", "not JSON"),
    "a surrogate in UTF-8": (
        json.dumps(chat(7)).encode()[:-1] + b', "x": "\xed\xa0\x80"}',
        "invalid_json_line",
        "not JSON",
    ),
    "two values": (b"{} {}", "invalid_json_line", "not JSON"),
    "a mark in the middle": (b"\xef\xbb\xbf" + json.dumps(chat(7)).encode(), "invalid_json_line", "not JSON"),
    "a number of many digits": (
        (json.dumps(chat(7))[:-1] + f', "x": {"9" * 5000}}}').encode(),
        "invalid_json_line",
        "not JSON",
    ),
} | {
    number: (
        f'{{"custom_id": "a", "url": "{URL}", "body": {BODY % number}}}'.encode(),
        "invalid_json_line",
        number,
    )
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")
}  # fmt: skip


def test_ignored_fields_are_logged_once(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines = [chat(i) for i in range(3)]
    for line in lines:
        line["body"]["zap"] = 1
    run(path, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    found = [record.getMessage() for record in caplog.records if "zap" in record.getMessage()]
    assert found == ["batch sends zap, which is ignored: hotset does not know it"]


def test_a_line_that_is_not_a_request_is_one_error_record(path: Path, tmp_path: Path):
    """The other requests are answered, also if a later run resumes."""
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps(chat(0)).encode(),
        *(line for line, _, _ in BAD.values()),
        json.dumps(chat(1)).encode(),
    ]
    requests.write_bytes(b"\n".join(lines))
    batch = run(path, requests, out)
    assert (batch.n_done, batch.n_failed, batch.n_left) == (len(lines), len(BAD), 0)
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert len(records) == len(lines)
    for number, (what, (_, code, message)) in enumerate(BAD.items(), 2):
        [record] = [one for one in records if one["error"] and one["error"]["line"] == number]
        assert record["response"] is None, what
        assert record["error"]["code"] == code, what
        assert re.search(message, record["error"]["message"]), (what, record)
        has_own = b'"custom_id": "a"' in lines[number - 1] and code == "invalid_request"
        assert record["custom_id"] == ("a" if has_own else None), what
    answered = {one["custom_id"]: one["response"]["status_code"] for one in records if not one["error"]}
    assert answered == {"request-0": 200, "request-1": 200}
    whole = out.read_bytes()
    for keep in (0, 1, 5, len(records) - 1):
        out.write_bytes(b"".join(whole.splitlines(keepends=True)[:keep]) + b'{"id":"batch_r')
        again = run(path, requests, out)
        assert (again.n_done, again.n_failed) == (len(lines), len(BAD))
        found = [json.loads(line) for line in out.read_bytes().splitlines()]
        assert len(found) == len(lines)
        assert {one["error"]["line"] for one in found if one["error"]} == set(range(2, len(lines)))


def test_blank_lines_line_ends_and_a_byte_order_mark_are_ignored(path: Path, tmp_path: Path):
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first, second = (json.dumps(chat(i, max_tokens=2)).encode() for i in range(2))
    requests.write_bytes(b"\xef\xbb\xbf" + first + b"\r\n\r\n \t\n\n" + second + b"\r\n")
    batch = run(path, requests, out)
    assert (batch.n_done, batch.n_failed) == (2, 0)
    assert read(out).keys() == {"request-0", "request-1"}


def test_a_line_that_is_too_long_is_one_error_record(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_module, "MAX_LINE_BYTES", 4000)
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(chat(i, max_tokens=2)) for i in range(2)]
    fits = lines[1].ljust(3999)  # 3,999 bytes and a line end
    requests.write_text("\n".join([lines[0], "x" * 3_000_000, "y" * 4000, fits, "z" * 5000]))
    assert run(path, requests, out).n_failed == 3
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["error"]["line"] for one in records if one["error"]] == [2, 3, 5]
    assert {one["custom_id"] for one in records if not one["error"]} == {"request-0", "request-1"}


@pytest.mark.parametrize("line", [line for line, code, _ in BAD.values() if code != "duplicate_custom_id"])
def test_a_file_without_a_request_is_refused_and_nothing_is_written(tmp_path: Path, line: bytes):
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"\n" + line + b"\nx\n")
    with pytest.raises(hotset.InvalidRequestError, match="has no request: line 2 cannot be used"):
        BatchRun(requests, out, 64)
    assert not out.exists()


def test_a_custom_id_is_returned_unchanged(path: Path, tmp_path: Path):
    """This includes lone surrogates, which UTF-8 cannot encode. A second run finds the answers again."""
    names = ["\ud800", "?", "a\udfffb", "\x00", "\u2028", "\U0001f600", "é", '"\\', " "]
    lines = [chat(i, max_tokens=1) | {"custom_id": name} for i, name in enumerate(names)]
    requests, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(path, requests, out).n_done == len(names)
    text = out.read_bytes()
    answers = [json.loads(line) for line in text.splitlines()]  # bytes: U+2028 does not end a line
    assert sorted(one["custom_id"] for one in answers) == sorted(names)
    with BatchRun(requests, out, 64) as done:
        assert (done.n_done, done.n_left) == (len(names), 0)
    assert out.read_bytes() == text


def test_a_body_arrives_unchanged():
    """The server must judge lone surrogates, so they are not replaced before."""
    body = {"model": "tiny", "input": "a\ud800é\u2028", "n": 1.5}
    arrived: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    line, status = asyncio.run(batch_module.answer_line(app, "1", URL, body))  # type: ignore[arg-type]
    assert (json.loads(arrived[0]), json.loads(line)["response"]["body"], status) == (body, {}, 200)
    assert "é".encode() in arrived[0]  # not escaped, which would be longer: bodies have a size limit


def test_a_file_with_other_answers_is_refused_unchanged(tmp_path: Path):
    requests, out = write(tmp_path / "in.jsonl", [chat(0)]), tmp_path / "out.jsonl"
    other = json.dumps({"custom_id": "other", "response": {"status_code": 200}}) + "\n"
    mine = json.dumps({"custom_id": "request-0", "response": {"status_code": 200}}) + "\n"
    record = {"custom_id": None, "response": None, "error": {"code": "x", "message": "", "line": 1}}
    hashless = json.dumps({"custom_id": [], "response": {"status_code": 200}}) + "\n"
    foreign = ("not json\n", '{"custom_id": []}\n', "notes without an end", mine + "notes")
    for text in (other, *foreign, mine + mine, hashless, json.dumps(record) + "\n", "null\n", "[]\n"):
        out.write_text(text)
        with pytest.raises(hotset.InvalidRequestError, match="answers no request"):
            BatchRun(requests, out, 64)
        assert out.read_text() == text
    with pytest.raises(hotset.InvalidRequestError, match="there is no file"):
        BatchRun(tmp_path / "none.jsonl", out, 64)
    with pytest.raises(hotset.InvalidRequestError):
        BatchRun(requests, requests, 64)  # answers would be appended to the requests


@pytest.mark.slow
def test_killed_runs_neither_lose_nor_repeat_a_line(path: Path, tmp_path: Path):
    n = 60
    requests = write(tmp_path / "in.jsonl", [chat(i, max_tokens=100) for i in range(n)])
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable, "-m", "hotset.cli.main", "batch", str(requests), "-o", str(out), "-m", str(path),
    ]  # fmt: skip
    command += ["-t", "1", "-np", "2"]

    def size() -> int:
        return out.stat().st_size if out.exists() else 0

    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        before, end = size(), time.monotonic() + 60
        while size() < before + 2000 and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert f"{n} answers" in done.stderr
    answers = read(out)
    assert answers.keys() == {f"request-{i}" for i in range(n)}
    with hotset.load(path, device="cpu", n_threads=1) as model:
        for i in (0, 7, 31, n - 1):
            messages = [{"role": "user", "content": f"number {i}"}]
            assert (
                text_of(answers[f"request-{i}"])
                == model.chat(messages, **(GREEDY | {"max_tokens": 100})).content
            )
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0
    assert "Fetching" not in again.stderr
    assert read(out) == answers


def test_a_second_run_does_not_change_the_first_ones_file(path: Path, tmp_path: Path):
    """A half-written line stays, although it looks like a killed run's: the second run has no lock."""
    pytest.importorskip("fcntl")
    requests, out = write(tmp_path / "in.jsonl", [chat(0), chat(1)]), tmp_path / "out.jsonl"
    with BatchRun(requests, out, 64):
        half = b'{"id":"batch_req_1","custom_id":"requ'
        with out.open("ab") as file:
            file.write(half)
        with pytest.raises(hotset.InvalidRequestError, match="another process is writing"):
            BatchRun(requests, out, 64)
        assert out.read_bytes() == half
    assert run(path, requests, out).n_done == 2


def test_requests_that_change_during_a_run_are_an_error_and_no_answer_is_lost(path: Path, tmp_path: Path):
    requests, out = write(tmp_path / "in.jsonl", [chat(0), chat(1)]), tmp_path / "out.jsonl"
    text = requests.read_text()
    with BatchRun(requests, out, 64) as batch:
        requests.write_text(text.replace("request-1", "request-2"))
        with pytest.raises(hotset.InvalidRequestError, match="was changed while it was in use"):
            asyncio.run(batch.run(service(path), Reporter()))
    requests.write_text(text)
    assert run(path, requests, out).n_done == 2


def test_a_fault_of_the_server_is_an_answer_with_status_500(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other requests are answered."""
    ask = Service.ask

    async def failing(self: Service, request: Any, *more: Any, **named: Any) -> Any:
        if "number 1" in str(request):
            raise KeyError("unforeseen")
        return await ask(self, request, *more, **named)

    monkeypatch.setattr(Service, "ask", failing)
    lines = [chat(i, max_tokens=1) for i in range(3)]
    run(path, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    status = {name: one["response"]["status_code"] for name, one in read(tmp_path / "out.jsonl").items()}
    assert status == {"request-0": 200, "request-1": 500, "request-2": 200}


FULL = """
import resource, sys
sys.dont_write_bytecode = True  # the limit would cut the bytecode of modules
from hotset.cli.main import main
# As a full disk does: a write takes a part of a line, and the next one nothing.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
sys.exit(main())
"""


def test_a_full_disk_gives_one_message_and_keeps_the_written_answers(path: Path, tmp_path: Path):
    pytest.importorskip("resource")
    n = 12
    lines = [chat(i) for i in range(n)]
    lines.insert(3, {"custom_id": "odd"})
    requests, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ["batch", str(requests), "-o", str(out), "-m", str(path), "-t", "1", "-np", "2"]
    done = subprocess.run(
        [sys.executable, "-c", FULL, "3000", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "ExceptionGroup" not in done.stderr
    [message] = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert str(out) in message
    assert "the same command goes on" in " ".join(done.stderr.split())
    kept = out.read_bytes()
    assert 0 < len(kept) <= 3000
    n_kept = len(kept.splitlines())
    assert kept.endswith(b"\n")
    assert f"has {n_kept} of {n + 1} answers" in " ".join(done.stderr.split())
    batch = run(path, requests, out)
    assert (batch.n_done, batch.n_failed) == (n + 1, 1)
    assert out.read_bytes().startswith(kept)
    assert read(out).keys() == {"odd", *(f"request-{i}" for i in range(n))}
