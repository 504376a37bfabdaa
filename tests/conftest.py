"""Rules for every test: nothing is drawn without a seed, so a test that passed once passes again.

A draw without a seed raises `UnseededDrawError`. This covers samplers with a temperature and no seed, here
and in the processes that a test starts. It also covers the generators of NumPy, Python and the system, if
code of this repository calls them. The generators with one state for the whole process (`random`,
`np.random`, torch's own) start every test in the same state, so it does not matter which tests ran before.
Libraries may draw freely: the name of a temporary folder decides nothing.

`--random-order` runs the tests in another order (`make test-order`).
"""

from __future__ import annotations

import os

# There are at least as many workers as cores. More threads of NumPy and torch, here and in the processes
# that tests start, mostly wait for one another: they took a third of the suite's time. NumPy and torch
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
from cases import needs_backends  # noqa: E402
from seeded import UnseededDrawError  # noqa: E402
from waiting import until  # noqa: E402

seeded.guard_modules()

TESTS = f"{HERE}{os.sep}"
OURS = (TESTS, *(f"{HERE.parent / folder}{os.sep}" for folder in ("src", "bench")))

# Tests start hundreds of processes, and each worker imports all tests. So bytecode is always written next to
# its source, whatever the environment says. Otherwise each process would compile hotset again, a third of its
# start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# MKL, which torch uses for matrix products, sums in an order that depends on the addresses of the arrays, and
# so on chance. Torch as a simulated device would then give other bits from one backend to the next.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Tests must not find the models of other programs on this machine (tests/storage/test_elsewhere.py).
os.environ["HOTSET_ELSEWHERE"] = "0"

# A background job of a shell ignores SIGINT, a job of nohup ignores SIGHUP, and their children inherit this.
# Tests that send these signals would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.name == "posix" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile(
    "hotset", derandomize=True, database=None, deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a busy machine is slow
)  # fmt: skip
hypothesis.settings.load_profile("hotset")


def _needs_seed(make: Callable[..., Any], name: str) -> Any:
    """Return a `make` that requires a seed from code of this repository. A class stays a class to inherit."""

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
    """Return a guarded `draw`, the system's generator: tests may not call it; code may name files with it."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(TESTS):
            raise UnseededDrawError(f"{name} in a test draws without a seed")
        return draw(*args, **kwargs)

    return checked


@pytest.fixture(scope="session", autouse=True)
def no_unseeded_draws() -> Iterator[None]:
    """Guard the generators for the whole session, since fixtures of a module draw too."""
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
    """List the reasons of skipped tests with their counts. Some reasons name a command that helps."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped")
        for reason, n in reasons.most_common():
            terminalreporter.write_line(f"{n:5} {reason}")


def pytest_collection_finish() -> None:
    """Exclude all objects created before the first test (modules, thousands of items) from collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of a device backend that is not in the registry: tests/repository/test_plugins.py."""
    needs_backends(*(name for mark in item.iter_markers("backend") for name in mark.args))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the event loop of asynchronous tests and fixtures."""
    return "asyncio"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder of hotset, with its models and caches."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Start each test with the same state of the generators, and restore torch's number of threads."""
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
    """Return a folder that all pytest-xdist workers of this run share, for the files of `made_once`."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def any_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow draws without a seed, for a test whose outcome does not depend on the drawn values."""
    monkeypatch.setattr(seeded, "any_seed", True)


@pytest.fixture
def threads() -> Callable[[int], int]:
    """Return a function that waits for a number of threads, native ones too, started since the test began.

    Threads are distinguished by their ids, since threads of earlier tests may end meanwhile. A thread of a
    pool lives a little longer than the pool, so the function waits until the count is as expected.
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
