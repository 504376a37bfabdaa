"""Marks of tests of what Wine, under which Windows wheels are tried here, does not do as Windows does."""

import ctypes
import sys

import pytest

ON_WINE = sys.platform == "win32" and hasattr(ctypes.windll.ntdll, "wine_get_version")


def lacks(what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(ON_WINE, reason=f"Wine lacks {what}")
