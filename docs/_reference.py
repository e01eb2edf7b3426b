"""Pages that are made while the site is built.

The reference has every public name. In all other pages such a name in code, `vernal.tree_at` or `nn.Linear`, becomes a
link to its place there, and below each name stands which guides speak of it. The front page is the README, the examples
have a page each, and the files of the project that people read, such as the changes, are pages too.
"""

import ast
import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

import vernal

ROOT = Path(__file__).parent.parent
FOLDER = "reference"
# Files of the project, and where the links to them lead.
FILES = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
LINKS = {
    "](docs/": "](",
    "](examples)": "](examples/index.md)",
    **{f"]({file})": f"]({page})" for file, page in FILES.items()},
}
ROOMS = (
    *("modules", "trees", "transforms", "loops", "nn", "optim", "estimators", "linalg", "saving"),
    *("sharding", "runtime", "debug", "show", "harvest", "primitives", "testing", "compat"),
)


def public_names(module: types.ModuleType) -> list[str]:
    """What a room exports, in the order of the alphabet: `from ._x import y as y`. Rooms themselves are left out."""
    exported = re.findall(r"import (\w+) as \1$", inspect.getsource(module), re.MULTILINE)
    names = [x for x in exported if not isinstance(getattr(module, x), types.ModuleType)]
    return sorted(names, key=str.lower)


def _first_line(module: types.ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _page(title: str, module: types.ModuleType, names: list[str]) -> str:
    entries = "\n\n".join(f"::: {module.__name__}.{name}" for name in names)
    return f"# {title}\n\n{inspect.cleandoc(module.__doc__ or '')}\n\n{entries}\n"


def _pages(titles: dict[str, str]) -> dict[str, str]:
    """The text of each page by its path; `titles` are those that `mkdocs.yml` gives pages."""
    top = public_names(vernal)
    pages = {f"{FOLDER}/vernal.md": _page("vernal", vernal, top)}
    index = [
        "# Reference",
        "",
        "Every public name, by room. What is used most is in `vernal` itself.",
        "",
        f"* [`vernal`](vernal.md): {', '.join(f'[`{x}`][vernal.{x}]' for x in top)}",
    ]
    for room in ROOMS:
        module = importlib.import_module(f"vernal.{room}")
        rest = [name for name in public_names(module) if not _is_same(name, module)]
        pages[f"{FOLDER}/{room}.md"] = _page(f"vernal.{room}", module, rest)
        index.append(f"* [`vernal.{room}`]({room}.md): {_first_line(module)}")
    pages[f"{FOLDER}/index.md"] = "\n".join(index) + "\n"
    for file, page in FILES.items():
        pages[page] = _from_root((ROOT / file).read_text(encoding="utf-8"))
    return pages | _examples(titles)


def _from_root(text: str) -> str:
    """A page of the root, with links that hold on the site; one to a file that is no page is its name alone."""
    for link, there in LINKS.items():
        text = text.replace(link, there)
    return re.sub(r"\[([^]]*)\]\((benchmarks|tests|src)/[^)]*\)", r"\1", text)


def _titles(nav: Any) -> dict[str, str]:
    """The titles of pages in the navigation, in its order."""
    titles: dict[str, str] = {}
    for entry in nav if isinstance(nav, list) else ():
        for title, below in entry.items() if isinstance(entry, dict) else ():
            titles |= {below: title} if isinstance(below, str) else _titles(below)
    return titles


def _examples(titles: dict[str, str]) -> dict[str, str]:
    """A page for each example: what it says of itself, the program, what it prints and draws."""
    cards: dict[str, str] = {}
    pages: dict[str, str] = {}
    for file in sorted((ROOT / "examples").glob("*.py")):
        source = file.read_text(encoding="utf-8")
        title, text = _cells(source) if source.startswith("# %%") else _program(source)
        path = f"examples/{file.stem}.md"
        pages[path] = f"# {title}\n\n`examples/{file.name}`\n\n{text}\n{_results(file.stem)}"
        picture = f"![]({_figure(file.stem)}){{ loading=lazy }}" if _figure(file.stem) else ""
        cards[path] = f"-   **[{titles[path]}]({file.stem}.md)**\n\n    {title}.\n\n    {picture}\n"
    pages["examples/index.md"] = "\n".join(
        [
            "# Examples",
            "",
            "Whole programs on data that ship in packages or are made by a formula. Each runs on a laptop; those in",
            "cells (`# %%`) open as notebooks in VS Code, PyCharm and, by jupytext, in Jupyter.",
            "",
            '<div class="grid cards" markdown>',
            "",
            *(cards[path] for path in titles if path in cards),
            "</div>",
        ]
    )
    return pages


def _program(source: str) -> tuple[str, str]:
    """The title and the text of a program that begins with a docstring."""
    tree = ast.parse(source)
    title, _, rest = (ast.get_docstring(tree) or "").partition("\n\n")
    program = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip("\n")
    return title.replace("\n", " ").rstrip("."), f"{rest}\n\n```python\n{program}\n```\n"


def _cells(source: str) -> tuple[str, str]:
    """The title and the text of a program in cells."""
    texts: list[str] = []
    for cell in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        kind, _, body = cell.partition("\n")
        body = body.strip("\n")
        if "markdown" in kind:
            texts.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE))
        else:
            texts.append(f"```python\n{body}\n```")
    title, _, rest = texts[0].partition("\n")
    return title.removeprefix("# "), "\n\n".join([rest.strip("\n"), *texts[1:]])


