"""The environment block of a result: what the figures were measured on, and with what.

It holds no name of a host or a user and no path, so that a result can be published as it is.
"""

import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

from kvprof.version import __version__

__all__ = [
    "PACKAGES",
    "Gpu",
    "Gpus",
    "collect_environment",
    "cpu_model",
    "memory_bytes",
    "package_version",
    "read_gpus",
    "usable_threads",
]

#: Packages whose versions can move a figure.
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "accelerate",
    "textual",
    "rich",
    "typer",
)

_GIT_SECONDS = 5


def collect_environment() -> dict[str, Any]:
    """Return the environment block of a result.

    Packages are looked up, not imported: torch's own settings (``torch``) are there only when the
    run has used torch.
    """
    gpus = read_gpus()
    return {
        "kvprof": {"version": __version__, "git": _own_git_state()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "threads": usable_threads(),
        },
        "memory_bytes": memory_bytes(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "gpus": [gpu.description() for gpu in gpus.devices],
        "gpu_driver": gpus.driver,
        "gpu_driver_cuda": gpus.driver_cuda,
        "torch": _torch_settings(),
    }


@cache  # a process keeps what it has loaded, whatever is installed meanwhile
def package_version(name: str) -> str | None:
    """Return an installed package's version without importing it; None when it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the processor's name as the system gives it, else its architecture."""
    if sys.platform == "darwin":
        named = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
        return named.strip() if named else platform.machine()
    try:
        listing = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", listing, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def usable_threads() -> int:
    """Return the hardware threads this process may use (a container may have fewer)."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # not there, or "max"
        pass
    return count


def memory_bytes() -> int:
    """Return the machine's memory, or the container's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    for limit_file in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            return min(total, int(Path(limit_file).read_text("ascii")))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def _torch_settings() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {
        "cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _checkout() -> Path | None:
    """Return the git checkout that kvprof runs from; None for an installed package.

    Only a repository that holds kvprof itself counts: an environment inside somebody's project
    must not lend its commit.
    """
    root = Path(__file__).resolve().parent.parent
    return root if (root / ".git").exists() and (root / "pyproject.toml").is_file() else None


@cache
def _own_git_state() -> dict[str, Any] | None:
    """Ask git once: what runs is what was loaded, whatever becomes of the files meanwhile."""
    return _git_state(_checkout())


def _git_state(checkout: Path | None) -> dict[str, Any] | None:
    if checkout is None:
        return None
    # A commit before the first is "(initial)"; what does not run (docs, tests) makes nothing dirty.
    listing = _output(
        [
            "git",
            "-C",
            str(checkout),
            "status",
            "--porcelain=v2",
            "--branch",
            "--",
            "kvprof",
            "recipes",
        ]
    )
    if listing is None:
        return None
    lines = listing.splitlines()
    match = re.search(r"^# branch\.oid ([0-9a-f]{40,})$", listing, re.MULTILINE)
    return {
        "commit": match[1] if match else None,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def _output(command: list[str]) -> str | None:
    """Return what a command prints; None when it is missing or fails."""
    # GIT_DIR and its like, set inside a hook, would point git at another repository.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            env=clean | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


# --- NVIDIA GPUs as the driver describes them, without importing torch or starting a context.


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str  # as the driver gives it
    memory_bytes: int | None  # of the whole device; None where the driver does not say
    memory_free_bytes: int | None
    compute_capability: str | None  # for example `"9.0"`
    #: Memory clock times bus width times two (double data rate): what the datasheet gives.
    peak_tb_per_s: float | None

    def description(self) -> dict[str, Any]:
        """Return what does not change from one moment to the next."""
        facts = asdict(self)
        del facts["memory_free_bytes"]
        return facts


@dataclass(frozen=True)
class Gpus:
    """All GPUs and their driver; `problem` says why there are none."""

    devices: list[Gpu] = field(default_factory=list)
    driver: str | None = None
    driver_cuda: str | None = None
    problem: str | None = None


def read_gpus() -> Gpus:
    """Ask the driver for its GPUs; without a driver there are none.

    ``CUDA_VISIBLE_DEVICES`` is not looked at: the machine is described, not the process.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as missing:
        return Gpus(problem=str(missing))
    try:
        cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
        return Gpus(
            devices=[_describe(index) for index in range(pynvml.nvmlDeviceGetCount())],
            driver=_ask(pynvml.nvmlSystemGetDriverVersion),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    except pynvml.NVMLError as failed:
        return Gpus(problem=str(failed))
    finally:
        pynvml.nvmlShutdown()


def _describe(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    clock_mhz = _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    bus_bits = _ask(pynvml.nvmlDeviceGetMemoryBusWidth, handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total if memory else None,
        memory_free_bytes=memory.free if memory else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
        peak_tb_per_s=clock_mhz * 1e6 * 2 * bus_bits / 8 / 1e12 if clock_mhz and bus_bits else None,
    )


def _ask(question: Any, *arguments: Any) -> Any:
    """Return an answer of the driver, or None where it has none (MIG slices, virtual GPUs)."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
