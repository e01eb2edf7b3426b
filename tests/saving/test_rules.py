"""Weights of other programs in our models and back, by rules; with NumPy alone. (`test_torch.py` has PyTorch.)"""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file

import vernal
from vernal import nn
from vernal.saving import (
    Conversion,
    LoadReport,
    Tied,
    attention_rules,
    from_torch,
    to_torch,
)
from vernal.trees import named_leaves


def numbers(*shape, start=0.0):
    return start + np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape)


def halves(weight):
    return tuple(np.split(weight.T, 2))


def whole(first, second):
    return np.concatenate([first, second]).T


W, B = numbers(2, 3), numbers(2, start=9.0)

# What the model becomes, their tensors, and the rules.
ROWS = {
    "the same names": ({"a": {"w": W}, "b": [B]}, {"a.w": W, "b.0": B}, {}),
    "one part": ({"x": {"w": W, "b": B}}, {"y.w": W, "y.b": B}, {"x.*": "y.*"}),
    "some of a part": ({"l1": W, "l2": B}, {"n1_x": W, "n2_x": B}, {"l*": "n*_x"}),
    "wildcards in order": (
        [{"w": W}, {"w": B}],
        {"h.0.lin.w": W, "h.1.lin.w": B},
        {"*.*": "h.*.lin.*"},
    ),
    "a prefix more": ({"a": {"w": W}, "b": B}, {"m.a.w": W, "m.b": B}, {"**": "m.**"}),
    "a prefix less": ({"m": {"a": {"w": W}, "b": B}}, {"a.w": W, "b": B}, {"m.**": "**"}),
    "anything within": (
        {"a": {"w": W, "x": {"y": {"w": B}}}},
        {"c.v": W, "c.x.y.v": B},
        {"a.**.w": "c.**.v"},
    ),
    "a whole part": ({"m": {"a": {"w": W}, "b": B}}, {"n.a.w": W, "n.b": B}, {"['m']": "n"}),
    "whole parts of a stack": (
        {"s": [{"w": W}, {"w": W + 1}], "t": B},
        {"h.0.w": W[0], "h.1.w": W[1], "g.0.w": W[0] + 1, "g.1.w": W[1] + 1, "t": B},
        {"s[0]": "h.#", "model['s'][1]": "g.#"},
    ),
    "parts that are one there": (
        {"q": {"w": W, "b": B}, "k": {"w": W + 6, "b": B + 1}},
        {"qk.w": np.concatenate([W, W + 6]), "qk.b": np.concatenate([B, B + 1])},
        {("q", "['k']"): "qk"},
    ),
    "printed paths with stars": (
        {"l": [{"w": W}, {"w": B}]},
        {"h.0.v": W, "h.1.v": B},
        {".l[*].w": "h.*.v"},
    ),
    "a quoted key": ({"a.b": {"w": W}}, {"a.b.w": W}, {'"a.b".*': "a.b.*"}),
    "a stack": ({"s": W}, {"h.0.w": W[0], "h.1.w": W[1]}, {"s": "h.#.w"}),
    "stacks in a stack": (
        {"s": {"w": W}},
        {f"h.{i}.{j}.w": W[i, j] for i in range(2) for j in range(3)},
        {"s.*": "h.#.#.*"},
    ),
    "axes of size 1": ({"b": B.reshape(2, 1, 1)}, {"b": B}, {}),
    "three in one": (
        {"q": W, "k": W[:1] + 6, "v": W + 7},
        {"qkv": np.concatenate([W, W[:1] + 6, W + 7])},
        {("q", "k", "v"): "qkv"},
    ),
    "three in one of each of a stack": (
        {"s": {"q": np.stack([W, W + 6]), "k": np.stack([W + 1, W + 7])}},
        {"h.0.qk": np.concatenate([W, W + 1]), "h.1.qk": np.concatenate([W + 6, W + 7])},
        {("s.q", "s.k"): "h.#.qk"},
    ),
    "one of three": (
        {"l0": np.concatenate([W, W[:1]])},
        {"l0.a": W, "l0.b": W[:1]},
        {"l*": ("l*.a", "l*.b")},
    ),
    "a transposed matrix": (
        {"w": W},
        {"kernel": W.T},
        {"w": Conversion("kernel", np.transpose, np.transpose)},
    ),
    "two in a transposed matrix, stacked": (
        {"s": {"q": np.stack([W, W + 1]), "k": np.stack([W + 2, W + 3])}},
        {"h.0.qk": np.concatenate([W, W + 2]).T, "h.1.qk": np.concatenate([W + 1, W + 3]).T},
        {("s.q", "s.k"): Conversion("h.#.qk", halves, whole)},
    ),
    "tied weights": ({"e": W}, {"wte.w": W, "head.w": W}, {"e": Tied("wte.w", "head.w")}),
    "tied weights there": ({"e": W, "u": W}, {"wte.w": W}, {"e": "wte.w", "u": "wte.w"}),
}


