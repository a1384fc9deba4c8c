"""Names, settings and their mistakes: the 18 algorithms, every other pair, classes of torch.optim, the paper's rows."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch

import tailopt
from tailopt.algorithms import ALGORITHMS, NAMED, OTHERS, _by_spelling, resolve_name, rule_names, spelling_key
from tailopt.paper.best_settings import pairs
from tailopt.rules.table import INNER, OUTER

EIGHTEEN = {
    "avg-sgd": "ilr",
    "avg-l2clip": "ilr i_u",
    "avg-biclip-l2": "ilr i_u i_d",
    "avg-biclip": "ilr i_u i_d",
    "avg-adagrad": "ilr ieps",
    "avg-adam": "ilr ieps",
    "adagrad-sgd": "ilr olr oeps",
    "rmsprop-sgd": "ilr olr oeps",
    "adam-sgd": "ilr olr oeps",
    "adam-l2clip": "ilr olr oeps i_u",
    "adagrad-biclip": "ilr olr oeps i_u i_d",
    "rmsprop-biclip": "ilr olr oeps i_u i_d",
    "adam-biclip": "ilr olr oeps i_u i_d",
    "adam-biclip-l2": "ilr olr oeps i_u i_d",
    "adam2": "ilr olr ieps oeps",
    "bi2clip": "ilr olr i_u i_d o_u o_d",
    "bi2clip-l2": "ilr olr i_u i_d o_u o_d",
    "diloco": "ilr olr ieps momentum weight_decay",
}
VALUES = {
    "ilr": 0.1,
    "ilr_adamw": 0.03,
    "olr": 0.5,
    "ieps": 1e-8,
    "oeps": 1e-3,
    "i_u": 1.0,
    "i_d": 0.1,
    "o_u": 0.2,
    "o_d": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.01,
}
# What a rule must be given, by place.
NEEDS = {
    "inner": {
        "sgd": "ilr",
        "l2clip": "ilr i_u",
        "biclip": "ilr i_u i_d",
        "biclip-l2": "ilr i_u i_d",
        "adagrad": "ilr ieps",
        "adam": "ilr ieps",
        "adamw": "ilr ieps",
        "sign": "ilr",
        "muon": "ilr ilr_adamw",
        "biclip+adam": "ilr ieps i_u i_d",
        "biclip+adamw": "ilr ieps i_u i_d",
    },
    "outer": {
        "avg": "",
        "sgd": "olr",
        "nesterov": "olr momentum",
        "biclip": "olr o_u o_d",
        "biclip-l2": "olr o_u o_d",
        "adagrad": "olr oeps",
        "rmsprop": "olr oeps",
        "adam": "olr oeps",
        "yogi": "olr oeps",
    },
}


def some(names: str) -> dict[str, Any]:
    return {name: VALUES[name] for name in names.split()}


def listed(message: str, start: str) -> set[str]:
    """The names that a message lists after a word."""
    return set(message.split(start)[1].split(".")[0].replace(" ", "").split(","))


# Names


def test_there_are_eighteen() -> None:
    assert list(ALGORITHMS) == list(EIGHTEEN)


@pytest.mark.parametrize(("name", "needs"), EIGHTEEN.items())
def test_the_eighteen_need_the_settings_of_the_table(name: str, needs: str) -> None:
    algo = tailopt.algorithm(name, **some(needs))
    assert algo.name == name and (algo.outer, algo.inner) == ALGORITHMS[name]
    assert {**algo.outer_settings, **algo.inner_settings} == some(needs)
    for missing in needs.split():
        rest = {key: value for key, value in some(needs).items() if key != missing}
        with pytest.raises(ValueError, match=rf"^Invalid settings for {name}: missing '{missing}'\.") as found:
            tailopt.algorithm(name, **rest)
        assert listed(str(found.value), "It needs ") == set(needs.split())


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Adam-BiClip", "adam-biclip"),
        ("Bi^2Clip", "bi2clip"),
        ("Bi²Clip", "bi2clip"),
        ("$Bi^2Clip$", "bi2clip"),
        ("Bi^{2}Clip", "bi2clip"),
        ("Adam^2", "adam2"),
        ("Avg-BiClip (L2)", "avg-biclip-l2"),
        ("Adam-BiClip (L2)", "adam-biclip-l2"),
        ("Bi^2Clip (L2)", "bi2clip-l2"),
        ("Avg-L2Clip", "avg-l2clip"),
        ("RMSProp-BiClip", "rmsprop-biclip"),
        ("DiLoCo", "diloco"),
        (" avg sgd ", "avg-sgd"),
        ("avg_sgd", "avg-sgd"),
        ("adam-adam", "adam2"),
        ("biclip-biclip", "bi2clip"),
        ("biclip-l2-biclip-l2", "bi2clip-l2"),
        ("SludgeClip", "avg-l2clip"),
        ("$SludgeClip$", "avg-l2clip"),
        ("sludgeclip-sgd", "avg-l2clip"),
        ("RMS-TailClip", "rmsprop-biclip"),
        ("RMS-$TailClip$", "rmsprop-biclip"),
        ("RMSProp-TailClip", "rmsprop-biclip"),
        ("RMSPropTailClip", "rmsprop-biclip"),
        ("rmstailclip", "rmsprop-biclip"),
        ("Adam-TailClip", "adam-biclip"),
        ("ADAMTAILCLIP", "adam-biclip"),
        ("Adagrad-TailClip", "adagrad-biclip"),
        ("AdaGrad_TailClip", "adagrad-biclip"),
        ("Avg-$L_2$Clip SGD", "avg-l2clip"),
        ("Bi^2Clip (Coordinate-wise)", "bi2clip"),
        ("Avg-$BiClip$ ($L_2$)", "avg-biclip-l2"),
        ("bi2clipl2", "bi2clip-l2"),
        ("AdamAdam", "adam2"),
        ("avgsgd", "avg-sgd"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    algo = tailopt.algorithm(spelling, **some(EIGHTEEN[name]))
    assert algo.name == name and (algo.outer, algo.inner) == ALGORITHMS[name]


@pytest.mark.parametrize(
    ("name", "outer"), [("FedAvg", "avg"), ("FedAdagrad", "adagrad"), ("fed-adam", "adam"), ("FedYogi", "yogi")]
)
def test_names_of_federated_averaging(name: str, outer: str) -> None:
    algo = tailopt.algorithm(name, **some(f"{NEEDS['outer'][outer]} ilr"))
    assert (algo.name, algo.outer, algo.inner) == (f"{outer}-sgd", outer, "sgd")


def test_the_papers_table_is_not_all_that_has_a_name() -> None:
    assert not ALGORITHMS.keys() & OTHERS.keys() and {**ALGORITHMS, **OTHERS} == NAMED
    assert not {*OTHERS} & {name for name, _ in pairs()}, "the paper has no settings for them"
    assert all(rule_names(name) == (outer, inner) for name, (outer, inner) in NAMED.items())


def test_no_two_algorithms_have_the_same_letters() -> None:
    names = {f"{outer}-{inner}" for outer in OUTER for inner in INNER}
    assert len({spelling_key(name) for name in names}) == len(names)
    for name in names:
        outer_inner = resolve_name(name)
        assert _by_spelling()[spelling_key(name)] == outer_inner, "hyphens say nothing that the letters do not"


@pytest.mark.parametrize("spelling", ["Avg-$L_2$Clip", "Adam-$L_2$Clip"])
def test_the_papers_l2(spelling: str) -> None:
    """What `paper_settings` understands, `algorithm` does too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tailopt.paper_settings(spelling, "QNLI")
    assert tailopt.algorithm(spelling, **found).inner == "l2clip"


