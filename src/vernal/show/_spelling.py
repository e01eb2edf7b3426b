"""How a key of a tree is written down.

There are two spellings. In a name the key stands between dots: `layers.0."a.b"`. In a path it is the
Python expression that reaches it: `.layers[0]['a.b']`. Here is what makes both of a key, and a name
of what stands in the brackets of a path.
"""

import ast
import json
import re
from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu
import numpy as np

_PLAIN = re.compile(r'(?!-?\d+\Z)[^\s.*?\[\]{},"`\\](?:[^.*?\[\]{},"`\\]*[^\s.*?\[\]{},"`\\])?')
_INDEX = re.compile(r"0|-?[1-9]\d*")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_FLAT_INDEX = re.compile(r"<flat index (\d+)>")
# What may stand in the brackets of a path: a string, an index, another constant, the repr of
# something else, or `*` for any key. All else in brackets is a set of characters.
BRACKET = re.compile(
    rf"""\[(?P<key>\*|{_INDEX.pattern}|{_STRING.pattern}|`(?:[^`\\]|\\.)*`|None|True|False
    |-?\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)|b'(?:[^'\\]|\\.)*'|<.*?>|[\w.]*\(.*?\))\](?=[.\[}},]|\Z)""",
    re.DOTALL | re.VERBOSE,
)


def quoted(text: str) -> str:
    """The name of a key that is a string: the string itself, in quotes if it could be misread.

    Args:
        text: the key.
    """
    plain = _PLAIN.fullmatch(text) and text.isprintable()
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _in_backquotes(text: str) -> str:
    return "`" + text.replace("\\", "\\\\").replace("`", "\\`") + "`"


def unquoted(name: str) -> str:
    """The text of a name, without quotes.

    Args:
        name: a name, in double quotes, in backquotes or plain.
    """
    if name[:1] == '"':
        return json.loads(name, strict=False)
    return re.sub(r"\\(.)", r"\1", name[1:-1], flags=re.DOTALL) if name[:1] == "`" else name


def name_of_text(text: str) -> str:
    """The name of the key that a part of a path without quotes stands for: an index, or a string.

    Args:
        text: the part.
    """
    return text if _INDEX.fullmatch(text) else quoted(text)


class UnnamedKey(jtu.GetAttrKey):
    """The key of a field that adds nothing to a path: what is in the field has the name of the module around it.

    To whoever looks at the class of a key, it is that of an ordinary field.
    """

    def __str__(self) -> str:
        return ""


def field_key(cls: Any, name: str) -> Any:
    """The key of a field of a module.

    Args:
        cls: the class. Its `_vernal_unnamed` says which of its fields, if any, has no name in paths.
        name: the field.
    """
    unnamed = name == getattr(cls, "_vernal_unnamed", None)
    return UnnamedKey(name) if unnamed else jtu.GetAttrKey(name)


def key_names(path: Iterable[Any]) -> tuple[str, ...]:
    """The names of the keys of a path, for those that have one.

    Args:
        path: key entries, as in `jax.tree_util.tree_flatten_with_path`.
    """
    return tuple(key_name(key) for key in path if not isinstance(key, UnnamedKey))


def key_name(key: Any) -> str:
    """The name of a key: what `vernal.trees.path_name` puts between dots."""
    if isinstance(key, jtu.GetAttrKey):
        value = key.name
    elif isinstance(key, jtu.SequenceKey):
        value = key.idx
    elif isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey)):
        value = key.key
    else:
        # A key class of somebody else. JAX asks of it only that it prints.
        value = str(key)
    if type(value) is int or isinstance(value, np.integer):
        # NumPy's integers are the same keys of a dictionary as Python's.
        return str(int(value))
    return quoted(value) if isinstance(value, str) else _in_backquotes(repr(value))


def name_in_brackets(text: str) -> str:
    """The name of the key that stands in the brackets of a path.

    Args:
        text: what is in the brackets.
    """
    if _INDEX.fullmatch(text):
        return text
    if text[0] == "`":
        return _in_backquotes(unquoted(text))
    if _STRING.fullmatch(text):
        return quoted(ast.literal_eval(text))
    flat = _FLAT_INDEX.fullmatch(text)
    return flat[1] if flat else _in_backquotes(text)


def key_text(key: Any) -> str:
    """A key as the end of a Python expression, which `BRACKET` can read back."""
    if isinstance(key, (jtu.SequenceKey, jtu.FlattenedIndexKey)):
        return str(key)
    if isinstance(key, UnnamedKey):
        return ""
    if not isinstance(key, jtu.DictKey):
        return f".{key_name(key)}"
    value = int(key.key) if isinstance(key.key, np.integer) else key.key
    text = str.__repr__(value) if isinstance(value, str) else repr(value)
    found = BRACKET.match(f"[{text}]")
    read_back = found and found["key"] == text != "*" and name_in_brackets(text) == key_name(key)
    return f"[{text if read_back else _in_backquotes(text)}]"
