"""The table of `test_factories.py`: every public factory of Optax with numbers to run it on, and which are leaves.

Factories of numbers, flags and functions have a line of text: the name, the settings that are leaves, those that are
structure, and the extra arguments that a step needs. All real numbers that a factory takes are given. Factories that
take other transformations have a function instead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

OPTAX = """
adabelief | learning_rate=0.01, eps=1e-8, eps_root=1e-9 | b1=0.8, b2=0.99
adadelta | learning_rate=0.5, eps=1e-5, weight_decay=0.1 | rho=0.8
adafactor | learning_rate=0.01, clipping_threshold=0.5, weight_decay_rate=1e-4, eps=1e-20, decay_rate=0.7 \
    | momentum=0.6, decay_offset=-1, min_dim_size_to_factor=2
adagrad | learning_rate=0.1, initial_accumulator_value=0.2, eps=1e-6 |
adam | learning_rate=0.01, eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99999
adamax | learning_rate=0.01, eps=1e-6, b2=0.99 | b1=0.8
adamaxw | learning_rate=0.01, eps=1e-6, weight_decay=0.1, b2=0.99 | b1=0.8, mask=MASK
adamw | learning_rate=0.01, eps=1e-6, eps_root=1e-9, weight_decay=0.1 | b1=0.8, b2=0.99, mask=mask_of
adan | learning_rate=0.01, eps=1e-6, eps_root=1e-9, weight_decay=0.1 | b1=0.9, b2=0.8, b3=0.95
adaptive_grad_clip | clipping=0.01, eps=1e-2 |
add_decayed_weights | weight_decay=0.001 | mask=MASK
add_noise | eta=0.02, gamma=0.6 | key=3
amsgrad | learning_rate=0.01, eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99
apply_every | | k=3
centralize | |
clip | max_delta=0.1 |
clip_by_block_rms | threshold=0.1 |
clip_by_global_norm | max_norm=0.1 |
ema | | decay=0.8
freeze | | mask=MASK
fromage | min_norm=1e-5 | learning_rate=0.01
identity | |
keep_params_nonnegative | |
lamb | learning_rate=0.01, eps=1e-6, eps_root=1e-9, weight_decay=0.1 | b1=0.8, b2=0.99
lars | learning_rate=0.1, weight_decay=0.1, trust_coefficient=0.01, eps=1e-6, momentum=0.8 |
lbfgs | learning_rate=0.3 | memory_size=3, linesearch=None | bowl
lion | learning_rate=0.01, weight_decay=0.1 | b1=0.8, b2=0.95
monitor | | measures={'norm': norm} | grows
nadam | learning_rate=0.01, eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99
nadamw | learning_rate=0.01, eps=1e-6, eps_root=1e-9, weight_decay=0.1 | b1=0.8, b2=0.99
noisy_sgd | learning_rate=0.1, eta=0.02, gamma=0.6 | key=3
normalize_by_update_norm | scale_factor=0.5, eps=1e-5 |
novograd | learning_rate=0.01, eps=1e-5, eps_root=1e-9, weight_decay=0.1, b1=0.8 | b2=0.3
optimistic_adam | learning_rate=0.01, optimism=0.02, eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99
optimistic_adam_v2 | learning_rate=0.01, alpha=0.9, beta=1.1, eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99
optimistic_gradient_descent | learning_rate=0.1, alpha=0.9, beta=1.1 |
polyak_sgd | max_learning_rate=0.3, scaling=0.5, f_min=-1.0, eps=1e-3 | | value
radam | learning_rate=0.01, eps=1e-6, eps_root=1e-9, threshold=4.0 | b1=0.8, b2=0.99
rmsprop | learning_rate=0.01, eps=1e-6, initial_scale=0.1, momentum=0.5 | decay=0.8, centered=True, nesterov=True
rprop | learning_rate=0.01, eta_minus=0.6, eta_plus=1.3, min_step_size=1e-5, max_step_size=0.1 |
scale | step_size=-0.1 |
scale_by_adadelta | eps=1e-5 | rho=0.8
scale_by_adam | eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99, mu_dtype=None
scale_by_adamax | eps=1e-6, b2=0.99 | b1=0.8
scale_by_adan | eps=1e-6, eps_root=1e-9 | b1=0.9, b2=0.8, b3=0.95
scale_by_amsgrad | eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99
scale_by_backtracking_linesearch \
    | slope_rtol=1e-3, increase_factor=1.4, max_learning_rate=0.3, atol=1e-9, rtol=1e-9, decrease_factor=0.7 \
    | max_backtracking_steps=5 | value grad value_fn
