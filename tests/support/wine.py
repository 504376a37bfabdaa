"""Marks of tests of features in which Wine, used for Windows wheels here, differs from Windows."""

import ctypes
import sys

import pytest

ON_WINE = sys.platform == "win32" and hasattr(ctypes.windll.ntdll, "wine_get_version")


def lacks(what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(ON_WINE, reason=f"Wine lacks {what}")
