"""The table of Optax's factories: which of their numbers are leaves, and which are structure.

There is a line for each factory that Optax exports and that takes real numbers: its name, its leaves, and its numbers
that stay structure, grouped after the reason. `tests/optim/test_table.py` goes through everything that Optax exports,
and checks each line against what Optax does with the numbers.

Optax only computes with leaves. An integer that is given for one means a real number (`learning_rate=1`). The numbers
that stay structure are those that are

* `close` to one: Optax computes `1 - b` in Python. In float32, `1 - 0.999` is off by 1e-5, and by
  1e-3 for `0.99999`, while Python's float keeps all its digits;
* `added` to another number in Python, with the same loss of digits (`1 / sqrt(1 + lr**2) - 1`);
* `branched` on: Optax compares them or converts them to integers, which is impossible for a leaf;
* `zero`, if they are: Optax then leaves a term out, and `0 * inf` with it. If not zero, they are leaves.
"""

import sys
from functools import partial
from typing import Any

LEAF, CLOSE, ADDED, BRANCHED, ZERO = "leaf", "close", "added", "branched", "zero"

# The reason for each setting of a factory.
Row = dict[str, str]

_OPTAX = """
adabelief | learning_rate eps eps_root | close b1 b2
adadelta | learning_rate eps | close rho, zero weight_decay
adafactor | learning_rate decay_rate clipping_threshold eps | close momentum, zero weight_decay_rate
adagrad | learning_rate initial_accumulator_value eps
adam | learning_rate eps eps_root | close b1 b2
adamax | learning_rate b2 eps | close b1
adamaxw | learning_rate b2 eps | close b1, zero weight_decay
adamw | learning_rate eps eps_root | close b1 b2, zero weight_decay
adan | learning_rate eps eps_root | close b1 b2 b3, zero weight_decay
adaptive_grad_clip | clipping eps
add_decayed_weights | | zero weight_decay
add_noise | eta gamma
amsgrad | learning_rate eps eps_root | close b1 b2
clip | max_delta
clip_by_block_rms | threshold
clip_by_global_norm | max_norm
constant_schedule | value
cosine_decay_schedule | init_value alpha exponent
cosine_onecycle_schedule | peak_value | branched pct_start div_factor final_div_factor
ema | | close decay
exponential_decay | init_value end_value | branched decay_rate
fromage | min_norm | added learning_rate
lamb | learning_rate eps eps_root | close b1 b2, zero weight_decay
lars | learning_rate trust_coefficient eps momentum | zero weight_decay
lbfgs | learning_rate
linear_onecycle_schedule | peak_value | branched pct_start pct_final div_factor final_div_factor
linear_schedule | init_value end_value
lion | learning_rate | close b1 b2, zero weight_decay
lookahead | slow_step_size
measure_with_ema | | close decay
nadam | learning_rate eps eps_root | close b1 b2
nadamw | learning_rate eps eps_root | close b1 b2, zero weight_decay
noisy_sgd | learning_rate eta gamma
normalize_by_update_norm | scale_factor eps
novograd | learning_rate b1 eps eps_root weight_decay | close b2
optimistic_adam | learning_rate optimism eps eps_root | close b1 b2
optimistic_adam_v2 | learning_rate alpha beta eps eps_root | close b1 b2
optimistic_gradient_descent | learning_rate alpha beta
piecewise_constant_schedule | init_value | branched boundaries_and_scales
piecewise_interpolate_schedule | init_value | branched boundaries_and_scales
polyak_sgd | max_learning_rate scaling f_min eps
polynomial_schedule | init_value end_value power
radam | learning_rate eps eps_root threshold | close b1 b2
rmsprop | learning_rate eps initial_scale momentum | close decay
rprop | learning_rate eta_minus eta_plus min_step_size max_step_size
scale | step_size
scale_by_adadelta | eps | close rho
scale_by_adam | eps eps_root | close b1 b2
scale_by_adamax | b2 eps | close b1
scale_by_adan | eps eps_root | close b1 b2 b3
scale_by_amsgrad | eps eps_root | close b1 b2
scale_by_backtracking_linesearch | slope_rtol decrease_factor increase_factor max_learning_rate \
    atol rtol
scale_by_belief | eps eps_root | close b1 b2
scale_by_distance_over_gradients | reps_rel eps global_scale
scale_by_factored_rms | decay_rate epsilon
scale_by_learning_rate | learning_rate
scale_by_lion | smooth_beta | close b1 b2
scale_by_novograd | b1 eps eps_root weight_decay | close b2
scale_by_optimistic_gradient | alpha beta
scale_by_param_block_norm | min_scale
scale_by_param_block_rms | min_scale
scale_by_polyak | f_min max_learning_rate eps
scale_by_radam | eps eps_root threshold | close b1 b2
scale_by_rms | eps initial_scale | close decay
scale_by_rprop | learning_rate eta_minus eta_plus min_step_size max_step_size
scale_by_rss | initial_accumulator_value eps
scale_by_sm3 | eps | close b1, branched b2
scale_by_stddev | eps initial_scale | close decay
scale_by_trust_ratio | min_norm trust_coefficient eps
scale_by_yogi | eps eps_root initial_accumulator_value | close b1 b2
scale_by_zoom_linesearch \
    | max_learning_rate tol increase_factor slope_rtol curv_rtol approx_dec_rtol stepsize_precision
sgd | learning_rate momentum
sgdr_schedule | | branched cosine_kwargs
sign_sgd | learning_rate
signum | learning_rate | close beta
sm3 | learning_rate | close momentum
trace | decay
warmup_constant_schedule | init_value peak_value
warmup_cosine_decay_schedule | init_value end_value exponent | branched peak_value
warmup_exponential_decay_schedule | init_value peak_value end_value | branched decay_rate
yogi | learning_rate eps | close b1 b2
"""