scale_by_belief | eps=1e-8, eps_root=1e-9 | b1=0.8, b2=0.99
scale_by_distance_over_gradients | reps_rel=0.01, eps=1e-7, global_scale=0.5 | | bowl descend
scale_by_factored_rms | epsilon=1e-20, decay_rate=0.7 | step_offset=-1, min_dim_size_to_factor=2
scale_by_lbfgs | | memory_size=3 | bowl descend
scale_by_learning_rate | learning_rate=0.1 | flip_sign=False
scale_by_lion | smooth_beta=1.5 | b1=0.8, b2=0.95, mode='smooth'
scale_by_novograd | eps=1e-5, eps_root=1e-9, weight_decay=0.1, b1=0.8 | b2=0.3 | bowl descend
scale_by_optimistic_gradient | alpha=0.9, beta=1.1 |
scale_by_param_block_norm | min_scale=0.01 | | bowl descend
scale_by_param_block_rms | min_scale=0.01 | | bowl descend
scale_by_polyak | f_min=-1.0, max_learning_rate=0.3, eps=1e-3 | variant='sps+' | value bowl descend
scale_by_radam | eps=1e-6, eps_root=1e-9, threshold=4.0 | b1=0.8, b2=0.99
scale_by_rms | eps=1e-6, initial_scale=0.1 | decay=0.8
scale_by_rprop | learning_rate=0.01, eta_minus=0.6, eta_plus=1.3, min_step_size=1e-5, max_step_size=0.1 |
scale_by_rss | initial_accumulator_value=0.2, eps=1e-6 |
scale_by_schedule | | step_size_fn=schedule
scale_by_sign | |
scale_by_sm3 | eps=1e-6 | b1=0.8, b2=0.99
scale_by_stddev | eps=1e-6, initial_scale=0.1 | decay=0.8
scale_by_trust_ratio | min_norm=1e-3, trust_coefficient=0.9, eps=1e-6 | | bowl descend
scale_by_yogi | eps=1e-3, eps_root=1e-9, initial_accumulator_value=1e-5 | b1=0.8, b2=0.99
scale_by_zoom_linesearch \
    | max_learning_rate=0.3, tol=1e-6, increase_factor=1.9, slope_rtol=1e-3, approx_dec_rtol=1e-5, \
    stepsize_precision=1e-4, curv_rtol=0.8 | max_linesearch_steps=5 | value grad value_fn
set_to_zero | |
sgd | learning_rate=0.1, momentum=0.9 | nesterov=True
sign_sgd | learning_rate=0.01 |
signum | learning_rate=0.01 | beta=0.8
sm3 | learning_rate=0.1 | momentum=0.8
snapshot | | measure_name='norm', measure=norm
stateless | | f=halve
stateless_with_tree_map | | f=halve_leaf
trace | decay=0.8 |
yogi | learning_rate=0.01, eps=1e-3 | b1=0.8, b2=0.99
zero_nans | |
"""

CONTRIB = """
acprop | learning_rate=0.01, eps=1e-8, eps_root=1e-9, weight_decay=0.1 | b1=0.8, b2=0.99
ademamix | learning_rate=0.01, alpha=4.0, eps=1e-6, eps_root=1e-9, weight_decay=0.1 | b1=0.8, b2=0.99, b3=0.999
adopt | learning_rate=0.01, eps=1e-5, b1=0.8, b2=0.99 |
cocob | learning_rate=0.9, alpha=90.0, eps=1e-7, weight_decay=0.1 |
dadapt_adamw | learning_rate=0.9, eps=1e-7, estim_lr0=1e-3, weight_decay=0.1 | betas=(0.8, 0.99) | bowl
differentially_private_aggregate | l2_norm_clip=0.5, noise_multiplier=0.1 | key=3 | batched
dog | learning_rate=0.9, eps=1e-7, weight_decay=0.1, init_step=('distance', 1e-3) |
dowg | learning_rate=0.9, init_estim_sq_dist=1e-3, eps=1e-3, weight_decay=0.1 |
dpsgd | learning_rate=0.1, l2_norm_clip=0.5, noise_multiplier=0.1, momentum=0.5 | seed=3 | batched
galore | learning_rate=0.01, scale=0.5, weight_decay=0.1 | rank=1, update_proj_gap=100
hutchinson_estimator_diag_hessian | | | obj_fn descend
madgrad | learning_rate=0.01, weight_decay=0.01, eps=1e-5 | momentum=0.8
momo | learning_rate=0.1, lower_bound=-1.0, weight_decay=0.1, beta=0.8 | | value
momo_adam | learning_rate=0.01, eps=1e-7, lower_bound=-1.0, weight_decay=0.1 | b1=0.8, b2=0.99 | value
muon \
    | learning_rate=0.01, eps=1e-7, weight_decay=0.1, adam_eps_root=1e-9, adam_weight_decay=0.01, \
    adam_learning_rate=0.02, ns_coeffs=(3.4, -4.8, 2.0) | beta=0.8, adam_b1=0.8, adam_b2=0.99, ns_steps=3
