"""Shards of a batch without a cluster: kept answers, missing answers, and their final order.

The engine is simulated; Ray's part is tested in tests/cluster/.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, KilledError
from filelock import FileLock

from hotset.errors import InvalidRequestError
from hotset.reporter import Reporter
from hotset.scale import batch
from hotset.settings import LoadSettings

N = 100  # requests: three whole shards, and a part of one


class Cluster(FakeCluster):
    """Answers shards from the last to the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, batch)
        monkeypatch.setattr(batch, "_answered", self._answered)

    def _answered(self, missing: Any, *more: Any) -> Iterator[tuple[int, bytes]]:
        self.asked = [i for i, _ in missing]
        for n, (i, lines) in enumerate(reversed(missing)):
            if n == self.dies_after:
                raise KilledError
            answers = []
            for line in lines:
                custom_id = json.loads(line)["custom_id"]
                status = 400 if custom_id == "r7" else 200
                response = {"status_code": status, "request_id": "x", "body": {"of": custom_id}}
                answers.append(json.dumps({"custom_id": custom_id, "response": response}) + "\n")
            yield i, "".join(answers).encode()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def write(path: Path, n: int = N) -> Path:
    body = {"prompt": "a"}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(n)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))  # the last line has no line feed
    return path


def run(requests: Path, answers: Path, progress: Reporter | None = None) -> tuple[int, int]:
    return batch.batch_on_ray(
        requests, answers, "m", LoadSettings(), ("m",), None, None, progress or Reporter()
    )


def test_answers_are_in_the_order_of_the_requests(cluster: Cluster, tmp_path: Path):
    requests, answers = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    told: list[int] = []

    class Heard(Reporter):
        def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
            assert total == N
            told.append(done)

    assert run(requests, answers, Heard()) == (N, 1)
    assert told == [0, 4, 36, 68, 100]
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(N)]
    assert all(line["response"]["body"] == {"of": line["custom_id"]} for line in lines)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    with pytest.raises(InvalidRequestError, match="exists already"):
        run(requests, answers)


def test_killed_run_resumes_with_the_missing_shards(cluster: Cluster, tmp_path: Path):
    requests, answers = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    cluster.dies_after = 1
    for left in ([0, 1, 2, 3], [0, 1, 2], [0, 1]):
        with pytest.raises(KilledError):
            run(requests, answers)
        assert cluster.asked == left
        assert not answers.exists()
    (tmp_path / "out.jsonl.parts" / "00000000.jsonl.torn").write_text("{")  # a possible leftover of a kill
    assert run(requests, answers) == (N, 1)
    assert cluster.asked == [0]
    assert len(answers.read_text().splitlines()) == N


def test_parts_of_other_requests_and_of_another_process(cluster: Cluster, tmp_path: Path):
    requests, answers = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    cluster.dies_after = 1
    with pytest.raises(KilledError):
        run(requests, answers)
    with pytest.raises(InvalidRequestError, match="has answers to other requests"):
        run(write(tmp_path / "other.jsonl", 99), answers)
    with (
        FileLock(tmp_path / "out.jsonl.parts" / "lock"),
        pytest.raises(InvalidRequestError, match="another process is writing"),
    ):
        run(requests, answers)


def test_invalid_lines_get_error_records(cluster: Cluster, tmp_path: Path):
    requests, answers = write(tmp_path / "in.jsonl", 70), tmp_path / "out.jsonl"
    lines = requests.read_bytes().split(b"\n")
    odd = {1: b'{"custom_id": "a"}', 34: b"{", 50: lines[0], 73: lines[0].replace(b'"a"', b"NaN")}
    for number, line in odd.items():
        lines.insert(number - 1, line)
    lines[10:10] = [b"", b" \r"]
    requests.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    cluster.dies_after = 1
    with pytest.raises(KilledError):
        run(requests, answers)
    cluster.dies_after = 99
    told: list[tuple[int, int]] = []

    class Heard(Reporter):
        def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
            told.append((done, total))

    n = 70 + len(odd)
    assert run(requests, answers, Heard()) == (n, 1 + len(odd))
    assert told[-1] == (n, n)
    found = [json.loads(line) for line in answers.read_bytes().splitlines()]
    assert [one["error"]["line"] for one in found if one.get("error")] == [1, 36, 52, 75]
    places = {i + 1 for i, one in enumerate(found) if one.get("error")}
    assert places == set(odd)
    codes = [one["error"]["code"] for one in found if one.get("error")]
    assert codes == ["invalid_request", "invalid_json_line", "duplicate_custom_id", "invalid_json_line"]
    assert [one["custom_id"] for one in found if not one.get("error")] == [f"r{i}" for i in range(70)]


def test_custom_id_is_returned_unchanged(cluster: Cluster, tmp_path: Path):
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = ["\ud800", "?", "\u2028", "\x0b"]
    lines = [{"custom_id": name, "url": "/v1/completions", "body": {}} for name in names]
    requests.write_text("\n".join(map(json.dumps, lines)))
    assert run(requests, answers) == (4, 0)
    found = [json.loads(line) for line in answers.read_bytes().splitlines()]
    assert [one["custom_id"] for one in found] == names


def test_worker_answers_lines_in_order(monkeypatch: pytest.MonkeyPatch):
    """Answer the encoded lines of a shard, and return the answers in the same order."""

    async def answered(app: Any, custom_id: str, url: str, body: Any) -> tuple[bytes, int]:
        return json.dumps([custom_id, url, body]).encode() + b"\n", 200

    monkeypatch.setattr(batch, "answer_line", answered)
    worker = object.__new__(batch.Answerer)
    worker._app, worker._n_ahead = None, 2  # type: ignore[assignment]
    lines = [{"custom_id": f"\ud800{i}", "url": "u", "body": {"i": i}} for i in range(5)]
    found = asyncio.run(worker._all([json.dumps(line).encode() for line in lines]))
    assert [json.loads(line) for line in found.splitlines()] == [
        [line["custom_id"], "u", line["body"]] for line in lines
    ]


def test_invalid_requests_are_refused_before_any_is_sent(cluster: Cluster, tmp_path: Path):
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"custom_id": "a"}\n')
    with pytest.raises(InvalidRequestError, match="has no request: line 1 cannot be used"):
        run(requests, tmp_path / "out.jsonl")
    assert cluster.asked == []
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]
    with pytest.raises(InvalidRequestError, match="write to another file"):
        run(requests, requests)
