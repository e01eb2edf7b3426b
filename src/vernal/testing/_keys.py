"""Random keys for tests: different on every run, and replayable from one number.

A test with a constant seed always checks the same point; a random seed that cannot be repeated is
worse. `GetKey` shows its seed in its `repr`, which pytest prints when a test with such an argument
fails.
"""

import dataclasses
import secrets

import jax
from jaxtyping import Key


# Two sources are never equal: each returns its own keys.
@dataclasses.dataclass(init=False, eq=False)
class GetKey:
    """A source of fresh random keys.

    Call number `n` returns `jax.random.fold_in(jax.random.key(seed), n)`: a source with the same
    seed repeats the same keys in the same order.

    Args:
        seed: a non-negative integer below 2**31; None draws one from the operating system.

    Attributes:
        seed: the seed in use. Pass it to a new `GetKey` to replay the keys.
        calls: the number of keys returned so far.

    Example:
        As a pytest fixture:

        >>> import pytest
        >>> @pytest.fixture
        ... def getkey():
        ...     return GetKey()

        and by hand:

        >>> import jax
        >>> from vernal.testing import GetKey
        >>> getkey = GetKey(seed=0)
        >>> x = jax.random.normal(getkey(), (3,))
        >>> y = jax.random.normal(getkey(), (3,))
        >>> getkey
        GetKey(seed=0, calls=2)
        >>> bool((x == y).any())
        False
    """

    seed: int
    calls: int

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbelow(2**31) if seed is None else seed
        self.calls = 0

    def __call__(self) -> Key[jax.Array, ""]:
        """Returns the next key.

        Returns:
            A typed JAX PRNG key of shape `()`.
        """
        key = jax.random.fold_in(jax.random.key(self.seed), self.calls)
        self.calls += 1
        return key
