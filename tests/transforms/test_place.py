"""Where in the user's code something was traced."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal.transforms._place import here, is_users_frame


def test_a_place_names_the_users_frames_and_none_of_jax_or_of_ours():
    def user_function(x):
        places.append(here())
        return x

    places = []
    jax.eval_shape(vernal.filter_jit(jax.vmap(user_function)), jnp.ones(2))
    text = str(places[0])
    lines = text.splitlines()
    assert lines[-2].endswith("in user_function")
    assert lines[-1].strip() == "places.append(here())"
    assert "test_place.py" in text
    assert "site-packages/jax/" not in text
    assert "/vernal/" not in text


def test_a_deep_place_is_cut_at_the_outer_end():
    def recurse(n):
        return here() if n == 0 else recurse(n - 1)

    lines = str(recurse(30)).splitlines()
    assert re.fullmatch(r"  \.\.\. \(\d+ outer frames\)", lines[0])
    assert "in recurse" in lines[1]
    assert len(recurse(30).entries) == 20


def frame_of(code, **namespace):
    """A frame that runs this code in a module of these names."""
    namespace["sys"] = sys
    exec(code, namespace)
    return namespace["frame"]


@pytest.mark.parametrize(
    ("names", "users"),
    [
        ({"__name__": "jax._src.api", "__package__": "jax._src"}, False),
        ({"__name__": "vernal"}, False),
        # `python -m vernal`.
        ({"__name__": "__main__", "__package__": "vernal"}, False),
        ({"__name__": "__main__", "__package__": None}, True),
        ({"__name__": "vernal_models.mlp", "__package__": "vernal_models"}, True),
        ({}, True),
    ],
)
def test_a_frame_is_known_by_its_module_wherever_its_file_lies(names, users):
    code = compile("frame = sys._getframe()", "app.zip/somewhere/a.py", "exec")
    assert is_users_frame(frame_of(code, **names)) is users


def test_a_frame_that_beartype_has_made_is_nobodys():
    code = compile("frame = sys._getframe()", "<@beartype(f) at 0x1>", "exec")
    assert not is_users_frame(frame_of(code, __name__="mine"))
