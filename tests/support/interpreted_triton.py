"""Triton's interpreter, without what it does again at every call of a kernel's own functions, and with what
it does wrong: products of bfloat16, which it keeps as whole numbers and multiplies as such.

A kernel that is launched replaces the language by what interprets it, and puts it back when it ends. A
function that it calls replaces it once more: a thousand attributes are looked through, each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """What is replaced already is left as it is. Does nothing where another Triton is written otherwise."""
    _multiply_bfloat16()
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    new_scope: Callable[[], Any] | None = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or new_scope is None:
        return

    def patched(function: Any) -> Any:
        # As `_patch_lang` finds them; a builtin that is replaced is none.
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
