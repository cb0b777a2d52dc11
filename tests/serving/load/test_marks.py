"""What engines say of themselves, in Prometheus's format."""

import pytest

from kvprof.serving.load.marks import added, difference, engine_name, parse_marks

# As vLLM 0.27.1 wrote it for two engines behind its router, shortened.
TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7954200228192003e+09
vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 10.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 86.5
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} nan
vllm:cache_config_info{block_size="128",engine="0",kv_cache_memory_bytes="1073741824",\
kv_cache_size_tokens="43648",num_gpu_blocks="341"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_memory_bytes="1073741824",\
kv_cache_size_tokens="43648",num_gpu_blocks="341"} 1.0
"""


def test_engines_behind_a_router_are_added():
    marks = parse_marks(TEXT)
    assert (marks.running, marks.waiting, marks.cache) == (5, 7, 0.375)
    assert marks.totals == {"preemptions": 4.0, "requests": 10.0, "end_to_end": 86.5}
    assert marks.cache_tokens == 2 * 43648
    assert marks.cache_bytes == 2 * 2**30
    assert engine_name(TEXT) == "vLLM"


def test_pages_that_each_engine_s_line_counts_for_all_are_counted_once():
    # As vLLM wrote it before it told tokens: the pages of both, twice.
    lines = b"".join(
        b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="200"} 1.0\n' % engine
        for engine in (0, 1)
    )
    marks = parse_marks(b"vllm:num_requests_running 1\n" + lines)
    assert (marks.cache_tokens, marks.cache_bytes) == (3200, None)


def test_another_engine_and_none():
    text = b"sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\nsglang:token_usage 0.3\n"
    marks = parse_marks(text)
    assert (marks.running, marks.waiting, marks.cache, marks.totals) == (4, 1, 0.3, {})
    assert engine_name(text) == "SGLang"
    assert parse_marks(b"process_cpu_seconds_total 5\n") is None
    assert parse_marks(b"<html>vllm:\x00") is None
    assert engine_name(b"x") is None


def test_servers_are_added_and_what_one_does_not_tell_is_not_known():
    one = parse_marks(TEXT)
    both = added([one, one])
    assert (both.running, both.cache, both.totals["end_to_end"]) == (10, 0.375, 173.0)
    assert added([one, None]) is None
    assert added([]) is None


def test_what_grew_and_an_engine_that_began_again():
    before = parse_marks(TEXT)
    after = parse_marks(TEXT.replace(b"86.5", b"90.0").replace(b"10.0\n", b"12.0\n"))
    assert difference(before, after) == pytest.approx(
        {"preemptions": 0.0, "requests": 2.0, "end_to_end": 3.5}
    )
    assert difference(after, before) == {}
    assert difference(None, after) == {}


def test_what_a_hostile_server_tells_has_no_number_that_cannot_be_used():
    config = b'vllm:cache_config_info{kv_cache_size_tokens="%s",num_gpu_blocks="7"} 1.0\n'
    huge = b"vllm:num_requests_running 1e308\n" * 9 + b"vllm:num_requests_waiting 1.0\n"
    marks = parse_marks(huge + config % (b"9" * 5000))
    assert (marks.running, marks.waiting, marks.cache_tokens) == (None, 1, None)
    below = b"vllm:num_requests_running 1\nvllm:num_requests_waiting -3\n"
    pages = b'vllm:cache_config_info{block_size="%s",num_gpu_blocks="%s"} 1.0\n'
    marks = parse_marks(below + pages % (b"9" * 18, b"9" * 18))
    assert (marks.running, marks.waiting, marks.cache_tokens) == (1, None, None)
    long = b"vllm:cache_config_info{" + b"a" * 2**20 + b"} 1.0\n"  # quadratic, were it read
    assert parse_marks(long) is None
