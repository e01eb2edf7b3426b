"""As many products as a tolerance needs.

The difficulty: which method needs the fewest products is known only afterwards. Deflation (a basis of the range) is
worth everything for a spectrum that decays, and nothing for a flat one.

The plan: probes and products come in chunks, and go into a growing sketch. The quadratic forms of the sketch are the
plain Hutchinson estimate, which costs nothing more, and is looked at after every chunk. The deflating method looks at
the same sketch now and then; the first to meet the tolerance ends the loop. For a positive semidefinite operator a look
costs no product.

Otherwise it costs one for each probe since the last look, and these are no use to Hutchinson. There must never be more
products than Hutchinson alone would make, but for one chunk. So the first look is at one chunk, if Hutchinson has far
to go. There is another one only if what was seen is better, beyond doubt, than Hutchinson's estimate from as many
products; or better at all, where Hutchinson alone would use up its budget, or give up for the exact answer.

If `max_matvecs` allows the exact answer, the loop ends as soon as neither method seems to get there with less; the
sketch is then completed to a basis of the whole space, which takes `size` products together with those that were made,
those for looks included (`_growing.py`).

Invariants: there are never more products than `limit`. A look works with the narrowest of a few widths, each compiled
once: without that every look would cost as much as one at the full width.

Glossary: chunk, look, free: as in `_growing.py`. Ratio: the half width of an error interval over the tolerance; at most
1 is success.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ..modules import Module
from ..trees import tree_at
from ._choose import Deflation, deflation
from ._exact import completed_trace, exact_trace
from ._growing import CHUNK, Drawn, Free, Kept, Nested, Stream
from ._hutchinson import Hutchinson
from ._method import Outcome, default_probes
from ._sensitivity import Sensitivity
from ._xnystrace import XNysTrace

# Of the intervals. More than the 95% that are promised: there are many looks, and the first success ends them.
# Student's quantiles at a level of 99%, by the inverse of the degrees of freedom: interpolated, because the exact ones
# would take longer than a look.
_DEGREES = 1 / np.asarray([np.inf, 30, 15, 10, 8, 6, 5, 4, 3, 2, 1])
_QUANTILES = np.asarray(
    [2.5758, 2.7500, 2.9467, 3.1693, 3.3554, 3.7074, 4.0321, 4.6041, 5.8409, 9.9248, 63.657]
)
# By which part of itself the sketch grows between two looks, in whole chunks.
_SHARE = 4
# A look that is not free is worth a try if Hutchinson has still so many times its cost to go.
_FAR = 2
# Between the widths of sketches that looks are compiled for.
_WIDER = 4
# Beyond doubt: so many standard deviations of the logarithm of a ratio of variances.
_DOUBT = 2


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

    kept: Kept | None
    """The sketch, if a deflating method looks at it."""
    forms: Array
    used: Array
    """How many probes there are."""
    made: Array
    """How many products."""
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
    def sketch(self) -> Free | Nested | None:
        """What the looks are at."""
        if isinstance(self.method, Hutchinson):
            return None
        method = deflation(self.operator, self.limit) if self.method is None else self.method
        size = self.operator.size
        most = size // 2 if self.can_complete else size - 1
        if method is None:
            return None
        if isinstance(method, XNysTrace):
            return Free(self.operator, self.limit, min(self.limit, most), method)
        return Nested(self.operator, self.limit, min(self.limit // 2, most), method)

    @property
    def is_watched(self) -> bool:
        """Whether Hutchinson's estimate counts."""
        return self.method is None or isinstance(self.method, Hutchinson)

    @property
    def is_tried(self) -> bool:
        """Whether looks cost products that Hutchinson would not make."""
        return self.method is None and isinstance(self.sketch, Nested)

    @property
    def stream(self) -> Stream:
        """Of the method's own probes, or signs: so that the forms are the best that Hutchinson can have."""
        sketch = self.sketch
        method = self.method if sketch is None else sketch.method
        probes = getattr(method, "probes", None) or default_probes(self.operator)
        return Stream(self.key, probes, self.operator.size, self.operator.dtype)

    def start(self) -> _State:
        """No product yet."""
        dtype = self.operator.dtype
        real = jnp.finfo(dtype).dtype
        value = real if self.operator.symmetric else dtype
        none = jnp.zeros((), int)
        return _State(
            kept=None if self.sketch is None else self.sketch.start(),
            forms=jnp.zeros(self.limit + CHUNK, value),
            used=none,
            made=none,
            found=_Found(
                jnp.zeros((), value),
                jnp.asarray(jnp.inf, real),
                jnp.ones((), real),
                jnp.asarray(True),
                none,
            ),
            pace=jnp.asarray(jnp.inf, real),
            deflating=jnp.asarray(self.sketch is not None),
            stop=jnp.asarray(False),
        )

    def advance(self, state: _State) -> _State:
        """Chunks up to the next look, and the look."""
        target = self.target(state)

        def goes_on(state: _State) -> Array:
            return (state.used < target) & ~self.plain_ends(state)

        state = lax.while_loop(goes_on, partial(self.extended, target), state)
        if self.sketch is not None and state.kept is not None:
            state = self.looked(self.sketch, state.kept, state)
        is_met = self.ratio(state.found) <= 1
        ends = is_met | self.plain_ends(state) | (self.target(state) <= state.used)
        return state._replace(stop=ends | (self.is_hopeless(state) if self.can_complete else False))

    def target(self, state: _State) -> Array:
        """How many probes to have at the next look; no more than there are, if nothing is left to be done."""
        added = CHUNK * jnp.maximum(state.used // (_SHARE * CHUNK), 1)
        target = jnp.minimum(state.used + added, self.limit - (state.made - state.used))
        sketch = self.sketch
        if not isinstance(sketch, Nested):
            return target
        # Once deflation has won, probes are of use only if they can be looked at, and that costs as many again.
        won = jnp.isfinite(state.found.variance) | (self.method is not None)
        return jnp.where(state.deflating & won, jnp.minimum(target, sketch.widest), target)

    def extended(self, target: Array, state: _State) -> _State:
        """A chunk more, or what is left of one."""
        drawn, count = self.stream.after(state.used, target - state.used)
        made = self.operator.matmul(drawn)
        forms = jnp.sum(drawn.conj() * made, axis=0)
        if not jnp.iscomplexobj(state.forms):
            forms = forms.real
        kept = state.kept
        if self.sketch is not None and kept is not None:
            add = partial(self.sketch.added, kept, drawn, made, state.used, count)
            # The sketch is of no use any more if it can neither be looked at nor completed.
            kept = add() if self.can_complete else lax.cond(state.deflating, add, lambda: kept)
        return state._replace(
            kept=kept,
            forms=lax.dynamic_update_slice_in_dim(state.forms, forms, state.used, axis=0),
            used=state.used + count,
            made=state.made + count,
        )

    def looked(self, sketch: Free | Nested, kept: Kept, state: _State) -> _State:
        """A look, if it is time for one."""
        cost = (2 * state.used if isinstance(sketch, Nested) else state.used) - state.made
        due = state.deflating & (state.used <= sketch.widest) & ~self.plain_ends(state)
        due &= state.made + cost <= self.limit
        if self.is_tried:
            due &= self.plain_need(state) - _real(state, state.made) >= _FAR * _real(state, cost)
            is_next = state.made > state.used
            due &= (state.used <= CHUNK) | is_next | self.exhausts(state)
        cost = jnp.where(due, cost, 0)
        kept = sketch.ready(kept, jnp.where(due, state.used, 0))
        state = state._replace(kept=kept, made=state.made + cost)
        found = self.look(sketch, kept, state, due)
        pace = self.pace(state.found, found, state.pace)
        state = state._replace(found=found, pace=pace)
        if not self.is_tried:
            return state
        return state._replace(deflating=state.deflating & (~due | self.is_better(state)))

    def is_better(self, state: _State) -> Array:
        """Whether the look was better than Hutchinson with as many products: beyond doubt, if he needs no more."""
        plain = self.plain(state)
        freedom = 2 / plain.degrees_of_freedom + 2 / state.found.degrees_of_freedom
        doubt = jnp.where(self.exhausts(state), 1, jnp.exp(_DOUBT * jnp.sqrt(freedom)))
        plain_variance = plain.variance * _real(state, state.used) / _real(state, state.made)
        return state.found.consistent & (state.found.variance * doubt < plain_variance)

    def look(self, sketch: Free | Nested, kept: Kept, state: _State, due: Array) -> _Found:
        """The deflating method on the sketch, at the narrowest width that holds it."""
        widths = [sketch.widest]
        while widths[0] > 2 * CHUNK:
            widths.insert(0, max(CHUNK, -(-widths[0] // _WIDER)))

        def at(width: int) -> _Found:
            outcome = sketch.look(kept, state.used, width)
            return _Found(
                outcome.value.astype(state.found.value.dtype),
                outcome.variance.astype(state.found.variance.dtype),
                outcome.degrees_of_freedom.astype(state.found.variance.dtype),
                outcome.consistent & kept.sound,
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
        return _real(state, state.used) * self.ratio(self.plain(state)) ** 2

    def plain_least(self, state: _State) -> Array:
        """The same, less two standard deviations of that."""
        deviation = jnp.sqrt(2 / _real(state, jnp.maximum(state.used, 1)))
        return self.plain_need(state) * jnp.maximum(1 - 2 * deviation, 0)

    def exhausts(self, state: _State) -> Array:
        """Whether Hutchinson alone would use up the budget, or give up for the exact answer."""
        return (state.used > 0) & (self.plain_least(state) > self.most)

    def plain_ends(self, state: _State) -> Array:
        """Whether Hutchinson has met the tolerance, or is alone and never will."""
        if not self.is_watched:
            return jnp.asarray(False)
        ends = (self.ratio(self.plain(state)) <= 1) & (state.used > 1)
        return ends | (~state.deflating & self.exhausts(state)) if self.can_complete else ends

    def is_hopeless(self, state: _State) -> Array:
        """Whether neither method seems to meet the tolerance with fewer products than the exact answer takes."""
        too_far = self.exhausts(state) if self.is_watched else jnp.asarray(True)
        if self.sketch is None:
            return too_far
        # The pace may double yet: a cliff in the spectrum.
        way = _real(state, state.used) / jnp.maximum(_real(state, self.sketch.widest), 1)
        never = self.ratio(state.found) * way ** (2 * state.pace) > 1
        late = state.used * 8 >= self.operator.size
        return (~state.deflating | (late & never)) & too_far

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
        plain, drawn = self.plain(state), Drawn(self.stream, state.used)
        sketch, kept = self.sketch, state.kept
        if sketch is None or kept is None:
            return (_outcome(plain, state.made, drawn),)
        # What the looks saw to be false of the operator is false whatever Hutchinson sees.
        plain = plain._replace(consistent=plain.consistent & state.found.consistent)
        pairs = sketch.sensitivity(sketch.method, kept, state.found.columns)
        return _outcome(plain, state.made, drawn), _outcome(state.found, state.made, pairs)

    def completed(self, state: _State, wanted: Array) -> Outcome:
        """The exact trace, if it is wanted."""
        kept = state.kept
        if kept is None:
            exact = exact_trace(self.operator, wanted=wanted)
            reused, consistent = jnp.zeros_like(state.used), exact.consistent
        else:
            reused = jnp.where(kept.sound, kept.columns, 0)
            sketch = kept.vectors, kept.images, reused
            exact = completed_trace(self.operator, self.key, sketch, wanted)
            consistent = exact.consistent & state.found.consistent
        matvecs = exact.matvecs + (state.made - reused).astype(jnp.int32)
        return tree_at(lambda x: (x.matvecs, x.consistent), exact, (matvecs, consistent))


def _outcome(found: _Found, matvecs: Array, sensitivity: Sensitivity) -> Outcome:
    return Outcome(
        value=found.value,
        variance=found.variance,
        degrees_of_freedom=found.degrees_of_freedom,
        matvecs=matvecs.astype(jnp.int32),
        consistent=found.consistent,
        sensitivity=sensitivity,
    )


def _real(state: _State, number: int | Array) -> Array:
    return jnp.asarray(number, state.found.variance.dtype)
