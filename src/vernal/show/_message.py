"""The common form of our error messages: what happened, where, what was expected and got, what to
write instead."""

from collections.abc import Iterable
from typing import Any


def message(
    what: str,
    *,
    where: str | None = None,
    expected: str | None = None,
    got: str | None = None,
    instead: str | None = None,
) -> str:
    """The text of an error.

    Args:
        what: one sentence: what happened.
        where: the path, argument or field concerned.
        expected: what would have been right.
        got: what was found.
        instead: what to write instead.

    Returns:
        `what`, then one indented line for each part that is given. Later lines of a part are
        indented further.

    Example:
        >>> from vernal.show import message
        >>> print(message("shapes differ", where="model.weight", expected="f32[3]", got="f32[2]"))
        shapes differ
          where: model.weight
          expected: f32[3]
          got: f32[2]
    """
    parts = {"where": where, "expected": expected, "got": got, "instead": instead}
    lines = [what]
    for label, text in parts.items():
        if text is not None:
            lines.append(f"  {label}: " + text.replace("\n", "\n    "))
    return "\n".join(lines)


def value_error(what: str, **parts: str | None) -> ValueError:
    """Makes a `ValueError` with a message.

    Args:
        what: one sentence: what happened.
        **parts: `where`, `expected`, `got`, `instead`, as for `message`.

    Returns:
        The error, to be raised.

    Example:
        >>> from vernal.show import value_error
        >>> raise value_error("shapes differ", expected="f32[3]", got="f32[2]")
        Traceback (most recent call last):
        ValueError: shapes differ
          expected: f32[3]
          got: f32[2]
    """
    return ValueError(message(what, **parts))


def type_error(what: str, **parts: str | None) -> TypeError:
    """Makes a `TypeError` with a message.

    Args:
        what: one sentence: what happened.
        **parts: `where`, `expected`, `got`, `instead`, as for `message`.

    Returns:
        The error, to be raised.

    Example:
        >>> from vernal.show import type_error
        >>> raise type_error("not an array", where="argument `x`", got="str")
        Traceback (most recent call last):
        TypeError: not an array
          where: argument `x`
          got: str
    """
    return TypeError(message(what, **parts))


def listed(things: Iterable[Any], separator: str = ", ", most: int = 10) -> str:
    r"""Lists the first few of many items, and how many more there are.

    Args:
        things: the items; each is written by `str`.
        separator: the text between them: `", "`, or `"\n"` for one on each line.
        most: the maximum number of items to list.

    Example:
        >>> from vernal.show import listed
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    texts = list(map(str, things))
    more = len(texts) - most
    told = separator.join(texts[:most])
    if more <= 0:
        return told
    return f"{told}{separator if separator.isspace() else ' '}and {more} more"
