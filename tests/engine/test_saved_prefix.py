"""Sessions: the cache of one conversation as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cached_engines import MODEL, engine, generate
from fake_backend import drain, prompt

from hotset.backends.base import BLOCK_SIZE
from hotset.engine.blocks import HEAD_BYTES, Kind, encoded
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.engine.saved_prefix import NO_PREFIX, SessionFiles
from hotset.errors import FormatError, InvalidRequestError

ABOUT = {"messages": [{"role": "user", "content": "hé"}]}


def files_of(engine: Engine) -> SessionFiles:
    engine.keep_slots()
    return SessionFiles(EngineThread(engine), MODEL, engine.backend)


@pytest.mark.parametrize("n_states", [0, 12])
def test_session_continues_where_it_ended(tmp_path: Path, n_states: int):
    path = tmp_path / "session"
    with engine(None, n_states=n_states) as first:
        files = files_of(first)
        tokens = generate(first, prompt(300)).tokens
        saved = files.save(path, first.slots[0], ABOUT)
        assert saved == (320, path.stat().st_size)
        going_on = [*tokens, *prompt(30, 8)]
        expected = generate(first, going_on)
    with engine(None, n_states=n_states) as second:
        files = files_of(second)
        found = files.read(path)
        assert found.about == ABOUT
        assert found.prefix.tokens == tokens[:320]
        assert found.n_bytes == path.stat().st_size
        assert files.restore(found) == 320
        assert files.restore(found) == 320  # it is in memory already
        again = generate(second, going_on)
        assert (again.tokens, again.n_reused) == (expected.tokens, 320)
        pool = second.scheduler.pool
        files.erase(found.prefix)
        assert generate(second, prompt(300)).n_reused == 0
        assert pool.n_available == pool.n_blocks


@pytest.mark.parametrize("n_states", [0, 12])
@pytest.mark.parametrize("at", range(5))
def test_damaged_block_ends_the_found_prefix(tmp_path: Path, n_states: int, at: int):
    path = tmp_path / "session"
    with engine(None, n_states=n_states) as first:
        files = files_of(first)
        tokens = generate(first, prompt(300)).tokens
        files.save(path, first.slots[0])
        data = path.read_bytes()
        assert len(files.read(path).found.blocks) == 5
    block = HEAD_BYTES + first.backend.block_nbytes
    n_states_bytes = 2 * (HEAD_BYTES + first.backend.state_nbytes) if n_states else 0
    begin = len(data) - 5 * block - n_states_bytes
    with engine(None, n_states=n_states) as second:
        files = files_of(second)
        damaged = bytearray(data)
        damaged[begin + at * block + HEAD_BYTES] ^= 1
        for contents in (bytes(damaged), data[: begin + at * block + 7]):
            path.write_bytes(contents)
            found = files.read(path)
            n = len(found.found.blocks)
            assert n in ((at,) if not n_states else (0, 4, 5))
            assert files.restore(found) == n * BLOCK_SIZE
            assert generate(second, prompt(300)).tokens == tokens
            second.scheduler.pool.clear()


def test_damaged_beginning_is_not_a_session(tmp_path: Path):
    path = tmp_path / "session"
    with engine(None) as made:
        files = files_of(made)
        generate(made, prompt(100))
        files.save(path, made.slots[0])
        data = path.read_bytes()
        for contents in (
            b"",
            b"x",
            data[:50],
            data[:HEAD_BYTES],
            b"[]" + data,
            data[:120] + b"x" + data[121:],
        ):
            path.write_bytes(contents)
            with pytest.raises(FormatError):
                files.read(path)
        with pytest.raises(FileNotFoundError):
            files.read(tmp_path / "none")


GOOD: dict[str, Any] = {"format": "hotset.session", "version": 1, "about": {}, "tokens": []}
GOOD |= {"first_thresholded": 0, "n_prompt": 0}


@pytest.mark.parametrize(
    "beginning",
    [
        [], {}, {"format": "hotset.session"}, GOOD | {"version": 2}, GOOD | {"about": []},
        GOOD | {"tokens": [97]}, GOOD | {"tokens": [[1]]}, GOOD | {"tokens": "text"},
        GOOD | {"first_thresholded": "x"}, GOOD | {"n_prompt": None},
        {key: value for key, value in GOOD.items() if key != "tokens"},
    ],
)  # fmt: skip
def test_hostile_beginning_is_not_a_session(tmp_path: Path, beginning: Any):
    path = tmp_path / "session"
    for text in (json.dumps(beginning).encode(), b"{", b"[" * 100_000, bytes(range(256))):
        path.write_bytes(encoded(MODEL.digest, Kind.session, bytes(32), text))
        with engine(None) as made, pytest.raises(FormatError):
            files_of(made).read(path)
    path.write_bytes(encoded(MODEL.digest, Kind.session, bytes(32), json.dumps(GOOD).encode()))
    with engine(None) as made:
        assert files_of(made).read(path).prefix.n_blocks == 0


def test_session_of_another_model_keeps_the_messages(tmp_path: Path):
    path = tmp_path / "session"
    with engine(None) as made:
        files = files_of(made)
        generate(made, prompt(300))
        files.save(path, made.slots[0], ABOUT)
        other = replace(files, identity=replace(MODEL, digest=b"o" * 16))
        found = other.read(path)
        assert (found.about, found.prefix, found.found.blocks, found.is_of_model) == (
            ABOUT,
            NO_PREFIX,
            (),
            False,
        )
        assert other.restore(found) == 0


def test_beginning_without_history_is_short(tmp_path: Path):
    """Check that files with a slow first record, or of another model, are refused quickly."""
    path = tmp_path / "session"
    with engine(None) as made:
        files = files_of(made)
        generate(made, prompt(300))
        files.save(path, made.slots[0], {"text": "x" * (16 * made.n_ctx + (64 << 10))})
        assert files.read(path).prefix.n_blocks
        with pytest.raises(FormatError):
            files.read(path, about_bytes=0)
        files.save(path, made.slots[0])
        assert files.read(path, about_bytes=0).prefix.n_blocks
        other = replace(files, identity=replace(MODEL, digest=b"o" * 16))
        path.write_bytes(path.read_bytes()[:HEAD_BYTES])
        assert not other.read(path, about_bytes=0).is_of_model


def test_a_session_larger_than_the_cache_is_found_in_part(tmp_path: Path):
    path = tmp_path / "session"
    with engine(None) as first:
        files = files_of(first)
        generate(first, prompt(400))
        files.save(path, first.slots[0])
    with engine(None, n_ctx=4 * BLOCK_SIZE, n_blocks=4) as small:
        files = files_of(small)
        assert files.restore(files.read(path)) == 4 * BLOCK_SIZE


def test_session_replaces_only_regular_files(tmp_path: Path):
    with engine(None) as made, pytest.raises(InvalidRequestError, match="is a folder"):
        files_of(made).save(tmp_path, NO_PREFIX)


def test_slots_keep_the_tokens_of_their_latest_answers(tmp_path: Path):
    with engine(None) as made:
        slots = made.keep_slots()
        params = SamplingParams(seed=1, max_tokens=20)
        first = made.enqueue(made.prepare(prompt(100), params))
        first.id_slot = 3
        made.enqueue(made.prepare(prompt(200), params))
        drain(made)
        assert {slot: prefix.n_blocks for slot, prefix in slots.items()} == {3: 1, 1: 3}
        assert slots[3].tokens == prompt(100)[:BLOCK_SIZE]
