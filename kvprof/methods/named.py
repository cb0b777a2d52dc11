"""Methods by name: all there are, those in every table, those that are compared by default.

Names only, so that a command can say them in its help, and the shell complete them, without loading
torch. `kvprof.methods.registry` knows what stands behind each.
"""

from importlib.metadata import entry_points

from kvprof.methods.papers import PAPERS

__all__ = ["ALWAYS", "COMBINATIONS", "COMPARED", "ENTRY_POINTS", "OWN", "method_names"]

#: Group of the entry points by which a package brings methods of its own.
ENTRY_POINTS = "kvprof.methods"

#: kvprof's own, in the order of every list.
OWN = (
    "full", "fp8", "fdc", "zack", "palu", "tale", "kq", "svd-kv", "svd-k", "svd-v", "strawman",
    "tale+kivi", "per-token", "kivi", "kvquant", "hqq", "quanto", "sink-recent", "h2o", "keyformer",
    *PAPERS,
)  # fmt: skip

#: Combinations that the papers have, and the quantised optimum.
COMBINATIONS = (
    "fdc+keyformer", "fdc+kvquant", "zack+keyformer", "zack+kvquant", "palu+keyformer",
    "palu+kvquant", "palu-3bit", "fdc-4bit", "kq-4bit",
)  # fmt: skip

#: What most people would use instead; they have nothing to turn.
ALWAYS = ("full", "fp8")

#: The four papers' methods and the optimal bases, as ``--methods`` writes them.
COMPARED = "fdc,zack,palu,tale,kq"


def method_names() -> list[str]:
    """Return every name that is listed: own methods, named combinations, then installed ones."""
    return [*OWN, *COMBINATIONS, *(point.name for point in entry_points(group=ENTRY_POINTS))]
