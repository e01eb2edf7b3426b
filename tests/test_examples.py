"""The examples do what they say, also when they are interrupted."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal.saving import load_metadata

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.py"
CUSTOM_RULE = ROOT / "examples" / "custom_rule.py"
ADAPTIVE_LOOP = ROOT / "examples" / "adaptive_loop.py"
SWEEP = ROOT / "examples" / "sweep.py"
RECOMPILE = ROOT / "examples" / "recompile.py"
GP_LOGDET = ROOT / "examples" / "gp_logdet.py"
HESSIAN_SPECTRUM = ROOT / "examples" / "hessian_spectrum.py"
HESSIAN_TRACE = ROOT / "examples" / "hessian_trace.py"
NEURAL_ODE = ROOT / "examples" / "neural_ode.py"
GPT = ROOT / "examples" / "gpt.py"
IN_CELLS = [
    file
    for file in sorted((ROOT / "examples").glob("*.py"))
    if file.read_text(encoding="utf-8").startswith("# %%")
]

# Runs a script, and interrupts it as Ctrl-C does when it has saved its second checkpoint.
INTERRUPTED = """
import os, runpy, signal, sys
import vernal

# Whoever started the tests may ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
save, saved = vernal.save, []

def save_and_interrupt(*args, **kwargs):
    save(*args, **kwargs)
    saved.append(args)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGINT)