def test_nesterov_adamw_is_diloco_with_state_made_anew() -> None:
    settings = some("ilr olr ieps momentum")
    pair = tailopt.algorithm("nesterov-adamw", **settings)
    assert (pair.name, pair.inner_state) == ("nesterov-adamw", "reset")
    assert pair.hparams("inner")["weight_decay"] == 0.01
    assert tailopt.algorithm("diloco", **settings, weight_decay=0.0).inner_state == "keep"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("avg-bicilp", "avg-biclip"), ("bi3clip", "bi2clip"), ("adam-sdg", "adam-sgd"), ("dilocco", "diloco")],
)
def test_unknown_names_suggest(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"^Unknown algorithm: '{name}'; did you mean '{meant}'\?") as found:
        tailopt.algorithm(name)
    assert all(known in str(found.value) for known in [*NAMED, *OUTER, *INNER])


# Pairs


def test_the_tables_of_rules_are_complete() -> None:
    assert set(NEEDS["inner"]) == set(INNER) and set(NEEDS["outer"]) == set(OUTER)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_every_pair_is_an_algorithm(outer: str, inner: str) -> None:
    needs = f"{NEEDS['outer'][outer]} {NEEDS['inner'][inner]}"
    algo = tailopt.algorithm(f"{outer}-{inner}", **some(needs))
    assert (algo.outer, algo.inner) == (outer, inner)
    assert {**algo.outer_settings, **algo.inner_settings} == some(needs)
    assert algo.rule("outer") is OUTER[outer] and algo.rule("inner") is INNER[inner]
    with pytest.raises(ValueError, match="unknown 'nothing'; missing") as found:
        tailopt.algorithm(f"{outer}-{inner}", nothing=1)
    assert listed(str(found.value), "It needs ") == set(needs.split())


