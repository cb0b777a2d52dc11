"""Requests as long as the papers' tables say, drawn reproducibly."""

import numpy as np
import pytest
import yaml

from kvprof.serving.load.traces import TokenRange, Trace, load_trace, sample_requests, trace_names


def test_every_row_of_both_tables_is_there():
    assert trace_names() == [
        "fdc/imdb",
        "fdc/arxiv",
        "fdc/cocktail",
        "fdc/humaneval",
        "fdc/pg-19",
        "zack/imdb",
        "zack/arxiv",
        "zack/cocktail",
        "zack/humaneval",
    ]


def test_the_papers_differ_in_cocktail():
    assert load_trace("fdc/cocktail").input == TokenRange(round(49.7 * 1024), 9626, 107_418)
    assert load_trace("zack/cocktail").input.average == round(16.2 * 1024)
    assert load_trace("FDC/PG-19").output.average == round(61.5 * 1024)
    assert load_trace("fdc/arxiv").source == "FDC table 6, arXiv summarization"


@pytest.mark.parametrize("name", trace_names())
@pytest.mark.parametrize("count", [200, 3000])
def test_draws_have_the_published_mean_and_bounds(name, count):
    trace = load_trace(name)
    drawn = np.array(sample_requests(trace, count, seed=3))
    for column, lengths in zip(drawn.T, (trace.input, trace.output), strict=True):
        assert lengths.minimum <= column.min()
        assert column.max() <= lengths.maximum
        assert column.mean() == pytest.approx(lengths.average, rel=0.01)
        # Draws are spread: half of them on either side of a median well inside the bounds.
        assert lengths.minimum < np.median(column) < lengths.maximum
        assert len(np.unique(column)) > 20


def test_a_mean_in_the_middle_is_a_flat_distribution():
    trace = Trace("t", "t", TokenRange(500, 0, 1000), TokenRange(10, 5, 100))
    drawn = np.array([given for given, _ in sample_requests(trace, 4000, seed=0)])
    assert np.percentile(drawn, 25) == pytest.approx(250, abs=3)
    # ... and one far off is an exponential that ends at the bounds.
    written = np.array([out for _, out in sample_requests(trace, 4000, seed=0)])
    assert np.percentile(written, 50) == pytest.approx(5 + 5 * np.log(2), rel=0.1)


def test_a_seed_gives_the_same_requests_and_another_gives_others():
    trace = load_trace("fdc/humaneval")
    assert sample_requests(trace, 50, 7) == sample_requests(trace, 50, 7)
    assert sample_requests(trace, 50, 7) != sample_requests(trace, 50, 8)


def test_inputs_and_outputs_are_independent():
    given, written = np.array(sample_requests(load_trace("fdc/arxiv"), 2000, 1)).T
    assert abs(np.corrcoef(given, written)[0, 1]) < 0.06


def test_cells_stand_as_printed():
    from importlib.resources import files

    text = (files("kvprof") / "assets" / "traces" / "fdc.yaml").read_text("utf-8")
    table = yaml.safe_load(text)
    assert table["table"] == "table 6"
    assert table["traces"]["cocktail"]["input"] == {
        "average": "49.7K",
        "minimum": "9.4K",
        "maximum": "104.9K",
    }
