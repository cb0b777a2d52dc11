"""How many tokens a calibration takes when the user does not say, and why."""

__all__ = ["DEFAULT_SEQ_LEN", "DEFAULT_TOKENS", "DEFAULT_TOKENS_REASON"]

DEFAULT_TOKENS = 8192
DEFAULT_TOKENS_REASON = (
    "8,192 random tokens are FDC's recommendation (§6.7); `kvprof stability` checks it on a model"
)

#: Post-RoPE moments depend on the positions seen; longer contexts are for the user to ask for.
DEFAULT_SEQ_LEN = 2048
