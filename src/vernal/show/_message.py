"""The one shape of our error messages: what happened, where, what was expected and got, what to
write instead."""


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
        where: the path, argument or field that it is about.
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
