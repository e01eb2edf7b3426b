"""Python imports this before a script that `python -m vernal compiles` starts.

A fresh Python runs the script as it always does, so that output, tracebacks, exit code, signals,
`sys.path` and `__main__` are its own. Before it, Python imports `sitecustomize`; for this run, the
folder of this file was put in front of `PYTHONPATH`. First that is undone. Then the script starts.
Recording begins as soon as JAX has been imported, by the script and in the environment that the
script has made for it (`JAX_PLATFORMS`, `JAX_ENABLE_X64`). The report is the last thing to happen.
"""

import atexit
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))
# Names in variables: they can be imported only once the script has done so with JAX.
_JAX, _VERNAL = "jax", "vernal"


class _AfterImport:
    """Finds modules as the other finders do, and has something done when one has been imported.

    Args:
        actions: by the name of the module, what is to be done.
    """

    def __init__(self, actions: dict[str, Callable[[], None]]):
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in self.actions:
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                # Once, also if it is loaded again.
                self.actions.pop(name, lambda: None)()

            spec.loader.exec_module = exec_module
        return spec


class _Watch:
    """The recording of this process.

    Args:
        page: where to write the page; None: nowhere.
        script: what is run, as the user wrote it.
    """

    def __init__(self, page: str | None, script: str):
        self.page = page
        self.script = script
        self.process = os.getpid()
        self.stack = contextlib.ExitStack()
        self.log: Any = None
        self.problem: Exception | None = None

    def jax_is_there(self) -> None:
        """Imports Vernal, which begins the recording; if it is Vernal that is importing JAX, that
        will happen by itself."""
        added = [] if _ROOT in sys.path else [_ROOT]
        sys.path += added
        try:
            importlib.import_module(_VERNAL)
        except Exception as error:
            # A script may have modules of its own under the names of those that we need.
            self.problem = error
        finally:
            for entry in added:
                sys.path.remove(entry)

    def vernal_is_there(self) -> None:
        """Begins."""
        vernal = sys.modules[_VERNAL]
        # Makes it import now what tables need. Imports at the end may call `exec`, and then Python
        # forgets that the script was interrupted, and ends with another exit code.
        vernal.show.table(None, [""], [[""]])
        self.log = self.stack.enter_context(vernal.debug.record_compilations())

    def report(self) -> None:
        """Prints the table, and writes the page."""
        if os.getpid() != self.process:
            # A fork of the script.
            return
        self.stack.close()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # What the script has printed comes first.
            sys.stdout.flush()
        lines = [f"{_VERNAL}: compilations of {self.script}"]
        if self.log is not None:
            lines.append(self.log.table(_width()))
            if self.page is not None:
                lines.append(self._save(self.page))
        elif self.problem is not None:
            lines.append(f"nothing was recorded: {type(self.problem).__name__}: {self.problem}")
        else:
            lines.append("nothing was compiled: JAX was not imported")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print("\n" + "\n".join(lines), file=sys.__stderr__, flush=True)

    def _save(self, page: str) -> str:
        try:
            with open(page, "w", encoding="utf-8") as file:
                file.write(self.log.page(f"Compilations of {self.script}"))
        except OSError as error:
            return f"the page could not be written: {error}"
        return f"page: {page}"


def _width() -> int:
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        # Not a terminal.
        return 120


def _undo(pythonpath: str | None) -> None:
    """Makes everything as it would be without us, also for the processes that the script starts."""
    os.environ.pop("PYTHONPATH", None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    # The `sitecustomize` that Python would have imported.
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _start(settings: dict[str, Any]) -> None:
    watch = _Watch(settings["page"], settings["script"])
    # The first to be registered is the last to be called.
    atexit.register(watch.report)
    actions = {_JAX: watch.jax_is_there, _VERNAL: watch.vernal_is_there}
    sys.meta_path.insert(0, _AfterImport(actions))
    _undo(settings["pythonpath"])


if "VERNAL_COMPILES" in os.environ:
    _start(json.loads(os.environ.pop("VERNAL_COMPILES")))
