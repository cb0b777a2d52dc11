"""Cells on a cluster of two machines of one CPU and, as Ray is told, one GPU each.

Its head runs none.
"""

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from kvprof.child import child_environment, child_python
from kvprof.errors import ExitCode, LackingError, UsageError
from kvprof.records.files import read_result
from kvprof.reproduction import cluster as cluster_module
from kvprof.reproduction import cluster_task
from kvprof.reproduction.cells import CellStore, Pool, Runner, code_version, named_files, run_child
from kvprof.reproduction.check import load_recipe
from kvprof.reproduction.cluster import Cluster, ClusterMachine
from kvprof.reproduction.cluster_driver import cpus_of_cell
from kvprof.reproduction.machine import this_machine
from kvprof.reproduction.recipe import Needs
from kvprof.reproduction.resolve import Planned
from kvprof.reproduction.run import Finished, prepare, run_planned
from tests.commands.running import kvprof
from tests.reproduction.written import CPU, TEXT, plan_result, write

# Stands for kvprof: prints a result that is there, says that it started, and holds where told.
FAKE = """\
import os, sys, time
from pathlib import Path
method = sys.argv[sys.argv.index("--method") + 1]
hold = Path(f"{method}.hold")
holds = hold.exists()
hold.unlink(missing_ok=True)  # before it says that it started: the next one must not hold
machine = os.environ.get("RAY_RAYLET_PID", "")
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
made = Path(f"{method}.{os.getpid()}.tmp")
made.write_text(f"{machine} {gpus}")
made.rename(f"{method}.{os.getpid()}.started")
if holds:
    time.sleep(120)  # it is killed before
    sys.exit("nobody killed it")
if not Path(f"{method}.json").exists():
    sys.exit("kvprof: cannot be factorised")
sys.stdout.write(Path(f"{method}.json").read_text())
"""
# A command of kvprof's own that is soon done: it loads no torch.
CELL = "bench --load --simulate --methods full --rates 1 --requests {rate}"
REAL = (
    TEXT.replace("plan reference --method {method} --rate {rate}", CELL)
    .replace('"0.30"', '"8"')
    .replace("judged: true", "judged: only its cell matters")
    .replace("method: [fdc, kq]", "method: [fdc]")
)
# Where GPUs count, Ray starts other processes for cells than for what machines are asked first.
ON_CPU = ("--device", "cpu")
SECONDS = 60  # that anything may take on a machine that is busy


SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}
# Processes that only look after a head's size and its logs take seconds to start.
HEAD = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False, **SMALL}


@pytest.fixture(scope="module")
def _head() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster as Machines

        # A killed machine is known to be dead soon, a slow one is not taken for dead.
        soon = {
            "health_check_period_ms": 500,
            "health_check_timeout_ms": 10_000,
            "health_check_failure_threshold": 2,
            "health_check_initial_delay_ms": 0,
        }
        found = Machines(initialize_head=True, head_node_args={"_system_config": soon, **HEAD})
        yield found
        found.shutdown()


def of(head: Any, number: int) -> Any:
    """Return the cluster with so many machines at least.

    Starting one takes seconds: those that a test has lost come back where another needs them.
    """
    for _ in range(len(head.worker_nodes), number):
        head.add_node(wait=False, num_cpus=1, num_gpus=1, **SMALL)
    head.wait_for_nodes(SECONDS)
    return head


@pytest.fixture
def machine(_head: Any) -> Any:
    return of(_head, 1)


@pytest.fixture
def machines(_head: Any) -> Any:
    return of(_head, 2)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(FAKE)
    for method, rate in (("fdc", 0.96), ("kq", 0.95)):
        (tmp_path / f"{method}.json").write_text(json.dumps(plan_result(method, rate)))
    return (str(tmp_path / "fake.py"),)


def planned(folder: Path, methods: str, *options: str) -> list[Planned]:
    text = TEXT.replace("method: [fdc, kq]", f"method: [{methods}]")
    text = text.replace("--method {method}", " ".join(("--method {method}", *options)))
    return prepare([load_recipe(write(folder, text))], "smoke", {}, None, CPU, code_version())


