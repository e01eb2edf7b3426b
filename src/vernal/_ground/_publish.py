"""One path per public object: a package sets its own name as the module of its exports.

Files inside a package are private, but an object defined in `vernal.trees._split` would show that path
in reprs, tracebacks and pickles. `publish` rewrites `__module__` to the package, which is also the path
that users import from.
"""

import inspect
import types
from typing import Any


def publish(room: str, namespace: dict[str, Any]) -> None:
    """Sets `__module__ = room` on every public function and class that the package's own files define.

    Args:
        room: the package's dotted name, `__name__` of its `__init__.py`.
        namespace: `globals()` of that `__init__.py`.
    """
    for name, value in list(namespace.items()):
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        if value.__module__.startswith(room + "."):
            value.__module__ = room
