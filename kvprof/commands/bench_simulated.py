"""``kvprof bench --load --simulate``: the engines that are simulated, in place of servers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvprof.errors import UsageError
from kvprof.sizes import parse_count

if TYPE_CHECKING:
    from kvprof.serving.load.step_records import ModelSteps
    from kvprof.serving.load.target import LoadTarget

__all__ = ["scheduler_settings", "simulated_targets"]

#: vLLM's options of which the simulator knows something, to what it calls them.
_ENGINE = {
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--block-size": "block_size",
}
_SWITCHES = {"--enable-prefix-caching": True, "--no-enable-prefix-caching": False}
_CACHING = "prefix_caching"


def simulated_targets(
    steps: "ModelSteps",
    methods: Sequence[str],
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> "tuple[list[LoadTarget], dict[str, Any]]":
    """Return what simulates each method, and what a result says of it."""
    from kvprof.serving.load.simulator import SimulatedTarget, engine_settings

    own = {**settings, "replicas": inputs["replicas"], "route": inputs["router"]}
    engines = {name: engine_settings(steps, name, inputs["memory"], **own) for name in methods}
    told = engines[methods[0]]
    return [SimulatedTarget(name, steps, engine) for name, engine in engines.items()], {
        "step_times": steps.described(),
        "engine_settings": {name: getattr(told, name) for name in (*_ENGINE.values(), _CACHING)},
    }


def scheduler_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that options of vLLM's scheduler ask for."""
    found: dict[str, Any] = {}
    left = list(words)
    while left:
        name, equals, value = left.pop(0).replace("_", "-").partition("=")
        if name in _SWITCHES and not equals:
            found[_CACHING] = _SWITCHES[name]
        elif name in _ENGINE:
            if not equals:
                value = left.pop(0) if left else ""
            found[_ENGINE[name]] = parse_count(value, what=f"--engine {name}")
        else:
            raise UsageError(
                f"--engine {name[:40]}: --simulate takes {', '.join((*_ENGINE, *_SWITCHES))}"
            )
    return found
