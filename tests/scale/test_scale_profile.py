"""A profile in shards without a cluster equals the profile of one machine, whatever shards existed before.

The counting runs in this process; tests/cluster/ tests Ray's part.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_sparse
from fake_cluster import FakeCluster, KilledError

import hotset
from hotset.errors import InvalidRequestError
from hotset.scale import profile
from hotset.settings import LoadSettings
from hotset.sparsity.profile import Profile, collect
from hotset.sparsity.sidecar import fingerprint

SETTINGS = LoadSettings(n_ctx=64, device="reference", sparsity="exact", max_batch=64)


class Cluster(FakeCluster):
    """Counts shards from the last to the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, profile)
        monkeypatch.setattr(profile, "on_machines", self._on_machines)

    def _on_machines(
        self, rows: Sequence[dict[str, Any]], kind: type, args: tuple[Any, ...], *_: Any
    ) -> Iterator[dict[str, Any]]:
        worker = kind(*pickle.loads(pickle.dumps(args)))
        self.asked = [row["shard"] for row in rows]
        for n, row in enumerate(reversed(rows)):
            if n == self.dies_after:
                raise KilledError
            found = worker({key: np.array([value], object) for key, value in row.items()})
            yield {key: values[0] for key, values in found.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("model") / "sparse.gguf")


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    rows = np.random.default_rng(1).integers(0, 100, (20, 12), dtype=np.int32)
    rows[8:16] = rows[:8]  # two equal shards
    return rows


@pytest.fixture(scope="module")
def expected(path: Path, tokens: np.ndarray) -> Profile:
    with hotset.load(path, SETTINGS) as model:
        return collect(model.tap_steps, model.config, tokens, model=fingerprint(model.gguf))


def counted(target: Path, path: Path, tokens: np.ndarray, expected: Profile) -> tuple[Profile, list[int]]:
    told: list[int] = []
    found = profile.profile_on_ray(
        target, tokens, str(path), SETTINGS, expected.model, None, lambda done, _: told.append(done)
    )
    return found, told


def check(found: Profile, expected: Profile) -> None:
    assert (found.n_tokens, found.model, found.data) == (expected.n_tokens, expected.model, expected.data)
    assert sum(int(counts.sum()) for counts in found.counts)
    for ours, theirs in zip(found.counts, expected.counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shards_together_are_the_profile_of_one_machine(
    cluster: Cluster, path: Path, tokens: np.ndarray, expected: Profile, tmp_path: Path
):
    found, told = counted(tmp_path / "p.gguf", path, tokens, expected)
    check(found, expected)
    assert cluster.asked == [0, 1, 2]
    assert told == [0, 4 * 12, 12 * 12, 20 * 12]
    assert not list(tmp_path.iterdir())
    short = tokens[0, :7]
    assert counted(tmp_path / "p.gguf", path, short, expected)[0].n_tokens == 7
    assert cluster.asked == [0]


def test_killed_run_resumes_with_the_missing_requests(
    cluster: Cluster, path: Path, tokens: np.ndarray, expected: Profile, tmp_path: Path
):
    cluster.dies_after = 1
    with pytest.raises(KilledError):
        counted(tmp_path / "p.gguf", path, tokens, expected)
    cluster.dies_after = 99
    with pytest.raises(InvalidRequestError, match="has counts of another text; write to another file"):
        counted(tmp_path / "p.gguf", path, tokens[1:], expected)
    found, told = counted(tmp_path / "p.gguf", path, tokens, expected)
    check(found, expected)
    assert cluster.asked == [0, 1]
    assert told[-1] == tokens.size
    assert not list(tmp_path.iterdir())


def test_a_machine_with_another_file_is_refused(
    cluster: Cluster, path: Path, tokens: np.ndarray, tmp_path: Path
):
    with pytest.raises(InvalidRequestError, match="differs from the file of the requesting machine"):
        profile.profile_on_ray(
            tmp_path / "p.gguf", tokens, str(path), SETTINGS, "0" * 32, None, lambda *_: None
        )