normalize | |
prodigy | learning_rate=0.9, eps=1e-7, estim_lr0=1e-3, estim_lr_coef=0.9, weight_decay=0.001, beta3=0.9 \
    | betas=(0.8, 0.99) | bowl
reduce_on_plateau | min_scale=0.1 | factor=0.5, patience=3, rtol=1e-3, atol=1e-6, cooldown=2 | value descend
scale_by_acprop | eps=1e-8, eps_root=1e-9 | b1=0.8, b2=0.99
scale_by_ademamix | alpha=4.0, eps=1e-6, eps_root=1e-9 | b1=0.8, b2=0.99, b3=0.999
scale_by_adopt | eps=1e-5, b1=0.8, b2=0.99 |
scale_by_cocob | alpha=90.0, eps=1e-7 |
scale_by_galore | scale=0.5 | rank=1, update_proj_gap=100
scale_by_madgrad | learning_rate=0.01, eps=1e-5 | momentum=0.8 | bowl descend
scale_by_simplified_ademamix | alpha=0.1, eps=1e-6, eps_root=1e-9, b1=0.9, b2=0.8 |
schedule_free_adamw | learning_rate=0.01, eps=1e-7, weight_decay=0.1, weight_lr_power=1.9 \
    | b1=0.8, b2=0.99, warmup_steps=10
schedule_free_sgd | learning_rate=0.1, weight_decay=0.1, weight_lr_power=1.9 | b1=0.8
simplified_ademamix | learning_rate=0.01, alpha=0.1, eps=1e-6, eps_root=1e-9, weight_decay=0.1, b1=0.9, b2=0.8 |
sophia | learning_rate=0.01, eps=1e-7, weight_decay=0.1, gamma=0.02, clip_threshold=0.9 \
    | b1=0.8, b2=0.9, update_interval=5 | obj_fn
