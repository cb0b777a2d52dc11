"""Runs cases/*_cases.py: interpreted where there is no GPU, compiled where there is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).with_name("cases").glob("*_cases.py"))
# One process, which loads torch, Triton and transformers once, and ends without unloading them.
RUN = """
import os, sys
import pytest

told = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(told)
"""


@pytest.mark.slow
def test_kernels_compute_what_their_references_compute() -> None:
    # Triton decides between compiler and interpreter when it is first imported, which in this
    # process may have happened already.
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not torch.cuda.is_available():
        settings["TRITON_INTERPRET"] = "1"
    command = ["-c", RUN, "-q", "-n0", "-p", "no:cacheprovider", *map(str, FILES)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout[-4000:]
