"""Runs cases/*_cases.py: interpreted where there is no GPU, compiled where there is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).with_name("cases").glob("*_cases.py"))


@pytest.mark.parametrize("cases", FILES, ids=lambda path: path.stem)
def test_kernels_compute_what_their_references_compute(cases: Path) -> None:
    # Triton decides between compiler and interpreter when it is first imported, which in this
    # process may have happened already.
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not torch.cuda.is_available():
        settings["TRITON_INTERPRET"] = "1"
    command = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cases.parents[3],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout[-4000:]
