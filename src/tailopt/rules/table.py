"""The rules by their name in an algorithm, with the defaults that they have as outer and as inner rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tailopt.rules.adagrad import ADAGRAD
from tailopt.rules.adam import ADAM, ADAMW, BICLIP_ADAM, BICLIP_ADAMW
from tailopt.rules.biclip import BICLIP, SIGN
from tailopt.rules.l2clip import BICLIP_L2, L2CLIP
from tailopt.rules.muon import MUON
from tailopt.rules.rmsprop import RMSPROP
from tailopt.rules.rule import Rule
from tailopt.rules.sgd import AVG, NESTEROV, SGD
from tailopt.rules.yogi import YOGI

# Outside, adam, rmsprop and yogi have the betas of adaptive federated optimizers and no bias correction, as in the
# paper's pseudocode of nested training.
OUTER: Mapping[str, Rule] = {
    "avg": AVG,
    "sgd": SGD,
    "nesterov": NESTEROV,
    "biclip": replace(BICLIP, defaults={"dead_zone": 0.0, "momentum": 0.0, "scale": "first"}),
    "biclip-l2": replace(BICLIP_L2, defaults={"scope": "global", "scale": "first"}),
    "adagrad": ADAGRAD,
    "rmsprop": RMSPROP,
    "adam": replace(ADAM, defaults={"betas": (0.9, 0.99), "bias_correction": False}),
    "yogi": YOGI,
}

# Inside, adam, adamw, adagrad and muon are torch's.
INNER: Mapping[str, Rule] = {
    "sgd": replace(SGD, defaults={}),
    "l2clip": L2CLIP,
    "biclip": BICLIP,
    "biclip-l2": BICLIP_L2,
    "adagrad": ADAGRAD,
    "adam": ADAM,
    "adamw": ADAMW,
    "sign": SIGN,
    "muon": MUON,
    "biclip+adam": BICLIP_ADAM,
    "biclip+adamw": BICLIP_ADAMW,
}
