"""Settings by parameter: patterns of names."""

from __future__ import annotations

import pytest

from tailopt.settings import per_parameter


def test_by_parameter() -> None:
    names = ["encoder.0.weight", "encoder.0.bias", "head.weight"]
    assert per_parameter(0.5, names, "i_u") == 0.5
    assert per_parameter({"*": 0.5}, names, "i_u") == [0.5, 0.5, 0.5]
    assert per_parameter({"*.bias": 1.0, "head.*": 2.0, "*": 0.5}, names, "i_u") == [0.5, 1.0, 2.0]
    assert per_parameter({"*": 0.5, "head.*": 2.0}, names, "i_u") == [0.5, 0.5, 0.5], "the first that fits"
    assert per_parameter({"encoder.[01].*": 1.0, "HEAD.*": 3.0, "head.?eight": 2.0}, names, "i_u") == [1.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"Invalid o_d: no pattern of \['a', 'b'\] fits the parameter 'head.weight'"):
        per_parameter({"b": 1.0, "a": 1.0}, ["head.weight"], "o_d")