def run(
    plan: list[Planned],
    folder: Path,
    runner: Runner | Pool,
    said: list[str],
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    return run_planned(
        plan,
        CellStore(folder),
        runner,
        machine=CPU,
        settings={},
        progress=said.append,
        should_stop=should_stop,
    )


def started(folder: Path, method: str) -> list[Path]:
    return sorted(folder.glob(f"{method}.*.started"))


def wait_for(there: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := there():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    cells = [{**cell, "seconds": None} for cell in entry["cells"]]
    return {**entry, "cells": cells, "created": None}


def kill(machines: Any, raylet: str) -> None:
    """Lose the machine whose Ray has this process."""
    (lost,) = (
        node
        for node in machines.worker_nodes
        if str(node.all_processes["raylet"][0].process.pid) == raylet
    )
    machines.remove_node(lost, allow_graceful=False)


def test_a_real_cell_is_what_it_is_locally_and_no_code_of_the_working_folder_runs(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("yaml", "jsonschema", "kvprof"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, REAL)
    done = kvprof("recipe", "run", path, "--out", "there", "--ray", machine.address)
    assert done.code == 0, done.stderr
    assert re.search(r"^1/1 done on \S+ in .* s: bench --load", done.stderr, re.MULTILINE)
    assert not (tmp_path / "trace").exists()
    (cell,) = Path("there", "cells").iterdir()
    assert kvprof("bench", *CELL.format(rate=8).split()[1:], "--json", "here.json").code == 0
    kept = [read_result(cell), read_result(Path("here.json"))]
    for result in kept:
        del result["created"], result["environment"]
        (method,) = result["data"]["methods"]
        del method["ready_seconds"]  # of a clock
    assert kept[0] == kept[1]


def test_ctrl_c_ends_what_runs_and_keeps_what_has_ended(
    machines: Any, fake: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "kq.hold").touch()
    said: list[str] = []
    with Cluster(machines.address, program=fake) as cluster:
        machine = cluster.machine(code_version(), [])
        assert machine.gpus == ("a GPU",)
        # Under the same digest: what one has measured on its CPU, the other knows.
        on_cpu = ("plan", *ON_CPU)
        assert machine.device(on_cpu) == this_machine().device(on_cpu)
        assert len(cluster.hosts) == 2
        found = run(
            planned(tmp_path, "fdc, kq"),
            tmp_path / "cells",
            cluster,
            said,
            lambda: bool(said and started(tmp_path, "kq")),
        )
    assert found.interrupted
    assert found.entries[0]["reasons"][0] == "plan-kq: interrupted"
    assert len(list((tmp_path / "cells").iterdir())) == 1
    (one,) = started(tmp_path, "kq")
    # Nothing told it to use the CPU.
    assert one.read_text().split()[1:] == ["0"]
    wait_for(lambda: not Path("/proc", one.name.split(".")[1]).exists())
    # The same again goes on where that stopped.
    again: list[str] = []
    run(
        planned(tmp_path, "fdc, kq"),
        tmp_path / "cells",
        lambda *_: run_child(("--method", "kq"), lambda: False, program=fake),
        again,
    )
    assert [line.split()[1] for line in again] == ["known:", "plan"]


def test_a_lost_machines_cell_runs_on_another_and_a_failing_one_only_once(
    machines: Any, fake: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "kq.hold").touch()
    killed: list[str] = []

    def lose() -> None:
        killed.append(wait_for(lambda: started(tmp_path, "kq"))[0].read_text())
        kill(machines, killed[0].split()[0])

    killer = threading.Thread(target=lose, daemon=True)
    killer.start()
    said: list[str] = []
    plan = planned(tmp_path, "fdc, kq, zack", *ON_CPU)
    with Cluster(machines.address, program=fake) as cluster:
        cluster.machine(code_version(), [])
        found = run(plan, tmp_path / "there", cluster, said)
    killer.join(SECONDS)
    assert len(killed) == 1
    assert {path.read_text() for path in started(tmp_path, "kq")} > set(killed)
    assert len(started(tmp_path, "kq")) == 2
    assert [line for line in said if re.match(r"\d/3 done on \S+ in .* s, attempt 2: .* kq ", line)]
    assert len(said) == 3
    assert len(started(tmp_path, "zack")) == 1
    local = run(
        plan, tmp_path / "here", lambda words, stop: run_child(words, stop, program=fake), []
    )
    assert without_times(found.entries[0]) == without_times(local.entries[0])
    assert "plan-zack: cannot be factorised" in found.entries[0]["reasons"]
    kept = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    assert len(kept) == 2
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}


def test_another_kvprof_is_refused_before_anything_runs(machine: Any) -> None:
    with (
        Cluster(machine.address) as cluster,
        pytest.raises(LackingError, match=r"has kvprof 0\.\S+, and this one 9\.9\.9; install"),
    ):
        cluster.machine("9.9.9", [])


def test_cells_that_no_machine_is_left_for_fail(
    machine: Any, fake: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "fdc.hold").touch()

    def lose() -> None:
        wait_for(lambda: started(tmp_path, "fdc"))
        for node in list(machine.worker_nodes):
            machine.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=lose, daemon=True)
    killer.start()
    with Cluster(machine.address, program=fake, patience=1.0) as cluster:
        cluster.machine(code_version(), [])
        found = run(planned(tmp_path, "fdc", *ON_CPU), tmp_path / "cells", cluster, [])
    killer.join(SECONDS)
    assert found.entries[0]["failed"]
    assert found.entries[0]["reasons"][0] == (
        "plan-fdc: no machine that could run it is left in the cluster"
    )
    with (
        Cluster(machine.address) as cluster,
        pytest.raises(LackingError, match="the cluster has no machine with a CPU for cells"),
    ):
        cluster.machine(code_version(), [])


def test_what_is_no_ray_cluster_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            Cluster(address) as cluster,
            pytest.raises(LackingError, match=f"--ray {address}: no answer of a Ray cluster in 1"),
        ):
            cluster.machine("1", [])
    monkeypatch.setenv("RAY_ADDRESS", address)
    nobody = pytest.raises(LackingError, match=r"can be reached there \(Connection refused")
    with nobody, Cluster():
        pass