_OPTAX_WITHOUT_NUMBERS = """
apply_every apply_if_finite centralize chain conditionally_mask conditionally_transform flatten
freeze identity join_schedules keep_params_nonnegative masked monitor multi_transform MultiSteps
named_chain partition scale_by_lbfgs scale_by_schedule scale_by_sign selective_transform
set_to_zero snapshot stateless stateless_with_tree_map with_extra_args_support zero_nans
"""

_CONTRIB = """
acprop | learning_rate eps eps_root | close b1 b2, zero weight_decay
ademamix | learning_rate alpha eps eps_root | close b1 b2 b3, zero weight_decay
adopt | learning_rate b1 b2 eps
cocob | learning_rate alpha eps | zero weight_decay
dadapt_adamw | learning_rate eps estim_lr0 weight_decay | close betas
differentially_private_aggregate | l2_norm_clip noise_multiplier
dog | learning_rate init_step eps | zero weight_decay
dowg | learning_rate init_estim_sq_dist eps | zero weight_decay
dpsgd | learning_rate l2_norm_clip noise_multiplier momentum
galore | learning_rate scale | zero weight_decay
madgrad | learning_rate eps | close momentum, zero weight_decay
mechanize | weight_decay eps s_init
momo | learning_rate beta lower_bound weight_decay
momo_adam | learning_rate eps lower_bound weight_decay | close b1 b2
muon | learning_rate eps ns_coeffs adam_eps_root adam_learning_rate consistent_rms \
    | close beta adam_b1 adam_b2, zero weight_decay adam_weight_decay
prodigy | learning_rate beta3 eps estim_lr0 estim_lr_coef weight_decay | close betas
reduce_on_plateau | min_scale | branched factor rtol atol
scale_by_acprop | eps eps_root | close b1 b2
scale_by_ademamix | alpha eps eps_root | close b1 b2 b3
scale_by_adopt | b1 b2 eps
scale_by_cocob | alpha eps
scale_by_galore | scale
scale_by_madgrad | learning_rate eps | close momentum
scale_by_muon | beta eps ns_coeffs
scale_by_simplified_ademamix | b1 b2 alpha eps eps_root
schedule_free | learning_rate weight_lr_power | close b1
schedule_free_adamw | learning_rate eps weight_lr_power | close b1 b2, zero weight_decay
schedule_free_sgd | learning_rate weight_lr_power | close b1, zero weight_decay
simplified_ademamix | learning_rate b1 b2 alpha eps eps_root | zero weight_decay
sophia | learning_rate eps gamma clip_threshold | close b1 b2, zero weight_decay
"""

_CONTRIB_WITHOUT_NUMBERS = """
hutchinson_estimator_diag_hessian normalize sam split_real_and_imaginary
"""


def _read(lines: str, without_numbers: str) -> dict[str, Row]:
    rows: dict[str, Row] = {name: {} for name in without_numbers.split()}
    for line in lines.strip().splitlines():
        name, leaves, *structure = line.split("|")
        rows[name.strip()] = row = dict.fromkeys(leaves.split(), LEAF)
        for part in ",".join(structure).split(","):
            reason, *names = part.split() or [LEAF]
            row |= dict.fromkeys(names, reason)
    return rows


TABLE = {
    "optax": _read(_OPTAX, _OPTAX_WITHOUT_NUMBERS),
    "optax.contrib": _read(_CONTRIB, _CONTRIB_WITHOUT_NUMBERS),
}


def _own_row(factory: Any) -> Row | None:
    for module, rows in TABLE.items():
        exported = vars(sys.modules[module]) if module in sys.modules else {}
        for name, row in rows.items():
            if exported.get(name) is factory:
                return row
    return None


def row_of(factory: Any) -> Row:
    """The row of a factory, or of the function of a `functools.partial`: empty for any function that is not Optax's
    own, whatever its name."""
    row = _own_row(factory)
    if row is not None:
        return row
    return row_of(factory.func) if isinstance(factory, partial) else {}


def is_optaxs(x: Any) -> bool:
    """Whether an object is one of Optax's own factories."""
    return callable(x) and _own_row(x) is not None
