"""The rules by the name they have in an algorithm, outside and inside, with the defaults of that place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tailopt.rules.adagrad import ADAGRAD
from tailopt.rules.adam import ADAM, ADAMW, BICLIP_ADAM, BICLIP_ADAMW
from tailopt.rules.biclip import BICLIP, SIGN
from tailopt.rules.l2clip import BICLIP_L2, L2CLIP
from tailopt.rules.rmsprop import RMSPROP
from tailopt.rules.rule import Rule
from tailopt.rules.sgd import AVG, NESTEROV, SGD

# The adaptive federated optimizers' betas and no bias correction: the pseudocode of nested training.
OUTER: Mapping[str, Rule] = {
    "avg": AVG,
    "sgd": SGD,
    "nesterov": NESTEROV,
    "biclip": replace(BICLIP, options={"dead_zone": 0.0}),
    "biclip-l2": replace(BICLIP_L2, options={"scope": "global"}),
    "adagrad": ADAGRAD,
    "rmsprop": RMSPROP,
    "adam": replace(ADAM, options={"betas": (0.9, 0.99), "bias_correction": False}),
}

# Inside, adam, adamw and adagrad are torch's own.
INNER: Mapping[str, Rule] = {
    "sgd": replace(SGD, options={}),
    "l2clip": L2CLIP,
    "biclip": BICLIP,
    "biclip-l2": BICLIP_L2,
    "adagrad": ADAGRAD,
    "adam": ADAM,
    "adamw": ADAMW,
    "sign": SIGN,
    "biclip+adam": BICLIP_ADAM,
    "biclip+adamw": BICLIP_ADAMW,
}
