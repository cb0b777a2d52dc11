"""What the machine has, as far as it decides whether a cell is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvprof.environment import cpu_model, read_gpus, usable_threads
from kvprof.recipes.recipe import Profile
from kvprof.requirements import extra_command, package_states

__all__ = ["Machine", "has_extra", "has_weights", "on_cpu", "this_machine"]


@dataclass(frozen=True)
class Machine:
    """A machine."""

    cpu: str  # model and threads
    gpus: tuple[str, ...]  # their names
    has_extra: Callable[[str], bool]  # whether an extra of kvprof is installed
    #: Whether a model's weights are here; none are fetched unasked, some have 140 GB.
    has_weights: Callable[[str], bool]

    def lacks(self, profile: Profile, *, model_given: bool) -> str | None:
        """Return why a profile cannot be run here, with the way out; None where it can."""
        needs = profile.needs
        if needs.gpus > len(self.gpus):
            wanted = "a GPU" if needs.gpus == 1 else f"{needs.gpus} GPUs"
            return f"it needs {wanted}, and this machine has {len(self.gpus) or 'none'}"
        for extra in needs.extras:
            if not self.has_extra(extra):
                return f"it needs the extra {extra}: {extra_command(extra)}"
        if not model_given:
            for name in needs.weights:
                if not Path(name).is_dir() and not self.has_weights(name):
                    return (
                        f"the weights of {name} are not on this machine: hf download {name}, or "
                        "--model FOLDER"
                    )
        return None


def on_cpu(words: Sequence[str]) -> bool:
    """Return whether a command says that it runs on the CPU."""
    return ("--device", "cpu") in pairwise(words) or "--device=cpu" in words


def this_machine() -> Machine:
    """Return what this machine has."""
    gpus = tuple(gpu.name for gpu in read_gpus().devices)
    return Machine(f"{cpu_model()}, {usable_threads()} threads", gpus, has_extra, has_weights)


def has_extra(name: str) -> bool:
    """Return whether an extra of kvprof is installed."""
    own = [state for state in package_states() if state.extra == name]
    return bool(own) and all(state.installed is not None for state in own)


def has_weights(name: str) -> bool:
    """Return whether a hub model's weights are in the cache of this machine."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no hub id
        return False
