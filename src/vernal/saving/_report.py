"""`LoadReport`: what did not fit when a tree was filled."""

import dataclasses

from ..show import shown_name


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What did not fit when a file was loaded with `strict=False`.

    Attributes:
        missing: by name, what the tree expects and the file lacks.
        extra: by name, what the file has and the tree does not expect.
        misshapen: by name, what was expected and what was found, for entries of another shape or
            dtype.

    Example:
        >>> from vernal.saving import LoadReport
        >>> print(LoadReport(missing={"bias": "f32[3]"}, misshapen={"weight": ("f32[3,2]", "f32[2,3]")}))
        bias: missing, expected f32[3]
        weight: expected f32[3,2], found f32[2,3]
    """

    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    extra: dict[str, str] = dataclasses.field(default_factory=dict)
    misshapen: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{shown_name(n)}: missing, expected {text}" for n, text in self.missing.items()]
        lines += [f"{shown_name(n)}: not expected, found {text}" for n, text in self.extra.items()]
        lines += [
            f"{shown_name(n)}: expected {expected}, found {found}"
            for n, (expected, found) in self.misshapen.items()
        ]
        return "\n".join(lines) or "everything fits"