def _figure(name: str) -> str:
    """Where the figure of an example is, seen from its page; empty if it draws none."""
    return f"../gallery/{name}.png" if (ROOT / "docs" / "gallery" / f"{name}.png").exists() else ""


def _results(name: str) -> str:
    """What an example printed and drew when `docs/_gallery.py` ran it."""
    printed = ROOT / "docs" / "gallery" / f"{name}.txt"
    text = ""
    if printed.exists():
        text += (
            f"\n## What it prints\n\n```text\n{printed.read_text(encoding='utf-8').rstrip()}\n```\n"
        )
    if _figure(name):
        text += f"\n## What it draws\n\n![the figure of {name}]({_figure(name)})\n"
    return text


def _is_same(name: str, module: types.ModuleType) -> bool:
    """Whether a name of a room is documented in `vernal`."""
    return name in dir(vernal) and getattr(vernal, name) is vars(module)[name]


def _places() -> dict[str, str]:
    """Under which name each public name is found, as guides may write it: `vernal.nn.Linear`, `nn.Linear`."""
    places = {f"vernal.{name}": f"vernal.{name}" for name in public_names(vernal)}
    for room in ROOMS:
        module = importlib.import_module(f"vernal.{room}")
        for name in public_names(module):
            home = "vernal" if _is_same(name, module) else f"vernal.{room}"
            for written in (f"vernal.{room}.{name}", f"{room}.{name}"):
                places[written] = f"{home}.{name}"
    return places


_PLACES = _places()
# Code in a line that is not part of a link yet, a name or a call of it; blocks of code are left out below.
_CODE = re.compile(r"(?<![\[`])`([\w.]+)(?:\([^`]*\))?`(?![\]`])")
_FENCED = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for path, text in _pages(_titles(config.nav)).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links the public names that a page has in code."""
    if page.file.src_uri.startswith((f"{FOLDER}/", "examples/")):
        return markdown
    if page.file.src_uri == "index.md":
        guides = markdown.partition("\n")[2]
        markdown = _from_root((ROOT / "README.md").read_text(encoding="utf-8"))
        markdown += f"\n## All guides\n{guides}"
    parts = _FENCED.split(markdown)
    # Every second one is a block of code.
    return "".join(part if i % 2 else _CODE.sub(_link, part) for i, part in enumerate(parts))


def _link(found: re.Match[str]) -> str:
    place = _PLACES.get(found[1])
    return found[0] if place is None else f"[{found[0]}][{place}]"


class Examples(griffe.Extension):
    """Reads a section `Example:` as what the parser of docstrings calls `Examples:`: code with its output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
