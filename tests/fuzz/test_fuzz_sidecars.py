"""Some odd files stored next to models; `tests/fuzz/fuzz_sidecars.py` makes as many as time allows."""

from __future__ import annotations

import pytest
from fuzz import fuzz_models, fuzz_sidecars


def test_odd_files_next_to_models_give_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_HOME", "set by the fuzzer, and put back behind it")
    for each in (fuzz_models, fuzz_sidecars):
        monkeypatch.setattr(each, "SLOW_S", float("inf"))  # no test looks at the time
    problems: list[str] = []
    n_cases, n_failed = fuzz_sidecars.attack(3, lambda n: n < 8, lambda _, __, what: problems.append(what))
    assert (n_cases, n_failed) == (8, 0), problems
