"""The prompt cache on disk, with a backend without a model: a restart does not change answers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cached_engines import MODEL, engine, generate
from fake_backend import FakeBackend, drain, prompt
from waiting import WATCHDOG, until

from hotset import files
from hotset.backends.base import BLOCK_SIZE
from hotset.engine import prompt_cache as module
from hotset.engine.blocks import HEAD_BYTES, Identity, Prefix, keys_of, states_to_store
from hotset.engine.engine import Engine, ModelTraits
from hotset.engine.prompt_cache import PromptCache
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Sequence
from hotset.errors import HotsetError, InvalidRequestError

OTHER = Identity(b"o" * 16, "other", "f16", 100.0)
BLOCK = HEAD_BYTES + FakeBackend.block_nbytes


def counts(engine: Engine) -> module.DiskCounts:
    cache = engine.scheduler.prompt_cache
    assert cache is not None
    return cache.counts


def blocks(folder: Path, ending: str = "*") -> list[Path]:
    return sorted(folder.glob(f"*/*.{ending}"))


def stored(folder: Path) -> list[Path]:
    return [path for path in blocks(folder) if path.suffix in (".kv", ".state")]


@pytest.mark.parametrize("n_states", [0, 12])
@pytest.mark.parametrize("n", [63, 64, 65, 300])
def test_an_answer_after_a_restart_is_the_same_and_computes_less(tmp_path: Path, n: int, n_states: int):
    with engine(None, n_states=n_states) as plain:
        expected = generate(plain, prompt(n)).tokens
    with engine(tmp_path, n_states=n_states) as first:
        assert generate(first, prompt(n)).tokens == expected
    with engine(tmp_path, n_states=n_states) as second:
        sequence = generate(second, prompt(n))
        assert sequence.tokens == expected
        reused = (n - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert sequence.n_reused == second.counters().restored_tokens == reused
        assert second.backend.n_tokens_seen == n + 39 - reused
        assert counts(second).blocks_damaged == 0
    with engine(tmp_path, n_states=n_states) as third:  # the conversation continues after its answer
        going_on = [*expected, *prompt(20, seed=9)]
        found = generate(third, going_on)
        assert found.n_reused == (n + 39) // BLOCK_SIZE * BLOCK_SIZE
    with engine(None, n_states=n_states) as plain:
        assert generate(plain, going_on).tokens == found.tokens


@pytest.mark.parametrize("n_states", [0, 12])
def test_prompt_with_an_early_change_reuses_the_part_before(tmp_path: Path, n_states: int):
    changed = [*prompt(300)[:200], *prompt(150, seed=4)]
    with engine(None, n_states=n_states) as plain:
        expected = generate(plain, changed).tokens
    with engine(tmp_path, n_states=n_states, max_batch=64) as first:
        generate(first, prompt(300))
    with engine(tmp_path, n_states=n_states) as second:
        found = generate(second, changed)
        assert found.tokens == expected
        assert found.n_reused == (3 * BLOCK_SIZE if not n_states else second.counters().restored_tokens)


@pytest.mark.parametrize("n_states", [0, 10])
@pytest.mark.parametrize("n_blocks", [8, 12, 40])
def test_batches_with_too_little_room_are_the_same_after_restarts(
    tmp_path: Path, n_blocks: int, n_states: int
):
    """Check preempted and waiting sequences, with half of a prefix in memory and half on the disk."""
    options: dict[str, Any] = {"n_ctx": 8 * BLOCK_SIZE, "n_blocks": n_blocks, "n_states": n_states}
    prompts = [[*prompt(130), *prompt(40 + 30 * i, seed=i)] for i in range(7)]
    with engine(None, **options) as plain:
        alone = [generate(plain, each, seed=i).tokens for i, each in enumerate(prompts)]
    for restart in range(3):
        with engine(tmp_path, **options) as found:
            each_of = [
                found.enqueue(found.prepare(tokens, SamplingParams(seed=i, max_tokens=40)))
                for i, tokens in enumerate(prompts)
            ]
            drain(found)
            assert [sequence.tokens for sequence in each_of] == alone
            assert n_states or found.counters().restored_tokens >= (2 * BLOCK_SIZE if restart else 0)
            assert counts(found).blocks_damaged == 0


def damages() -> list[tuple[str, Callable[[bytes], bytes]]]:
    def flipped(at: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    places = {"magic": 0, "identity": 8, "key": 24, "kind": 56, "length": 64, "checksum": 72, "contents": -1}
    found = [(name, flipped(at if at >= 0 else BLOCK - 1)) for name, at in places.items()]
    lengths = (0, 1, HEAD_BYTES - 1, HEAD_BYTES, BLOCK - 1)
    found += [(f"{n} bytes", lambda data, n=n: data[:n]) for n in lengths]
    return [
        *found,
        ("longer", lambda data: data.replace(b"hotsetKV", b"hotsetKV" * 2, 1)),
        ("other", lambda _: b"x" * BLOCK),
    ]


@pytest.mark.parametrize("damage", [pytest.param(change, id=name) for name, change in damages()])
def test_a_damaged_block_is_a_miss_and_is_written_again(tmp_path: Path, damage: Callable[[bytes], bytes]):
    with engine(tmp_path) as first:
        expected = generate(first, prompt(300)).tokens
    whole = {path: path.read_bytes() for path in stored(tmp_path)}
    last = max(whole, key=lambda path: -path.stat().st_mtime_ns)  # no prompt here uses this one
    for path, data in whole.items():
        path.write_bytes(damage(data))
    for n_healed in range(5):  # each restart finds the first damaged one
        with engine(tmp_path) as again:
            found = generate(again, prompt(300))
            assert (found.tokens, found.n_reused) == (expected, n_healed * BLOCK_SIZE)
            assert counts(again).blocks_damaged == (n_healed < 4)
    assert [path for path in whole if path.read_bytes() != whole[path]] == [last]


def test_a_damaged_state_is_a_miss(tmp_path: Path):
    with engine(tmp_path, n_states=12) as first:
        expected = generate(first, prompt(300)).tokens
    for path in blocks(tmp_path, "state"):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with engine(tmp_path, n_states=12) as second:
        found = generate(second, prompt(300))
        assert (found.tokens, found.n_reused) == (expected, 0)
        assert counts(second).blocks_damaged >= 1


def test_blocks_of_other_models_are_not_found(tmp_path: Path):
    """Check blocks of another model, also under this one's name, and of this model under a wrong name."""
    with engine(tmp_path, OTHER) as first:
        generate(first, prompt(300))
    with engine(tmp_path) as second:
        expected = generate(second, prompt(300))
        assert expected.n_reused == 0
        assert counts(second).blocks_damaged == 0
    own, other = (tmp_path / one.digest.hex() for one in (MODEL, OTHER))
    names = sorted(path.name for path in own.glob("*.kv"))
    for path in other.glob("*.kv"):
        (own / names.pop()).write_bytes(path.read_bytes())
    with engine(tmp_path) as third:
        assert generate(third, prompt(300)).tokens == expected.tokens
    with engine(tmp_path) as fourth:
        generate(fourth, prompt(300))
    paths = sorted(own.glob("*.kv"))
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    with engine(tmp_path) as fifth:
        found = generate(fifth, prompt(300))
        assert (found.tokens, found.n_reused) == (expected.tokens, 0)


