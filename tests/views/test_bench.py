"""The report of a bench: tables at every width, and what it says."""

import re
from statistics import median
from typing import Any

import pytest

from kvprof.views.bench import groups
from kvprof.views.numbers import number
from tests.views.synthetic_bench import METHODS, SWEEP, bench_result, flat, text_of


def block(text: str, title: str) -> list[str]:
    """Return the lines below a heading, up to the next empty one."""
    lines = text.splitlines()
    start = lines.index(title) + 1
    return lines[start : lines.index("", start)]


def table(text: str, title: str) -> list[str]:
    """Return the lines of the table below a heading that begin with a method's name."""
    lines = block(text, title)
    return [line for line in lines if line.split() and line.split()[0] in METHODS]


# --- tables -----------------------------------------------------------------------------------


def test_a_buffer_larger_than_what_is_stored_has_a_column() -> None:
    result = bench_result(batches=(8,))
    assert "buffer" not in text_of(result, 160)
    for row in result["data"]["rows"]:
        row["buffer_bytes"] = row["cache_bytes"]
    assert "buffer" not in text_of(result, 160)
    row = next(r for r in result["data"]["rows"] if (r["method"], r["phase"]) == ("fp8", "decode"))
    row |= {"cache_bytes": 2**30, "buffer_bytes": 5 * 2**28}
    text = text_of(result, 160)
    (line,) = (line for line in table(text, "Decode, batch 8, 100k tokens") if "fp8" in line)
    assert line.split()[-4:] == ["1.0", "GiB", "1.2", "GiB"]


def test_each_phase_and_batch_has_its_table_of_methods() -> None:
    text = text_of(bench_result())
    for title in ("Decode, batch 1", "Decode, batch 8", "Prefill, batch 1", "Prefill, batch 8"):
        rows = table(text, f"{title}, 100k tokens")
        assert [row.split()[0] for row in rows] == list(METHODS)


def test_a_row_shows_what_was_measured() -> None:
    result = bench_result(batches=(8,))
    row = next(r for r in result["data"]["rows"] if r["method"] == "fdc")
    row |= {
        "seconds": [4.1e-4, 4.0e-4, 4.3e-4],
        "seconds_interval": [4.0e-4, 4.2e-4],
        "tb_per_s": 4.0625,
        "bandwidth_share": 0.8948,
        "speedup": 1.8649,
        "error": 0.00214,
        "speedup_interval": [1.82, 1.9],
        "baseline_seconds": [7.6e-4, 7.7e-4, 7.65e-4],
        "cache_bytes": 3 * 2**30 // 2,
        "rate": 0.5,
    }
    line = next(
        line
        for line in table(text_of(result), "Decode, batch 8, 100k tokens")
        if line.split()[0] == "fdc"
    )
    shown = "fdc 0.500 64.0 (32–112) 0.4100 0.4000–0.4200 4.06 89.5 0.7650 1.86× [1.82, 1.90]"
    assert line.split() == [*shown.split(), "0.0021", "1.5", "GiB"]


def test_a_latent_that_several_heads_share_says_so() -> None:
    for line in table(text_of(bench_result(), 80), "Decode, batch 8, 100k tokens"):
        assert ("256 / 4 heads" in line) == (line.split()[0] == "palu")


def test_full_rank_is_the_width_of_the_heads() -> None:
    line = table(text_of(bench_result()), "Decode, batch 8, 100k tokens")[0]
    assert line.split()[:3] == ["full", "0", "128"]


def test_prefill_is_held_against_arithmetic_not_bandwidth() -> None:
    lines = block(text_of(bench_result()), "Prefill, batch 1, 100k tokens")
    assert "TFLOP/s" in "".join(lines[:3])
    assert "TB/s" not in "".join(lines[:3])
    assert any(
        "TB/s" in line
        for line in block(text_of(bench_result()), "Decode, batch 1, 100k tokens")[:3]
    )


@pytest.mark.parametrize("settings", [{}, SWEEP], ids=["plain", "sweep"])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_line_is_too_wide_and_no_figure_breaks(width: int, settings: dict[str, Any]) -> None:
    result = bench_result(**settings)
    text = text_of(result, width)
    assert max(map(len, text.splitlines())) <= width
    for group in groups(result):
        for row, line in zip(group.rows, table(text, group.name), strict=True):
            cells = line.split()
            assert cells[0] == row["method"]
            assert f"{row['speedup']:#.3g}×" in cells
            assert any(cell in ("0", f"{row['rate']:.3f}") for cell in cells)


def test_the_least_important_columns_go_first_and_are_named() -> None:
    result = bench_result(phases=("decode",))
    wide = block(text_of(result, 120), "Decode, batch 8, 100k tokens")
    narrow = block(text_of(result, 80), "Decode, batch 8, 100k tokens")
    narrowest = block(text_of(result, 60), "Decode, batch 8, 100k tokens")
    assert not any("Columns hidden" in line and "error" in line for line in wide)
    assert any("error" in line for line in narrow if line.startswith("Columns hidden"))
    assert any("range" in line for line in narrowest if line.startswith("Columns hidden"))
    for lines in (wide, narrow, narrowest):
        assert "time" in (head := " ".join(lines[:3]))
        assert "speed-up" in head