def test_adam_over_adam_sends_its_preconditioner() -> None:
    settings = some(EIGHTEEN["adam2"])
    assert tailopt.algorithm("adam2", **settings).send_preconditioner is True
    assert tailopt.algorithm("adam-adam", **settings).send_preconditioner is True
    assert tailopt.algorithm("adam2", **settings, send_preconditioner=False).send_preconditioner is False
    raw = tailopt.algorithm("adam2", **settings, send_preconditioner="raw")
    assert raw.hparams("inner")["bias_correction"] == "first"
    assert tailopt.algorithm("adam2", **settings).hparams("inner")["bias_correction"] is True


# Settings that are not right


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("avg-sgd", {"i_u": 1.0}, "unknown 'i_u'. It needs ilr."),
        ("avg-sgd", {"lr": 1.0}, "unknown 'lr'. It needs ilr."),
        ("avg-l2clip", {"i_d": 0.0}, "unknown 'i_d'. It needs i_u, ilr."),
        ("avg-adam", {"bias_correction": True}, "unknown 'bias_correction'. It needs ieps, ilr."),
        ("avg-biclip", {"olr": 1.0, "oeps": 1.0}, "unknown 'olr', 'oeps'. It needs i_d, i_u, ilr."),
        ("adam-sgd", {"momentum": 0.9}, "unknown 'momentum'. It needs ilr, oeps, olr."),
    ],
)
def test_superfluous_settings(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Invalid settings for {name}: {message}")):
        tailopt.algorithm(name, **some(EIGHTEEN[name]), **more)


@pytest.mark.parametrize(
    ("name", "optional"),
    [
        ("avg-sgd", ""),
        ("avg-biclip", "weight_decay dead_zone inner_momentum scale"),
        ("avg-biclip-l2", "weight_decay scope scale"),
        ("adam-biclip", "weight_decay dead_zone inner_momentum scale outer_betas bias_correction"),
        ("adam2", "inner_betas outer_betas bias_correction"),
        ("bi2clip-l2", "weight_decay scope scale"),
        ("bi2clip", "weight_decay dead_zone momentum inner_momentum scale"),
        ("diloco", "inner_betas"),
    ],
)
def test_what_may_be_given_is_listed(name: str, optional: str) -> None:
    with pytest.raises(ValueError, match="unknown 'nothing'") as found:
        tailopt.algorithm(name, **some(EIGHTEEN[name]), nothing=1)
    assert listed(str(found.value), "It may have ") == {*optional.split(), "inner_state", "send_preconditioner"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam-biclip", {"weight_decay": 0.1, "dead_zone": "auto", "outer_betas": (0.8, 0.9), "bias_correction": True}),
        ("adam2", {"inner_betas": (0.8, 0.9), "outer_betas": (0.5, 0.9), "bias_correction": True}),
        ("avg-l2clip", {"weight_decay": 0.1, "scope": "tensor"}),
        ("avg-adam", {"inner_state": "keep", "inner_betas": (0.5, 0.9)}),
        ("diloco", {"inner_state": "reset"}),
    ],
)
def test_options_are_taken(name: str, options: dict[str, Any]) -> None:
    algo = tailopt.algorithm(name, **some(EIGHTEEN[name]), **options)
    for key, value in options.items():
        if key == "inner_state":
            assert algo.inner_state == value
        else:
            assert algo.settings[key] == value