@pytest.mark.parametrize("address", ["host", "host:port", "ray://", "a:1/b", "local"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError, match="write HOST:PORT or ray://HOST:PORT"):
        Cluster(address)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"ray": None, "grpc": None}
    monkeypatch.setattr(cluster_module, "find_spec", there.get)
    with pytest.raises(LackingError, match=r"-m pip install .*'ray>="):
        Cluster()
    monkeypatch.setitem(there, "ray", object())
    with pytest.raises(LackingError, match=r"-m pip install .*'ray\[client\]'"):
        Cluster("ray://head:10001")


def test_ray_takes_no_recipes_name_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], str | None]] = []
    monkeypatch.setattr(
        "kvprof.commands.recipe.run_recipes", lambda one: asked.append((one.names, one.ray))
    )
    for words in (
        ("--ray", "fdc-*"),
        ("fdc-*", "--ray"),
        ("fdc-*",),
        ("--ray", "auto", "fdc-*"),
        ("--ray", "head:6379", "fdc-*"),
        ("--ray=ray://head:1", "fdc-*"),
    ):
        assert kvprof("recipe", "run", *words).code == 0
    assert [ray for _, ray in asked] == ["auto", "auto", None, "auto", "head:6379", "ray://head:1"]
    assert {names for names, _ in asked} == {("fdc-*",)}


def test_what_the_cluster_lacks() -> None:
    there = ClusterMachine("a CPU", ("H200",), lambda name: name == "plot", lambda _: False)
    recipe = load_recipe(next(Path("recipes").glob("example-*.yaml")))
    profile = recipe.profiles["smoke"]

    def lacks(**needs: Any) -> str:
        found = there.lacks(replace(profile, needs=Needs(**needs)), model_given=False)
        return found or "nothing"

    assert lacks() == lacks(gpus=1, extras=("plot",)) == "nothing"
    assert lacks(gpus=2) == "it needs 2 GPUs, and no machine of the cluster has more than 1"
    assert "extra harness on every machine" in lacks(extras=("harness",))
    assert "weights of a/b are not on every machine" in lacks(weights=("a/b",))
    bare = replace(there, gpus=())
    assert bare.lacks(replace(profile, needs=Needs(1)), model_given=True) == (
        "it needs a GPU, and no machine of the cluster has one"
    )


