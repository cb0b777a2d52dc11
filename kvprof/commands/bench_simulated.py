"""``kvprof bench --load --simulate``: what it is asked for, and the targets that simulate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprof.commands.run_source import load_run
from kvprof.errors import FailedError, UsageError
from kvprof.records.load_against import against, differing
from kvprof.records.load_names import LoadMethod, load_methods
from kvprof.sizes import parse_count

if TYPE_CHECKING:
    from kvprof.commands.bench_load_options import LoadOptions
    from kvprof.serving.load.step_records import ModelSteps
    from kvprof.serving.load.target import LoadTarget

__all__ = ["Served", "Simulation", "served_load", "simulation"]

#: vLLM's options of which the simulator knows something, to what it calls them.
_ENGINE = {
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--block-size": "block_size",
}
_SWITCHES = {"--enable-prefix-caching": True, "--no-enable-prefix-caching": False}
_CACHING = "prefix_caching"
#: Of the inputs of a load that a simulation is held against.
_NEEDED = ("lengths", "arrivals", "replicas", "router", "seed")


# --- A load that was served, which the simulation is held against.


@dataclass(frozen=True)
class Served:
    """What was asked of a load that was served, and what it gave.

    Attributes
    ----------
    name : str
        The run, as the user named it.
    inputs, data : dict
        Of its result.
    """

    name: str
    inputs: Mapping[str, Any]
    data: Mapping[str, Any]

    @property
    def rates(self) -> str:
        """The rates that it completed, as an option has them."""
        known = sorted({row["rate"] for row in self.data["rates"] if row["complete"]})
        return ",".join(f"{rate:.15g}" for rate in known)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that it completed a rate of."""
        return tuple(dict.fromkeys(r["method"] for r in self.data["rates"] if r["complete"]))

    def has(self, methods: Sequence[LoadMethod]) -> bool:
        """Whether it completed a rate of each of these."""
        return all(one.label in self.methods for one in methods)

    def asked_again(self, asked: "LoadOptions") -> "LoadOptions":
        """Return the options with those of this load where none were given.

        Raises
        ------
        UsageError
            When its lengths are of a file, which must be named again.
        """
        inputs, lengths = self.inputs, asked.lengths
        if lengths is None:
            known = inputs["lengths"]
            if known["source"].endswith(" file"):
                raise UsageError(
                    f"--against: its lengths are of the file {known['name']}; "
                    "name it: --lengths FILE"
                )
            lengths = known["name"]
        replicas = inputs["replicas"] if asked.replicas is None else asked.replicas
        memory = inputs.get("memory")
        if asked.memory is None and memory is not None:
            asked = replace(asked, memory=f"{memory}B")
        return replace(
            asked,
            lengths=lengths,
            arrivals=asked.arrivals or inputs["arrivals"],
            rates=asked.rates or self.rates,
            replicas=replicas,
            router=asked.router or (inputs["router"] if replicas > 1 else None),
        )

    def refuse_others(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a load of other requests, or at other times.

        Raises
        ------
        UsageError
        """
        if other := differing(inputs, self.inputs):
            raise UsageError(
                f"--against {self.name} had other {' and '.join(other)}: only the same requests at "
                "the same times can be compared; leave these options out to take its own"
            )

    def held(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return how near simulated data come; see `kvprof.records.load_against`."""
        return against(data, self.data)


def served_load(name: str) -> Served:
    """Return a load to hold a simulation against.

    Raises
    ------
    UsageError
        When it is no load, was itself simulated, or completed no rate.
    FailedError
        When it does not say what was asked for.
    """
    result = load_run(name)
    if result["kind"] != "load":
        raise UsageError(f"--against {name} is a result of {result['kind']}, no load")
    if result["data"]["mode"] == "simulated":
        raise UsageError(f"--against {name} is simulated itself; name a load that was served")
    found = Served(name, result["inputs"], result["data"])
    if lacking := [each for each in _NEEDED if each not in found.inputs]:
        raise FailedError(f"{name} does not say what was asked for: {', '.join(lacking)}")
    if type(found.inputs["seed"]) is not int:
        raise FailedError(f"{name}: its seed is {str(found.inputs['seed'])[:40]!r}, no number")
    if not found.methods:
        raise UsageError(f"--against {name} completed no rate")
    return found


# --- What is simulated.


@dataclass(frozen=True)
class Simulation:
    """Step times and an engine's settings.

    Attributes
    ----------
    steps : dict of int to ModelSteps
        One model's, by the GPUs that share it.
    settings : dict
        As `kvprof.serving.load.replica.EngineSettings` names them; what is missing is vLLM's.
    """

    steps: "dict[int, ModelSteps]"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name of the model."""
        return next(iter(self.steps.values())).model

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method that there are steps of, on each number of GPUs."""
        first, *others = self.steps.values()
        return tuple(name for name in first.methods if all(name in one.methods for one in others))

    def inputs(self, methods: Sequence[LoadMethod], memory: int | None) -> dict[str, Any]:
        """Return what a result says of the simulation, resolved.

        Raises
        ------
        UsageError
            As `kvprof.serving.load.simulator.engine_settings`.
        """
        from kvprof.serving.load.simulator import engine_settings

        first = methods[0]
        engine = engine_settings(self.steps[first.tp], first.name, memory, **self.settings)
        return {
            "step_times": self._described(),
            "engine_settings": {
                name: getattr(engine, name) for name in (*_ENGINE.values(), _CACHING)
            },
        }

    def _described(self) -> dict[str, Any]:
        first, *others = (one.described() for one in self.steps.values())
        if not others:
            return first
        labelled = [
            {**row, "method": load_methods([row["method"]], list(self.steps))[index].label}
            for index, one in enumerate((first, *others))
            for row in one["methods"]
        ]
        return {**first, "tp": list(self.steps), "methods": labelled}

    def targets(
        self, methods: Sequence[LoadMethod], memory: int | None, *, replicas: int, router: str
    ) -> "list[LoadTarget]":
        """Return what simulates each method.

        Raises
        ------
        UsageError
            As `kvprof.serving.load.simulator.engine_settings`.
        """
        from kvprof.serving.load.simulator import SimulatedTarget, engine_settings

        own = {**self.settings, "replicas": replicas, "route": router}
        return [
            SimulatedTarget(
                one.name,
                self.steps[one.tp],
                engine_settings(self.steps[one.tp], one.name, memory, **own),
                one.label,
            )
            for one in methods
        ]


def simulation(
    step_times: Path | None,
    engine: Sequence[str],
    served: Sequence[str],
    model: str | None,
    tps: Sequence[int],
) -> Simulation:
    """Return what is to be simulated.

    Parameters
    ----------
    step_times : Path or None
        A record of steps; None takes the one that ships.
    engine : sequence of str
        Options as vLLM has them: those of its scheduler.
    served : sequence of str
        Options that a server was started with, of which those of its scheduler are taken.
    model : str or None
        None takes the record's only one, of the shipped record Llama-3.1-8B.
    tps : sequence of int
        GPUs that share the model.

    Raises
    ------
    UsageError
        For an option that the simulator does not know, a record without such steps, or with those
        of another model on another number of GPUs.
    """
    from kvprof.serving.load.step_records import read_model_steps

    settings = {**_settings(served, strict=False), **_settings(engine, strict=True)}
    steps = {tp: read_model_steps(step_times, model, tp) for tp in tps}
    if len({one.model for one in steps.values()}) > 1:
        known = ", ".join(f"{one.model} with --tp {tp}" for tp, one in steps.items())
        raise UsageError(
            f"--tp {','.join(map(str, tps))}: the steps are of unlike models, {known}; take one of "
            "them, or name a record of one model (--step-times)"
        )
    return Simulation(steps, settings)


def _settings(words: Sequence[str], *, strict: bool) -> dict[str, Any]:
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
        elif strict:
            raise UsageError(
                f"--engine: the simulator knows nothing of {name[:40]}; it knows "
                f"{', '.join((*_ENGINE, *_SWITCHES))}"
            )
    return found
