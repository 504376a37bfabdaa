"""The faults that can be put into a file: small ones, like human mistakes. `RULES` lists the exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RULES = """These stay unchanged, since no test should notice a fault in them:
- docstrings, annotations, `if TYPE_CHECKING`, `cast`, decorators, `__repr__`, `__str__`, `__all__`;
- the wording of messages: arguments of `raise`, `warnings.warn`, `print` and the like, f-strings, help texts
  of options (but a `raise` can be dropped);
- the look of a plot (the functions `draw`, `_figure` and `_style`, keywords of style), and the rates of the
  simulated GPU;
- anything that affects only speed: the names in `SPEED`, and prefetches of the native operations."""

# Names of constants that affect only speed.
SPEED = {
    "_TILE_BYTES", "_CHUNK", "_CHUNK_BYTES", "_BUFFER", "_ROWS_AT_ONCE", "_SPIN", "_POLL", "_PATIENCE",
    "num_warps", "num_stages", "n_warps", "n_stages", "chunksize", "buffer_size",
    "STAND_IN", "kChunkBytes", "kMaxPanels", "kPrefetch", "kAhead", "kLinesAhead", "kGatherLines",
}  # fmt: skip
STYLE = {
    "ms", "lw", "ls", "fontsize", "ha", "va", "color", "alpha", "zorder", "xytext", "textcoords", "xycoords",
    "loc", "pad", "rotation", "rotation_mode", "dpi", "linewidth", "dim", "stacklevel", "help", "metavar",
    "rich_help_panel",
}  # fmt: skip
SAYING = {
    "warn", "print", "progress", "Option", "Argument", "_option", "option", "info", "debug", "echo", "line",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault: `old` at offset `at` of the file becomes `new`. line: its line number, from 1."""

    file: str
    at: int
    old: str
    new: str
    line: int
    kind: str

    def apply(self, text: str) -> str:
        assert text[self.at : self.at + len(self.old)] == self.old
        return text[: self.at] + self.new + text[self.at + len(self.old) :]


def of_file(path: Path, name: str) -> list[Fault]:
    text = path.read_text()
    found = _python(text, name) if path.suffix == ".py" else _native(text, name)
    return list(dict.fromkeys(fault for fault in found if fault.old != fault.new))


_COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
_BINARY = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.Pow: ("**", "*"),
}  # fmt: skip
_OPPOSITES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor",
    "argmax": "argmin", "argmin": "argmax", "minimum": "maximum", "maximum": "minimum",
    "cumsum": "cumprod", "zeros": "ones", "append": "extend", "startswith": "endswith",
    "sum": "max", "mean": "sum",
}  # fmt: skip


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.found: list[Fault] = []
        # ast counts columns in bytes of UTF-8
        self.lines = [line.encode() for line in text.splitlines(keepends=True)]
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.decode()))

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1][:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        return self.offset(first, node.col_offset), self.offset(last, node.end_col_offset)  # type: ignore[attr-defined]

    def add(self, begin: int, end: int, new: str, kind: str) -> None:
        line = self.text.count("\n", 0, begin) + 1
        self.found.append(Fault(self.name, begin, self.text[begin:end], new, line, kind))

    def replace(self, node: ast.AST, new: str, kind: str) -> None:
        self.add(*self.span(node), new, kind)

    def source(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str, kind: str) -> None:
        """Replace an operator between two operands, which may have brackets around them."""
        begin, end = self.span(left)[1], self.span(right)[0]
        pattern = rf"\b{old}\b" if old[0].isalpha() else re.escape(old)
        match = re.search(pattern.replace(" ", r"\s+"), self.text[begin:end])
        if match and "#" not in self.text[begin:end]:
            self.add(begin + match.start(), begin + match.end(), new, kind)

    # -- unchanged code

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__", "draw", "_figure", "_style"):
            return
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(default)
        self.body(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            self.body(node.body)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace(node, "pass", "dropped raise")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        names = {node.target.id} if isinstance(node.target, ast.Name) else set()
        if node.value is not None and not names & SPEED:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & (SPEED | {"__all__", "__slots__"}):
            return
        self.visit(node.value)

    def body(self, statements: list[ast.stmt]) -> None:
        for i, statement in enumerate(statements):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring, or an ellipsis
            self.visit(statement)
            if i and isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete):
                value = getattr(statement, "value", None)
                if not (isinstance(value, ast.Call) and _called(value) in SAYING):
                    self.replace(statement, "pass", "dropped statement")

    def visit_Module(self, node: ast.Module) -> None:
        self.body(node.body)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self.condition(node.test)
        self.visit(node.test)
        self.body(node.body)
        self.body(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self.condition(node.test)
            self.visit(node.test)
        self.body(node.body)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.body(node.body)
        self.body(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
        self.body(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        for part in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
            self.body(part)

    # -- faults

    def condition(self, test: ast.expr) -> None:
        text = self.source(test)
        self.replace(test, f"(not ({text}))", "negated condition")
        self.replace(test, "False", "condition never holds")
        self.replace(test, "True", "condition always holds")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.replace(node.test, f"(not ({self.source(node.test)}))", "negated condition")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.replace(test, "True", "dropped filter")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, old, new, "and for or")
        neutral = "True" if isinstance(node.op, ast.And) else "False"
        for value in node.values:
            self.replace(value, neutral, "dropped condition")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace(node, f"({self.source(node.operand)})", "dropped not")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.replace(node, f"({self.source(node.operand)})", "dropped minus")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            self.between(left, right, *_COMPARE[type(op)], "swapped comparison")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        strings = any(isinstance(side, ast.Constant | ast.JoinedStr) and not _number(side)
                      for side in (node.left, node.right))  # fmt: skip
        if type(node.op) in _BINARY and not strings:
            self.between(node.left, node.right, *_BINARY[type(node.op)], "swapped operator")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _BINARY:
            old, new = _BINARY[type(node.op)]
            self.between(node.target, node.value, old + "=", new + "=", "swapped operator")
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value), "changed constant")
        elif isinstance(node.value, int):
            self.replace(node, str(node.value + 1), "off by one")
            if node.value > 1:
                self.replace(node, str(node.value - 1), "off by one")
        elif isinstance(node.value, float):
            by = "1000" if node.value >= 100 or 0 < node.value < 0.01 else "2"
            self.replace(node, f"({self.source(node)} * {by})" if node.value else "1.0", "wrong unit")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else (node.slice,):
            if isinstance(part, ast.Slice):
                for bound in (part.lower, part.upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        self.replace(bound, f"({self.source(bound)}) + 1", "off by one")
        self.visit(node.value)
        self.visit(node.slice)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.replace(node, "return None", "returns nothing")
        if node.value is not None:
            self.visit(node.value)
        else:
            self.replace(node, "pass", "dropped return")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "pass", "dropped continue")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "continue", "dropped break")

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name in SAYING or name == "cast":
            return
        if name in _OPPOSITES and self.source(node.func).endswith(name):
            end = self.span(node.func)[1]
            self.add(end - len(name), end, _OPPOSITES[name], "another function")
        if name == "range" and node.args:
            last = node.args[0] if len(node.args) == 1 else node.args[1]
            self.replace(last, f"({self.source(last)}) + 1", "off by one")
            self.replace(last, f"({self.source(last)}) - 1", "off by one")
        for keyword in node.keywords:
            if keyword.arg in SPEED | STYLE:
                continue
            if keyword.arg and len(node.keywords) > 1:
                begin, end = self.span(keyword)
                rest = re.match(r",\s*", self.text[end:])
                if rest:
                    self.add(begin, end + rest.end(), "", "dropped argument")
            self.visit(keyword.value)
        for first, second in zip(node.args, node.args[1:], strict=False):
            if isinstance(first, ast.Name) and isinstance(second, ast.Name) and name not in _OPPOSITES:
                begin, end = self.span(first)[0], self.span(second)[1]
                self.add(begin, end, f"{second.id}, {first.id}", "swapped arguments")
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _python(text: str, name: str) -> Iterator[Fault]:
    finder = _Finder(text, name)
    finder.visit(ast.parse(text))
    return iter(finder.found)


