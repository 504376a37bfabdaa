"""`hotset batch --ray`: a file of requests in shards (shards.py), answered on the machines of a cluster.

A shard's answers are a part. At the end all parts become ANSWERS, in the order of the requests, with an error
record in place of each line that is not a request. Requests and answers are JSON lines, or Parquet if the
file's name ends so (`_COLUMNS`, `_ANSWER_COLUMNS`; bodies and errors are texts of JSON).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import hotset
from hotset.errors import InvalidRequestError
from hotset.escaping import clause
from hotset.files import check_output, open_regular, replacing, write_whole
from hotset.reporter import Reporter
from hotset.scale.cluster import check_installed, connect, machines
from hotset.scale.shards import check_mark, on_machines, parts_of
from hotset.server.app import create_app
from hotset.server.batch import AHEAD, SETTINGS, RequestFile, answer_line, error_line
from hotset.server.replies import dumped_exactly
from hotset.server.service import Service
from hotset.settings import LoadSettings

_SHARD = 32  # requests
_COLUMNS = ("custom_id", "method", "url", "body")
_ANSWER_COLUMNS = ("custom_id", "status_code", "request_id", "body", "error")


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
    """Answer all requests.

    Return their number, and the number of answers that are error records, refusals or failures.

    model: a name or path that each machine has. n_workers: the number of workers; None: one per machine.
    Raises InvalidRequestError as Batch does, and if the answers already exist.
    """
    check_installed("pyarrow", "pandas")
    check_output(answers, [requests])
    if answers.exists():
        raise InvalidRequestError(f"{answers} exists already; write to another file, or remove it")
    with (
        parts_of(answers) as parts,
        RequestFile(_as_lines(requests, parts), SETTINGS.max_nesting) as checked,
    ):
        if answers.suffix == ".parquet":
            _reject_surrogates(checked)
        shards = list(_shards(checked, parts))
        missing = [(i, shard) for i, shard in enumerate(shards) if not _part(parts, i).exists()]
        total = len(checked)
        n_done = total - sum(len(shard) for _, shard in missing)
        if missing:
            progress.advance("requests", n_done, total, "requests")
            connect(address)
            for i, lines in _answered(missing, model, loading, names, n_workers or len(machines())):
                write_whole({_part(parts, i): lines})
                n_done += len(shards[i])
                progress.advance("requests", n_done, total, "requests")
        n_failed = _joined(parts, checked, len(shards), answers)
    return total, n_failed


def _answered(
    missing: list[tuple[int, list[bytes]]],
    model: str,
    loading: LoadSettings,
    names: tuple[str, ...],
    n_workers: int,
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each shard and its answers, as they arrive."""
    rows = [{"shard": i, "lines": b"\n".join(lines)} for i, lines in missing]
    args = model, replace(loading, progress=None), names
    for row in on_machines(rows, Answerer, args, n_workers, "the batch"):
        yield int(row["shard"]), bytes(row["answers"])


class Answerer:
    """An actor of Ray Data that answers shards. names: the model's names in requests."""

    def __init__(self, model: str, loading: LoadSettings, names: tuple[str, ...]) -> None:
        service = Service(
            lambda: hotset.load(model, loading),
            SETTINGS,
            name=names[0],
            aliases=names[1:],
        )
        self._n_ahead = AHEAD * loading.max_sequences
        self._app = create_app(service)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="hotset-batch", daemon=True).start()
        self._wait(self._begin(service))

    def __call__(self, shards: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Answer shards. shards: number and lines of each. Return number and answers, lines in that order."""
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
    """Return the path of the requests as JSON lines; convert a Parquet file first."""
    if requests.suffix != ".parquet":
        return requests
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(requests)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRequestError(f"{requests} is not a Parquet file ({clause(str(error))})") from None
    if missing := [name for name in _COLUMNS if name not in table.column_names]:
        raise InvalidRequestError(
            f"{requests} has no column {missing[0]}; requests have {', '.join(_COLUMNS)}"
        )
    try:
        lines = [_line_of_row(row) for row in table.select(list(_COLUMNS)).to_pylist()]
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{requests} has texts that are not UTF-8; write it again") from None
    path = parts / "requests.jsonl"
    write_whole({path: b"".join(line + b"\n" for line in lines)})
    return path


def _line_of_row(row: dict[str, Any]) -> bytes:
    """Return a request as JSON. An invalid request remains invalid, and is rejected with the other lines."""
    with suppress(ValueError, RecursionError):  # a body that is not JSON remains a text
        row["body"] = json.loads(row["body"]) if isinstance(row["body"], str) else row["body"]
    try:
        return json.dumps(row).encode()
    except (TypeError, ValueError, RecursionError):  # a value that JSON cannot hold
        return b"null"


def _reject_surrogates(checked: RequestFile) -> None:
    for request in list(checked.requests.values()):
        try:
            request.custom_id.encode()
        except UnicodeEncodeError:
            message = "its custom_id has a lone surrogate, which Parquet cannot hold; write to a .jsonl file"
            checked.reject(request, "invalid_request", message)


def _shards(checked: RequestFile, parts: Path) -> Iterator[list[bytes]]:
    """Yield the lines of each shard. Raises InvalidRequestError if existing parts answer other requests."""
    with open_regular(checked.path) as file:
        mark = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    check_mark(parts, mark.encode(), "answers to other requests")
    requests = list(checked.requests.values())
    for first in range(0, len(requests), _SHARD):
        yield [checked.line(request) for request in requests[first : first + _SHARD]]


def _joined(parts: Path, checked: RequestFile, n_shards: int, answers: Path) -> int:
    """Write the answers of all parts. Return how many are error records, refusals or failures."""
    lines = (line for i in range(n_shards) for line in _part(parts, i).read_bytes().splitlines())
    numbered = [
        (request.number, json.loads(line))
        for request, line in zip(checked.requests.values(), lines, strict=True)
    ]
    numbered += [(one.number, json.loads(error_line(one))) for one in checked.rejected.values()]
    found = [line for _, line in sorted(numbered, key=itemgetter(0))]
    with replacing(answers) as target:
        if answers.suffix == ".parquet":
            _write_parquet(found, target)
        else:
            target.writelines(dumped_exactly(line) + b"\n" for line in found)
    return sum(line["response"] is None or line["response"]["status_code"] != 200 for line in found)


def _write_parquet(found: list[dict[str, Any]], target: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for line in found:
        response, error = line["response"] or {}, line["error"]
        body = json.dumps(response["body"], ensure_ascii=False) if response else None
        custom_id = line["custom_id"]
        if error is not None:
            error, body = json.dumps(error), None
            custom_id = custom_id and custom_id.encode("utf-8", "backslashreplace").decode()
        status, request_id = response.get("status_code"), response.get("request_id")
        rows.append(dict(zip(_ANSWER_COLUMNS, (custom_id, status, request_id, body, error), strict=True)))
    kinds = {name: pa.int64() if name == "status_code" else pa.string() for name in _ANSWER_COLUMNS}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds)), target)
