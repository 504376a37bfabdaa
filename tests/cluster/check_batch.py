"""A batch on the nodes of a cluster: every answer once and in order, whichever process is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from byte_models import write_model
from conftest import Nodes
from pyarrow import Table

import hotset
from hotset.errors import InvalidRequestError
from hotset.reporter import Reporter
from hotset.scale.batch import batch_on_ray
from hotset.settings import LoadSettings

SETTINGS = LoadSettings(n_ctx=240, n_threads=1, max_sequences=4, device="cpu")
N = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def request(i: int) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": f"number {i}", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    if i == 7:
        body["nonsense"] = 1  # this request is refused, and its answer says so
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture(scope="module")
def expected(path: Path) -> list[str]:
    with hotset.load(path, SETTINGS) as model:
        prompts = [f"number {i}" for i in range(N)]
        answers = model.generate_many(prompts, max_tokens=20, temperature=0, ignore_eos=True)
        return [answer.text for answer in answers]


def write(path: Path, n: int = N) -> Path:
    path.write_text("".join(json.dumps(request(i)) + "\n" for i in range(n)))
    return path


def texts(lines: list[dict[str, Any]]) -> list[str]:
    assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(len(lines))]
    bodies = [line["response"]["body"] for line in lines]
    return ["" if "error" in body else body["choices"][0]["text"] for body in bodies]


def check(answers: Path, expected: list[str]) -> None:
    found = texts([json.loads(line) for line in answers.read_text().splitlines()])
    assert found == [text if i != 7 else "" for i, text in enumerate(expected)]
    assert not answers.with_name(f"{answers.name}.parts").exists()


def test_a_machine_that_dies_in_mid_load(path: Path, expected: list[str], nodes: Nodes, tmp_path: Path):
    requests, answers = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    killed = threading.Event()

    class Killer(Reporter):
        def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
            if not killed.is_set():
                killed.set()
                nodes.kill("c")

    found = batch_on_ray(requests, answers, str(path), SETTINGS, ("tiny",), nodes.address, 3, Killer())
    nodes.add("c")
    assert found == (N, 1)
    assert killed.is_set()
    check(answers, expected)
    with pytest.raises(InvalidRequestError, match="exists already"):
        batch_on_ray(requests, answers, str(path), SETTINGS, ("tiny",), nodes.address, 3, Reporter())


def test_killed_driver_resumes(path: Path, expected: list[str], nodes: Nodes, tmp_path: Path):
    requests, answers = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "hotset.cli.main", "batch", str(requests), "-o", str(answers)]
    command += ["-m", str(path), "-c", "240", "-t", "1", "--ray", nodes.address, "--replicas", "2"]
    parts = answers.with_name("out.jsonl.parts")
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(parts.glob("0*.jsonl")):
        assert time.monotonic() < until
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    there = {one.name: one.stat().st_mtime_ns for one in parts.glob("0*.jsonl")}
    assert not answers.exists()
    other = write(tmp_path / "other.jsonl", 40)
    with pytest.raises(InvalidRequestError, match="has answers to other requests"):
        batch_on_ray(other, answers, str(path), SETTINGS, ("tiny",), nodes.address, 2, Reporter())
    assert {one.name: one.stat().st_mtime_ns for one in parts.glob("0*.jsonl")} == there
    done: list[int] = []

    class Heard(Reporter):
        def advance(self, label: str, now: int, total: int, unit: str = "bytes") -> None:
            done.append(now)

    batch_on_ray(requests, answers, str(path), SETTINGS, ("tiny",), nodes.address, 2, Heard())
    kept = sum(min(32, N - 32 * int(Path(name).stem)) for name in there)
    assert (done or [N])[0] == kept  # kept answers are not computed again
    check(answers, expected)


def test_parquet(path: Path, expected: list[str], nodes: Nodes, tmp_path: Path):
    rows = [{**request(i), "body": json.dumps(request(i)["body"])} for i in range(40)]
    requests, answers = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(Table.from_pylist(rows), requests)
    found = batch_on_ray(requests, answers, str(path), SETTINGS, ("tiny",), nodes.address, 1, Reporter())
    assert found == (40, 1)
    table = pq.read_table(answers).to_pylist()
    assert [row["custom_id"] for row in table] == [f"r{i}" for i in range(40)]
    assert [row["status_code"] for row in table] == [400 if i == 7 else 200 for i in range(40)]
    assert json.loads(table[3]["body"])["choices"][0]["text"] == expected[3]
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(InvalidRequestError, match="is not a Parquet file"):
        batch_on_ray(broken, tmp_path / "x.jsonl", str(path), SETTINGS, ("t",), nodes.address, 1, Reporter())
