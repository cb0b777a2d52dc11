"""Runs decode_cases.py: interpreted where there is no GPU, compiled where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import torch

CASES = Path(__file__).with_name("decode_cases.py")


def test_the_ragged_decode_kernel_is_attention() -> None:
    # Triton decides between compiler and interpreter when it is first imported, which in this
    # process may have happened already.
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not torch.cuda.is_available():
        settings["TRITON_INTERPRET"] = "1"
    command = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=CASES.parents[2],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "4 passed" in done.stdout
