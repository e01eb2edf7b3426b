"""`GroupNorm` for single examples only, as Equinox has it: nothing else that an input could be."""

from jax import Array

from .... import nn


class GroupNorm(nn.GroupNorm):
    """`vernal.nn.GroupNorm`, whose input is always one example unless `num_spatial_dims` is given."""

    def _refuse_two_readings(self, x: Array, fitting: list[bool]) -> None:
        pass
