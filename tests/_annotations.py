"""Checks the annotations of a package in every call of its functions and methods, by beartype.

jaxtyping's import hook does this and compares the names of axes between arguments as well, of which this package has
none; it takes a sixth of the time of the suite for that.
"""

import ast
import importlib.abc
import importlib.machinery
import sys
from typing import Any


class _Checked(ast.NodeTransformer):
    """Puts `@beartype` on every function, below its other decorators, but not on those inside of a function.

    Those are made anew in every call: with checks this took a quarter of the time of the suite, and no two were equal.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        decorator = ast.parse("__import__('beartype').beartype", mode="eval").body
        for part in ast.walk(decorator):
            ast.copy_location(part, node)
        node.decorator_list.append(decorator)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        # Not from a file of bytecode, which has the functions without checks.
        path = self.get_filename(fullname)
        checked = _Checked().visit(ast.parse(self.get_data(path), path))
        return compile(checked, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def check_annotations(package: str) -> None:
    """Checks the annotations of all modules of a package that are imported from now on.

    Args:
        package: its name.
    """
    sys.meta_path.insert(0, _Finder(package))
