"""A model under a RAM budget, from the name to the answer: decisions, messages and counters."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_sparse
from cli_runs import inside
from fuzz import fuzz_reads
from stored_weights import least_of

import hotset
from hotset import _core
from hotset.backends.cpu.backend import CpuBackend
from hotset.errors import InvalidRequestError, OutOfMemoryError, ReadError
from hotset.loader.build import open_model
from hotset.placement import disk, ram
from hotset.placement.disk import USUAL, DiskRates, measure_disk
from hotset.settings import LoadSettings
from hotset.sparsity.profile import Profile, profile_path
from hotset.sparsity.sidecar import fingerprint

PROMPT = list(range(3, 40))
GIB = 2**30


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file with predictors, and leave the program's own memory out of budgets."""
    monkeypatch.setattr(ram, "own_memory", lambda: 0)
    monkeypatch.setattr(ram, "PROGRAM", 0)
    return write_sparse(tmp_path / "model.gguf")


def tokens_of(model: hotset.Model) -> list[int]:
    return list(model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True).tokens)


@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted"])
def test_the_least_budget_gives_the_same_tokens(model: Path, sparsity: str) -> None:
    settings: dict[str, Any] = {"n_ctx": 256, "sparsity": sparsity, "device": "cpu"}
    with hotset.load(model, **settings) as mapped:
        expected = tokens_of(mapped)
    with hotset.load(model, **settings, ram_budget=least_of(model, **settings) / GIB) as under:
        assert tokens_of(under) == expected
        assert under.ram is not None
        assert under.stored is not None
        assert under.ram.total <= under.ram.limit
        assert under.stored.counts().misses > 0


def test_steps_are_short_where_weights_have_no_room(model: Path) -> None:
    """Check that a tight budget shortens steps, whose workspace would take the room of the weights."""
    settings: dict[str, Any] = {"n_ctx": 256, "device": "cpu"}
    prompt = [3 + i % 40 for i in range(240)]
    with hotset.load(model, **settings, ram_budget=1) as roomy:
        assert roomy.ram is not None
        assert roomy.ram.max_batch == roomy.backend.max_batch == 512
        expected = roomy.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True).tokens
    with hotset.load(model, **settings, ram_budget=least_of(model, **settings) / GIB) as tight:
        assert tight.ram is not None
        assert tight.ram.max_batch == tight.backend.max_batch == 128
        assert tight.ram.workspace < roomy.ram.workspace
        assert tight.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True).tokens == expected
    with hotset.load(model, **settings, max_batch=64, ram_budget=1) as asked:
        assert asked.backend.max_batch == 64


def test_a_budget_that_is_too_small_names_the_smallest(model: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"this model works within 0\.\d\d GiB") as raised:
        hotset.load(model, n_ctx=256, ram_budget=0.001)
    named = float(str(raised.value).split("works within ")[1].split(" ")[0])
    with hotset.load(model, n_ctx=256, ram_budget=named) as loaded:
        assert loaded.ram is not None


def test_budget_excludes_other_settings(model: Path) -> None:
    for wrong in (0, -1, float("nan"), "much"):
        with pytest.raises(InvalidRequestError, match="ram_budget must be a number of GiB above 0"):
            LoadSettings(ram_budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="device='reference' cannot be combined with ram_budget"):
        LoadSettings(ram_budget=1, device="reference")


