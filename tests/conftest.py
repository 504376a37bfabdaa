"""What holds for every test: nothing is drawn without a seed, so a test that passed once passes again.

A draw that no seed decides raises `UnseededDrawError`: a sampler with a temperature and without a seed, here
and in the processes that a test starts, and NumPy's, Python's and the system's generators where code of this
repository asks them. The generators that have one state for the whole process (`random`, `np.random`, torch's
own) start every test alike, so that it does not matter which tests ran before. Libraries may draw as they
like: a name of a temporary folder decides nothing.

`--random-order` runs the tests in another order (`make test-order`).
"""

from __future__ import annotations

import os

# There are as many workers as cores, or more. More threads of NumPy and torch, here and in the processes
# that tests start, do little but wait for one another: they took a third of the suite's time. NumPy and torch
# read this when they are imported.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

import gc
import random
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import psutil
import pytest

HERE = Path(__file__).resolve().parent
CHILDREN = HERE / "children"
sys.path.append(str(CHILDREN))
FOR_CHILDREN = os.pathsep.join(map(str, (CHILDREN, HERE / "support", HERE)))

import seeded  # noqa: E402
from seeded import UnseededDrawError  # noqa: E402
from waiting import until  # noqa: E402

seeded.guard_modules()

TESTS = f"{HERE}{os.sep}"
OURS = (TESTS, *(f"{HERE.parent / folder}{os.sep}" for folder in ("src", "bench")))

# Tests start hundreds of processes, and each worker imports all tests: what one has compiled is kept beside
# its source, whatever the environment says. Otherwise each compiles hotset anew, a third of its start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# MKL, which torch multiplies with, adds up in an order that depends on where the arrays lie, and so on
# chance: torch, where it stands in for a device, then has other bits from one backend to the next.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# What other programs have on this machine is none of the tests' models (tests/storage/test_elsewhere.py).
os.environ["HOTSET_ELSEWHERE"] = "0"

# A job in a shell's background ignores Ctrl-C, one of nohup the end of its terminal, and so does what they
# start: tests that send these signals would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.name == "posix" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile(
    "hotset", derandomize=True, database=None, deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # of a machine that is busy
)  # fmt: skip
hypothesis.settings.load_profile("hotset")


def _needs_seed(make: Callable[..., Any], name: str) -> Any:
    """`make`, which code of this repository must call with a seed. A class stays one: it may be inherited."""

    def check(seed: Any) -> None:
        if seed is None and sys._getframe(2).f_code.co_filename.startswith(OURS):
            raise UnseededDrawError(f"{name} without a seed: give it one")

    if not isinstance(make, type):

        def checked(seed: Any = None) -> Any:
            check(seed)
            return make(seed)

        return checked

    class Checked(make):  # type: ignore[misc]
        def __new__(cls, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
            check(seed)
            return make(seed, *args, **kwargs)

    return Checked


def _refused(draw: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`draw`, which asks the system for its numbers. Tests have no use for it, the code names files."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(TESTS):
            raise UnseededDrawError(f"{name} in a test: no seed decides what it draws")
        return draw(*args, **kwargs)

    return checked


@pytest.fixture(scope="session", autouse=True)
def no_unseeded_draws() -> Iterator[None]:
    """For the whole session, since fixtures of a module draw too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("default_rng", "Philox", "PCG64", "PCG64DXSM", "SFC64", "MT19937", "SeedSequence"):
            patch.setattr(np.random, name, _needs_seed(getattr(np.random, name), f"np.random.{name}()"))
        patch.setattr(random, "Random", _needs_seed(random.Random, "random.Random()"))
        for name in ("randbits", "randbelow", "choice", "token_bytes", "token_hex", "token_urlsafe"):
            patch.setattr(secrets, name, _refused(getattr(secrets, name), f"secrets.{name}()"))
        patch.setattr(os, "urandom", _refused(os.urandom, "os.urandom()"))
        patch.setenv("PYTHONPATH", FOR_CHILDREN, prepend=os.pathsep)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, as one list: how many tests, why, and the command that helps where there is one."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped")
        for reason, n in reasons.most_common():
            terminalreporter.write_line(f"{n:5} {reason}")


def pytest_collection_finish() -> None:
    """What is there before the first test, modules and eight thousand items, is left out of collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the event loop of asynchronous tests and fixtures."""
    return "asyncio"


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """The generators of the process begin every test alike, and torch's threads are as many as before it."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        seeded.seed_torch(torch)
    n_threads = torch.get_num_threads() if torch is not None else 0
    yield
    if torch is not None:
        torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this run of the tests: pytest-xdist's workers share it. For what `made_once` makes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def any_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what happens without a seed, whose outcome may not depend on what is drawn."""
    monkeypatch.setattr(seeded, "any_seed", True)


@pytest.fixture
def threads() -> Callable[[int], int]:
    """Threads that this process started since the test began, those of native code too.

    They are distinguished by their numbers: threads of earlier tests may end meanwhile. The thread of a pool
    is there a little longer than the pool, so the count that is expected is waited for.
    """
    gc.collect()  # backends that other tests left open
    process = psutil.Process()

    def numbers() -> set[int]:
        return {thread.id for thread in process.threads()}

    before = numbers()

    def count(expected: int) -> int:
        until(lambda: len(numbers() - before) == expected, f"{expected} threads were expected")
        return expected

    return count
