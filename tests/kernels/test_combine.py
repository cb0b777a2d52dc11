"""What a combining program takes: every column once, few of them where there are few programs."""

import triton
from hypothesis import given
from hypothesis import strategies as st

from kvprof.kernels.split_kv import combine_sizes


@given(
    st.integers(1, 32).map(lambda n: 16 * n),
    st.integers(1, 4000),
    st.integers(1, 512),
    st.integers(1, 64),
    st.integers(1, 200),
)
def test_sizes_are_powers_of_two_that_registers_hold(widest, items, tasks, group, multiprocessors):
    width, parts, warps = combine_sizes(widest, items, tasks, group, multiprocessors)
    assert 16 <= width <= triton.next_power_of_2(widest)
    for number in (width, parts, warps):
        assert number & (number - 1) == 0
    assert parts >= 16
    # 64 values and their sums fit into a thread's registers.
    assert width * parts <= 64 * 32 * warps
    # No multiprocessor has more than two of the narrowest, or sixteen of the next.
    programs = tasks * group * triton.cdiv(widest, width)
    assert width >= widest or programs <= {16: 2, 32: 16}[width] * multiprocessors
    narrowest = tasks * group * triton.cdiv(widest, 16)
    assert width == 16 or narrowest > 2 * multiprocessors


def test_few_heads_are_joined_by_many_programs_and_many_by_few_wide_ones():
    # Two KV heads with eight queries each, 264 parts a head, on 132 multiprocessors.
    assert combine_sizes(112, 528, 2, 8, 132) == (16, 512, 4)
    # Eight with four, 66 parts.
    assert combine_sizes(112, 528, 8, 4, 132) == (16, 128, 2)
    # Eight sequences of eight, 16 parts a head: wider programs took longer on an H100.
    for group in (4, 8):
        assert combine_sizes(112, 1120, 64, group, 132) == (32, 32, 4)
    # 32 sequences of eight, four parts each.
    assert combine_sizes(112, 1056, 256, 8, 132) == (128, 16, 2)
