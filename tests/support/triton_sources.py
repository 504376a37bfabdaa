"""A launch as Triton's just-in-time compiler sees it, without a device."""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import ASTSource

INT32 = (1 << 31) - 1
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def source_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """Return a launch's source with its constants and the arguments divisible by 16."""
    signature, constants, facts = {}, dict(constants), {}
    for i, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if arg is None or (isinstance(arg, int) and arg == 1):
            signature[name], constants[name] = "constexpr", arg
        elif isinstance(arg, torch.Tensor):
            signature[name] = TYPES[arg.dtype]
            if arg.data_ptr() % 16 == 0:
                facts[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(arg) <= INT32 else "i64"
            if arg % 16 == 0 and not kernel.params[i].do_not_specialize_on_alignment:
                facts[(i,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, signature, constexprs=constants, attrs=facts)
