"""``kvprof doctor``: what has this machine, and what can each command do here?"""

import platform
from dataclasses import asdict
from typing import Annotated, Any

import psutil
import typer
from packaging.specifiers import SpecifierSet

from kvprof import console
from kvprof.bandwidth import cpu_read_bandwidth, gpu_read_bandwidth
from kvprof.commands.output import ForceOption, JsonOption, OutOption, Outputs
from kvprof.environment import Gpu, Gpus, memory_bytes, package_version, read_gpus
from kvprof.errors import ExitCode
from kvprof.requirements import (
    COMMAND_NEEDS,
    PackageState,
    install_command,
    package_states,
    python_wanted,
)
from kvprof.triton_probe import probe_triton

# Decoding is bound by how fast memory is read; steps between generations of hardware.
_BANDWIDTH_CLASSES = (
    (3.0, "HBM3 or newer (over 3 TB/s)"),
    (1.2, "HBM2e (1.2 to 3 TB/s)"),
    (0.0, "GDDR or older (under 1.2 TB/s)"),
)


def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure the GPUs' read bandwidth (needs torch).")
    ] = False,
    json: JsonOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Show what this machine has, which commands it can run, and what is missing.

    Exits 3 when a required package is missing or out of range.

    Examples
    --------
    kvprof doctor
    kvprof doctor --measure --json doctor.json
    """
    outputs = Outputs(json=json, out=out, force=force)
    outputs.check()
    warnings: list[str] = []
    with console.status("examining this machine"):
        data = _examine(measure, warnings)
    for warning in warnings:
        console.warn(warning)
    outputs.end(
        "doctor",
        inputs={"measure": measure},
        data=data,
        warnings=warnings,
        code=ExitCode.DONE if data["usable"] else ExitCode.LACKING,
    )


def _examine(measure: bool, warnings: list[str]) -> dict[str, Any]:
    python = platform.python_version()
    wanted = python_wanted()
    python_ok = SpecifierSet(wanted).contains(python, prereleases=True)
    packages = package_states()
    gpus = read_gpus()
    rates = _measured(gpus, warnings) if measure else {}
    return {
        "usable": python_ok and all(package.ok for package in packages if package.extra is None),
        "python": {"version": python, "wanted": wanted, "ok": python_ok},
        "packages": [asdict(package) | {"ok": package.ok} for package in packages],
        "memory": {
            "total_bytes": memory_bytes(),
            "available_bytes": min(int(psutil.virtual_memory().available), memory_bytes()),
            # With a GPU the CPU's memory is no figure to plan by, unless asked for.
            "read_tb_per_s": cpu_read_bandwidth() if measure or not gpus.devices else None,
        },
        "gpus": [
            asdict(gpu)
            | {"bandwidth_class": _bandwidth_class(gpu), "measured_tb_per_s": rates.get(index)}
            for index, gpu in enumerate(gpus.devices)
        ],
        "gpu_problem": gpus.problem,
        "triton": asdict(probe_triton()),
        "commands": [_command(name, packages, gpus) for name in COMMAND_NEEDS],
        "install": _install(packages),
    }


def _install(packages: list[PackageState]) -> list[dict[str, str]]:
    """Return the command lines that put right what is missing or out of range."""
    wrong: dict[str | None, list[str]] = {}
    for package in packages:
        if not package.ok:
            wrong.setdefault(package.extra, []).append(package.name + package.wanted)
    return [
        {"for": f"extra {extra}" if extra else "required", "command": install_command(*lacking)}
        for extra, lacking in wrong.items()
    ]


def _bandwidth_class(gpu: Gpu) -> str:
    if gpu.peak_tb_per_s is None:
        return "unknown (the driver does not say)"
    return next(name for least, name in _BANDWIDTH_CLASSES if gpu.peak_tb_per_s >= least)


def _measured(gpus: Gpus, warnings: list[str]) -> dict[int, float]:
    """Measure every GPU that torch sees; in the driver's order, which torch is told to follow."""
    if not gpus.devices:
        return {}
    if package_version("torch") is None:
        warnings.append("--measure: torch is missing; no GPU was measured")
        return {}
    import torch

    if torch.cuda.device_count() != len(gpus.devices):
        warnings.append(
            f"--measure: torch sees {torch.cuda.device_count()} of {len(gpus.devices)} GPUs (CPU "
            "build, or CUDA_VISIBLE_DEVICES); none was measured"
        )
        return {}
    rates = {}
    for index in range(len(gpus.devices)):
        try:
            rates[index] = gpu_read_bandwidth(index)
        except torch.OutOfMemoryError:
            warnings.append(f"--measure: GPU {index} has less than 2 GiB free; it was not measured")
    return rates


def _command(name: str, packages: list[PackageState], gpus: Gpus) -> dict[str, Any]:
    """Return what one command can do here, and what it lacks."""
    needs = COMMAND_NEEDS[name]
    states = {package.name: package for package in packages}
    missing = [need for need in needs.packages if not states[need].ok]
    lacks = [f"{need} {states[need].wanted}" for need in missing]
    lacks += [f"{need} (for {what})" for need, what in needs.optional if not states[need].ok]
    on_gpu = needs.uses_gpu and gpus.devices
    if needs.uses_gpu and not on_gpu:
        lacks.append("a GPU (for large models)")
    return {
        "name": name,
        "ready": not missing,
        "runs_on": None if missing else "GPU or CPU" if on_gpu else "CPU",
        "lacks": lacks,
    }