def test_a_scope_counts_on_both_levels_and_a_dead_zone_inside() -> None:
    l2 = tailopt.algorithm("bi2clip-l2", **some(EIGHTEEN["bi2clip-l2"]), scope="tensor")
    assert l2.hparams("inner")["scope"] == l2.hparams("outer")["scope"] == "tensor"
    plain = tailopt.algorithm("bi2clip", **some(EIGHTEEN["bi2clip"]), dead_zone=0.01)
    assert (plain.hparams("inner")["dead_zone"], plain.hparams("outer")["dead_zone"]) == (0.01, 0.0)


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("avg-sgd", {"ilr": -0.1}, "Invalid ilr: -0.1; need 0 <= ilr < inf."),
        ("avg-sgd", {"ilr": math.nan}, "Invalid ilr: nan; need 0 <= ilr < inf."),
        ("avg-sgd", {"ilr": math.inf}, "Invalid ilr: inf"),
        ("avg-sgd", {"ilr": "0.1"}, "Invalid ilr: '0.1'"),
        ("avg-sgd", {"ilr": True}, "Invalid ilr: True"),
        ("adam-sgd", {"olr": -1.0}, "Invalid olr: -1.0"),
        ("adam-sgd", {"oeps": -1e-8}, "Invalid oeps: -1e-08; need 0 <= oeps < inf."),
        ("avg-adam", {"ieps": math.inf}, "Invalid ieps: inf"),
        ("diloco", {"momentum": 1.0}, "Invalid momentum: 1.0; need 0 <= momentum < 1."),
        ("diloco", {"weight_decay": -0.1}, "Invalid weight_decay: -0.1"),
        ("adam-sgd", {"outer_betas": (0.9, 1.0)}, "Invalid outer_betas: (0.9, 1.0); need two numbers in [0, 1)."),
        ("avg-adam", {"inner_betas": (0.9,)}, "Invalid inner_betas: (0.9,)"),
        ("avg-l2clip", {"scope": "layer"}, "Invalid scope: 'layer'; need one of global, tensor."),
        ("avg-biclip", {"i_d": 2.0}, "Invalid thresholds: i_d=2.0 exceeds i_u=1.0; need 0 <= i_d <= i_u."),
        ("avg-biclip", {"i_d": -0.1}, "Invalid thresholds: i_d=-0.1; need 0 <= i_d <= i_u=1.0."),
        ("avg-biclip", {"i_u": -1.0}, "Invalid thresholds: i_u=-1.0; need 0 <= i_u <= inf."),
        ("avg-biclip", {"i_u": math.nan}, "Invalid thresholds: i_u=nan"),
        ("avg-biclip", {"dead_zone": 3.0}, "Invalid thresholds: dead_zone=3.0 exceeds i_u=1.0"),
        ("bi2clip", {"o_d": 1.0}, "Invalid thresholds: o_d=1.0 exceeds o_u=0.2; need 0 <= o_d <= o_u."),
        ("avg-biclip", {"i_u": torch.tensor([0.05, 1.0])}, "Invalid thresholds: need 0 <= i_d <= i_u everywhere"),
        ("avg-biclip", {"i_u": {"a": 1.0, "*": 0.01}}, "Invalid thresholds: i_d=0.1 exceeds i_u=0.01"),
        ("avg-biclip", {"i_u": {"*": 1.0}, "i_d": {"*": 2.0}}, "Invalid thresholds: i_d=2.0 exceeds i_u=1.0"),
        ("avg-sgd", {"inner_state": "kept"}, 'Invalid inner_state: \'kept\'; need "reset" or "keep".'),
        ("avg-adam", {"send_preconditioner": True}, "only adam over adam (adam2) has one to send."),
        ("adam2", {"send_preconditioner": "cooked"}, "Invalid send_preconditioner: 'cooked'"),
        ("adam2", {"inner_state": "keep"}, "excludes send_preconditioner="),
    ],
)
def test_values_out_of_range(name: str, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tailopt.algorithm(name, **{**some(EIGHTEEN[name]), **bad})


@pytest.mark.parametrize(
    "edge",
    [{"i_u": math.inf, "i_d": 0.0}, {"i_u": 0.0, "i_d": 0.0}, {"i_u": 1.0, "i_d": 1.0}, {"ilr": 0.0}, {"ilr": 1}],
)
def test_values_at_the_edge(edge: dict[str, Any]) -> None:
    assert tailopt.algorithm("avg-biclip", **{**some("ilr i_u i_d"), **edge}).inner_settings == {
        **some("ilr i_u i_d"),
        **edge,
    }


# Classes, and the settings property


def test_two_classes() -> None:
    algo = tailopt.Algorithm(
        outer=torch.optim.RMSprop,
        inner=torch.optim.SGD,
        outer_settings={"lr": 1e-3, "alpha": 0.9},
        inner_settings={"lr": 0.1, "momentum": 0.9},
    )
    assert algo.name == "RMSprop-SGD"
    assert algo.hparams("outer") == {"lr": 1e-3, "alpha": 0.9}
    assert algo.hparams("inner") == {"lr": 0.1, "momentum": 0.9}
    assert algo.settings == {"olr": 1e-3, "alpha": 0.9, "ilr": 0.1, "momentum": 0.9}


def test_a_class_and_a_name() -> None:
    algo = tailopt.Algorithm("avg", torch.optim.NAdam, inner_settings={"lr": 0.1}, inner_state="keep", name="mine")
    assert (algo.name, algo.settings) == ("mine", {"ilr": 0.1})
    other = tailopt.Algorithm(torch.optim.SGD, "biclip", {"lr": 0.5}, some("ilr i_u i_d"))
    assert other.name == "SGD-biclip"
    assert other.settings == {"olr": 0.5, **some("ilr i_u i_d")}


def test_a_class_may_have_its_defaults() -> None:
    assert tailopt.Algorithm("avg", torch.optim.Adam).hparams("inner") == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inner": torch.optim.SGD, "inner_settings": {"ilr": 0.1}}, "unknown 'ilr'"),
        ({"inner": torch.optim.SGD, "inner_settings": {"lr": 0.1, "betas": 1}}, "unknown 'betas'"),
        ({"inner": torch.optim.LBFGS}, "LBFGS cannot be used here: it needs a closure"),
        ({"inner": torch.optim.SparseAdam}, "SparseAdam cannot be used here"),
        ({"inner": "sdg"}, "Unknown inner optimizer: 'sdg'; need one of sgd, l2clip"),
        ({"inner": "rmsprop"}, "Unknown inner optimizer: 'rmsprop'"),
        ({"outer": "adamw", "inner": "sgd"}, "Unknown outer optimizer: 'adamw'; need one of avg, sgd"),
        ({"inner": "sgd"}, "missing 'ilr'"),
        ({"inner": "sgd", "inner_settings": {"lr": 0.1}}, "unknown 'lr'; missing 'ilr'. It needs ilr."),
        ({"inner": torch.optim.SGD, "inner_settings": {"lr": -1.0}}, "need 0 <= ilr < inf"),
    ],
)
def test_what_an_algorithm_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tailopt.Algorithm(**{"outer": "avg", **given})


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="need a name or a class of torch.optim"):
        tailopt.Algorithm("avg", torch.nn.Linear)  # type: ignore[arg-type]


