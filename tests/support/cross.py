"""Finds a compiler and an emulator for AArch64."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys


def compiler() -> str | None:
    """Return a command that compiles and links C++ for AArch64: a cross compiler, or zig's."""
    if named := os.environ.get("CXX_AARCH64"):
        return named
    if found := shutil.which("aarch64-linux-gnu-g++"):
        return found
    if importlib.util.find_spec("ziglang") is None:
        return None
    return f"{sys.executable} -m ziglang c++ -target aarch64-linux-musl"


def emulator() -> str | None:
    """Return a command that runs AArch64 programs."""
    return os.environ.get("QEMU_AARCH64") or shutil.which("qemu-aarch64")
