import pytest

from kvprof.bandwidth import cpu_read_bandwidth, gpu_read_bandwidth
from kvprof.environment import read_gpus


def test_memory_is_read_at_a_rate_that_hardware_has() -> None:
    assert 0.0005 < cpu_read_bandwidth(repeats=2) < 3


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not read_gpus().devices, reason="needs an NVIDIA GPU")
def test_a_gpu_reads_near_the_peak_that_its_driver_states() -> None:
    peak = read_gpus().devices[0].peak_tb_per_s
    assert peak is not None
    assert 0.5 * peak < gpu_read_bandwidth(0) <= peak
