"""A plan takes as few rotary pairs without their mean as keep what all of them keep."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.evaluation import centre_pairs
from kvprof.methods.registry import plan_family
from kvprof.moments.tokens import CalibrationTokens
from kvprof.progress import silent
from kvprof.sources.grammar import parse_source
from tests.methods.models import inputs, model

_EVERY = 8  # pairs of the model's heads


@given(st.lists(st.floats(0.98, 1.0), min_size=3, max_size=3))
def test_the_fewest_are_taken_that_keep_enough(kept: list[float]) -> None:
    accuracies = dict(zip((0, 4, _EVERY), kept, strict=True))

    class Evaluator:
        baseline_steps = 1
        baseline = staticmethod(lambda *_: None)
        steps = staticmethod(lambda _: 1)

        def __init__(self, *_: Any) -> None:
            pass

        def evaluate(self, plan: Any, *_: Any) -> dict[str, Any]:
            return {"complete": True, "relative_accuracy": accuracies[plan.made["centre"]]}

    def plan(pairs: int) -> Any:
        return plan_family("hadamard-int4", inputs("Llama"), centre=pairs).build(4.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(centre_pairs, "Evaluator", Evaluator)
        found = centre_pairs.fewest_pairs(
            model("Llama"),
            plan(_EVERY),
            plan,
            CalibrationTokens(parse_source("calibration"), (np.arange(8),), 8),
            progress=silent,
            should_stop=lambda: False,
        )
    wanted = next(pairs for pairs in sorted(accuracies) if accuracies[pairs] >= kept[-1] - 0.002)
    assert found.made["centre"] == wanted
    centre = found.layers[0].centre
    assert centre is not None
    assert int((centre.keys != 0).any(0).sum()) == 2 * wanted