def equal(a, b):
    assert named_leaves(a).keys() == named_leaves(b).keys()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("ours", "theirs", "rules"), ROWS.values(), ids=ROWS)
def test_rules_lead_there_and_back(ours, theirs, rules):
    zeros = jax.tree.map(np.zeros_like, ours)
    equal(from_torch(zeros, theirs, rules), ours)
    back = to_torch(ours, rules, like=theirs)
    assert list(back) == list(theirs)
    equal(back, theirs)


@pytest.mark.parametrize("row", sorted(set(ROWS) - {"axes of size 1", "one of three"}))
def test_the_way_back_needs_no_example_unless_sizes_are_lost(row):
    ours, theirs, rules = ROWS[row]
    equal(to_torch(ours, rules), dict(sorted(theirs.items())))


def test_the_model_decides_about_dtypes_and_kinds_of_arrays():
    theirs = {"a": numbers(2), "b": numbers(2) > 0, "c": np.arange(2), "d": numbers(2)}
    model = {
        "a": jnp.zeros(2, jnp.bfloat16),
        "b": np.zeros(2),
        "c": jax.ShapeDtypeStruct((2,), "float32"),
        "d": np.zeros(2, "complex64"),
    }
    got = from_torch(model, theirs)
    assert {name: type(x) for name, x in got.items()} == {
        "a": type(jnp.zeros(2)),
        "b": np.ndarray,
        "c": type(jnp.zeros(2)),
        "d": np.ndarray,
    }
    wanted = {name: theirs[name].astype(model[name].dtype) for name in theirs}
    equal(got, wanted)
    back = to_torch(got, like=dict.fromkeys("abcd", jnp.zeros(2, "complex64")))
    assert {x.dtype.name for x in back.values()} == {"complex64"}


def test_a_model_of_layers_is_filled_without_being_initialised():
    def make(key):
        stack = jax.vmap(lambda k: nn.Conv1d(2, 2, 1, key=k))(jax.random.split(key, 3))
        return vernal.freeze({"stack": stack, "head": nn.Linear(2, 1, key=key)}, "head.bias")

    skeleton = jax.eval_shape(make, jax.random.key(0))
    theirs = {f"h.{i}.weight": numbers(2, 2, 1, start=i) for i in range(3)}
    theirs |= {f"h.{i}.bias": numbers(2, start=9 + i) for i in range(3)}
    theirs |= {"head.weight": numbers(1, 2), "head.bias": numbers(1)}
    filled = from_torch(skeleton, theirs, {"stack.*": "h.#.*"})
    assert jax.tree.structure(filled) == jax.tree.structure(skeleton)
    np.testing.assert_array_equal(filled["stack"].weight[2], theirs["h.2.weight"])
    np.testing.assert_array_equal(filled["stack"].bias[1, :, 0], theirs["h.1.bias"])
    np.testing.assert_array_equal(filled["head"].weight, theirs["head.weight"])
    equal(to_torch(filled, {"stack.*": "h.#.*"}, like=theirs), theirs)


def test_random_keys_and_leaves_with_the_rule_none_are_kept(getkey):
    model = {"key": getkey(), "count": np.array(3), "w": np.zeros(2)}
    got = from_torch(model, {"w": np.ones(2)}, {"count": None})
    assert got["key"] is model["key"] and got["count"] == 3 and got["w"].tolist() == [1, 1]
    assert list(to_torch(model, {"{count,key}": None, "w": "v"} if False else {"count": None})) == [
        "w"
    ]


