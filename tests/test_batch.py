"""`hotset batch`: every request has its answer, once, whatever ended the runs before."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_server import write_model

import hotset
from hotset.reporter import Reporter
from hotset.server.batch import Batch
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def chat(i: int, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"number {i}"}]} | GREEDY | more
    return {"custom_id": f"request-{i}", "method": "POST", "url": URL, "body": body}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Answers by custom_id; each is there once, and is a whole line."""
    text = path.read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    answers = {line["custom_id"]: line for line in lines}
    assert len(answers) == len(lines)
    return answers


class Heard(Reporter):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def advance(self, label: str, done: int, total: int) -> None:
        self.steps.append((done, total))


def run(path: Path, requests: Path, answers: Path, progress: Reporter | None = None) -> Batch:
    batch = Batch(requests, answers, 64)
    settings = ServerSettings(max_queue=1 << 20)
    service = Service(
        lambda: hotset.load(path, backend="cpu", n_threads=1, max_sequences=3), settings, name="tiny"
    )
    asyncio.run(batch.run(service, progress or Reporter()))
    return batch


def text_of(line: dict[str, Any]) -> str:
    return str(line["response"]["body"]["choices"][0]["message"]["content"])


def test_answers_are_the_models_own(path: Path, tmp_path: Path):
    lines = [chat(i) for i in range(12)]
    lines[3] = {
        "custom_id": "a completion",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "abc", "n": 2, "seed": 4, "max_tokens": 5},
    }
    requests, heard = write(tmp_path / "in.jsonl", lines), Heard()
    batch = run(path, requests, tmp_path / "out.jsonl", heard)
    assert (batch.n_done, batch.n_failed, batch.n_left) == (12, 0, 0)
    assert heard.steps == [(i, 12) for i in range(1, 13)]
    answers = read(tmp_path / "out.jsonl")
    assert answers.keys() == {line["custom_id"] for line in lines}
    with hotset.load(path, backend="cpu", n_threads=1) as model:
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


def test_refusals_are_lines_too(path: Path, tmp_path: Path):
    lines = [
        chat(0),
        chat(1, made_up=3),
        chat(2, model="gpt-4o-mini"),
        chat(3, stream=True),
        chat(4, messages=[{"role": "user", "content": "x" * 3000}]),
        chat(5, messages="\ud800"),
    ]
    batch = run(path, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    answers = read(tmp_path / "out.jsonl")
    status = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert status == {f"request-{i}": code for i, code in enumerate((200, 400, 404, 400, 400, 400))}
    error = answers["request-1"]["response"]["body"]["error"]
    assert error["code"] == "unsupported_parameter"
    assert answers["request-4"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert batch.n_failed == 5


def test_it_goes_on_where_it_was(path: Path, tmp_path: Path):
    lines = [chat(i) for i in range(9)]
    requests, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run(path, requests, out)
    whole = read(out)
    text = out.read_bytes()
    starts = [0] + [i + 1 for i, byte in enumerate(text) if byte == 10]
    for end in (starts[4], starts[4] + 7, starts[5] - 1, 3, 0):  # between two lines, and in the midst of one
        out.write_bytes(text[:end])
        batch = Batch(requests, out, 64)
        assert batch.n_done == sum(start <= end for start in starts[1:])
        run(path, requests, out)
        again = read(out)
        assert {name: text_of(line) for name, line in again.items()} == {
            name: text_of(line) for name, line in whole.items()
        }
        assert out.read_bytes()[: starts[batch.n_done]] == text[: starts[batch.n_done]]
    done = Batch(requests, out, 64)
    assert (done.n_left, done.n_done) == (0, 9)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2, is not JSON"),
        ("[]", "is no request"),
        ('{"custom_id": "a"}', "is no request"),
        ('{"url": "/v1/completions", "body": {}}', "has no custom_id"),
        ('{"custom_id": 3, "url": "/v1/completions", "body": {}}', "has no custom_id"),
        ('{"custom_id": "a", "url": "/v1/messages", "body": {}}', "/v1/messages"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "GET"),
        ('{"custom_id": "request-0", "url": "/v1/completions", "body": {}}', "a line before it"),
        ('{"custom_id": "a", "body": ' + "[" * 100, "nested"),
    ],
)
def test_what_is_no_request_is_told_before_anything_runs(tmp_path: Path, line: str, sentence: str):
    requests = tmp_path / "in.jsonl"
    requests.write_text(json.dumps(chat(0)) + "\n" + line + "\n")
    with pytest.raises(hotset.InvalidRequestError, match=sentence):
        Batch(requests, tmp_path / "out.jsonl", 64)


def test_answers_of_other_requests_are_left_alone(tmp_path: Path):
    requests, out = write(tmp_path / "in.jsonl", [chat(0)]), tmp_path / "out.jsonl"
    other = json.dumps({"custom_id": "other", "response": {"status_code": 200}}) + "\n"
    mine = json.dumps({"custom_id": "request-0", "response": {"status_code": 200}}) + "\n"
    for text in (other, "not json\n", '{"custom_id": []}\n', mine + mine):
        out.write_text(text)
        with pytest.raises(hotset.InvalidRequestError, match="answers no request"):
            Batch(requests, out, 64)
        assert out.read_text() == text
    with pytest.raises(hotset.InvalidRequestError, match="is not there"):
        Batch(tmp_path / "none.jsonl", out, 64)
    with pytest.raises(hotset.InvalidRequestError):
        Batch(requests, requests, 64)  # the answers behind the requests


def test_a_killed_run_loses_and_doubles_no_line(path: Path, tmp_path: Path):
    n = 60
    requests = write(tmp_path / "in.jsonl", [chat(i, max_tokens=100) for i in range(n)])
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "hotset.cli.main",
        "batch",
        str(requests),
        "-o",
        str(out),
        "-m",
        str(path),
    ]
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
    with hotset.load(path, backend="cpu", n_threads=1) as model:
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


def test_two_runs_do_not_write_the_same_answers(path: Path, tmp_path: Path):
    fcntl = pytest.importorskip("fcntl")
    requests, out = write(tmp_path / "in.jsonl", [chat(0)]), tmp_path / "out.jsonl"
    with out.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(hotset.InvalidRequestError, match="another process is writing"):
            run(path, requests, out)
    assert run(path, requests, out).n_done == 1
