"""What the machines of a cluster have, as far as it decides whether a cell is run there."""

from dataclasses import dataclass

from kvprof.reproduction.machine import Machine
from kvprof.reproduction.recipe import Profile
from kvprof.requirements import extra_command

__all__ = ["ClusterMachine"]


@dataclass(frozen=True)
class ClusterMachine(Machine):
    """The machines of a cluster as one: where they are alike, the same as one of them."""

    def lacks(self, profile: Profile, *, model_given: bool) -> str | None:
        """Return why a profile cannot be run on this cluster; None where it can."""
        needs = profile.needs
        if needs.gpus > len(self.gpus):
            has = f"has more than {len(self.gpus)}" if self.gpus else "has one"
            wanted = "a GPU" if needs.gpus == 1 else f"{needs.gpus} GPUs"
            return f"it needs {wanted}, and no machine of the cluster {has}"
        for extra in needs.extras:
            if not self.has_extra(extra):
                return (
                    f"it needs the extra {extra} on every machine of the cluster, here: "
                    f"{extra_command(extra)}"
                )
        if not model_given:
            for name in needs.weights:
                if not self.has_weights(name):
                    return (
                        f"the weights of {name} are not on every machine of the cluster: hf "
                        f"download {name}, or --model FOLDER"
                    )
        return None
