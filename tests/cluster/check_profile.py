"""A profile on the nodes of a cluster equals the profile of one machine, even if a node dies meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from byte_models import write_sparse
from conftest import Nodes
from typer.testing import CliRunner

from hotset.cli.main import app
from hotset.scale import profile
from hotset.sparsity.profile import Profile

TEXT = " ".join(str(i * i) for i in range(6000))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("model") / "sparse.gguf")


def counted(path: Path, output: Path, *more: str) -> Profile:
    text = output.with_name("text")
    text.write_text(TEXT)
    argv = ["profile", str(path), "-f", str(text), "-c", "64", "-t", "1", "-o", str(output), *more]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.stderr
    return Profile.open(output)


def test_the_profile_of_one_machine(
    path: Path, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = counted(path, tmp_path / "one.gguf")
    check(counted(path, tmp_path / "three.gguf", "--ray", nodes.address), expected)
    on_machines = profile.on_machines

    def killing(*given):
        for n, row in enumerate(on_machines(*given)):
            if n == 1:
                nodes.kill("b")
            yield row

    monkeypatch.setattr(profile, "on_machines", killing)
    check(counted(path, tmp_path / "two.gguf", "--ray", nodes.address), expected)
    nodes.add("b")
    assert not list(tmp_path.glob("*.parts"))


def check(found: Profile, expected: Profile) -> None:
    assert (found.n_tokens, found.model, found.data) == (expected.n_tokens, expected.model, expected.data)
    assert found.n_tokens > 10_000
    for ours, theirs in zip(found.counts, expected.counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
