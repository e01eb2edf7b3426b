"""Every `raise` of the package is met by a `pytest.raises(..., match=...)` of the suite that reads its text.

A text is not compared in full: its values are only known at run time. What can be read from the source are the
literal parts, in order. A pattern of the suite covers a text if it is found in the text (with a neutral sign for
every value), or if most of its own words occur in the text in the same order.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.architecture._checks import parse, source_files

VALUE = "§"
# What makes messages of parts, the same for all of them.
_MESSAGES = ("message", "value_error", "type_error")
_WORD = re.compile(r"[A-Za-z_]{2,}")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Raise(NamedTuple):
    """One `raise` of the source: `text` holds its literal parts, `§` for each value; `scope` is its function."""

    line: int
    text: str
    scope: str


def literal_text(node: ast.AST) -> str:
    """The string literals below a node, in order; `§` for a formatted value, `name: ` before a keyword."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return VALUE
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal_text, node.values))
    if isinstance(node, ast.BinOp):
        return f"{literal_text(node.left) or VALUE}{literal_text(node.right) or VALUE}"
    if isinstance(node, ast.keyword):
        return f"{node.arg}: {literal_text(node.value) or VALUE}"
    if isinstance(node, ast.Call):
        parts = [node.func, *node.args, *node.keywords]
        return "\n".join(filter(None, map(literal_text, parts)))
    return "\n".join(filter(None, map(literal_text, ast.iter_child_nodes(node))))


def raises_of(path: Path) -> Iterator[Raise]:
    """The `raise X(...)` of a file. `raise` and `raise error` pass on what was made elsewhere."""
    helpers: dict[str, Function] = {}
    # The file's own functions come last, and so win over those of its neighbours.
    for file in (*sorted(path.parent.glob("*.py")), path):
        helpers |= _functions(file)

    def visit(node: ast.AST, scope: ast.AST) -> Iterator[Raise]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            text = _text_of(node.exc, scope, helpers)
            yield Raise(node.lineno, text, getattr(scope, "name", ""))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, node if isinstance(node, Function) else scope)

    tree = parse(path)
    return visit(tree, tree)


@functools.cache
def _functions(path: Path) -> dict[str, Function]:
    found = (node for node in ast.walk(parse(path)) if isinstance(node, Function))
    return {function.name: function for function in found if function.name not in _MESSAGES}


def _text_of(call: ast.Call, scope: ast.AST, helpers: dict[str, Function]) -> str:
    """The literals of a raise, of the local variables it names, and of the functions of its room that it calls."""
    texts = [literal_text(call)]
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if names & {target.id for target in targets if isinstance(target, ast.Name)}:
                texts.append(literal_text(node.value))
    for node in ast.walk(call):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name in helpers:
                texts += map(literal_text, _without_docstring(helpers[name].body))
    return "\n".join(texts)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_docstring else body


def patterns_of(path: Path) -> set[str]:
    """What the `match=` of a test file may be: a literal, or any literal of the tables it is taken from."""
    tree = parse(path)
    tables = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()

    def visit(node: ast.AST, scope: ast.AST) -> None:
        if isinstance(node, Function):
            scope = node
        if isinstance(node, ast.keyword) and node.arg == "match":
            found.update(_strings(node.value))
            if any(isinstance(part, ast.Name) for part in ast.walk(node.value)):
                found.update(_strings(scope))
                names = {part.id for part in ast.walk(scope) if isinstance(part, ast.Name)}
                for name in names & tables.keys():
                    found.update(_strings(tables[name]))
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(tree, tree)
    return found


def _strings(node: ast.AST) -> Iterator[str]:
    """The string literals below a node; the parts of an f-string or of a sum are joined."""
    if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant):
        yield literal_text(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def covers(pattern: str, text: str) -> bool:
    """Whether a pattern of the suite reads a text of the source."""
    plain = re.sub(r"\\[bBdDsSwWAZ]", " ", pattern)
    words = _WORD.findall(re.sub(r"\\(.)", r"\1", plain))
    if len("".join(words)) < 6:
        # A pattern such as "x" or ".*" would cover everything.
        return False
    try:
        if re.search(pattern, text, re.DOTALL):
            return True
    except re.error:
        # The table it stands in holds other strings too.
        return False
    enough, known = max(2, 0.6 * len(words)), _WORD.findall(text)
    if sum(word in known for word in words) < enough:
        return False
    return _common_in_order(words, known) >= enough


def _common_in_order(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        previous = row
        row = [0]
        for j, y in enumerate(b):
            row.append(previous[j] + 1 if x == y else max(previous[j + 1], row[j]))
    return row[-1]


def check_raises(root: Path, tests: Iterable[Path]) -> list[str]:
    """The raises of the package that no test reads."""
    patterns = sorted({pattern for path in tests for pattern in patterns_of(path)})
    problems: list[str] = []
    for path in source_files(root):
        for site in raises_of(path):
            place = f"{path.relative_to(root.parent)}:{site.line}"
            if site.scope == "__getattr__" and not _WORD.search(site.text):
                # Python's own protocol: `hasattr` and `copy` catch it, nobody reads it.
                continue
            if not _WORD.search(site.text):
                problems.append(f"{place}: its text cannot be read from this file")
            elif not any(covers(pattern, site.text) for pattern in patterns):
                shown = " | ".join(filter(None, map(str.strip, site.text.splitlines())))
                problems.append(f"{place}: no test reads {shown[:160]!r}")
    return problems