def test_ignored_tensors_are_left_and_come_back_as_they_were():
    theirs = {"w": W, "bn.num_batches_tracked": np.array(5), "mask": B}
    ignore = ["**.num_batches_tracked", "mask"]
    model = from_torch({"w": np.zeros_like(W)}, theirs, ignore=ignore)
    equal(model, {"w": W})
    back = to_torch(model, like=theirs, ignore=ignore)
    equal(back, theirs)


def test_loaded_arrays_do_not_share_memory_with_theirs():
    theirs = {"w": numbers(1000)}
    model = from_torch({"w": jnp.zeros(1000)}, theirs)
    theirs["w"][:] = -1
    assert model["w"][1] == 1


# --- files


@pytest.fixture
def folder(tmp_path):
    save_file({"a": W, "skipped": B}, tmp_path / "one.safetensors")
    save_file({"b": B.astype(ml_dtypes.bfloat16)}, tmp_path / "two.safetensors")
    index = {"a": "one.safetensors", "skipped": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


def test_files_are_read_by_path_by_index_and_by_folder(folder):
    model = {"a": np.zeros((2, 3), "float32"), "b": np.zeros(2, "float32")}
    for path in (folder, str(folder), folder / "model.safetensors.index.json"):
        equal(from_torch(model, path, ignore=["skipped"]), {"a": W, "b": B})
    one = from_torch({"a": model["a"]}, folder / "one.safetensors", ignore=["skipped"])
    equal(one, {"a": W})
    back = to_torch({"a": W, "b": B}, like=folder, ignore=["skipped"])
    assert back["b"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(back["skipped"], B)


def test_what_is_no_file_of_weights_is_refused(folder, tmp_path):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"(?s)folder holds no weights.*got: one.safetensors, two"):
        from_torch({}, folder)
    with pytest.raises(ValueError, match=r"(?s)`torch.save` is a pickle.*torch.load"):
        from_torch({}, "model.bin")
    with pytest.raises(FileNotFoundError):
        from_torch({}, tmp_path / "none.safetensors")


@pytest.mark.parametrize("how", ["absolute", "upwards", "file link", "folder link"])
def test_an_index_names_files_of_its_folder_only(folder, how):
    inside = folder / "inside"
    inside.mkdir()
    (inside / "file").symlink_to(folder / "one.safetensors")
    (inside / "folder").symlink_to(folder)
    part = {
        "absolute": str(folder / "one.safetensors"),
        "upwards": "../one.safetensors",
        "file link": "file",
        "folder link": "folder/one.safetensors",
    }[how]
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": part}}))
    with pytest.raises(ValueError, match="the index names a file outside of its folder") as info:
        from_torch({"a": np.zeros((2, 3), "float32")}, inside, ignore=["skipped"])
    assert str(folder / "one.safetensors") in str(info.value)


def test_an_index_may_go_round_inside_its_folder(folder):
    (folder / "inside").mkdir()
    (folder / "here").symlink_to(".")
    index = {"weight_map": {"a": "inside/../one.safetensors", "b": "here/two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = {"a": np.zeros((2, 3), "float32"), "b": np.zeros(2, "float32")}
    equal(from_torch(model, folder, ignore=["skipped"]), {"a": W, "b": B})


def test_the_cache_of_hugging_face_is_read_whose_files_are_links(folder):
    snapshot = folder / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    for name in ("one.safetensors", "two.safetensors", "model.safetensors.index.json"):
        blob = folder / "blobs" / name[::-1]
        blob.parent.mkdir(exist_ok=True)
        (folder / name).rename(blob)
        (snapshot / name).symlink_to(f"../../blobs/{name[::-1]}")
    model = {"a": np.zeros((2, 3), "float32"), "b": np.zeros(2, "float32")}
    equal(from_torch(model, snapshot, ignore=["skipped"]), {"a": W, "b": B})


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_of_another_form_is_refused(folder, content):
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"(?s)not an index of safetensors files.*index\.json.*weight_map"
    ):
        from_torch({}, folder)


def test_a_tensor_of_a_dtype_that_jax_does_not_have_can_only_be_left(tmp_path):
    path, raw = str(tmp_path / "m.safetensors"), np.zeros(2, "uint8")
    spec = TensorSpec(
        dtype="float8_e8m0fnu", shape=(2,), data_ptr=raw.ctypes.data, data_len=raw.nbytes
    )
    serialize_file({"w": spec}, path, {})
    content = (tmp_path / "m.safetensors").read_bytes().replace(b"F8_E8M0", b"F6_E2M3", 1)
    # Four numbers of six bits are three bytes.
    content = content.replace(b"[2]", b"[4]", 1).replace(b"[0,2]", b"[0,3]", 1) + b"\0"
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"w: not expected, found F6_E2M3\[4\]"):
        from_torch({}, path)
    assert from_torch({}, path, ignore=["w"]) == {}
    with pytest.raises(ValueError, match=r"(?s)a dtype that JAX does not have.*m.safetensors, w"):
        from_torch({"w": np.zeros(4)}, path)


# --- what does not fit


def refused(ours, theirs, rules=None, **options):
    with pytest.raises(ValueError, match="weights do not fit the model") as error:
        from_torch(ours, theirs, rules, **options)
    return str(error.value)


def test_names_of_both_sides_that_do_not_match_are_listed():
    text = refused({"a": W, "b": B}, {"x": W, "b": B.astype("int64"), "y": B[0]})
    assert "a: missing, expected f32[2,3]\n" in text
    assert "x: not expected, found f32[2,3]\n" in text
    assert "y: not expected, found f32[]\n" in text
    assert "b: " not in text
    text = refused({"s": np.zeros((9, 2))}, {"h.0.w": B}, {"s": "h.#.w"})
    assert "s: missing, expected f64[9,2] from 'h.1.w', 'h.2.w', 'h.3.w' and 5 more" in text
    text = refused({"e": W}, {}, {"e": Tied("a", "b")})
    assert "e: missing, expected f32[2,3] from 'a', 'b'" in text


def test_what_is_no_tensor_can_only_be_left():
    theirs = {"w": W, "_extra_state": {"version": 1}}
    text = refused({"w": W}, theirs)
    assert "_extra_state: not expected, found {'version': 1}" in text
    equal(from_torch({"w": W}, theirs, ignore=["_extra_state"]), {"w": W})
    text = refused({"_extra_state": np.zeros(())}, theirs, ignore=["w"])
    assert "of another shape or kind of number" in text


def raise_a_pear(weight):
    raise RuntimeError("a pear")


@pytest.mark.parametrize(
    ("ours", "theirs", "rules", "found"),
    [
        ({"w": W}, {"w": W.T}, {}, "'w': f32[3,2], its transpose (square ones fit either way"),
        ({"w": W}, {"w": W[:, :1]}, {}, "'w': f32[2,1], of another shape or kind of number"),
        ({"w": np.arange(2)}, {"w": B}, {}, "'w': f32[2], of another shape or kind of number"),
        ({"w": B}, {"w": B + 0j}, {}, "'w': c64[2], of another shape or kind of number"),
        ({"s": W}, {"h.0": B, "h.1": B}, {"s": "h.#"}, "'h.#': f32[2], of another shape or"),
        ({"s": B}, {"h.0.0": B}, {"s": "h.#.#"}, "no 2 leading axes in common, which"),
        (
            {"s": B, "t": numbers(3)},
            {"h.0": B},
            {("s", "t"): "h.#"},
            "no 1 leading axes in common, which the rule for 'h.#' needs",
        ),
        ({"w": W}, {"a": W, "b": B}, {"w": ("a", "b")}, "f32[2,3], f32[2], which cannot be joined"),
        ({"q": W, "k": W}, {"qk": W}, {("q", "k"): "qk"}, "f32[2,3], which cannot be cut along"),
        (
            {"e": B},
            {"a": B, "b": B + 1},
            {"e": Tied("a", "b")},
            "values in 'b' that differ from those in 'a', to which it is tied",
        ),
        (
            {"w": W},
            {"a": W},
            {"w": Conversion("a", raise_a_pear)},
            "in the conversion: a pear",
        ),
        (
            {"w": W},
            {"a": W},
            {"w": Conversion("a", tuple)},
            "'a': 2 arrays from the conversion, for 1 leaves",
        ),
    ],
)
def test_what_has_another_form_is_listed_with_both_names(ours, theirs, rules, found):
    with pytest.raises(ValueError, match=re.escape(found)):
        from_torch(ours, theirs, rules)
    kept, report = from_torch(ours, theirs, rules, strict=False)
    equal(kept, ours)
    assert list(report.misshapen) == list(ours) and report.missing == {}


def test_what_fits_is_taken_if_that_is_asked_for():
    model = {"a": np.zeros((2, 3), "float32"), "b": B}
    got, report = from_torch(model, {"a": W, "x": B}, strict=False)
    equal(got, {"a": W, "b": B})
    assert report == LoadReport(missing={"b": "f32[2]"}, extra={"x": "f32[2]"})
    skeleton = jax.eval_shape(lambda: model)
    with pytest.raises(ValueError, match=r"(?s)only a shape and dtype have no value.*got: b"):
        from_torch(skeleton, {"a": W}, strict=False)


# --- rules that cannot be


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            {"c": "x"},
            r"(?s)paths do not match the tree.*rule 'c'.*got: 'c': no leaf there\s+the leaves are:\s+a\s+b",
        ),
        ({("a", "c"): "x"}, r"(?s)paths do not match the tree.*got: 'c': no leaf there"),
        (
            {"*": "x.*", "a": "y"},
            r"(?s)where: the rules.*got: a: more than one path matches it, '\*' and 'a'",
        ),
        ({"{a,b}": "x"}, r"(?s)what matches in '\{a,b\}' cannot be filled in.*a rule for each"),
        ({"*": "x"}, r"(?s)different numbers of wildcards.*'\*', 'x'.*# for the index"),
        ({"a": "h.*.x"}, r"(?s)the two sides of a rule have different numbers of wildcards"),
        (
            {"a": ("h.#", "x")},
            r"(?s)tensors of a rule do not have the same leading axes.*'h.#', 'x'",
        ),
        ({"a": ()}, r"(?s)a rule names no tensor.*or None"),
        ({"a..b": "x"}, "an empty part"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rules, text):
    model = {"a": W, "b": B}
    with pytest.raises(ValueError, match=text):
        from_torch(model, {}, rules)
    with pytest.raises(ValueError, match=text):
        to_torch(model, rules)


