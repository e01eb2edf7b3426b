"""`install` and `uninstall`: which library `import equinox` imports."""

import os
import sys

from ..show import message
from . import equinox
from .equinox import _module, debug, internal, nn
from .equinox._module import _module as _module_of_module
from .equinox.nn import _attention

# The private ones are those that programs import.
_MODULES = {
    "equinox": equinox,
    "equinox._module": _module,
    "equinox._module._module": _module_of_module,
    "equinox.debug": debug,
    "equinox.internal": internal,
    "equinox.nn": nn,
    "equinox.nn._attention": _attention,
}

# Equinox's settings, and ours that mean the same.
_SETTINGS = {"EQX_ON_ERROR": "VERNAL_ON_ERROR"}


def install() -> None:
    """Makes `import equinox` import Vernal.

    Call it before importing the first library built on Equinox (Diffrax, Lineax, Optimistix, ...). Calling it again
    changes nothing. If the environment sets `EQX_ON_ERROR`, `VERNAL_ON_ERROR` is set to the same value, unless it is
    set already.

    Raises:
        RuntimeError: if the real Equinox has already been imported: libraries would then mix both.

    Example:
        >>> import subprocess, sys
        >>> program = "import vernal.compat; vernal.compat.install(); import equinox as eqx; "
        >>> program += "print(eqx.nn.Linear.__module__, eqx.__version__)"
        >>> print(subprocess.check_output([sys.executable, "-c", program], text=True))
        vernal.compat.equinox.nn 0.13.8
    """
    theirs = sys.modules.get("equinox")
    if theirs is not None and theirs is not equinox:
        raise RuntimeError(
            message(
                "the real Equinox has been imported already",
                where="vernal.compat.install()",
                expected="a call before the first import of `equinox`, or of a library built on it",
                got=f"equinox {getattr(theirs, '__version__', '')} from {theirs.__file__}",
                instead="import vernal.compat; vernal.compat.install() as the first lines of the "
                "script, or `python -m vernal compat SCRIPT`; or neither: modules of Vernal work in "
                "libraries on the real Equinox too",
            )
        )
    for theirs_name, ours_name in _SETTINGS.items():
        if theirs_name in os.environ:
            os.environ.setdefault(ours_name, os.environ[theirs_name])
    sys.modules.update(_MODULES)


def uninstall() -> None:
    """Undoes `install`: the next `import equinox` imports the real one.

    Libraries imported meanwhile keep using Vernal. Without an earlier `install`, it does nothing.

    Example:
        >>> import vernal.compat
        >>> vernal.compat.uninstall()
    """
    for name, module in _MODULES.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
