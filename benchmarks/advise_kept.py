"""What plans keep on the measured models, of the records: the table that ``kvprof advise`` shows.

Run it where a record changed: ``python benchmarks/advise_kept.py``.
"""

import json
from pathlib import Path
from typing import Any

from commands import ADVISED

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "kvprof" / "assets" / "advise-kept.json"

#: Name, and model type, by which the nearest measured model is chosen.
MODELS = {
    "qwen2.5-coder-1.5b.gguf": ("Qwen2.5-Coder-1.5B", "qwen2"),
    "smollm2": ("SmolLM2-135M", "llama"),
}
_QWEN, _SMOL = "qwen2.5-coder-1.5b-h200", "smollm2-h200"
#: A plan's name in the table, its record, and its method there.
SOURCES = (
    *((name, f"needles-formats-{_QWEN}", name) for name in ADVISED),
    *((name, f"needles-formats-to-4k-{_SMOL}", name) for name in ADVISED),
    ("hadamard 3/2", f"needles-5.8x-{_QWEN}", "hadamard-int3"),
    ("hadamard 3/2", f"needles-5x-hadamard-{_SMOL}", "hadamard-int3"),
    ("kq-wf 4x", f"needles-4x-{_QWEN}", "kq-wf"),
    ("kq-wf 7x", f"needles-7x-{_QWEN}", "kq-wf"),
    ("kq-wf 7x", "kept-7x-on-cpu-smollm2-cpu", "kq-wf"),
)


def _row(record: str, method: str) -> tuple[str, dict[str, Any]]:
    """Return a record's model, and what it holds of a plan."""
    found = json.loads((ROOT / "records" / f"{record}.json").read_text())
    rows: list[dict[str, Any]] = found["data"]["evaluations"]
    return found["inputs"]["model"], next(one for one in rows if one["method"] == method)


def _needles(row: dict[str, Any]) -> list[int] | None:
    task = row["tasks"].get("niah_single_1")
    return task and [round(task["accuracy"] * task["items"]), task["items"]]


def table() -> list[dict[str, Any]]:
    """Return the table's rows."""
    rows = []
    for plan, record, method in SOURCES:
        model, row = _row(record, method)
        name, kind = MODELS[model]
        rows.append(
            {
                **{"plan": plan, "measured_on": name, "model_type": kind},
                "keeps": row["relative_accuracy"],
                "keeps_interval": row["relative_accuracy_interval"],
                "keeps_tokens": row["decoded_tokens"],
                "needles": _needles(row),
                "record": f"{record}.json",
            }
        )
    return rows


def main() -> None:
    """Write the table."""
    lines = ",\n".join(f" {json.dumps(row)}" for row in table())
    TABLE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
