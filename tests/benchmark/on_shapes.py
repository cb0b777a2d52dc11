"""Methods on a shape without weights, as the tests of the benchmark name them."""

from typing import Any

from kvprof.benchmark.jct.ablations import composed_method, parse_variant
from kvprof.benchmark.methods import Method
from kvprof.benchmark.shapes import Shape


def method_on(name: str, shape: Shape, rate: float = 0.5, **given: Any) -> Method:
    """Return a method of ``bench``, or of a composed run."""
    return composed_method(parse_variant(name), shape, rate, **{"tokens": 256, **given})
