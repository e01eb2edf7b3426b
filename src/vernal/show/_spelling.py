"""The spellings of a key of a tree.

There are two. In a name, keys are joined by dots: `layers.0."a.b"`. In a path, a key is the Python
expression that reaches it: `.layers[0]['a.b']`. This file makes both from a key, and a name from the
brackets of a path.
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
# The keys in the brackets of a path: a string, an index, another constant, the repr of something
# else, or `*` for any key. Anything else in brackets is a set of characters.
BRACKET = re.compile(
    rf"""\[(?P<key>\*|{_INDEX.pattern}|{_STRING.pattern}|`(?:[^`\\]|\\.)*`|None|True|False
    |-?\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)|b'(?:[^'\\]|\\.)*'|<.*?>|[\w.]*\(.*?\))\](?=[.\[}},]|\Z)""",
    re.DOTALL | re.VERBOSE,
)


def quoted(text: str) -> str:
    """The name of a string key: the string itself, in quotes if it could be misread.

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
        name: a name, plain, in double quotes or in backquotes.
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
    """The key of a field that adds nothing to a path: the contents of the field have the name of the module around it.

    For code that checks the class of a key, it is the key of an ordinary field.
    """

    def __str__(self) -> str:
        return ""


def field_key(cls: Any, name: str) -> Any:
    """The key of a field of a module.

    Args:
        cls: the class. Its `_vernal_unnamed`, if any, is the field that has no name in paths.
        name: the field.
    """
    unnamed = name == getattr(cls, "_vernal_unnamed", None)
    return UnnamedKey(name) if unnamed else jtu.GetAttrKey(name)


def key_names(path: Iterable[Any]) -> tuple[str, ...]:
    """The names of the keys of a path that have one.

    Args:
        path: key entries, as in `jax.tree_util.tree_flatten_with_path`.
    """
    return tuple(key_name(key) for key in path if not isinstance(key, UnnamedKey))


def key_name(key: Any) -> str:
    """The name of a key, as `vernal.trees.path_name` puts it between dots."""
    if isinstance(key, jtu.GetAttrKey):
        value = key.name
    elif isinstance(key, jtu.SequenceKey):
        value = key.idx
    elif isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey)):
        value = key.key
    else:
        # Another library's key class. JAX requires only that it prints.
        value = str(key)
    if type(value) is int or isinstance(value, np.integer):
        # As keys of a dictionary, NumPy's integers equal Python's.
        return str(int(value))
    return quoted(value) if isinstance(value, str) else _in_backquotes(repr(value))


def name_in_brackets(text: str) -> str:
    """The name of the key in the brackets of a path.

    Args:
        text: the text in the brackets.
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
