"""What the machine has that this process runs on."""

from kvprof.environment import cpu_model, usable_threads
from kvprof.gpus import read_gpus
from kvprof.reproduction.machine import Machine
from kvprof.requirements import package_states

__all__ = ["has_extra", "has_weights", "this_machine"]


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
