"""Whether a plan is of the model that is to be served, known before the engine loads weights."""

from kvprof.methods.plan import Plan
from kvprof.methods.soundness import check_fits
from kvprof.models.load import load_model

__all__ = ["check_identity"]


def check_identity(
    plan: Plan, spec: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse a plan of another model.

    The checkpoint is read on the CPU as kvprof reads it; its files are mapped, and the engine finds
    them in memory afterwards.

    Parameters
    ----------
    plan : Plan
    spec : str
        Hub id or folder.
    revision : str, optional
    trust_remote_code : bool

    Raises
    ------
    UsageError
        When its weights, configuration or shape are not those that the plan was made for.
    KvprofError
        As `load_model`.
    """
    loaded = load_model(spec, device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    check_fits(plan, loaded.layout, loaded.fingerprint)