def test_thresholded_tokens_are_other_blocks(tmp_path: Path):
    """Check thresholds: an answer's blocks are computed without small values, a prompt's with them."""
    with engine(tmp_path, traits=ModelTraits(thresholded="answers")) as first:
        whole = generate(first, prompt(100), max_tokens=200).tokens
    with engine(tmp_path, traits=ModelTraits(thresholded="answers")) as second:
        assert generate(second, whole).n_reused == BLOCK_SIZE  # the block with only prompt tokens


def test_prefix_not_to_be_reused_is_not_stored(tmp_path: Path):
    with engine(tmp_path) as made:
        made.enqueue(made.prepare(prompt(300), SamplingParams(seed=1, max_tokens=3), reuse_prefix=False))
        made.enqueue(made.prepare_score(prompt(200), lambda *_: None))
        drain(made)
    assert stored(tmp_path) == []


# ---- the limit ----


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in stored(folder))


@pytest.mark.parametrize("n_states", [0, 12])
def test_directory_keeps_its_limit_and_the_latest_blocks(tmp_path: Path, n_states: int):
    limit = 24 * BLOCK + (8 * 4300 if n_states else 0)
    with engine(tmp_path, limit=limit, n_states=n_states) as made:
        for seed in range(12):
            generate(made, prompt(300, seed))
            cache = made.scheduler.prompt_cache
            assert cache is not None
            cache.flush()
            assert size_of(tmp_path) <= limit
        assert counts(made).blocks_evicted > 0
    with engine(tmp_path, limit=limit, n_states=n_states) as again:
        assert generate(again, prompt(300, 11)).n_reused == 4 * BLOCK_SIZE
        assert generate(again, prompt(300, 0)).n_reused == 0
        assert again.scheduler.prompt_cache is not None
        again.scheduler.prompt_cache.flush()
        assert counts(again).bytes == size_of(tmp_path)