@pytest.mark.parametrize(
    ("ours", "rules", "like", "text"),
    [
        ({"w": W}, {"w": Conversion("x", np.array)}, None, "a Conversion without `dump`"),
        (
            {"w": W},
            {"w": Conversion(("x", "y"), np.array, np.array)},
            None,
            "1 arrays from the conversion, for 2 tensors",
        ),
        ({"w": W}, {"w": ("x", "y")}, None, "one array, and no sizes for its pieces: give `like`"),
        ({"a": W, "b": W + 1}, {"a": "x", "b": "x"}, None, "a value for 'x' that differs"),
        ({"a": W}, {}, {"b": W}, r"(?s)do not match `like`.*b: missing.*a: not expected"),
        ({"a": W}, {}, {"a": W.T}, r"(?s)a: expected f32\[3,2\], found f32\[2,3\], its transpose"),
        ({"a": W}, {}, {"a": W.astype(int)}, r"(?s)a: expected i64\[2,3\], found f32\[2,3\]"),
    ],
)
def test_what_cannot_be_made_theirs_is_refused(ours, rules, like, text):
    with pytest.raises(ValueError, match=text):
        to_torch(ours, rules, like=like)


def test_two_rules_for_one_leaf_are_refused():
    with pytest.raises(ValueError, match="the rules for names of another program"):
        from_torch({"a": W}, {"x": W}, {"a": "x", "*": "*"})


def test_rules_of_attention_name_what_pytorch_has():
    assert attention_rules("a", "b", use_bias=True) == {
        ("a.query_proj.weight", "a.key_proj.weight", "a.value_proj.weight"): "b.in_proj_weight",
        "a.output_proj.weight": "b.out_proj.weight",
        ("a.query_proj.bias", "a.key_proj.bias", "a.value_proj.bias"): "b.in_proj_bias",
        "a.output_proj.bias": "b.out_proj.bias",
    }