def test_file_larger_than_free_memory_gets_a_budget(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = least_of(model, n_ctx=64, max_batch=4)
    monkeypatch.setattr("hotset.loader.build.free_memory", lambda: int(least / 0.9) + 1)
    monkeypatch.setattr("hotset.formats.gguf.GGUFFile.nbytes", 10 * least)
    with (
        pytest.warns(UserWarning, match="more than what is free: what has no room is read as it is needed"),
        hotset.load(model, n_ctx=64, max_batch=4, device="cpu") as loaded,
    ):
        assert loaded.ram is not None
    monkeypatch.setattr("hotset.loader.build.free_memory", lambda: least // 2)
    with hotset.load(model, n_ctx=64, max_batch=4, device="cpu") as loaded:
        assert loaded.ram is None  # no budget would fit: the file is mapped instead


def test_subcommands_report_disk_reads(model: Path) -> None:
    budget = str(least_of(model, n_ctx=64) / GIB)
    planned = json.loads(inside("plan", model, "-c", 64, "--ram-budget", budget, "--json").stdout)
    assert planned["total"] <= planned["limit"]
    assert planned["rows"] < planned["all_rows"]
    [entry] = json.loads(
        inside("bench", model, "-p", 0, "-n", 8, "-r", 2, "-b", 32, "--ram-budget", 0.5, "-o", "json").stdout
    )
    assert entry["disk_bytes_per_token"] >= 0
    assert 0 < entry["cache_hit_rate"] <= 1
    assert "reads at a time" in inside("bench", model, "-p", 0, "-n", 2, "-r", 1, "--ram-budget", 0.5).stderr
    ran = inside("run", model, "Hi", "-n", 3, "-c", 64, "--temp", 0, "--ram-budget", 0.5, "--stats").stderr
    assert re.search(r"The context has 64 tokens\..*\[prompt and answer: ", ran, re.DOTALL)


def test_disks_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = tmp_path / "data", tmp_path / "machine.json"
    file.write_bytes(bytes(2 << 20))
    assert measure_disk(file, path=kept) == USUAL
    monkeypatch.setattr(disk, "SMALLEST_FILE", 1)
    monkeypatch.setattr(disk, "SECONDS", 0.001)
    measured = measure_disk(file, path=kept)
    assert all(rate > 0 for _, rate in measured.rates)
    monkeypatch.setattr(disk, "SECONDS", None)  # no second time
    assert measure_disk(file, path=kept) == measured


def test_threads_read_where_the_kernel_gives_no_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deny the ring, as the kernel may do even after it gave one: a user's locked memory has a limit."""
    file, made = tmp_path / "data", _core.Reader
    file.write_bytes(bytes(2 << 20))

    def reader(ring: bool, depth: int) -> _core.Reader:
        if ring:
            raise ReadError("this system gives no ring for reads (io_uring); use threads")
        return made(ring, depth)

    monkeypatch.setattr(_core, "Reader", reader)
    monkeypatch.setattr(disk, "SMALLEST_FILE", 1)
    monkeypatch.setattr(disk, "SECONDS", 0.001)
    assert not measure_disk(file, path=tmp_path / "machine.json").ring
    assert DiskRates(True, 8, USUAL.rates).reader().ring is False


def test_rates_give_gaps_and_ceilings() -> None:
    rates = DiskRates(False, 8, ((4096, 4e8), (524288, 1e9)))
    assert rates.gap == 4096  # a read costs 6 µs beyond a nanosecond for each byte
    assert rates.rate(1) == 4e8
    assert rates.rate(1e9) == 1e9
    assert 4e8 < rates.rate(100_000) < 1e9


async def test_server_counts_disk_reads(model: Path) -> None:
    tiny_server = pytest.importorskip("tiny_server", reason="the server's packages are not there")

    settings: dict[str, Any] = {"n_ctx": 64, "device": "cpu", "n_threads": 1, "max_sequences": 4}
    async with tiny_server.client_of(
        model, load=settings | {"ram_budget": least_of(model, **settings) / GIB}
    ) as (
        client,
        _,
    ):
        counts = await tiny_server.metrics_after_an_answer(client)
        assert counts["hotset_row_misses_total"] > 0
        assert counts["hotset_disk_read_bytes_total"] >= 4096


@pytest.mark.parametrize("sparsity", ["exact", "predicted"])
def test_answers_under_faults_are_right_or_one_message(model: Path, sparsity: str) -> None:
    """Check that a failed read ends only the answers of its step, and that later answers are right.

    `tests/fuzz/fuzz_reads.py` writes a longer text.
    """
    budget = fuzz_reads.least_budget(model, max_sequences=2, sparsity=sparsity)
    report = fuzz_reads.attack(model, 160, 0.01, 2, seed=7, budget=budget, sparsity=sparsity)
    assert (report.problems, report.stuck, report.n_tokens) == ([], 0, 160)
    assert report.n_failed > 2


def test_profile_decides_the_rows_in_memory(model: Path, tmp_path: Path) -> None:
    """Use the profile next to the model, or a named one, which is refused if it belongs to another model."""
    settings: dict[str, Any] = {"n_ctx": 64, "sparsity": "predicted", "device": "cpu"}
    with open_model(model, LoadSettings(**settings)) as opened:
        n_ff, made = opened.config.n_ff, fingerprint(opened.gguf)
    rng = np.random.default_rng(0)
    hot = [rng.permutation(n)[: n // 3] for n in n_ff]  # by layer
    counts = tuple(
        np.bincount(rows, minlength=n).astype(np.uint64) for rows, n in zip(hot, n_ff, strict=True)
    )
    profile_path(model).parent.mkdir(exist_ok=True)
    Profile(counts, 1, made, ("test",), {}).save(profile_path(model))
    Profile(counts, 1, "another", ("test",), {}).save(tmp_path / "other.hotset.gguf")
    budget = (least_of(model, **settings) + 100_000) / GIB
    with hotset.load(model, **settings, ram_budget=budget) as loaded:
        assert loaded.stored is not None
        assert loaded.stored.store is not None
        assert any("which rows are in memory first" in note for note in loaded.notes)
        places = [loaded.stored.store.n_slots(group) for group in range(len(n_ff))]
        assert min(places) > 0
        assert max(places) <= min(map(len, hot))
        assert loaded.stored.counts().misses == 0  # read-ahead counts as no miss
        with_profile = tokens_of(loaded)
        n_missed = loaded.stored.counts().misses
    profile_path(model).unlink()
    with hotset.load(model, **settings, ram_budget=budget) as loaded:
        assert loaded.stored is not None
        assert tokens_of(loaded) == with_profile
        assert loaded.stored.counts().misses != n_missed
    with pytest.raises(InvalidRequestError, match="belongs to another model file"):
        hotset.load(model, **settings, ram_budget=budget, profile=tmp_path / "other.hotset.gguf")


def test_an_error_keeps_no_plan(model: Path) -> None:
    """Check that an error frees the plan and its contents without the garbage collector.

    The error's traceback refers back to the engine.
    """
    settings: dict[str, Any] = {"n_ctx": 256, "sparsity": "exact", "device": "cpu"}
    with hotset.load(model, **settings, ram_budget=least_of(model, **settings) / GIB) as under:
        assert under.stored is not None
        under.stored.reader.inject_faults(1.0, 7)
        with pytest.raises(ReadError) as raised:
            tokens_of(under)
    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    [run] = [frame for frame in frames if frame.f_code is CpuBackend.run.__code__]
    assert "plan" not in run.f_locals


def test_reorder_bundles_from_the_command_line(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundled.gguf"
    done = inside("reorder", model, out, "--bundle", "--json")
    written = json.loads(done.stdout)
    assert written["bundled"] is True
    assert written["profile"] is None
    settings: dict[str, Any] = {"n_ctx": 128, "device": "cpu"}
    with hotset.load(model, **settings) as plain, hotset.load(out, **settings, ram_budget=0.5) as bundled:
        assert tokens_of(plain) == tokens_of(bundled)
    with hotset.load(out, **settings) as mapped, hotset.load(model, **settings) as plain:
        assert tokens_of(plain) == tokens_of(mapped)
