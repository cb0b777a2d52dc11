"""Each paper's own setting, under a name: ``fdc:paper``, ``zack:paper``, ``palu:paper``, ….

A plain method takes kvprof's defaults (ranks on the kernels' grid, a short calibration); with
``:paper`` it is what the paper ran, as far as kvprof has it, and says what differs. Recipes use
these. Data only, so that a command can tell them without loading torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PAPERS", "SOURCES", "PaperSetting", "papers_named"]

# SVD-LLM's calibration, whose decomposition Palu (§4.1) and TALE (§3) take: 256 sequences of 2,048.
_SVD_LLM = 256 * 2048
_SVD_LLM_DATA = (
    None,
    "Whitened on the calibration text, or the user's, with as many tokens as SVD-LLM takes (256 "
    "sequences of 2,048), not on WikiText-2.",
)


@dataclass(frozen=True)
class PaperSetting:
    """What a paper's own setting of a method is.

    Attributes
    ----------
    method : str
        The plain name.
    options : mapping
        That differ from the plain method's defaults.
    source : str
        What it is calibrated on unless the user says otherwise.
    tokens : int
        How many of them.
    fisher_tokens : int or None
        For Fisher information, where the paper says so.
    differs : tuple of (str or None, str)
        Where this is still not the paper, a sentence each, behind the option that changes it.
    """

    method: str
    options: Mapping[str, Any]
    source: str
    tokens: int
    fisher_tokens: int | None = None
    differs: tuple[tuple[str | None, str], ...] = ()

    def differences(self, options: Iterable[str] = ()) -> list[str]:
        """Return the sentences that hold where the user gives these options."""
        given = set(options)
        return [sentence for option, sentence in self.differs if option not in given]


# No paper limits the kinds of head, which are what kernels are compiled for.
_FINE = {"grid": 1, "minimum": 1, "kinds": 0}

PAPERS: dict[str, PaperSetting] = {
    "fdc:paper": PaperSetting(
        "fdc",
        {**_FINE, "values": "weight-v"},
        "random:8k",
        8192,
        differs=(
            (
                "keys",
                "A KV head has one basis, from its query heads each paired with its key; FDC §5.1 "
                "finds one per query head, which with grouped queries stores a key for each "
                "(keys=svd-qk-literal).",
            ),
            (
                "values",
                "V's basis is W_V's own, as FDC §5.2 says; that of V and W_O (values=svd-vo, the "
                "plain method's) keeps more when calibrated on text, and less on random tokens.",
            ),
        ),
    ),
    "zack:paper": PaperSetting(
        "zack",
        {**_FINE, "values": "svd-vo-raw"},
        "calibration",
        56 * 1024,
        differs=(
            ("keys", "A KV head has one basis, from its query heads each paired with its key."),
            (
                None,
                "Calibrated on the calibration text, or the user's, not on 57K tokens of articles "
                "that ChatGPT-4o wrote (§4.3).",
            ),
        ),
    ),
    "palu:paper": PaperSetting(
        "palu",
        {"hadamard": True, "kinds": 0},
        "calibration",
        _SVD_LLM,
        fisher_tokens=2048 * 1024,
        differs=(
            _SVD_LLM_DATA,
            (
                None,
                "Fisher information, where ranks go by it, is taken on the calibration text, or "
                "the user's, at most the paper's 2,048 sequences of 1,024, not on WikiText-2.",
            ),
        ),
    ),
    "tale:paper": PaperSetting("tale", _FINE, "calibration", _SVD_LLM, differs=(_SVD_LLM_DATA,)),
    "tale+kivi:paper": PaperSetting(
        "tale+kivi",
        _FINE,
        "calibration",
        _SVD_LLM,
        differs=(
            _SVD_LLM_DATA,
            (
                "window",
                "KIVI's full-precision window of 128 tokens counts as bytes, which the paper's "
                "9.14× leaves out (window=0 is without it).",
            ),
        ),
    ),
}

#: The papers whose tables and figures recipes repeat: authors, title, link.
SOURCES: dict[str, str] = {
    "FDC": (
        "Zeyu Zhang, Haiying Shen. FDC: Fast KV Dimensionality Compression for Efficient LLM "
        "Inference. Version 3 of https://arxiv.org/abs/2408.04107, whose version 2 is ZACK."
    ),
    "ZACK": (
        "Zeyu Zhang, Haiying Shen. ZACK: Zero-Overhead LLM Inference Acceleration via "
        "Dimensionality Compression of the Key-Value Cache. Version 2 of "
        "https://arxiv.org/abs/2408.04107, whose version 3 is FDC."
    ),
    "Palu": (
        "Chi-Chih Chang, Wei-Cheng Lin, Chien-Yu Lin, Chong-Yan Chen, Yu-Fang Hu, Pei-Shuo Wang, "
        "Ning-Chi Huang, Luis Ceze, Mohamed S. Abdelfattah, Kai-Chiang Wu. Palu: KV-Cache "
        "Compression with Low-Rank Projection. https://arxiv.org/abs/2407.21118"
    ),
    "TALE": (
        "Jaeseong Lee, Seung-won Hwang, Aurick Qiao, Daniel Campos, Zhewei Yao, Yuxiong He. TALE: "
        "Token-Adaptive Low-Rank KVCache Approximation with Reconstruction Elimination. https://aclanthology.org/2025.tacl-1.59/"
    ),
}

_NAMED = re.compile("|".join(f"(?<![\\w+:-]){re.escape(name)}(?!\\w)" for name in PAPERS))


def papers_named(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the papers' settings that a command names, each with what differs from the paper.

    Parameters
    ----------
    words : iterable of str
        Of a command line; combinations (``fdc:paper+keyformer``) name theirs too.
    """
    found = [match[0] for word in words for match in _NAMED.finditer(word)]
    return {name: PAPERS[name].differences() for name in PAPERS if name in found}
