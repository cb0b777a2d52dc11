"""The report of ``kvprof doctor``."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from kvprof.sizes import format_bytes
from kvprof.views.numbers import MISSING, number
from kvprof.views.page import bullets, framed, heading
from kvprof.views.tables import Column, DataTable, key_values

__all__ = ["report"]


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return what the machine has and what each command can do."""
    data = result["data"]
    parts = [
        heading("Machine"),
        key_values(_machine(result)),
        heading("Commands"),
        _commands(data["commands"]),
        heading("Packages"),
        _packages(data["packages"]),
        *_advice(data),
    ]
    # The command says its warnings while it looks; they are no part of the report.
    found = {**result, "warnings": ()}
    return framed(found, parts, answer=_verdict(data), width=width, colour=colour)


def _verdict(data: dict[str, Any]) -> str:
    if not data["usable"]:
        lacking = [p["name"] for p in data["packages"] if not p["ok"] and p["extra"] is None]
        if not data["python"]["ok"]:
            lacking.insert(0, f"Python {data['python']['wanted']}")
        return f"kvprof cannot run here: {', '.join(lacking)} missing or out of range."
    where = "with a GPU" if data["gpus"] else "on the CPU"
    ready = sum(command["ready"] for command in data["commands"])
    return f"{ready} of {len(data['commands'])} commands can run here, {where}."


def _machine(result: Mapping[str, Any]) -> dict[str, str]:
    environment, data = result["environment"], result["data"]
    cpu = environment["cpu"]
    memory = data["memory"]
    rows = {
        "kvprof": _own_version(environment["kvprof"]),
        "Python": f"{data['python']['version']} (wanted {data['python']['wanted']})",
        "CPU": f"{cpu['model']}, {cpu['threads']} hardware threads",
        "Memory": f"{format_bytes(memory['total_bytes'])}, "
        f"{format_bytes(memory['available_bytes'])} available"
        + _rate(memory["read_tb_per_s"], ", reads {} (measured)"),
    }
    for index, gpu in enumerate(data["gpus"]):
        rows[f"GPU {index}"] = _gpu(gpu)
    if data["gpus"]:
        rows["GPU driver"] = (
            f"{environment['gpu_driver']} (CUDA up to {environment['gpu_driver_cuda']})"
        )
    else:
        rows["GPU"] = f"none ({data['gpu_problem'] or 'the driver lists none'})"
    rows["Triton"] = _triton(data["triton"], bool(data["gpus"]))
    return rows


def _own_version(own: dict[str, Any]) -> str:
    git = own.get("git")
    if git is None:
        return str(own["version"])
    commit = git["commit"][:12] if git["commit"] else "no commit"
    return f"{own['version']} (checkout {commit}{', changed' if git['dirty'] else ''})"


def _gpu(gpu: dict[str, Any]) -> str:
    memory = MISSING if gpu["memory_bytes"] is None else format_bytes(gpu["memory_bytes"])
    free = (
        ""
        if gpu["memory_free_bytes"] is None
        else f" ({format_bytes(gpu['memory_free_bytes'])} free)"
    )
    return (
        f"{gpu['name']}, compute capability {gpu['compute_capability'] or MISSING}, "
        f"{memory}{free}, {gpu['bandwidth_class']}"
        + _rate(gpu["peak_tb_per_s"], ", peak {}")
        + _rate(gpu["measured_tb_per_s"], ", reads {} (measured)")
    )


def _rate(tb_per_s: float | None, text: str) -> str:
    if tb_per_s is None:
        return ""
    named = f"{number(tb_per_s)} TB/s" if tb_per_s >= 1 else f"{number(tb_per_s * 1000)} GB/s"
    return text.format(named)


def _triton(state: dict[str, Any], has_gpu: bool) -> str:
    if state["version"] is None:
        return f"none ({state['problem']})"
    if not state["compiles"]:
        return f"{state['version']}, cannot compile: {state['problem']}"
    text = f"{state['version']}, compiles"
    if not has_gpu:
        text += "; without a GPU, kernels run only interpreted (TRITON_INTERPRET=1)"
    if state["interpreted"]:
        text += "; TRITON_INTERPRET is set: kernels are slow, and wrong in BF16"
    return text


def _commands(commands: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            command["name"],
            "yes" if command["ready"] else "no",
            command["runs_on"] or MISSING,
            ", ".join(command["lacks"]) or "nothing",
        )
        for command in commands
    ]
    columns = ("command", "ready", "runs on", "missing")
    return DataTable([Column(title, words=True) for title in columns], rows)


def _packages(packages: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            package["name"],
            package["installed"] or "missing",
            package["wanted"] or "any",
            "yes" if package["ok"] else "no",
            f"extra {package['extra']}" if package["extra"] else "required",
        )
        for package in packages
    ]
    columns = ("package", "installed", "wanted", "ok", "why")
    return DataTable([Column(title, words=True) for title in columns], rows)


def _advice(data: dict[str, Any]) -> list[RenderableType]:
    """Return the way out of everything that is not in order."""
    lines = [f"{entry['for']}: {entry['command']}" for entry in data.get("install", [])]
    return [heading("To install what is missing"), bullets(lines)] if lines else []
