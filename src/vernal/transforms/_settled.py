"""`settled`: packages whose functions may stand for each other."""

from .._ground import settled_packages
from ..show import value_error


def settled(*packages: str) -> None:
    """Declares packages of your own whose functions may stand for each other.

    Two fresh closures of a settled package are one static value if they have the same code and
    captured the same plain values, as two `optax.adam(1e-3)` have: a compiled step takes either, and
    `mypackage.make_loss(0.1)`, called twice, compiles once. The standard library, JAX, NumPy, SciPy,
    Optax and Vernal are settled from the start.

    Call this only if the following holds for the package, as it does for those: while the program runs,
    its functions, classes and global variables are not replaced; none of its functions depends on a
    variable that changes; and what a function captured when it was made is not assigned later, not even
    by another function in the same scope. Otherwise a compiled program gives stale results.

    Args:
        *packages: names of top-level packages, imported already or not.

    Raises:
        ValueError: for `__main__`, whose functions are expected to change; for anything but the name of
            a top-level package.

    Example:
        >>> import vernal
        >>> vernal.settled("mypackage")
    """
    for package in packages:
        if package == "__main__" or not package.isidentifier():
            raise value_error(
                "settled takes the name of a whole package",
                where=f"settled({package!r})",
                expected="the name of a top-level package, such as 'mypackage'",
                got=repr(package),
                instead="move the functions into a package, and name that",
            )
    settled_packages.update(packages)