"""

MASK = {"b": False, "w": True}
LABELS = {"b": "second", "w": "first"}


def mask_of(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def halve(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda u: 0.5 * u, updates)


def halve_leaf(update: Any, param: Any) -> Any:
    return 0.5 * update


def as_matrices(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def labels_of(params: Any) -> Any:
    return LABELS


def every_third(step: Any, **_: Any) -> Any:
    return step % 3 == 0


NAMES = {
    "MASK": MASK,
    "mask_of": mask_of,
    "halve": halve,
    "halve_leaf": halve_leaf,
    "norm": optax.tree.norm,
    "schedule": optax.cosine_decay_schedule(0.1, 500, 0.1),
}

# Called as `new(factory, *args, **settings)`, it makes an `Optimizer`, or what Optax makes.
New = Callable[..., Any]


def of_optax(factory: Any, /, *args: Any, **settings: Any) -> Any:
    return factory(*args, **settings)


def adam(new: New) -> Any:
    return new(optax.adam, learning_rate=0.01, b1=0.8)


def sgd(new: New) -> Any:
    return new(optax.sgd, learning_rate=0.1)


@dataclasses.dataclass(frozen=True)
class Row:
    """How an optimiser is made, the paths of its leaves, and what its steps need.

    That is the names of extra arguments of `update`, and `batched` (a gradient for each example),
    `bowl` (a loss with a minimum), `grows` (a state that is whole only after the first step).
    """

    make: Callable[[New], Any]
    leaves: frozenset[str]
    needs: frozenset[str] = frozenset()


def _lines(module: Any, text: str) -> dict[str, Row]:
    rows = {}
    for line in text.strip().splitlines():
        name, leaves, structure, *needs = map(str.strip, line.split("|"))
        numbers = eval(f"dict({leaves})", NAMES)
        settings = numbers | eval(f"dict({structure})", NAMES)
        make = functools.partial(_make, getattr(module, name), settings)
        row = Row(make, _paths(numbers), frozenset(" ".join(needs).split()))
        rows[name] = _downhill(row) if "descend" in row.needs else row
    return rows


def _paths(numbers: dict[str, Any]) -> frozenset[str]:
    """The paths of the leaves among some settings, in the form of `test_factories.leaf_names`."""
    keyed = jax.tree_util.tree_leaves_with_path(numbers)
    return frozenset(
        path[0].key + jax.tree_util.keystr(path[1:]) for path, x in keyed if isinstance(x, float)
    )


def _make(factory: Any, settings: dict[str, Any], new: New) -> Any:
    return new(factory, **settings)


def _downhill(row: Row) -> Row:
    """Steps against the gradient, without which the numbers grow beyond all bounds."""
    leaves = frozenset({f"args[0].{path}" for path in row.leaves} | {"args[1].step_size"})
    return Row(
        lambda new: new(optax.chain, row.make(new), new(optax.scale, step_size=-0.01)),
        leaves,
        row.needs,
    )


def nest(make: Callable[[New], Any], leaves: str, needs: str = "") -> Row:
    return Row(make, frozenset(leaves.split()), frozenset(needs.split()))


def lookahead(new: New) -> Any:
    return new(optax.lookahead, sgd(new), sync_period=3, slow_step_size=0.4)


def split(new: New) -> dict[str, Any]:
    return {"first": adam(new), "second": sgd(new)}


NESTED = {
    "apply_if_finite": nest(
        lambda new: new(optax.apply_if_finite, sgd(new), max_consecutive_errors=2),
        "inner.learning_rate",
    ),
    "chain": nest(
        lambda new: new(optax.chain, new(optax.clip_by_global_norm, max_norm=0.1), adam(new)),
        "args[0].max_norm args[1].learning_rate",
    ),
    "conditionally_mask": nest(
        lambda new: new(optax.conditionally_mask, adam(new), every_third), "inner.learning_rate"
    ),
    "conditionally_transform": nest(
        lambda new: new(optax.conditionally_transform, adam(new), every_third),
        "inner.learning_rate",
    ),
    "flatten": nest(lambda new: new(optax.flatten, adam(new)), "inner.learning_rate"),
    "lookahead": nest(lookahead, "fast_optimizer.learning_rate slow_step_size"),
    "masked": nest(lambda new: new(optax.masked, adam(new), MASK), "inner.learning_rate"),
    "measure_with_ema": nest(
        lambda new: new(
            optax.monitor, {"norm": new(optax.measure_with_ema, optax.tree.norm, decay=0.8)}
        ),
        "",
        "grows",
    ),
    "multi_transform": nest(
        lambda new: new(optax.multi_transform, split(new), LABELS),
        "transforms['first'].learning_rate transforms['second'].learning_rate",
    ),
    "MultiSteps": nest(
        lambda new: new(optax.MultiSteps, adam(new), every_k_schedule=3), "opt.learning_rate"
    ),
    "named_chain": nest(
        lambda new: new(optax.named_chain, ("a", adam(new)), ("b", new(optax.scale, 0.5))),
        "args[0][1].learning_rate args[1][1].step_size",
    ),
    "partition": nest(
        lambda new: new(optax.partition, split(new), labels_of),
        "transforms['first'].learning_rate transforms['second'].learning_rate",
    ),
    "selective_transform": nest(
        lambda new: new(optax.selective_transform, adam(new), freeze_mask=MASK),
        "optimizer.learning_rate",
    ),
    "with_extra_args_support": nest(
        lambda new: new(optax.with_extra_args_support, adam(new)), "tx.learning_rate"
    ),
    "mechanize": nest(
        lambda new: new(optax.contrib.mechanize, sgd(new), weight_decay=0.1, eps=1e-7, s_init=1e-2),
        "base_optimizer.learning_rate eps s_init weight_decay",
        "bowl",
    ),
    "sam": nest(
        lambda new: new(optax.contrib.sam, adam(new), sgd(new), sync_period=3),
        "adv_optimizer.learning_rate optimizer.learning_rate",
    ),
    "schedule_free": nest(
        lambda new: new(
            optax.contrib.schedule_free, sgd(new), learning_rate=0.1, b1=0.8, weight_lr_power=1.9
        ),
        "base_optimizer.learning_rate learning_rate weight_lr_power",
    ),
    "scale_by_muon": nest(
        lambda new: new(
            optax.masked,
            new(optax.contrib.scale_by_muon, eps=1e-7, weight_dimension_numbers=as_matrices),
            MASK,
        ),
        "inner.eps",
    ),
    "split_real_and_imaginary": nest(
        lambda new: new(optax.contrib.split_real_and_imaginary, adam(new)), "inner.learning_rate"
    ),
}

ROWS = {**_lines(optax, OPTAX), **_lines(optax.contrib, CONTRIB), **NESTED}