def test_settings_by_their_public_names() -> None:
    algo = tailopt.algorithm("adam-biclip", **some("ilr olr oeps i_u i_d"))
    assert algo.settings == {**some("ilr olr oeps i_u i_d"), "outer_betas": (0.9, 0.99)}
    assert tailopt.algorithm("bi2clip", **some(EIGHTEEN["bi2clip"])).settings == some(EIGHTEEN["bi2clip"])
    assert tailopt.algorithm("avg-adam", **some("ilr ieps")).settings == {
        **some("ilr ieps"),
        "inner_betas": (0.9, 0.999),
    }


def test_momentum_of_both_levels() -> None:
    given = {**some(EIGHTEEN["bi2clip"]), "momentum": 0.5, "inner_momentum": 0.9}
    algo = tailopt.algorithm("bi2clip", **given)
    assert algo.settings == given
    assert (algo.hparams("outer")["momentum"], algo.hparams("inner")["momentum"]) == (0.5, 0.9)
    for bad in ({"momentum": 1.0}, {"inner_momentum": -0.1}):
        with pytest.raises(ValueError, match=f"Invalid {next(iter(bad))}: .*; need 0 <= {next(iter(bad))} < 1"):
            tailopt.algorithm("bi2clip", **some(EIGHTEEN["bi2clip"]), **bad)


