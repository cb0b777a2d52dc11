"""From a method to the call that is timed."""

from kvprof.benchmark.case import Case, Place
from kvprof.benchmark.methods import Method
from kvprof.benchmark.own_cases import ragged_case
from kvprof.benchmark.ranks import Widths

__all__ = ["build_case"]


def build_case(
    method: Method, place: Place, widths: Widths | None, schedule: str | None, *, path: str = "auto"
) -> Case:
    """Make the inputs of a method and return its call.

    Parameters
    ----------
    method : Method
        Not ``full``, which is the best of the baselines.
    place : Place
    widths : Widths or None
        From `kvprof.benchmark.methods.method_widths`.
    schedule : str or None
    path : str
        See `ragged_case`.

    Raises
    ------
    UsageError
        When the kernel refuses the shape.
    torch.OutOfMemoryError
    """
    shape = place.shape
    if widths is not None and method.bits is None and method.kind != "tale":
        if method.kind == "palu" and shape.rope.kind != "none":
            from kvprof.benchmark.palu_case import palu_case

            return palu_case(method.name, place, widths)
        # Without RoPE the basis is folded into W_Q (Palu eq. 7): latents are keys of their own.
        group = shape.num_heads // len(widths.keys)
        return ragged_case(method.name, place, widths, schedule=schedule, group=group, path=path)
    from kvprof.benchmark.level_cases import level_case

    return level_case(method, place, widths)
