"""Parses PTX: the instructions of one kernel, as in NVIDIA's "Parallel Thread Execution ISA"."""

from __future__ import annotations

import re
from dataclasses import dataclass

Operand = str | tuple[str, ...]  # a register, a number, an address in brackets; several registers in braces


@dataclass(frozen=True)
class Instruction:
    """One statement.

    kinds: the opcode, split at its dots. guard: the predicate register under which it is executed, or None;
    negated: executed if the predicate is false.
    """

    text: str
    kinds: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool

    @property
    def opcode(self) -> str:
        return ".".join(self.kinds)

    @property
    def type(self) -> str:
        return self.kinds[-1]


@dataclass(frozen=True)
class Program:
    """A kernel. Labels are indices into `instructions`; n_threads is per block."""

    name: str
    n_parameters: int
    n_threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def read(ptx: str) -> Program:
    """Parse the only kernel of a module."""
    head, _, rest = ptx[ptx.index(".entry") :].partition("{")
    (name,) = re.findall(r"\.entry\s+(\w+)", head)
    (n_threads,) = re.findall(r"\.reqntid\s+(\d+)", head)
    lines = [line.split("//")[0].strip() for line in rest.split("$L__func_end")[0].splitlines()]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in " ".join(line for line in lines if not line.startswith(".")).split(";"):
        left = statement.strip()
        # Braces open and close the scope of inline assembly's own registers.
        while found := re.match(r"[{}]\s*|(\$?\w+):\s*", left):
            if found[1]:
                labels[found[1]] = len(instructions)
            left = left[found.end() :]
        if left and not left.startswith("."):
            instructions.append(_instruction(left))
    return Program(name, len(re.findall(r"\.param\s", head)), int(n_threads), tuple(instructions), labels)


def _instruction(text: str) -> Instruction:
    found = re.match(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", text)
    assert found is not None, text
    negation, guard, opcode, rest = found.groups()
    operands = tuple(map(_operand, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)))
    return Instruction(text, tuple(opcode.split(".")), operands, guard, bool(negation))


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(one.strip() for one in text.strip("{}").split(","))
    return text.replace(" ", "")