def test_a_sequence_larger_than_the_limit_keeps_its_beginning(tmp_path: Path):
    with engine(tmp_path, limit=3 * BLOCK) as made:
        generate(made, prompt(400))
    assert 1 <= len(stored(tmp_path)) <= 3
    with engine(tmp_path, limit=3 * BLOCK) as again:
        assert generate(again, prompt(400)).n_reused == len(stored(tmp_path)) * BLOCK_SIZE


def test_blocks_that_are_cheaper_to_compute_are_deleted_first(tmp_path: Path):
    cheap = Identity(b"c" * 16, "small", "f16", 1.0)
    for identity in (MODEL, cheap):  # the large model's blocks are older
        with engine(tmp_path, identity, limit=40 * BLOCK) as made:
            generate(made, prompt(300))
    ages = {MODEL: 1000.0, cheap: 900.0}
    for identity, age in ages.items():
        for path in (tmp_path / identity.digest.hex()).glob("*.kv"):
            at = path.stat().st_mtime - age
            os.utime(path, (at, at))
    with engine(tmp_path, limit=6 * BLOCK):
        pass
    assert len(list((tmp_path / MODEL.digest.hex()).glob("*.kv"))) == 5
    assert len(list((tmp_path / cheap.digest.hex()).glob("*.kv"))) == 0


@pytest.mark.parametrize("worth", ["1" + "0" * 400, "NaN"])
def test_a_model_file_of_nonsense_keeps_no_cache_from_its_limit(tmp_path: Path, worth: str):
    with engine(tmp_path, OTHER, limit=40 * BLOCK) as made:
        generate(made, prompt(300))
    (tmp_path / OTHER.digest.hex() / "model.json").write_text(f'{{"flops_per_byte": {worth}}}')
    with engine(tmp_path, limit=2 * BLOCK) as made:
        generate(made, prompt(300))
    assert size_of(tmp_path) <= 2 * BLOCK


def test_the_end_of_a_prefix_is_deleted_before_its_beginning(tmp_path: Path):
    with engine(tmp_path) as made:
        generate(made, prompt(450))
    n = len(stored(tmp_path))
    for left in range(n - 1, 1, -1):
        with engine(tmp_path, limit=(left + 1) * BLOCK) as made:
            now = len(stored(tmp_path))
            assert 1 <= now <= left + 1
            sequence = made.prepare(prompt(450), SamplingParams(seed=1))
            reading = made.scheduler._sought(sequence, made.scheduler.prompt_cache)
            until(lambda reading=reading: reading.is_done, "the blocks are not read")
            assert len(reading.found.blocks) == min(now, 7)


def test_a_limit_below_a_block_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match="cannot hold one block of this model, which takes 616 B"):
        PromptCache(tmp_path, MODEL, FakeBackend(), BLOCK - 1)


