"""Patches Triton's interpreter to save repeated work and to multiply bfloat16 correctly.

It stores bfloat16 as integers and multiplies these. Launching a kernel replaces the language module by the
interpreter's and restores it at the end. Each function that the kernel calls replaces it again, which looks
through a thousand attributes each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Patch once. Does nothing if this version of Triton is written differently."""
    _multiply_bfloat16()
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    new_scope: Callable[[], Any] | None = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or new_scope is None:
        return

    def patched(function: Any) -> Any:
        # As `_patch_lang` finds them; a replaced builtin is not one any more.
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        languages = [value for value in seen if value is tl or value is tl.core]
        if not languages or any(tl.core.is_builtin(language.load) for language in languages):
            return patch(function)
        return new_scope()

    interpreter._patch_lang = patched


def _multiply_bfloat16() -> None:
    original = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(builder, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
