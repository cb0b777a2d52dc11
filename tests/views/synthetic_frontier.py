"""A frontier result whose every figure is known."""

from typing import Any

from tests.results.made import made

TASKS = ("needle", "variables", "copy", "frequent_words")
WIDTH = 24_576  # bytes per token, uncompressed
_BASE = {name: {"accuracy": 0.975, "baseline": 0.975, "items": 40} for name in TASKS}


def point(rate: float, share: float, *, tasks: bool = True) -> dict[str, Any]:
    interval = [share - 0.004, share + 0.004]
    texts = {"prose": share - 0.01, "code": share + 0.01}
    own = {"accuracy": 0.975 * share}
    return {
        **{"rate": rate, "bytes_per_token": WIDTH * (1 - rate), "perplexity": 9.0 / share},
        **{"share": share, "share_interval": interval, "compression_ratio": 1 / (1 - rate)},
        **{"relative_accuracy": share, "relative_accuracy_interval": interval},
        "kl": {"mean": 1.0 - share + 1e-7, "p999": 0.5, "worst": 2.0},
        "sources": {x: {"relative_accuracy": texts[x], "interval": interval} for x in texts},
        "tasks": {name: task | own for name, task in _BASE.items() if tasks},
    }


def frontier_result(*, complete: bool = True, tasks: bool = True) -> dict[str, Any]:
    """Return a frontier of five methods, one that does not fit and one that never passes."""

    def row(
        label: str,
        points: list[tuple[float, float]],
        max_rate: float | None,
        interval: list[float | None] | None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        method, _, options = label.partition(":")
        return {
            **{"label": label, "method": method, "reason": reason, "max_rate": max_rate},
            **{"max_rate_interval": interval, "max_rates": {"0.99": max_rate, "0.95": 0.6}},
            "options": {"allocation": "budget"} if options else {},
            "points": [point(rate, share, tasks=tasks) for rate, share in points],
        }

    fdc = [(0.25, 0.999), (0.34, 0.992), (0.38, 0.985), (0.5, 0.93), (0.62, 0.6)]
    budget = [(0.25, 1.0), (0.45, 0.996), (0.48, 0.991), (0.53, 0.97)]
    kq = [(0.25, 1.0), (0.41, 0.993), (0.44, 0.983), (0.5, 0.96)]
    lowest = "no tested rate reaches 0.99 of the baseline's accuracy; the lowest, 0.050: 0.97"
    methods = [
        row("fdc", fdc, 0.34, [0.25, 0.5]),
        row("kq:allocation=budget", budget, 0.48, [0.45, 0.53]),
        row("kq", kq, 0.41, [0.25, 0.5]),
        row("palu", [(0.05, 0.97), (0.3, 0.9)], None, [None, 0.05], lowest),
        row("zack", [], None, None, "zack folds Q and K, which QK-norm does not allow"),
        row("full", [(0.0, 1.0)], 0.0, [0.0, None]),
        row("fp8", [(0.5, 0.9995)], 0.5, [0.5, None]),
    ]
    base = {"perplexity": 9.0, "decoded_tokens": 8192, "tasks": _BASE if tasks else {}}
    source = {"fdc": "random", "palu": "calibration", "kq": "random"}
    taken = {"tokens": 8192, "seq_len": 512}
    return made(
        "frontier",
        {
            **{"metric": "accuracy", "target": 0.99, "context": 384, "dtype": "bfloat16"},
            **{"baseline": base, "methods": methods},
        },
        inputs={
            **{"fingerprint": "f" * 32, "points": 6, "text": ["prose", "code"], "sequences": 32},
            **{"seq_len": 512, "tasks": TASKS, "task_items": 160, "protocol": "decode"},
            "calibration": {method: {"source": source[method], **taken} for method in source},
        },
        warnings=[] if complete else ["interrupted"],
        complete=complete,
    )


def two_targets() -> dict[str, Any]:
    """Return the frontier of two targets: of needles kq keeps 0.95 to 0.25 alone."""
    result = frontier_result()
    data = result["data"]
    data["targets"] = [{"metric": "accuracy", "target": 0.99}, {"metric": "needle", "target": 0.95}]
    for method in data["methods"]:
        method["sure_rate"] = (method["max_rate_interval"] or [None])[0]
        method["binding"] = [] if method["label"] in ("full", "fp8") else ["accuracy"]
        for point in method["points"]:
            kept = {key: point[key] for key in ("share", "share_interval")}
            lost = method["label"] == "kq" and point["rate"] > 0.3
            needle = {"share": 0.5 if lost else 0.97, "share_interval": [0.4, 0.98]}
            point["shares"] = {"accuracy": kept, "needle": needle}
        if method["label"] == "kq":
            method |= {"max_rate": 0.25, "max_rate_interval": [None, 0.41]}
            method["binding"] = ["needle"]
    return result


def with_facts() -> dict[str, Any]:
    """Return the frontier with what running takes."""
    result = frontier_result()
    kept = {"full": [], "palu": ["folded", "rebuilt"]}
    for method in result["data"]["methods"]:
        refused = None if method["label"] != "fdc" else "tokens are evicted"
        for one in method["points"]:
            one["needs"] = kept.get(method["label"], ["online", "folded"])
            one["kernel"] = {"layers": 0 if refused else 6, "of": 6, "reason": refused}
            one["long_context"] = {
                "context": 102_400,
                "rate": one["rate"],
                "bytes_per_token": 24_576 * (1 - one["rate"]),
            }
    return result
