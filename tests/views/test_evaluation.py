import csv
import io
import re

import pytest

from kvprof.records.schema import validate_result
from kvprof.views.evaluation import COLUMNS, report, to_csv
from kvprof.views.page import render_text

from .synthetic_evaluation import evaluation_result


def shown(result, width=100):
    return render_text(report(result, width), width)


def line(text, start):
    (found,) = [row for row in text.splitlines() if row.startswith(start)]
    return found


def test_results_for_these_tests_are_real_ones():
    validate_result(evaluation_result(texts=("prose", "code"), harness=True))


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_nothing_is_wider_than_the_page_and_every_figure_is_whole(width):
    result = evaluation_result(texts=("prose", "code"), harness=True)
    text = shown(result, width)
    assert max(map(len, text.splitlines())) <= width
    for one in result["data"]["evaluations"]:
        assert f"{one['bytes_per_token']:,.0f}" in text
        low, high = one["relative_accuracy_interval"]
        assert f"{100 * low:.1f}–{100 * high:.1f}" in text
        for task in one["tasks"].values():
            assert f"{task['accuracy'] * task['items']:.0f}/{task['items']}" in text


def test_one_table_at_120_columns_and_two_at_80():
    result = evaluation_result(("full", "fp8", "kq"))
    for width, tables in ((120, 1), (80, 2)):
        text = shown(result, width)
        head = text[: text.index("Tasks\n")]
        assert head.count("─\n") == tables, head


def test_the_uncompressed_model_s_answers_come_first_and_a_task_at_chance_is_in_no_mean():
    result = evaluation_result(("full", "fp8", "kq"), at_chance=("copy",))
    text = shown(result)
    table = text[text.index("Tasks\n") :]
    assert line(table, "right answers  ").split()[2:] == ["chance", "uncompressed", "fp8", "kq"]
    assert line(table, "copy").split() == ["copy", "0", "0/6", *["no", "verdict"] * 2]
    tasks = result["data"]["evaluations"][2]["tasks"]
    judging = [tasks[name]["accuracy"] for name in ("needle", "variables", "frequent_words")]
    mean = line(table, "mean of 3 (%)").split()
    assert mean[-1] == f"{100 * sum(judging) / 3:.1f}"
    assert mean[5] == "100.0"
    assert "no better than chance, or too few questions to tell: copy; it judges" in " ".join(
        text.split()
    )
    # Two of the tasks that judge have a depth, each with two questions at one.
    assert line(text[text.index("by depth") :].split("\n\n")[0], "full").split()[1] == "4/4"
    assert "mean of 4" in shown(evaluation_result())


def test_lengths_of_answers_are_told_with_what_they_cost():
    assert "Length of answers" not in shown(evaluation_result())
    result = evaluation_result(("full", "fp8", "kq"), written=True)
    validate_result(result)
    text = shown(result)
    table = text[text.index("Length of answers") :]
    assert line(table, "kq  ").split() == ["kq", "8", "81.5", "1.140", "–", "0.0"]
    assert "lengthens answers" not in text  # of 8 prompts nobody knows
    result["data"]["evaluations"][2]["answer_lengths"]["ratio_interval"] = [1.1, 1.2]
    flat = " ".join(shown(result).split())
    assert "kq lengthens answers 1.140 times: a step has to take at least 12.3 % less" in flat
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    own = [row for row in rows if row["scope"] == "answers" and row["method"] == "kq"]
    assert {row["name"] for row in own} == {"", "vt", "open_questions"}
    (ratio,) = [row for row in own if row["metric"] == "ratio" and row["name"] == "vt"]
    assert float(ratio["value"]) == (15 + 10) / 15
    (never,) = [row for row in own if row["metric"] == "never_ended" and row["name"] == "vt"]
    assert float(never["value"]) == 0.0
    found = result["data"]["evaluations"][2]["answer_lengths"]
    found |= {"never_ended": 0.6, "baseline_never_ended": 0.5}
    assert "most answers are cut at their limit" in shown(result)


def test_the_first_line_answers():
    result = evaluation_result(("full", "fp8", "kq"))
    row = result["data"]["evaluations"][2]
    text = " ".join(shown(result, 200).split())
    low, high = row["relative_accuracy_interval"]
    assert text.startswith(
        f"kq saves 50.0 % of the cache's bytes and keeps "
        f"{100 * row['relative_accuracy']:.1f} % of "
        f"the uncompressed model's accuracy (95 % interval {100 * low:.1f}–{100 * high:.1f} %); KL"
    )


