"""Which methods stand in every table, and which are compared unless the user names some.

Names only, so that a command can say them in its help without loading torch.
"""

__all__ = ["ALWAYS", "COMPARED"]

#: What most people would use instead; they have nothing to turn.
ALWAYS = ("full", "fp8")

#: The four papers' methods and the optimal bases, as ``--methods`` writes them.
COMPARED = "fdc,zack,palu,tale,kq"