# ---- errors of the system ----


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        PromptCache(tmp_path / "file", MODEL, FakeBackend(), 1 << 20)
    with pytest.raises(HotsetError, match="cache_dir"):
        PromptCache(tmp_path / "file" / "below", MODEL, FakeBackend(), 1 << 20)


def test_a_full_disk_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with engine(None) as plain:
        expected = [generate(plain, prompt(300, seed)).tokens for seed in range(3)]
    create = files.create

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with engine(tmp_path) as made:
        cache = made.scheduler.prompt_cache
        assert cache is not None
        monkeypatch.setattr(files, "create", full)
        assert [generate(made, prompt(300, seed)).tokens for seed in range(2)] == expected[:2]
        cache.flush()
        assert cache.counts.write_errors == 2
        assert stored(tmp_path) == []
        monkeypatch.setattr(files, "create", create)
        assert generate(made, prompt(300, 2)).tokens == expected[2]
    assert len(stored(tmp_path)) == 5


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_loses_the_block_that_it_writes(tmp_path: Path, n: int, when: str):
    code = """
import os, signal, sys
sys.path[:0] = sys.argv[4].split(os.pathsep)
from pathlib import Path
from cached_engines import engine, generate
from fake_backend import prompt
import hotset.files
replace, left = os.replace, int(sys.argv[2])
def kill(source, target):
    global left
    if target.suffix == ".kv":
        if left == 0 and sys.argv[3] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    replace(source, target)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
hotset.files.os.replace = kill
with engine(Path(sys.argv[1])) as made:
    generate(made, prompt(300))
"""
    arguments = [str(tmp_path), str(n), when, os.pathsep.join(sys.path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], timeout=WATCHDOG, check=False)
    assert done.returncode == -signal.SIGKILL
    n_whole = n + (when == "after")
    assert len(stored(tmp_path)) == n_whole
    with engine(None) as plain:
        expected = generate(plain, prompt(300)).tokens
    with engine(tmp_path) as again:
        found = generate(again, prompt(300))
        assert (found.tokens, found.n_reused) == (expected, n_whole * BLOCK_SIZE)
        assert counts(again).blocks_damaged == 0
    assert len(stored(tmp_path)) == 5
    for path in tmp_path.glob("*/.*.tmp"):  # its remains are deleted an hour later
        os.utime(path, (0, 0))
    with engine(tmp_path):
        assert list(tmp_path.glob("*/.*.tmp")) == []


# ---- threads ----


def test_no_step_waits_for_a_disk_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_write, write = threading.Event(), module.write_whole

    def slow(*args: Any, **how: Any) -> None:
        assert may_write.wait(WATCHDOG)
        write(*args, **how)

    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    with engine(tmp_path) as made:
        monkeypatch.setattr(module, "write_whole", slow)
        for seed in range(5):
            generate(made, prompt(100, seed))
        assert counts(made).sequences_dropped == 3
        assert stored(tmp_path) == []
        may_write.set()
    assert len(stored(tmp_path)) == 4


def test_running_answers_continue_while_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with engine(tmp_path) as made:
        expected = generate(made, prompt(300)).tokens
    may_read, load = threading.Event(), PromptCache._load

    def slow(*args: Any) -> bytes | None:
        assert may_read.wait(WATCHDOG)
        return load(*args)

    monkeypatch.setattr(PromptCache, "_load", slow)
    with engine(tmp_path) as made:
        running = made.enqueue(made.prepare(prompt(20, 5), SamplingParams(seed=2, max_tokens=100)))
        while len(running.tokens) < 30:
            made.step()
        waiting = made.enqueue(made.prepare(prompt(300), SamplingParams(seed=1, max_tokens=40)))
        twice = made.enqueue(made.prepare(prompt(300), SamplingParams(seed=1, max_tokens=40)))
        dropped = made.enqueue(made.prepare(prompt(300), SamplingParams(seed=1, max_tokens=40)))
        while len(running.tokens) < 60:
            made.step()
        assert waiting.slot < 0
        assert waiting.reading is twice.reading  # both use one copy in memory
        made.cancel(dropped)
        drain_until(made, running)
        assert waiting.slot < 0
        may_read.set()
        drain(made)
        assert waiting.tokens == twice.tokens == expected
        assert made.counters().restored_tokens == 4 * BLOCK_SIZE