def test_of_many_methods_the_first_line_names_what_surely_keeps_enough_and_saves_most():
    names = [f"m{number}" for number in range(6)]
    result = evaluation_result(("full", "fp8", *names))
    for row, low, rate in zip(
        result["data"]["evaluations"][2:],
        (0.97, 0.999, 0.995, 0.989, 0.993, 0.98),
        (0.9, 0.2, 0.4, 0.6, 0.3, 0.8),
        strict=True,
    ):
        row["relative_accuracy_interval"], row["rate"] = [low, 1.01], rate
    text = shown(result)
    assert [word for word in text[: text.index("──")].split() if word in names] == ["m2"]
    assert not any(f"{name}: tokens" in text for name in names)


def test_texts_stand_apart_only_where_there_are_several():
    assert "By text" not in shown(evaluation_result())
    text = shown(evaluation_result(texts=("prose", "code")))
    assert re.search(r"^kq, code +\d", text, re.MULTILINE)


def test_answers_by_depth_and_length():
    text = shown(evaluation_result(("full", "fp8", "kq")))
    # 3 tasks have a depth, each question at two lengths; two in seven fail at place 2.
    row = line(text[text.index("by depth") :].split("\n\n")[0], "full")
    assert row.split() == ["full", "6/6", "6/6", "6/6"]
    row = line(text[text.index("by length") :].split("\n\n")[0], "full")
    assert row.split() == ["full", "12/12", "12/12"]


def test_worst_tokens_are_of_the_methods_asked_for_and_print_as_they_are():
    text = shown(evaluation_result(("full", "fp8", "kq")))
    worst = text[text.index("Worst tokens") : text.index("How to read this")]
    assert "kq: tokens that diverge most" in worst
    assert "fp8" not in worst
    assert "…bold] + some" in worst  # no markup
    assert "[\\n" in worst


def test_what_was_not_done_is_not_shown():
    text = shown(evaluation_result(tasks=()))
    assert "Tasks" not in text
    assert "lm-evaluation-harness" not in text


def test_protocols_are_named():
    assert "decoded step by" in shown(evaluation_result())
    assert "in one pass" in shown(evaluation_result(protocol="one_pass"))
    text = shown(evaluation_result(harness=True))
    assert "By its own protocol" in text
    assert re.search(r"arc_easy,\s+acc_norm", text)


def test_an_incomplete_result_says_so_twice():
    text = shown(evaluation_result(("full",), complete=False, warnings=["a [doubt]"]))
    assert text.count("INCOMPLETE") == 2
    assert "- a [doubt]" in text
    assert "Only the uncompressed model was measured" in text
    validate_result(evaluation_result((), complete=False))
    assert "INCOMPLETE" in shown(evaluation_result((), complete=False))


def test_an_incomplete_result_names_the_methods_that_it_lacks():
    result = evaluation_result(("full", "fp8", "kq"), complete=False)
    result["inputs"]["methods"] = ["kq", "palu", 7]
    assert "Not measured: palu.\n" in shown(result)
    result["complete"] = True
    assert "Not measured" not in shown(result)


def test_csv_holds_every_figure_in_full():
    result = evaluation_result(texts=("prose", "code"), harness=True)
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert list(rows[0]) == list(COLUMNS)

    def one(**wanted):
        (row,) = [r for r in rows if all(r[key] == value for key, value in wanted.items())]
        return row

    for evaluation in result["data"]["evaluations"]:
        name = evaluation["method"]
        row = one(method=name, scope="all", metric="relative_accuracy")
        assert float(row["value"]) == evaluation["relative_accuracy"]
        assert [float(row["low"]), float(row["high"])] == evaluation["relative_accuracy_interval"]
        row = one(method=name, scope="text", name="code", metric="perplexity")
        assert float(row["baseline"]) == evaluation["sources"]["code"]["baseline_perplexity"]
        row = one(method=name, scope="all", metric="kl_p999")
        assert float(row["value"]) == evaluation["kl"]["p999"]
        row = one(method=name, scope="task", name="copy", metric="accuracy")
        assert float(row["value"]) == evaluation["tasks"]["copy"]["accuracy"]
        assert int(row["count"]) == 6
        row = one(method=name, scope="task_depth", name="needle 0.5")
        assert float(row["value"]) == evaluation["tasks"]["needle"]["by_depth"]["0.5"]["accuracy"]
    assert one(method="kq", scope="harness", metric="acc")["value"] == "0.5"


def test_few_sequences_say_how_many_give_an_interval() -> None:
    result = evaluation_result()
    assert "32 sequences or more" not in shown(result)
    for one in result["data"]["evaluations"]:
        one["relative_accuracy_interval"] = None
    assert "32 sequences or more give an interval." in shown(result)