vernal.save = save_and_interrupt
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command, code=0):
    """Runs a Python command on one device; returns what it printed."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def arrays(path):
    from safetensors.numpy import load_file

    return load_file(path)


@pytest.mark.slow
def test_digits_trains_saves_and_loads(tmp_path):
    text = run(DIGITS, "--out", tmp_path)
    accuracy = load_metadata(tmp_path / "checkpoint.safetensors")["history"][-1]["test_accuracy"]
    assert accuracy >= 0.97
    assert f"test accuracy: {accuracy:.2%}" in text
    assert "compiled once" in text and "predictions are equal" in text
    assert "Conv2d" in text and "21,386" in text
    assert sorted(arrays(tmp_path / "model.safetensors"))[0] == "layers.0.bias"
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_digits_interrupted_and_resumed_ends_like_an_uninterrupted_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    text = run("-c", INTERRUPTED, DIGITS, "--epochs", 9, "--seed", 3, "--out", parts, code=130)
    assert "Stopped" in text and "--resume" in text and "Traceback" not in text
    assert len(load_metadata(parts / "checkpoint.safetensors")["history"]) == 2
    assert not (parts / "model.safetensors").exists()

    text = run(DIGITS, "--epochs", 3, "--resume", "--out", parts)
    assert "compiled once" in text and "predictions are equal" in text
    run(DIGITS, "--epochs", 3, "--seed", 3, "--out", whole)
    resumed, straight = (arrays(out / "model.safetensors") for out in (parts, whole))
    assert resumed.keys() == straight.keys()
    for name, array in resumed.items():
        np.testing.assert_allclose(array, straight[name], rtol=1e-4, atol=1e-5, err_msg=name)
    histories = [load_metadata(out / "checkpoint.safetensors") for out in (parts, whole)]
    assert [json.dumps(sorted(h)) for h in histories] == ['["history", "seed"]'] * 2


@pytest.mark.slow
def test_digits_has_nothing_to_resume_at_first(tmp_path):
    text = run(DIGITS, "--resume", "--out", tmp_path, code=1)
    assert "nothing to resume" in text


def test_the_digits_model_works_with_plain_jax():
    Classifier = runpy.run_path(str(DIGITS))["Classifier"]
    model = Classifier(jax.random.key(0))
    image = jnp.ones((1, 8, 8))
    want = model(image)
    np.testing.assert_allclose(jax.jit(model)(image), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(model)(image[None])[0], want, rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda m: m(image).sum())(model)
    assert jax.tree.structure(grads) == jax.tree.structure(model)
    assert jax.tree.structure(optax.adam(1e-3).init(model)[0].mu) == jax.tree.structure(model)
    carried, _ = jax.lax.scan(
        lambda m, _: (jax.tree.map(lambda p: 2 * p, m), None), model, length=2
    )
    np.testing.assert_allclose(carried.layers[0].weight, 4 * model.layers[0].weight, rtol=1e-6)
    chosen = jax.lax.cond(True, lambda m: m, lambda m: carried, model)
    np.testing.assert_array_equal(chosen.layers[7].bias, model.layers[7].bias)


def test_the_custom_rule_mends_the_gradient_and_the_ball_is_learnt():
    lines = run(CUSTOM_RULE).splitlines()
    assert "nan" in lines[0]
    assert "nan" not in "".join(lines[1:])
    # Both end in "log(drag) -3.00, wind 4.00".
    learnt, truth = (line.split() for line in lines[-2:])
    for i in (2, 4):
        value, want = (float(words[i].strip(",")) for words in (learnt, truth))
        assert abs(value - want) < 0.05


def test_the_adaptive_loop_shows_its_progress_and_learns_the_stiffness():
    lines = run(ADAPTIVE_LOOP).splitlines()
    assert lines[0] == "0.00%" and lines[4] == "100.00%"
    fits = [line for line in lines if line.startswith("stiffness")]
    for line in fits:
        _, reverse, forward = line.split(": ")[1].replace("gradient ", "").split(", ")
        assert abs(float(reverse.split()[0]) - float(forward.split()[0])) < 1e-3
    assert lines[-2:] == ["learnt: stiffness 2.0000", "truth:  stiffness 2.0000"]


def test_the_sweep_compiles_once_and_the_best_network_learns_with_its_head_alone():
    text = run(SWEEP, "--epochs", 10)
    assert "15 networks: compiled once" in text
    by_rate = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "%" in line}
    best, worst = (float(by_rate[rate][0].rstrip("%")) for rate in ("0.01", "1"))
    assert best > 90 and worst < 40
    assert float(by_rate["odd"][-1].rstrip("%")) > 80
    assert "66 parameters trained, 3,136 frozen" in text
    assert "frozen layers: unchanged" in text


def test_the_careless_script_is_told_what_it_did_and_the_mended_one_compiles_once():
    careless, mended = run(RECOMPILE, "--epochs", 2).split("mended:\n")
    lines = [line for line in careless.splitlines() if "traced again" in line]
    assert len(lines) == 3
    assert "images: f32[64,64] -> f32[5,64]; labels: i32[64] -> i32[5]" in lines[0]
    assert "step_size (captured): -0.01 -> -0.005; smoothing: 0.1 -> 0.05" in lines[1]
    assert "images: f32[64,64] -> f32[5,64]; labels: i32[64] -> i32[5]" in lines[2]
    assert "compiled 4 times" in careless and "compiled once" in mended


@pytest.mark.slow
def test_the_gaussian_process_learns_from_products_what_it_learns_by_factorisation(tmp_path):
    text = run(GP_LOGDET, "--steps", 60, "--out", tmp_path)
    lines = [line.split() for line in text.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) == 6}
    (_, *want), (_, *got) = rows["exact"], rows["estimated"]
    assert rows["exact"][0] == rows["estimated"][0] == "once"
    for index, tolerance in enumerate((0.5, 0.1, 0.02, 0.01)):
        assert abs(float(got[index]) - float(want[index])) < tolerance
    assert float(got[3]) < 0.8
    inside, _, count = next(line for line in lines if "within" in line)[:3]
    assert int(inside) >= 0.7 * int(count)
    assert (tmp_path / "likelihood.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_curvature_during_training_is_estimated_with_intervals_that_hold(tmp_path):
    text = run(HESSIAN_TRACE, "--epochs", 4, "--out", tmp_path)
    rows = [line.split() for line in text.splitlines() if line.endswith(("yes", "no"))]
    assert len(rows) == 6
    for row in rows:
        exact, estimate = map(float, row[3:5])
        assert abs(estimate - exact) < 0.1 * exact
    # Six intervals of 95%.
    assert sum(row[-1] == "yes" for row in rows) >= 5
    assert "666 parameters" in text
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_largest_eigenvalues_of_a_hessian_are_shown_by_path(tmp_path):
    plot = tmp_path / "spectrum.png"
    text = run(HESSIAN_SPECTRUM, "--steps", 100, "--plot", plot)
    values = re.search(r"eigenvalue +(.*)", text)[1].split()
    values = [float(x) for x in values if x[0].isdigit()]
    assert len(values) == 5 and values == sorted(values, reverse=True) and values[-1] > 0
    assert "layers[0].weight" in text and "tolerance met: True" in text
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_small_gpt_learns_in_one_program_and_decodes_with_caches_what_it_reads_at_once(
    tmp_path,
):
    text = run(GPT, "--steps", 8, "--length", 40, "--prompt", "Return ", "--out", tmp_path)
    found = re.search(r"([\d.]+) bits per byte at first, ([\d.]+) at the end", text)
    first, last = map(float, found.groups())
    # It begins as one who knows nothing of bytes: 8 bits for each.
    assert abs(first - 8) < 0.5 and last < 6
    assert "training step: compiled once" in text and "predictions are equal" in text
    assert float(re.search(r"logits differ by (\S+) at most", text)[1]) < 1e-4
    stored = arrays(tmp_path / "model.safetensors")
    assert {str(array.dtype) for array in stored.values()} == {"float32"}
    assert stored["model.blocks.layers.attention.key_proj.weight"].shape == (3, 64, 128)
    # The embedding is tied, and stored once.
    assert [array.shape for array in stored.values()].count((256, 128)) == 1
    assert len(text.split("\nReturn ")[1]) > 20
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_neural_ode_learns_through_diffrax(tmp_path):
    printed = run(NEURAL_ODE, "--steps", "8", "--output", tmp_path)
    errors = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(errors) == 8 and errors[-1] < errors[0] / 2
    assert "compiled 1 time(s)" in printed
    assert (tmp_path / "field.safetensors").stat().st_size > 0
    assert (tmp_path / "spirals.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("file", IN_CELLS, ids=lambda file: file.stem)
def test_examples_in_cells_assert_what_they_reach_and_print_and_draw_what_their_pages_show(
    file, tmp_path
):
    run(ROOT / "docs" / "_gallery.py", "--into", tmp_path, file.stem)
    shown = ROOT / "docs" / "gallery"
    printed = [(folder / f"{file.stem}.txt").read_text() for folder in (tmp_path, shown)]
    # The last digits depend on the processor.
    ours, theirs = (re.sub(r"[-+]?[\d.]+(e-?\d+)?", "#", text) for text in printed)
    assert ours == theirs
    for folder in (tmp_path, shown):
        assert (folder / f"{file.stem}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("file", IN_CELLS, ids=lambda file: file.stem)
def test_examples_in_cells_open_as_notebooks(file):
    cells = re.split(r"^# %%", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cells[0] == "" and cells[1].startswith(" [markdown]\n# # ")
    for cell in cells[1:]:
        kind, _, body = cell.partition("\n")
        assert kind in ("", " [markdown]")
        if kind:
            assert all(line.startswith("#") for line in body.split("\n") if line), body
        else:
            compile(body, file.name, "exec")