def test_a_cell_takes_its_share_of_a_machine() -> None:
    machines = [{"cpus": 8.0, "ray_gpus": 0.0}, {"cpus": 64.0, "ray_gpus": 8.0}]
    assert [cpus_of_cell(machines, gpus) for gpus in (0, 1, 4, 8)] == [8, 8, 32, 64]
    assert cpus_of_cell([{"cpus": 2.0, "ray_gpus": 8.0}], 1) == 1


READS = "import sys; sys.stdout.write(open('texts/notes.json').read())"


def task(folder: Path, word: str, **more: Any) -> dict[str, Any]:
    return {
        "words": ("eval", word),
        "program": ("-c", READS),
        "version": code_version(),
        "folder": str(folder),
        "files": named_files([word]),
        "contents": {},
        "environment": {},
        **more,
    }


def test_files_travel_where_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get", lambda reference: reference)
    monkeypatch.chdir(tmp_path)
    content = json.dumps(plan_result("fdc", 0.5)).encode()
    name = "texts/notes.json"
    (tmp_path / "texts").mkdir()
    (tmp_path / name).write_bytes(content)
    absolute, model = tmp_path / "other.txt", tmp_path / "model"
    absolute.write_text("one")
    model.mkdir()
    (model / "config.json").write_text("{}")
    travels = task(tmp_path / "elsewhere", f"--text={name}", contents={name: [content]})
    at_home = task(tmp_path, name)
    stays = task(tmp_path / "elsewhere", "model")
    differs = task(tmp_path / "elsewhere", str(absolute))
    for one in (travels, at_home):
        assert cluster_task.run_cell(one)["result"] == json.loads(content)
    # The folder of this name that a machine has is somebody else's.
    (tmp_path / "elsewhere" / "texts").mkdir(parents=True)
    (tmp_path / "elsewhere" / name).write_text("{}")
    assert cluster_task.run_cell(travels)["result"] == json.loads(content)
    said = cluster_task.run_cell(stays)
    assert said["code"] == ExitCode.LACKING
    assert said["message"].startswith("model does not travel to other machines")
    absolute.write_text("two")
    assert f"{absolute} is not the same on the machine" in cluster_task.run_cell(differs)["message"]
    said = cluster_task.run_cell({**at_home, "version": "9.9.9"})
    assert "a machine of the cluster has kvprof 0." in said["message"]


def test_threads_are_what_they_are_here_and_not_what_ray_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows = "import os; raise SystemExit('kvprof: ' + os.environ.get('OMP_NUM_THREADS', 'unset'))"
    seen = []
    for here in ("3", None):
        if here is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", here)
        carried = cluster_module._carried()
        monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")  # Ray's
        one = task(tmp_path, "x", program=("-c", shows), environment=carried)
        seen.append(cluster_task.run_cell(one)["message"])
    assert seen == ["3", "unset"]


# What kvprof's own driver does where it finds no cluster, and what then listens.
LISTENERS = """\
import json, psutil
from kvprof.reproduction.cluster_driver import _start_here
_start_here({"log_to_driver": False})
import ray
ray.get(ray.remote(lambda: 1).remote())
own = psutil.Process()
print("listen", json.dumps([
    (process.name(), one.laddr.ip)
    for process in (own, *own.children(recursive=True))
    for one in process.net_connections("inet")
    if one.status == psutil.CONN_LISTEN
]))
ray.shutdown()
"""


def test_a_cluster_of_ones_own_is_reached_from_this_machine_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        child_python("-c", LISTENERS),
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("listen ")]
    if not said and "_RefusedError" not in done.stderr:
        pytest.skip(f"Ray cannot start here: {done.stderr[-200:]}")
    sockets = json.loads(said[0].removeprefix("listen "))
    assert len(sockets) > 3
    assert {ip.removeprefix("::ffff:") for _, ip in sockets} <= {"127.0.0.1", "::1"}, sockets
