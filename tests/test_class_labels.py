"""Labels of function classes, and classes of the user's own."""

from __future__ import annotations

import numpy as np
import pytest

from geomstats_lm import class_labels
from geomstats_lm.class_labels import known_classes, parse_classes, register_function_class
from geomstats_lm.decompose import decompose
from tests.synthetic import activations


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(class_labels, "_REGISTERED", {})


@pytest.mark.parametrize(
    "label, message",
    [
        ("afine", "known are identity, self_only"),
        ("affine[rho=1]", r"no parameter \['rho'\]; it has \['k', 'ridge', 'scope', 'weights'\]"),
        ("affine[ridge=-1]", "numbers >= 0 and 'cv'"),
        ("affine[k=2.5]", "integers >= 1"),
        ("affine[scope=galactic]", "accepted are"),
        ("mean[scope=local]", "no parameter"),
        ("affine[scope=global,k=3]", "no neighbours"),
        ("affine[weights=flat]", "accepted are"),
        ("affine[ridge]", "parameter=value"),
    ],
)
def test_a_wrong_label_is_refused_with_what_is_accepted(label, message):
    with pytest.raises(ValueError, match=message):
        parse_classes([label])


def test_labels_are_canonical():
    labels = ["affine[ridge=1]", "linear[weights=uniform,k=9]", "affine[scope=global, ridge=0.1]"]
    assert [c.label for c in parse_classes(labels)] == [
        "affine", "linear[k=9]", "affine[ridge=0.1,scope=global]"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="more than once"):
        parse_classes(["affine", "affine[ridge=1.0]"])
    with pytest.raises(ValueError, match="at least one"):
        parse_classes([])
    assert [c.label for c in parse_classes(["mean", "affine", "scalar"], ridge=0.3)] == [
        "mean", "affine[ridge=0.3]", "scalar"
    ]  # fmt: skip


def local_average(x, X, D, weights, *, shrink=1.0):
    return shrink * np.einsum("nk,nkd->nd", weights, D)


def affine_map(X, D):
    augmented = np.c_[X, np.ones(len(X))]
    slope = np.linalg.lstsq(augmented, D, rcond=None)[0]
    return lambda x: np.c_[x, np.ones(len(x))] @ slope


def test_a_class_of_ones_own_is_used_like_any_other(registry):
    register_function_class("average", local_average)
    register_function_class("least_squares", affine_map, scope="global")
    assert known_classes()[-2:] == ["average", "least_squares"]
    data = activations()
    labels = ["average", "average[shrink=0.5]", "local_mean", "least_squares"]
    parts = decompose(data, [*labels, "affine[ridge=0,scope=global]"], k=12).compute()
    assert parts.function_class.values.tolist()[:4] == labels
    own, half, mean, least, built_in = parts["tokenwise"].values[0]
    assert np.allclose(own, mean, atol=1e-5)
    assert np.allclose(half, mean / 2, atol=1e-5)
    assert np.allclose(least, built_in, atol=1e-3)  # the built-in has a floor of 1e-6 on lambda


def test_a_global_class_of_ones_own_leaves_documents_out_in_sample(registry):
    seen = []

    def fit(X, D):
        seen.append(len(X))
        return lambda x: np.zeros_like(x)

    register_function_class("counting", fit, scope="global")
    data = activations(documents=10, split=1.0, n_layers=1)
    decompose(data, ["counting"], k=4, tokens="reference").compute()
    assert seen == [240] * 5  # five times, each without 2 of 10 documents of 30 usable tokens


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("affine", local_average), "give an identifier other than"),
        (("a b", local_average), "give an identifier"),
        (("mine", lambda x, X, D, weights, rate: x), "need defaults"),
        (("mine", local_average, "both"), "scope='both'"),
    ],
)
def test_registering_nonsense_is_refused(registry, arguments, message):
    name, function, *scope = arguments
    with pytest.raises(ValueError, match=message):
        register_function_class(name, function, **({"scope": scope[0]} if scope else {}))
    with pytest.raises(TypeError, match="callable"):
        register_function_class("mine", 3)


def test_a_name_is_replaced_only_when_asked(registry):
    register_function_class("mine", local_average)
    with pytest.raises(ValueError, match="registered already"):
        register_function_class("mine", local_average)
    register_function_class("mine", affine_map, scope="global", overwrite=True)
    assert parse_classes(["mine"])[0].scope == "global"


@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_function_that_returns_the_wrong_shape_is_told_so(registry, scope):
    if scope == "local":
        register_function_class("mine", lambda x, X, D, weights: x[0])
    else:
        register_function_class("mine", lambda X, D: lambda x: x[:, :2], scope="global")
    with pytest.raises(ValueError, match="function class 'mine' returned shape"):
        decompose(activations(n_layers=1), ["mine"], k=4).compute()
    register_function_class("mine", lambda X, D: X, scope="global", overwrite=True)
    with pytest.raises(ValueError, match="returns a function"):
        decompose(activations(n_layers=1), ["mine"], k=4).compute()
