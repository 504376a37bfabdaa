"""`hotset batch --ray`: a file of requests in shards (shards.py), answered on the machines of a cluster.

A shard's answers are a part, and at the end all become ANSWERS, in the order of the requests. Requests and
answers are JSON lines, or Parquet where a file's name ends so (columns of `_COLUMNS`; bodies as texts with
JSON in them).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import hotset
from hotset.errors import InvalidRequestError
from hotset.escaping import clause
from hotset.files import check_target, open_regular, replacing, write_whole
from hotset.reporter import Reporter
from hotset.scale.cluster import check_installed, connect, machines
from hotset.scale.shards import check_mark, on_machines, parts_of
from hotset.server.app import create_app
from hotset.server.batch import AHEAD, Batch, answer_line
from hotset.server.replies import dumped
from hotset.server.service import Service
from hotset.server.settings import ServerSettings
from hotset.settings import LoadSettings

_SHARD = 32  # requests
_COLUMNS = ("custom_id", "method", "url", "body")
_UNBOUNDED = 1 << 30


def batch_on_ray(
    requests: Path,
    answers: Path,
    model: str,
    loading: LoadSettings,
    names: tuple[str, ...],
    address: str | None,
    n_workers: int | None,
    progress: Reporter,
) -> tuple[int, int]:
    """Answers all requests; how many there are, and how many of the answers are refusals or failures.

    model: a name or path that each machine has. n_workers: that compute; None: one for each machine.
    Raises InvalidRequestError as Batch does, and for answers of other requests that are there.
    """
    check_installed("pyarrow", "pandas")
    check_target(answers, [requests])
    if answers.exists():
        raise InvalidRequestError(f"{answers} is there already; write to another file, or take it away")
    with parts_of(answers) as parts:
        shards = list(_shards(_as_lines(requests, parts), parts))
        missing = [(i, shard) for i, shard in enumerate(shards) if not _part(parts, i).exists()]
        n_done, total = sum(map(len, shards)) - sum(len(shard) for _, shard in missing), sum(map(len, shards))
        if missing:
            connect(address)
            for i, lines in _answered(missing, model, loading, names, n_workers or len(machines())):
                write_whole({_part(parts, i): lines})
                n_done += len(shards[i])
                progress.advance("requests", n_done, total)
        n_failed = _joined(parts, len(shards), answers)
    return total, n_failed


def _answered(
    missing: list[tuple[int, list[bytes]]],
    model: str,
    loading: LoadSettings,
    names: tuple[str, ...],
    n_workers: int,
) -> Iterator[tuple[int, bytes]]:
    """The number of each shard, and its answers, as they come."""
    rows = [{"shard": i, "lines": b"\n".join(lines)} for i, lines in missing]
    args = model, replace(loading, progress=None), names
    for row in on_machines(rows, Answerer, args, n_workers, "the batch"):
        yield int(row["shard"]), bytes(row["answers"])


class Answerer:
    """Answers shards; an actor of Ray Data. names: what the model is called in requests."""

    def __init__(self, model: str, loading: LoadSettings, names: tuple[str, ...]) -> None:
        service = Service(
            lambda: hotset.load(model, loading),
            ServerSettings(max_queue=_UNBOUNDED),
            name=names[0],
            aliases=names[1:],
        )
        self._n_ahead = AHEAD * loading.max_sequences
        self._app = create_app(service)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="hotset-batch", daemon=True).start()
        self._wait(self._begin(service))

    def __call__(self, shards: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """shards: number and lines of each; gives number and answers, lines in the same order."""
        answers = [self._wait(self._all(bytes(lines).split(b"\n"))) for lines in shards["lines"]]
        return {"shard": list(shards["shard"]), "answers": answers}

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, service: Service) -> None:
        self._open = AsyncExitStack()
        await self._open.enter_async_context(self._app.router.lifespan_context(self._app))
        await service.loaded()

    async def _all(self, lines: list[bytes]) -> bytes:
        turns = asyncio.Semaphore(self._n_ahead)

        async def one(line: bytes) -> bytes:
            async with turns:
                given = json.loads(line)
                answer, _ = await answer_line(self._app, given["custom_id"], given["url"], given["body"])
                return answer

        return b"".join(await asyncio.gather(*(one(line) for line in lines)))


# -- files -------------------------------------------------------------------------------------------


def _part(parts: Path, i: int) -> Path:
    return parts / f"{i:08d}.jsonl"


def _as_lines(requests: Path, parts: Path) -> Path:
    """The requests as JSON lines."""
    if requests.suffix != ".parquet":
        return requests
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(requests)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRequestError(f"{requests} is no Parquet file ({clause(str(error))})") from None
    if missing := [name for name in _COLUMNS if name not in table.column_names]:
        raise InvalidRequestError(
            f"{requests} has no column {missing[0]}; requests have {', '.join(_COLUMNS)}"
        )
    lines = []
    for i, row in enumerate(table.select(list(_COLUMNS)).to_pylist(), 1):
        try:
            row["body"] = json.loads(row["body"]) if isinstance(row["body"], str) else row["body"]
        except ValueError as error:
            raise InvalidRequestError(f"{requests}, row {i}: the body is not JSON ({error})") from None
        lines.append(json.dumps(row).encode())
    path = parts / "requests.jsonl"
    write_whole({path: b"".join(line + b"\n" for line in lines)})
    return path


def _shards(requests: Path, parts: Path) -> Iterator[list[bytes]]:
    """The lines of the requests, checked. Raises InvalidRequestError where the parts are of others."""
    checked = Batch(requests, parts / "answers.jsonl", ServerSettings().max_nesting)
    with open_regular(requests) as file:
        hashed = hashlib.sha256()
        while piece := file.read(1 << 20):
            hashed.update(piece)
        check_mark(parts, hashed.hexdigest().encode(), "answers to other requests")
        shard: list[bytes] = []
        for request in checked.requests.values():
            file.seek(request.start)
            shard.append(file.read(request.size).strip())
            if len(shard) == _SHARD:
                yield shard
                shard = []
        if shard:
            yield shard


def _joined(parts: Path, n: int, answers: Path) -> int:
    """Makes the answers of all parts; how many of them are refusals or failures."""
    found = [json.loads(line) for i in range(n) for line in _part(parts, i).read_bytes().splitlines()]
    with replacing(answers) as target:
        if answers.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            rows = [
                {
                    "custom_id": line["custom_id"],
                    "status_code": line["response"]["status_code"],
                    "request_id": line["response"]["request_id"],
                    "body": json.dumps(line["response"]["body"], ensure_ascii=False),
                }
                for line in found
            ]
            pq.write_table(pa.Table.from_pylist(rows), target)
        else:
            target.writelines(dumped(line) + b"\n" for line in found)
    return sum(line["response"]["status_code"] != 200 for line in found)