def test_settings_of_both_levels_stand_apart() -> None:
    """None replaces another of the same name: they are what a run folder says of a run."""
    outer, inner = {"lr": 0.5, "momentum": 0.9, "nesterov": True}, {"lr": 0.1, "momentum": 0.5, "nesterov": True}
    algo = tailopt.Algorithm(torch.optim.SGD, torch.optim.SGD, outer, inner)
    assert algo.settings == {
        "olr": 0.5,
        "outer_momentum": 0.9,
        "nesterov": True,
        "ilr": 0.1,
        "inner_momentum": 0.5,
    }
    mixed = tailopt.Algorithm(torch.optim.AdamW, "biclip", {"lr": 0.5, "weight_decay": 0.1}, some("ilr i_u i_d"))
    assert mixed.settings == {"olr": 0.5, "weight_decay": 0.1, **some("ilr i_u i_d")}


def test_an_algorithm_from_its_own_settings_is_the_same() -> None:
    for name, needs in EIGHTEEN.items():
        algo = tailopt.algorithm(name, **some(needs))
        again = tailopt.algorithm(name, **algo.settings)
        assert again.settings == algo.settings
        assert all(again.hparams(level) == algo.hparams(level) for level in ("outer", "inner"))


def test_defaults() -> None:
    """Outside as in the pseudocode of adaptive federated optimizers, inside as in torch."""
    algo = tailopt.algorithm("adam2", **some(EIGHTEEN["adam2"]))
    assert algo.hparams("outer") == {"lr": 0.5, "eps": 1e-3, "betas": (0.9, 0.99), "bias_correction": False}
    assert algo.hparams("inner") == {"lr": 0.1, "eps": 1e-8, "betas": (0.9, 0.999), "bias_correction": True}
    assert tailopt.algorithm("rmsprop-sgd", **some("ilr olr oeps")).hparams("outer")["betas"] == (0.9, 0.99)
    assert tailopt.algorithm("avg-sgd", ilr=0.1).inner_state == "reset"


# The paper


@pytest.mark.parametrize("printed", [False, True], ids=["corrected", "printed"])
def test_every_row_of_the_paper_is_an_algorithm(printed: bool) -> None:
    assert len(pairs()) == 168
    assert {name for name, _ in pairs()} == set(EIGHTEEN)
    for name, dataset in pairs():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            row = tailopt.paper_settings(name, dataset, printed=printed)
        algo = tailopt.algorithm(name, **row)
        assert algo.name == name and {**algo.outer_settings, **algo.inner_settings} == row
        assert set(row) == set(EIGHTEEN[name].split())
