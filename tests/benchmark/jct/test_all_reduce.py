"""What summing over GPUs costs."""

import json
import sys

import pytest
import torch

from kvprof.benchmark.jct.layer_bench import AllReduce, measure_all_reduce
from kvprof.errors import FailedError
from tests.benchmark.jct.shapes import tiny_bench, tiny_shape
from tests.benchmark.on_shapes import method_on


def test_without_the_gpus_nothing_is_measured():
    assert measure_all_reduce(2, count=lambda: 1) is None


def test_every_process_gets_its_rank_and_the_first_answers():
    program = """
import json, sys
rank, world, sizes, port = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
assert world == 3 and int(port) > 0
if rank == 0:
    print(json.dumps([size / 1e9 for size in sizes]))
"""
    found = measure_all_reduce(3, count=lambda: 4, program=(sys.executable, "-c", program))
    assert found.seconds == [size / 1e9 for size in found.sizes]
    assert found(3 * 2**14) == pytest.approx(3 * 2**14 / 1e9)
    assert found(1) == found.seconds[0]
    assert found(4 * found.sizes[-1]) == pytest.approx(4 * found.seconds[-1])
    json.dumps(found.sizes)


def test_a_process_that_fails_says_why():
    program = "import sys; sys.exit('NCCL is not built in')"
    with pytest.raises(FailedError, match="NCCL is not built in"):
        measure_all_reduce(2, count=lambda: 2, program=(sys.executable, "-c", program))


def test_summing_is_a_part_of_a_layer_twice():
    bench = tiny_bench(tiny_shape(), all_reduce=AllReduce([1, 2**20], [0.0, 1.0]))
    with torch.inference_mode():
        point = bench.point(
            method_on("full", bench.model.attention), bench.workload("decode", 4, 32)
        )
    assert point.parts["communication"] == pytest.approx(2 * (4 * 128 * 4 - 1) / (2**20 - 1))
    assert point.layer > point.parts["communication"]
