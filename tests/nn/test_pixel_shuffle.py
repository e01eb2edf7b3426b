"""`PixelShuffle` and `PixelUnshuffle`: each the inverse of the other. (PyTorch's are in `test_torch.py`.)"""

import jax
import jax.numpy as jnp
import pytest

from vernal import nn


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.sample(3)
def test_they_are_inverses_bit_by_bit(factor, dtype, getkey):
    x = jax.random.normal(getkey(), (2, 2 * factor**2, 3, 3)).astype(dtype)
    shuffle, unshuffle = nn.PixelShuffle(factor), nn.PixelUnshuffle(factor)
    y = shuffle(x)
    assert y.shape == (2, 2, 3 * factor, 3 * factor) and y.dtype == dtype
    assert (unshuffle(y) == x).all() and (shuffle(unshuffle(y)) == y).all()


def test_the_order_is_rows_first():
    # As many channels as rows and columns.
    y = nn.PixelShuffle(2)(jnp.arange(64).reshape(4, 4, 4))
    assert y.shape == (1, 8, 8)
    assert y[0, 6:, 2:4].tolist() == [[13, 29], [45, 61]]


def test_an_empty_image_stays_empty():
    assert nn.PixelShuffle(2)(jnp.ones((4, 0, 3))).shape == (1, 0, 6)
    assert nn.PixelUnshuffle(2)(jnp.ones((1, 0, 6))).shape == (4, 0, 3)


def test_what_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match=r"(?s)cannot arrange the channels in squares.*factor\*\*2=4.*got: 6"
    ):
        nn.PixelShuffle(2)(jnp.ones((6, 2, 2)))
    with pytest.raises(ValueError, match=r"(?s)into whole squares.*divisible by factor=2.*4 and 3"):
        nn.PixelUnshuffle(2)(jnp.ones((1, 4, 3)))


@pytest.mark.parametrize("layer", [nn.PixelShuffle, nn.PixelUnshuffle])
def test_wrong_arguments_are_refused(layer):
    with pytest.raises(ValueError, match=rf"(?s)`{layer.__name__}`.*`factor`.*at least 1"):
        layer(0)
    with pytest.raises(
        ValueError, match=rf"(?s)`{layer.__name__}`.*\(\.\.\., channels, height, width\)"
    ):
        layer(2)(jnp.ones((4, 4)))