def drain_until(engine: Engine, sequence: Sequence) -> None:
    while sequence.finish_reason is None:
        engine.step()


def test_a_block_that_is_used_again_while_it_is_copied_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with engine(tmp_path, n_states=12) as made:
        read, n_read = made.backend.read_block, 0

        def evicted(block: int) -> bytes:
            nonlocal n_read
            n_read += 1
            data = read(block)
            if n_read == 3:
                made.scheduler.pool.clear()
            return data

        monkeypatch.setattr(made.backend, "read_block", evicted)
        made.enqueue(made.prepare(prompt(300), SamplingParams(seed=1, max_tokens=40)))
        drain(made)
    assert len(blocks(tmp_path, "kv")) == 2


def test_two_processes_share_a_directory(tmp_path: Path):
    """Check two engines, each of which finds the other's blocks, and may delete them."""
    with engine(None) as plain:
        expected = [generate(plain, prompt(300, seed)).tokens for seed in range(6)]
    with engine(tmp_path, limit=14 * BLOCK) as one, engine(tmp_path, limit=14 * BLOCK) as other:
        for turn in range(3):
            for seed, tokens in enumerate(expected):
                for each in (one, other) if seed % 2 else (other, one):
                    assert generate(each, prompt(300, seed)).tokens == tokens
                    each.scheduler.pool.clear()
                    if turn:
                        each.scheduler.prompt_cache.flush()
        generate(one, prompt(300, 0))
        one.scheduler.prompt_cache.flush()
        restored = other.counters().restored_tokens
        assert generate(other, prompt(300, 0)).tokens == expected[0]
        assert other.counters().restored_tokens > restored
        assert counts(one).blocks_damaged == counts(other).blocks_damaged == 0


def test_a_forked_process_has_threads_of_its_own(tmp_path: Path):
    with engine(tmp_path) as made:
        expected = generate(made, prompt(300)).tokens
        cache = made.scheduler.prompt_cache
        assert cache is not None
        cache.flush()
        cache._process = 0  # as after a fork
        made.reset()
        found = generate(made, prompt(300))
        assert (found.tokens, found.n_reused) == (expected, 4 * BLOCK_SIZE)


def test_only_the_owner_can_read_files(tmp_path: Path):
    """Check the permissions, because blocks contain users' texts."""
    if os.name != "posix":
        pytest.skip("permissions are POSIX's")
    with engine(tmp_path) as made:
        generate(made, prompt(300))
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*/*")} == {0}
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


@pytest.mark.parametrize(
    ("kept", "end_of_prompt", "blocks_of_state", "expected"),
    [
        ([], 3, 1, []),
        ([0, 1, 2, 3], 1, 1, [0, 1, 2, 3]),
        (list(range(12)), 6, 4, [3, 6, 7, 11]),
        ([5, 9], 20, 100, [9]),
        ([5, 9], 7, 100, [5, 9]),
    ],
)
def test_states_take_no_more_room_than_the_blocks_between_them(
    kept: list[int], end_of_prompt: int, blocks_of_state: int, expected: list[int]
):
    class Memory(FakeBackend):
        block_nbytes = 10
        state_nbytes = 10 * blocks_of_state

    assert sorted(states_to_store(kept, end_of_prompt, Memory())) == expected


def test_the_order_of_images_in_a_block_is_part_of_its_key():
    """Check two blocks with the same two images, the first or the second of which comes again."""
    images = ((-1, b"a" * 32), (-2, b"b" * 32))
    blocks = [[-1] * 20 + [7] + [-2] * 20 + [7] + [last] * (BLOCK_SIZE - 42) for last in (-1, -2)]
    first, second = (keys_of(Identity(b"", "", "f16", 1.0), Prefix(one, images=images)) for one in blocks)
    assert first != second
