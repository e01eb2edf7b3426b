"""One door to private JAX, each name beside the version that retires it."""

from pathlib import Path

import pytest

from tests.architecture._checks import check_private_jax, listing

SOURCE = Path(__file__).parents[2] / "src" / "vernal"


def test_private_jax_is_used_only_behind_its_door():
    problems = check_private_jax(SOURCE)
    assert not problems, listing(problems)


def put(tmp_path: Path, name: str, text: str) -> Path:
    root = tmp_path / "vernal"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "text",
    [
        "import jax._src.core\n",
        "from jax._src import core\n",
        "from jax import extend\n",
        "from jax.interpreters import ad\n",
        "import jax\nx = jax.interpreters.ad.Zero\n",
        "def f():\n    from jax.extend.core import Primitive\n",
    ],
)
def test_private_jax_elsewhere_is_found(tmp_path, text):
    found = check_private_jax(put(tmp_path, "trees/_walk.py", text))
    assert len(found) == 1
    assert found[0].endswith("is private JAX")


@pytest.mark.parametrize("text", ["from jax.core import Tracer\n", "import jax.extended\n"])
def test_public_jax_is_free(tmp_path, text):
    assert check_private_jax(put(tmp_path, "trees/_walk.py", text)) == []


def test_the_door_asks_for_a_version_beside_each_name(tmp_path):
    text = (
        "# Retired by JAX 0.13, which makes it public.\n"
        "from jax._src.core import A as A\n"
        "from jax._src.core import B as B  # until JAX 0.14\n"
        "from jax._src.core import C as C\n"
    )
    (found,) = check_private_jax(put(tmp_path, "_ground/_jax_private.py", text))
    assert found.startswith("vernal/_ground/_jax_private.py:4: jax._src.core.C has no comment")