_NATIVE = [
    (r"(?<![<\-=>!])<(?![<=])(?=\s)", "<=", "swapped comparison"),
    (r"(?<=\s)>(?![>=])(?=\s)", ">=", "swapped comparison"),
    (r"<=(?!>)", "<", "swapped comparison"),
    (r">=", ">", "swapped comparison"),
    (r"==", "!=", "swapped comparison"),
    (r"!=", "==", "swapped comparison"),
    (r"&&", "||", "and for or"),
    (r"\|\|", "&&", "and for or"),
    (r"(?<=\s)\+(?=\s)", "-", "swapped operator"),
    (r"(?<=\s)-(?=\s)", "+", "swapped operator"),
    (r"(?<=[\w)] )\*(?= [\w(])", "/", "swapped operator"),
    (r"(?<=\s)/(?=\s)", "*", "swapped operator"),
    (r"(?<=\s)%(?=\s)", "/", "swapped operator"),
    (r"\+=", "-=", "swapped operator"),
    (r"(?<=\s)\+\+(?=\w)", "--", "swapped operator"),
    (r"\bstd::min\b", "std::max", "another function"),
    (r"\bstd::max\b", "std::min", "another function"),
    (r"\btrue\b", "false", "changed constant"),
    (r"\bfalse\b", "true", "changed constant"),
    (r"\bcontinue;", ";", "dropped continue"),
    (r"\bbreak;", "continue;", "dropped break"),
    (r"\breturn;", ";", "dropped return"),
]


_STATEMENT = re.compile(r"\s+(?:[\w:.\[\]>-]+(?:\([^;]*\))?(?: [-+*|&]?= [^;]*)?|\*\w+ = [^;]*);$")
_KEPT = re.compile(r"\s+(return|continue|break|using|case|const|auto)\b")


def _native(text: str, name: str) -> Iterator[Fault]:
    """Yield faults by pattern, line by line: the code of the operations is plain enough for it."""
    at = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = re.sub(r"//.*|\"[^\"]*\"", lambda m: " " * len(m[0]), line.rstrip("\n"))
        plain = code.strip()
        skip = (
            not plain
            or plain.startswith(("#", "template", "using", "namespace", "static_assert", "throw"))
            or "refetch" in code
            or "rows[count + j]" in code  # a prefetch in a list of rows
            or any(word in code for word in SPEED)
        )
        if not skip:
            for pattern, new, kind in _NATIVE:
                for match in re.finditer(pattern, code):
                    yield Fault(name, at + match.start(), match[0], new, number, kind)
            for match in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
                value = int(match[0])
                for changed in {value + 1, max(value - 1, 0)} - {value}:
                    yield Fault(name, at + match.start(), match[0], str(changed), number, "off by one")
            if match := re.match(r"(\s*(?:\} else )?if \()(.*)\)( \{| [^()]*;)$", code):
                begin = at + match.start(2)
                condition = line[match.start(2) : match.end(2)]
                yield Fault(name, begin, condition, f"!({condition})", number, "negated condition")
                yield Fault(name, begin, condition, "false", number, "condition never holds")
                yield Fault(name, begin, condition, "true", number, "condition always holds")
            # A statement of one line: a call, or an assignment to a name declared earlier.
            if _STATEMENT.match(code) and not _KEPT.match(code):
                begin = at + len(code) - len(code.lstrip())
                yield Fault(name, begin, line.strip(), ";", number, "dropped statement")
        at += len(line)
