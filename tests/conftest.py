"""What all tests share: few threads, and a tiny model folder with a tokenizer of its own."""

import atexit
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

# Several test processes share few cores; threads that wait for each other only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# What tests start loads all of kvprof: compiled once, not in every process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import HealthCheck, settings

from kvprof.errors import options_named
from tests.methods.documented import site  # noqa: F401 - a fixture of several folders

sys.dont_write_bytecode = False  # as the environment says that children inherit
# Python looks for unreachable circles after every 700 new objects: a quarter of what collecting
# these tests takes, and an eighth of running a kernel in Triton's interpreter.
gc.set_threshold(20_000, 20, 50)

# How long an example takes says how busy the machine is.
settings.register_profile(
    "kvprof", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvprof")


def pytest_configure(config: pytest.Config) -> None:
    """Say how a process begins, and ends when all else is done."""
    if hasattr(config, "workerinput"):
        # It has told what it found; removing what it has loaded would take seconds. What is
        # registered first is called last, and what a test forks ends as it likes.
        worker = os.getpid()
        atexit.register(lambda: os.getpid() == worker and os._exit(0))
    else:
        # What Python removes at its end is removed: Triton's bindings name what is left.
        atexit.register(gc.unfreeze)
    if config.getoption("dist", "no") == "no":  # whoever hands tests out collects none
        gc.disable()  # until all is collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let the second worker load tests from the other end: what one has compiled the other reads.

    In a fresh clone, where compiling takes as long as loading; all of it is loaded either way.
    """
    if getattr(session.config, "workerinput", {}).get("workerid") != "gw1":
        return
    root = session.config.rootpath
    asked = [Path(root, argument.partition("::")[0]) for argument in session.config.args]
    files = {file for path in asked for file in ([path] if path.is_file() else path.rglob("*.py"))}
    for file in sorted(files, reverse=True):
        if file.name.startswith("test_"):
            # What cannot be loaded is told, or skipped, when it is collected.
            with suppress(Exception, pytest.skip.Exception):
                import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Keep modules and tests out of every later look for unreachable circles: they stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _as_in_a_command() -> Iterator[None]:
    """Name options in errors, as commands do; `test_error_spelling.py` looks at Python's names."""
    with options_named():
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Leave the user's caches alone."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random Llama (3 layers, 2 KV heads of 16) and a tokenizer."""
    from tests.models.folder import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


def calibrate_on_few(patch: pytest.MonkeyPatch) -> None:
    """Let a method's own source be 256 random tokens: a plan of them is one like any other."""
    from kvprof.moments import calibrator

    whole = calibrator.parse_source
    patch.setattr(
        calibrator,
        "parse_source",
        lambda text, **more: whole(
            "random:256" if more.get("what") == "the method's own source" else text, **more
        ),
    )


#: What commands have loaded, by what they asked for and the state of the files.
_LOADED: dict[Any, Any] = {}


def share_models(patch: pytest.MonkeyPatch) -> None:
    """Let commands share models, each of which leaves its own as it was.

    What lies in a folder is loaded again when a file of it has changed, and whatever brings code
    along always.
    """
    from kvprof.benchmark import methods
    from kvprof.benchmark.jct import model
    from kvprof.commands import loading
    from kvprof.models import locate
    from kvprof.models.load import load_model

    def shared(spec: str, *, before: Any = lambda _: None, **how: Any) -> Any:
        # What ships is the same from any working folder.
        ships = Path(str(locate.files("kvprof"))) / "assets" / "reference"
        path = ships if spec == "reference" else Path(spec).resolve()
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if not path.exists() or how.get("trust_remote_code"):
            return load_model(spec, before=before, **how)
        stats = [one.stat() for one in files if one.exists()]
        now = tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)
        asked = spec, path, now, tuple(sorted(how.items()))
        if asked not in _LOADED:
            _LOADED[asked] = load_model(spec, before=before, **how)
        else:
            before(_LOADED[asked])
        return _LOADED[asked]

    for module in (methods, model, loading):
        patch.setattr(module, "load_model", shared)


#: Moments by model, its weights, where tokens come from and how many, with the model itself.
_COLLECTED: dict[Any, Any] = {}


def share_moments(patch: pytest.MonkeyPatch) -> None:
    """Let commands that share a model share what it is calibrated with, where no file is read."""
    from kvprof.moments import calibrator

    collect = calibrator.collect_moments

    def shared(loaded: Any, source: Any, options: Any, *, abandon: Any, **told: Any) -> Any:
        asked = id(loaded), loaded.fingerprint, source, options
        if source.paths or abandon():
            yield from collect(loaded, source, options, abandon=abandon, **told)
            return
        if asked not in _COLLECTED:
            *_, moments = collect(loaded, source, options, abandon=abandon, **told)
            _COLLECTED[asked] = loaded, moments
        yield deepcopy(_COLLECTED[asked][1])

    patch.setattr(calibrator, "collect_moments", shared)


def few_layers(patch: pytest.MonkeyPatch, folder: Path, layers: int) -> None:
    """Let ``reference`` be the first layers of the model that ships, written into a folder."""
    import torch
    from safetensors.torch import load_file, save_file

    from kvprof.benchmark import shapes
    from kvprof.models import locate

    whole = Path(str(locate.files("kvprof"))) / "assets" / "reference"
    cut = folder / "assets" / "reference"
    cut.mkdir(parents=True)
    cut.with_name("shapes").symlink_to(whole.with_name("shapes"))
    weights: dict[str, torch.Tensor] = load_file(whole / "model.safetensors")
    beyond = tuple(f"model.layers.{number}." for number in range(layers, 100))
    kept = {name: one for name, one in weights.items() if not name.startswith(beyond)}
    save_file(kept, cut / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = layers
    (cut / "config.json").write_text(json.dumps(config), "utf-8")
    for path in whole.iterdir():
        if not (cut / path.name).exists():
            (cut / path.name).symlink_to(path)
    of = shapes._folder
    patch.setattr(locate, "files", lambda _: folder)
    patch.setattr(shapes, "_folder", lambda given: cut if given == "reference" else of(given))


@pytest.fixture(scope="session")
def short_splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the first documents of the splits begin with, and their tasks.

    What is cut into sequences of a few tokens need not be whole: every command would read all.
    """
    import kvprof

    whole = Path(kvprof.__file__).parent / "assets" / "splits" / "evaluation"
    short = tmp_path_factory.mktemp("splits")
    for name in ("prose.jsonl", "code.jsonl"):
        lines = (whole / name).read_text("utf-8").splitlines()[:12]
        begun = [{**(one := json.loads(line)), "text": one["text"][:2000]} for line in lines]
        (short / name).write_text("".join(f"{json.dumps(one)}\n" for one in begun), "utf-8")
    (short / "tasks.jsonl").symlink_to(whole / "tasks.jsonl")
    return short


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model with other weights."""
    from tests.models.folder import save_tiny

    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)
