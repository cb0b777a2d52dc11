"""Passes over a tiny model, in few words."""

import torch

from kvprof.analysis.moments import Moments
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.sources.grammar import Source, SourceKind, file_source

RANDOM = Source(SourceKind.RANDOM, "random")
SEQ_LEN = 16


def last(*args, **options) -> Moments:
    *_, moments = collect_moments(*args, **options)
    return moments


def options(tokens: int | None, **others) -> CollectOptions:
    return CollectOptions(**{"tokens": tokens, "seq_len": SEQ_LEN, "batch_size": 3, **others})


def ids_file(tmp_path, *sequences) -> Source:
    path = tmp_path / "a.ids"
    path.write_text("\n".join(" ".join(map(str, sequence)) for sequence in sequences))
    return file_source([path], token_ids=True)


def same(a, b) -> bool:
    return (a.tokens, a.sequences) == (b.tokens, b.sequences) and all(
        torch.equal(x.rest[key], y.rest[key]) and torch.equal(x.first[key], y.first[key])
        for x, y in zip(a.layers, b.layers, strict=True)
        for key in x.rest
    )
