"""Results of ``kvprof plan`` without a model: one plan, and what moves."""

from typing import Any

from tests.results.made import made

_CONTEXT = 1536
_BYTES = {"keys": 3 * 2**20, "values": 2 * 2**20, "scales": 486 * 2**10, "window": 2**20}
STORED = {**_BYTES, "total": sum(_BYTES.values()), "full": 18 * 2**20}


def ranks(keys: int, values: int) -> dict[str, list[list[int]]]:
    """Two layers of two groups each."""
    return {"keys": [[keys, keys + 8], [keys, keys]], "values": [[values, values], [values] * 2]}


def plan_data(**changes: Any) -> dict[str, Any]:
    """A plan of ranks that were rounded up, on a model."""
    rate = 1 - STORED["total"] / STORED["full"]
    rounding = {
        **{"knob": "removal_rate", "value": 0.21, "grid": 16, "minimum": 16},
        **{"requested": ranks(85, 71), "stored": ranks(96, 80)},
        **{"requested_rate": rate + 0.02, "bytes_lost": 244_224},
    }
    how = {
        **{"model": "reference", "rate_asked": 0.63, "context": _CONTEXT},
        "calibration": {"source": "calibration", "tokens": 8192},
        "options": {"allocation": "removal", "grid": 16, "kinds": 8, "seed": None},
    }
    return {
        **{"method": "kq-4bit", "context": _CONTEXT, "rate": rate, "ranks": ranks(96, 80)},
        **{"bytes": STORED, "bytes_per_token": STORED["total"] / _CONTEXT, "kinds": 5},
        **{"compression_ratio": 1 / (1 - rate), "dim_rate": 0.21, "paper_rate": 0.78},
        **{"folded": {"W_V": 2, "W_O": 2}, "online": {"K into its latent": 1}},
        **{"rounding": rounding, "made": how, "sentences": ["Keys have 4 bits.", "Values too."]},
        "weights": {"online": 2**20, "folded": -(2**21), "total": -(2**20), "running": -(2**19)},
        "kernel": {"layers": 1, "of": 2, "reason": "tokens move down 32 at a time"},
        **changes,
    }


def comparison(differences: int = 30) -> dict[str, Any]:
    """What another plan has different."""
    path = "layers.{}.keys.groups.0.ranks.0"
    return {
        **{"file": "other.plan", "method": "fdc", "rate": 0.4, "bytes": STORED},
        "differences": [
            {"path": path.format(layer), "this": 96, "other": 80} for layer in range(differences)
        ],
    }


def transfer_data() -> dict[str, Any]:
    """Two methods over two links."""
    links = [("pcie5x16", 6.3e10, True), ("rdma", 4.62e10, False)]
    rows = [
        {
            **{"label": label, "method": label, "rate": rate, "rate_context": _CONTEXT},
            "at": [
                {
                    **{"context": context, "bytes": context * width, "rate": rate},
                    "seconds": [context * width / speed for _, speed, _ in links],
                }
                for context in (2048, 4096)
            ],
        }
        for label, rate, width in (("full", 0.0, 12288), ("kq", 0.5, 6144))
    ]
    return {
        **{"dtype": "float32", "model_context": 2048, "rows": rows},
        "links": [{"link": a, "bytes_per_s": b, "nominal": c} for a, b, c in links],
        "contexts": [
            {"context": context, "over_model_context": context > 2048} for context in (2048, 4096)
        ],
    }


def plan_result(
    data: dict[str, Any] | None = None, *, complete: bool = True, **inputs: Any
) -> dict[str, Any]:
    """A result of one plan, or of some parts."""
    plan = {"plan": plan_data()}
    return made("plan", plan if data is None else data, inputs=inputs, complete=complete)


def results() -> dict[str, dict[str, Any]]:
    """Return a result of each form that the report has."""
    latents = [{"side": side, "layers": 4, "width": 512, "kept": 96} for side in ("keys", "values")]
    levels = {"shares": [0.9, 0.1], "sink": 4, "least_ranks": ranks(64, 48)}
    trials = {"kept": {"0": 0.995, "16": 1.0}, "tokens": 2048, "text": "calibration"}
    centred = {**plan_data()["made"], "centre": 16, "centre_trials": trials}
    alone = {"weights": None, "kernel": None, "rounding": None, "folded": {}, "online": {}}
    return {
        "plan": plan_result(
            {"plan": plan_data(), "comparison": comparison()}, describe=True, saved="kq.plan"
        ),
        "plan, levels": plan_result({"plan": plan_data(levels=levels, bits=ranks(4, 2))}),
        "plan, across layers": plan_result({"plan": plan_data(across=latents)}, describe=True),
        "plan, centred": plan_result({"plan": plan_data(made=centred)}),
        "plan, alone": plan_result(
            {"plan": plan_data(**alone), "comparison": comparison(0)}, device=None
        ),
        "plan, what moves": plan_result({"transfer": transfer_data()}, complete=False),
        "plan, a shape": plan_result({"transfer": transfer_data()}, fingerprint=None, device=None),
    }
