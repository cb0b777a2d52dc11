"""Which long steps over quantised latents are graphs."""

import pytest

from kvprof.serving.choosing import graph_pays, scheduled_rows
from tests.serving.scheduled_steps import LONG_PAST


@pytest.mark.parametrize(
    ("rows", "pays"),
    [
        # As short as vLLM's own graphs, whatever came before.
        ([(512, 100_000)], True),
        ([(500, 100_000)] + [(1, 9_000)] * 12, True),
        # Prompts of which nothing came before, and any that decode beside them.
        ([(315, 0)] * 3, True),
        ([(315, 0)] * 3 + [(1, 100_000)] * 64, True),
        # All decode.
        ([(1, 8_000)] * 700, True),
        # A few tokens go on after a beginning that is found again.
        ([(100, 256)] * 8, True),
        ([(600, 0), (10, 8_192)], True),
        # The rest of a long prompt.
        ([(800, 400)], True),
        ([(800, 401)], False),
        ([(600, 8_192)] + [(1, 300)] * 20, False),
        ([], True),
    ],
)
def test_a_long_step_is_a_graph_where_little_came_before_its_chunks(
    rows: list[tuple[int, int]], pays: bool
) -> None:
    assert graph_pays(rows) is pays


def test_what_a_step_holds_is_what_was_scheduled() -> None:
    assert list(scheduled_rows(LONG_PAST)) == [(20, 0), (1, 900), (600, 8192)]
