"""As many products as a tolerance needs.

The difficulty: which method needs the fewest products is known only afterwards. Deflation (a basis of the range) is
worth everything for a spectrum that decays, and nothing for a flat one.

The plan: probes and products come in chunks, and go into a growing sketch. The quadratic forms of the sketch are the
plain Hutchinson estimate, which costs nothing more, and is looked at after every chunk. The deflating method looks at
the same sketch now and then; the first to meet the tolerance ends the loop. For a positive semidefinite operator a look
costs no product. Otherwise it costs as many as the sketch has columns: then there is a first look only if Hutchinson
has far to go, and another one, at twice the columns, only as long as deflation wins.

If `max_matvecs` allows the exact answer, the loop ends as soon as neither method seems to get there with less; the
sketch is then completed to a basis of the whole space, which takes `size` products together with those that were made.

Invariants: columns of the sketch from `used` on are zero. `used + extra` products have been made, and never more than
`limit`. A look works with the narrowest of a few widths, each compiled once: without that every look would cost as much
as one at the full width.

Glossary: chunk: so many columns are added at a time. Look: an evaluation of the deflating method. Free: a look costs no
product. Ratio: the half width of an error interval over the tolerance; at most 1 is success.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..trees import tree_at
from ._choose import Deflation, deflation
from ._exact import completed_trace, exact_trace
from ._hutchinson import Hutchinson
from ._method import Outcome, default_probes
from ._operators import Operator
from ._probes import Probes
from ._sensitivity import Sensitivity

# Columns that are added at a time. An error is estimated from so many at least, if the budget has them.
CHUNK = 16
# Of the intervals. More than the 95% that are promised: there are many looks, and the first success ends them.
# Student's quantiles at a level of 99%, by the inverse of the degrees of freedom: interpolated, because the exact ones
# would take longer than a look.
_DEGREES = 1 / np.asarray([np.inf, 30, 15, 10, 8, 6, 5, 4, 3, 2, 1])
_QUANTILES = np.asarray(
    [2.5758, 2.7500, 2.9467, 3.1693, 3.3554, 3.7074, 4.0321, 4.6041, 5.8409, 9.9248, 63.657]
)
# By which part of itself the sketch grows between two looks that are free; it doubles between any other.
_SHARE = 4
# A look that is not free is worth a try if Hutchinson has still so many times its cost to go.
_FAR = 2
# Between the widths of sketches that looks are compiled for.
_WIDER = 4


class _Found(NamedTuple):
    """What a method makes of the sketch."""

    value: Array
    variance: Array
    degrees_of_freedom: Array
    consistent: Array
    columns: Array
    """How many the sketch had."""


class _State(NamedTuple):
    """Of the loop."""

    probes: Array
    products: Array
    forms: Array
    used: Array
    extra: Array
    found: _Found
    """By the last look; with infinite variance before the first."""
    pace: Array
    """With what power of the columns the interval shrank between the last two looks."""
    deflating: Array
    """Whether there may be another look."""
    stop: Array


class Run(Module):
    """What does not change in the loop, and its steps."""

    operator: Operator
    key: PRNGKeyArray
    method: Hutchinson | Deflation | None
    rtol: Array
    atol: Array
    most: int

    @property
    def can_complete(self) -> bool:
        """Whether the exact answer is within the budget."""
        return self.most == self.operator.size

    @property
    def limit(self) -> int:
        """How many products there may be in the loop. A basis can only be completed well if some of it is missing."""
        return self.most - CHUNK if self.can_complete else self.most

    @property
    def deflation(self) -> Deflation | None:
        """The method of the looks."""
        if isinstance(self.method, Hutchinson):
            return None
        return deflation(self.operator, self.limit) if self.method is None else self.method

    @property
    def is_free(self) -> bool:
        """Whether a look costs no product."""
        return self.deflation is not None and self.deflation.needs_positive_semidefinite

    @property
    def widest(self) -> int:
        """Of the sketches that are looked at."""
        most = self.limit if self.is_free else self.limit // 2
        return (
            min(most, self.operator.size // 2)
            if self.can_complete
            else min(most, self.operator.size - 1)
        )

    @property
    def probes(self) -> Probes:
        """The method's own, or signs: so that the forms are the best that Hutchinson can have."""
        method = self.deflation if self.method is None else self.method
        return getattr(method, "probes", None) or default_probes(self.operator)

    def start(self) -> _State:
        """No product yet."""
        columns = self.limit + CHUNK
        kept = 0 if self.deflation is None else columns
        dtype = self.operator.dtype
        real = jnp.finfo(dtype).dtype
        value = real if self.operator.symmetric else dtype
        none = jnp.zeros((), int)
        return _State(
            probes=jnp.zeros((self.operator.size, kept), dtype),
            products=jnp.zeros((self.operator.size, kept), dtype),
            forms=jnp.zeros(columns, value),
            used=none,
            extra=none,
            found=_Found(
                jnp.zeros((), value),
                jnp.asarray(jnp.inf, real),
                jnp.ones((), real),
                jnp.asarray(True),
                none,
            ),
            pace=jnp.asarray(jnp.inf, real),
            deflating=jnp.asarray(self.deflation is not None),
            stop=jnp.asarray(False),
        )

    def advance(self, state: _State) -> _State:
        """Chunks up to the next look, and the look."""
        target = self.target(state)

        def goes_on(state: _State) -> Array:
            return (state.used < target) & ~self.plain_ends(state)

        state = lax.while_loop(goes_on, partial(self.extended, target), state)
        if self.deflation is not None:
            state = self.looked(self.deflation, state)
        is_met = self.ratio(state.found) <= 1
        ends = is_met | self.plain_ends(state) | (self.target(state) <= state.used)
        return state._replace(stop=ends | (self.is_hopeless(state) if self.can_complete else False))

    def target(self, state: _State) -> Array:
        """How many columns to have at the next look; no more than there are, if nothing is left to be done."""
        left = self.limit - state.extra
        added = state.used // _SHARE
        if not self.is_free:
            added = jnp.where(state.deflating, state.used, added)
        target = jnp.minimum(state.used + jnp.maximum(added, CHUNK), left)
        if self.is_free or self.deflation is None:
            return target
        # Once deflation has won, columns are of use only if they can be looked at, and that costs as many again.
        won = jnp.isfinite(state.found.variance) | (self.method is not None)
        return jnp.where(
            state.deflating & won, jnp.minimum(target, jnp.minimum(left // 2, self.widest)), target
        )

    def extended(self, target: Array, state: _State) -> _State:
        """One chunk more."""
        size, dtype = self.operator.size, self.operator.dtype
        count = jnp.minimum(CHUNK, target - state.used)
        drawn = self.probes.draw(jax.random.fold_in(self.key, state.used), size, CHUNK, dtype)
        drawn = jnp.where((jnp.arange(CHUNK) < count)[None, :], drawn, 0)
        made = self.operator.matmul(drawn)
        forms = jnp.sum(drawn.conj() * made, axis=0)
        if not jnp.iscomplexobj(state.forms):
            forms = forms.real
        if self.deflation is not None:
            state = state._replace(
                probes=lax.dynamic_update_slice_in_dim(state.probes, drawn, state.used, axis=1),
                products=lax.dynamic_update_slice_in_dim(state.products, made, state.used, axis=1),
            )
        return state._replace(
            forms=lax.dynamic_update_slice_in_dim(state.forms, forms, state.used, axis=0),
            used=state.used + count,
        )

    def looked(self, deflation: Deflation, state: _State) -> _State:
        """A look, if it is time for one."""
        cost = jnp.zeros_like(state.used) if self.is_free else state.used
        due = state.deflating & (state.used <= self.widest) & ~self.plain_ends(state)
        due &= state.used + state.extra + cost <= self.limit
        plain = self.plain(state)
        tried = self.method is None and not self.is_free
        if tried:
            ahead = self.plain_need(state) - (state.used + state.extra).astype(plain.variance.dtype)
            due &= ahead >= _FAR * cost.astype(plain.variance.dtype)
            if self.can_complete:
                # Not even if the looks turn out to be in vain there may be more products than Hutchinson needs.
                in_vain = state.extra + cost
                most = (self.operator.size + in_vain).astype(plain.variance.dtype)
                due &= (in_vain <= CHUNK) | (self.plain_least(state) >= most)
        found = self.look(deflation, state, due)
        extra = state.extra + jnp.where(due, cost, 0)
        deflating = state.deflating
        if tried:
            # Hutchinson's variance with as many products as deflation has had.
            share = state.used.astype(plain.variance.dtype) / (state.used + extra).astype(
                plain.variance.dtype
            )
            deflating &= ~due | (found.consistent & (found.variance < plain.variance * share))
        return state._replace(
            found=found,
            extra=extra,
            pace=self.pace(state.found, found, state.pace),
            deflating=deflating,
        )

    def look(self, deflation: Deflation, state: _State, due: Array) -> _Found:
        """The deflating method on the sketch, at the narrowest width that holds it."""
        widths = [min(CHUNK, self.widest)]
        while widths[-1] < self.widest:
            widths.append(min(_WIDER * widths[-1], self.widest))

        def at(width: int) -> _Found:
            sketch = state.probes[:, :width], state.products[:, :width], state.used
            outcome = deflation.from_sketch(self.operator, *sketch)
            return _Found(
                outcome.value.astype(state.found.value.dtype),
                outcome.variance.astype(state.found.variance.dtype),
                outcome.degrees_of_freedom.astype(state.found.variance.dtype),
                outcome.consistent,
                state.used,
            )

        place = jnp.sum(state.used > jnp.asarray(widths, int), dtype=int)
        branches = [lambda: state.found, *(partial(at, width) for width in widths)]
        return lax.switch(jnp.where(due, place + 1, 0), branches)

    def plain(self, state: _State) -> _Found:
        """Hutchinson's estimate from the sketch's quadratic forms."""
        real = state.found.variance.dtype
        count = jnp.maximum(state.used, 1).astype(real)
        mask = jnp.arange(state.forms.size) < state.used
        mean = jnp.sum(state.forms) / count.astype(state.forms.dtype)
        spread = jnp.sum(jnp.where(mask, jnp.abs(state.forms - mean) ** 2, 0))
        variance = jnp.where(count > 1, spread / (count * jnp.maximum(count - 1, 1)), jnp.inf)
        consistent = mean.real >= 0 if self.operator.positive_semidefinite else jnp.asarray(True)
        return _Found(mean, variance, jnp.maximum(count - 1, 1), consistent, state.used)

    def ratio(self, found: _Found) -> Array:
        """The half width of the interval over the tolerance."""
        real = found.variance.dtype
        table = jnp.asarray(_DEGREES, real), jnp.asarray(np.log(_QUANTILES), real)
        half = jnp.exp(jnp.interp(1 / found.degrees_of_freedom, *table)) * jnp.sqrt(found.variance)
        most = jnp.maximum(self.atol, self.rtol * jnp.abs(found.value))
        ratio = jnp.where(half <= most, jnp.where(half == 0, 0, 1), jnp.inf)
        return jnp.where(found.consistent, jnp.where(most > 0, half / most, ratio), jnp.inf)

    def plain_need(self, state: _State) -> Array:
        """How many products Hutchinson needs for the tolerance, as it seems."""
        return state.used.astype(state.found.variance.dtype) * self.ratio(self.plain(state)) ** 2

    def plain_ends(self, state: _State) -> Array:
        """Whether Hutchinson has met the tolerance, or is alone and never will."""
        if self.method is not None and self.deflation is not None:
            return jnp.asarray(False)
        ends = (self.ratio(self.plain(state)) <= 1) & (state.used > 1)
        return ends | (~state.deflating & self.is_too_far(state)) if self.can_complete else ends

    def plain_least(self, state: _State) -> Array:
        """The same, less two standard deviations of that."""
        need = self.plain_need(state)
        return need * jnp.maximum(
            1 - 2 * jnp.sqrt(2 / jnp.maximum(state.used, 1).astype(need.dtype)), 0
        )

    def is_too_far(self, state: _State) -> Array:
        """Whether Hutchinson, if it is watched, needs more products than there are rows."""
        if self.method is not None and self.deflation is not None:
            return jnp.asarray(True)
        return (state.used > 0) & (self.plain_least(state) > self.operator.size)

    def is_hopeless(self, state: _State) -> Array:
        """Whether neither method seems to meet the tolerance with fewer products than the exact answer takes."""
        if self.deflation is None:
            return self.is_too_far(state)
        # The pace may double yet: a cliff in the spectrum.
        real = state.found.variance.dtype
        way = state.used.astype(real) / jnp.asarray(max(self.widest, 1), real)
        never = self.ratio(state.found) * way ** (2 * state.pace) > 1
        late = state.used * 8 >= self.operator.size
        return (~state.deflating | (late & never)) & self.is_too_far(state)

    def pace(self, before: _Found, after: _Found, known: Array) -> Array:
        """Of two looks; at least that of independent samples."""
        growth = after.columns.astype(known.dtype) / jnp.maximum(before.columns, 1).astype(
            known.dtype
        )
        pace = jnp.log(before.variance / after.variance) / (2 * jnp.log(growth))
        usable = (after.columns > before.columns) & (before.columns > 0) & jnp.isfinite(pace)
        return jnp.where(usable, jnp.maximum(pace, 0.5), known)

    def outcomes(self, state: _State) -> tuple[Outcome, ...]:
        """By Hutchinson, and by the deflating method."""
        made = state.used + state.extra
        plain = self.plain(state)
        if self.deflation is None:
            drawn = _Drawn(
                self.key, self.probes, self.operator.size, self.operator.dtype, state.used
            )
            return (_outcome(plain, made, drawn),)
        mask = (jnp.arange(state.probes.shape[1]) < state.found.columns)[None, :]
        probes, made_of = (
            jnp.where(mask, x, 0)[:, : self.widest] for x in (state.probes, state.products)
        )
        sensitivity = self.deflation.from_sketch(
            self.operator, probes, made_of, state.found.columns
        ).sensitivity
        # What the looks saw to be false of the operator is false whatever Hutchinson sees.
        plain = plain._replace(consistent=plain.consistent & state.found.consistent)
        made = made.astype(jnp.int32)
        return _outcome(plain, made, _Kept(state.probes, state.used)), _outcome(
            state.found, made, sensitivity
        )

    def completed(self, state: _State, wanted: Array) -> Outcome:
        """The exact trace, if it is wanted."""
        if self.deflation is None:
            exact = exact_trace(self.operator, wanted=wanted)
            return tree_at(
                lambda outcome: outcome.matvecs, exact, exact.matvecs + state.used.astype(jnp.int32)
            )
        sketch = state.probes, state.products, state.used
        exact = completed_trace(self.operator, self.key, sketch, wanted)
        new = (
            exact.matvecs + state.extra.astype(jnp.int32),
            exact.consistent & state.found.consistent,
        )
        return tree_at(lambda outcome: (outcome.matvecs, outcome.consistent), exact, new)


def _outcome(found: _Found, matvecs: Array, sensitivity: Sensitivity) -> Outcome:
    return Outcome(
        value=found.value,
        variance=found.variance,
        degrees_of_freedom=found.degrees_of_freedom,
        matvecs=matvecs,
        consistent=found.consistent,
        sensitivity=sensitivity,
    )


class _Drawn(Sensitivity):
    """The probes, drawn again chunk by chunk."""

    key: PRNGKeyArray
    probes: Probes
    size: int
    dtype: Any = field(static=True)
    used: Array

    def blocks(self) -> Array:
        return -(-self.used // CHUNK)

    def block(self, index: int | Array) -> tuple[Array, Array]:
        start = jnp.asarray(index * CHUNK, int)
        drawn = self.probes.draw(jax.random.fold_in(self.key, start), self.size, CHUNK, self.dtype)
        drawn = jnp.where((start + jnp.arange(CHUNK) < self.used)[None, :], drawn, 0)
        return drawn / self.used.astype(drawn.dtype), drawn


class _Kept(Sensitivity):
    """The probes of the sketch, chunk by chunk."""

    probes: Array
    used: Array

    def blocks(self) -> Array:
        return -(-self.used // CHUNK)

    def block(self, index: int | Array) -> tuple[Array, Array]:
        chunk = lax.dynamic_slice_in_dim(self.probes, index * CHUNK, CHUNK, axis=1)
        return chunk / self.used.astype(chunk.dtype), chunk
