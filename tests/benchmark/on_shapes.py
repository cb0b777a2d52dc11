"""Methods on a shape without weights, as the tests of the benchmark name them."""

from typing import Any

from kvprof.benchmark.jct.ablations import composed_method, parse_variant
from kvprof.benchmark.methods import Method
from kvprof.benchmark.shapes import Shape

#: About half of the columns, with what bits save of them.
_RATES = {"2bit": 0.9, "3bit": 0.87, "4bit": 0.8}


def method_on(name: str, shape: Shape, rate: float | None = None, **given: Any) -> Method:
    """Return a method of ``bench``, or of a composed run."""
    if rate is None:
        rate = next((own for bits, own in _RATES.items() if bits in name), 0.5)
    return composed_method(parse_variant(name), shape, rate, **{"tokens": 256, **given})