def test_a_speed_up_stands_beside_the_times_that_it_is_of() -> None:
    result = bench_result(phases=("decode",), batches=(8,), methods=("full", "fdc"))
    row = result["data"]["rows"][1]
    moved = [1.3 * value for value in row["baseline_seconds"]]
    row |= {"baseline_seconds": moved, "speedup": 2.2, "speedup_interval": [2.1, 2.3]}
    for width in (80, 120):
        shown = text_of(result, width)
        own = next(line for line in shown.splitlines() if re.match("fdc +0", line))
        beside = number(1e3 * median(moved), 4)
        assert re.search(rf"{beside} \(drift \+\d\d\.\d %\) +2.20× \[2.10, 2.30\]", own)
    assert "bench --jct" in flat(result)


def test_a_cpus_rates_are_written_in_its_own_unit() -> None:
    result = bench_result()
    result["data"]["bandwidth"]["tb_per_s"] = 0.0312
    result["data"]["compute"]["flop_per_s"] = 1e11
    for row in result["data"]["rows"]:
        row["tb_per_s"] *= 0.005
        row["flop_per_s"] *= 1e-4
    shown = text_of(result, 200)
    assert "31.2 GB/s" in shown
    assert "GFLOP/s" in shown
    assert "TB/s" not in shown
    assert "TFLOP/s" not in shown


def test_baselines_are_listed_by_time_with_the_reason_of_those_that_did_not_run() -> None:
    result = bench_result(phases=("decode",), batches=(8,))
    lines = text_of(result).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("uncompressed kernel"))
    assert [line.split()[0] for line in lines[start + 2 : start + 5]] == [
        "cudnn",
        "kvprof",
        "flash",
    ]
    assert lines[start + 2].endswith("1.00×")
    assert "speed-up vs cudnn" in lines
    assert "- flashinfer: FlashInfer is not installed" in lines
    for name in ("sdpa-math", "sdpa-math-rows"):
        seconds = [1.0] if name == "sdpa-math" else None
        result["data"]["baselines"].append(
            {
                "name": name,
                "phase": "decode",
                "batch": 8,
                "seq": 102_400,
                "seconds": seconds,
                "reason": None if seconds else "no room",
            }
        )
    lines = text_of(result).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("uncompressed kernel"))
    assert lines[start + 5].split()[:2] == ["sdpa-math", "1,000"]
    result["data"]["baselines"].append(result["data"]["baselines"][-2] | {"name": "last"})
    assert any(
        line.startswith("slower: sdpa-math 0.000764×") for line in text_of(result).splitlines()
    )


def test_rows_with_unlike_baselines_name_theirs() -> None:
    result = bench_result(phases=("decode",), batches=(8,))
    result["data"]["rows"][0]["baseline"] = "flash"
    text = text_of(result)
    assert "speed-up vs" not in text
    assert any("against" in line for line in block(text, "Decode, batch 8, 100k tokens")[:3])
    assert table(text, "Decode, batch 8, 100k tokens")[0].endswith("flash")


# --- what it says -----------------------------------------------------------------------------


def test_the_first_line_answers() -> None:
    result = bench_result()
    for row in result["data"]["rows"]:
        row["speedup_interval"] = None
        row["speedup"] = {"fdc": 1.79, "fdc-4bit": 4.12, "fp8": 1.93}.get(row["method"], 0.5)
    text = flat(result)
    assert text.startswith(
        "Decode, batch 8, 100k tokens: fdc-4bit is 4.12× as fast as the fastest uncompressed "
    )
    assert "; then fp8 1.93×, fdc 1.79×, kq 0.500×." in text
    assert "Prefill, batch 8, 100k tokens: fdc-4bit" in text


def test_where_nothing_is_faster_that_is_the_answer() -> None:
    result = bench_result(phases=("decode",))
    for row in result["data"]["rows"]:
        row["speedup_interval"] = None
        row["speedup"] = {"fdc": 0.91, "full": 1.2}.get(row["method"], 0.5)
    text = flat(result)
    assert "closest: fdc, 0.910×" in text


def test_a_verdict_needs_its_interval() -> None:
    """A speed-up that may be none is told as that, whichever side of 1 its median is on."""
    result = bench_result(phases=("decode",), batches=(8,))
    wide = {"fdc": (0.54, [0.16, 1.42]), "kq": (1.2, [0.8, 1.9])}
    for row in result["data"]["rows"]:
        row["speedup"], row["speedup_interval"] = wide.get(row["method"], (0.5, [0.4, 0.6]))
    text = flat(result)
    assert "kq 1.20× [0.800, 1.90], fdc 0.540× [0.160, 1.42]." in text
    assert "closest" not in text
    for row in result["data"]["rows"]:
        if row["method"] == "fp8":
            row["speedup"], row["speedup_interval"] = 1.1, [1.05, 1.15]
    text = flat(result)
    assert "tokens: fp8 is 1.10× [1.05, 1.15] as fast as the fastest" in text
    assert "; not significant: kq 1.20× [0.800, 1.90], fdc 0.540× [0.160, 1.42]." in text


def test_an_interrupted_bench_says_so_and_keeps_its_warnings() -> None:
    text = flat(bench_result(complete=False))
    assert text.count("INCOMPLETE") == 2
    assert "samples spread by 12 %" in text


def test_an_interrupted_bench_names_what_its_answer_leaves_out() -> None:
    result = bench_result(complete=False)
    assert "Not measured" not in flat(result)  # stopped after the last row
    result["inputs"]["seqs"].append(204_800)
    rows = result["data"]["rows"]
    kept = [row for row in rows if row["phase"] == "decode" and row["method"] != "kq"]
    result["data"]["rows"] = kept
    assert "Not measured: decode: kq, 200k tokens; prefill: all." in flat(result)
    result["complete"] = True
    assert "Not measured" not in flat(result)
