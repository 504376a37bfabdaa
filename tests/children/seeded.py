"""Guards that hold in the process of the tests and in the processes that a test starts.

The guards import nothing themselves, since some tests check the imports of a subcommand. A module is guarded
once something else has imported it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class UnseededDrawError(AssertionError):
    """A draw without a seed: the test could pass today and fail tomorrow."""


any_seed = False  # True while a test checks the behaviour without a seed


def guard_sampler(module: ModuleType) -> None:
    """Make samplers refuse parameters that have a temperature and no seed."""
    make = module.Sampler.__init__

    def checked(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        if params.seed is None and params.temperature > 0 and not any_seed:
            raise UnseededDrawError("a test samples without a seed: give it `seed=`, or `temperature=0`")
        make(self, params, *args, **kwargs)

    module.Sampler.__init__ = checked


def seed_torch(module: ModuleType) -> None:
    """Seed torch's own generator, which would start from the system's noise."""
    module.manual_seed(0)


def guard_modules() -> None:
    for name, guard in {"hotset.engine.sampler": guard_sampler, "torch": seed_torch}.items():
        if name in sys.modules:
            guard(sys.modules[name])
        else:
            sys.meta_path.insert(0, _WhenImported(name, guard))


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and guards it when it has been executed."""

    def __init__(self, name: str, guard: Callable[[ModuleType], None]) -> None:
        self.name, self.guard = name, guard

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def guarded(module: ModuleType) -> None:
                execute(module)
                self.guard(module)

            spec.loader.exec_module = guarded  # type: ignore[method-assign]
        return spec
