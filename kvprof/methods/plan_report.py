"""What ``kvprof plan`` tells about a plan: its account, where its matrices went, its rounding."""

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from kvprof.methods.accounting import (
    SERVED_BYTES,
    bytes_at,
    compression_ratio,
    dim_rate,
    full_bytes,
    paper_rate,
    rate,
    running_weights,
    weight_bytes,
)
from kvprof.methods.across import Across, coded_layers
from kvprof.methods.plan import HeadGroup, Placement, Plan
from kvprof.methods.plan_files import structure
from kvprof.methods.soundness import head_kinds
from kvprof.methods.storage import ARITHMETICS, ROW_RMS, row_layout
from kvprof.models.layout import ModelLayout

__all__ = [
    "bits_by_head",
    "compare_plans",
    "comparison",
    "describe",
    "latents_across",
    "least_ranks",
    "plan_report",
    "ranks_of",
]

# --- A plan in words and figures, and what two plans differ in.


def ranks_of(plan: Plan) -> dict[str, list[list[int]]]:
    """Return the top-level ranks, ``{"keys": [layer][group], "values": …}``.

    Where columns have bits of their own, how many have any. Of a plan that keeps layers together
    they are what stays of a layer by itself; `latents_across` has what is stored.
    """
    return {
        side: [
            [_stored_columns(own) for own in getattr(layer, side).groups] for layer in plan.layers
        ]
        for side in ("keys", "values")
    }


def _stored_columns(group: HeadGroup) -> int:
    if group.column_bits:
        return sum(columns for columns, bits in group.column_bits if bits)
    return group.rank


def latents_across(plan: Plan) -> list[dict[str, Any]] | None:
    """Return the latents that several layers have together, each a mapping; None of none.

    With its ``side``, its number of ``layers``, its ``width`` and how many components are ``kept``.
    """
    if plan.across is None:
        return None
    return [
        {
            "side": group.side,
            "layers": len(group.layers),
            "width": group.width,
            "kept": group.kept,
        }
        for group in plan.across.groups
    ]


def bits_by_head(plan: Plan) -> dict[str, list[list[int]]] | None:
    """Return each group's bits at the top level where heads have unlike ones, else None.

    ``{"keys": [layer][group], "values": …}``; what is not quantised has 16.
    """
    quantiser = plan.quantiser
    sides = {name: getattr(quantiser, name, None) for name in ("keys", "values")}
    found: dict[str, list[list[int]]] = {name: [] for name in sides}
    for layer in plan.layers:
        for name, side in sides.items():
            quantised = not (layer.left_out or layer.shared)
            groups = getattr(layer, name).groups
            runs = [group.runs(side, -1) if quantised else () for group in groups]
            if any(len(own) > 1 for own in runs):
                return None  # by column
            found[name].append([own[0][1] if own else 8 * SERVED_BYTES for own in runs])
    alike = [len({bits for row in rows for bits in row}) == 1 for rows in found.values()]
    return None if all(alike) else found


def describe(plan: Plan, tokens: int, *, layout: ModelLayout | None = None) -> dict[str, Any]:
    """Return what a plan stores, folds and runs, as JSON values."""
    stored = bytes_at(plan, tokens, itemsize=SERVED_BYTES)
    full = full_bytes(plan, tokens, itemsize=SERVED_BYTES)
    share = 1.0 - stored.total / full
    weights = weight_bytes(plan, layout, itemsize=SERVED_BYTES) if layout is not None else None
    return {
        "method": plan.method,
        "context": tokens,
        "bytes": {**asdict(stored), "total": stored.total, "full": full},
        "bytes_per_token": stored.total / tokens,
        "rate": share,
        "compression_ratio": compression_ratio(share),
        "dim_rate": dim_rate(plan),
        "paper_rate": paper_rate(plan),
        "ranks": ranks_of(plan),
        "across": latents_across(plan),
        "bits": bits_by_head(plan),
        "kinds": len(head_kinds(plan)),
        "weights": {**asdict(weights), "total": weights.total} if weights is not None else None,
        "sentences": _sentences(plan),
        "made": plan.made,
    }


def compare_plans(one: Plan, other: Plan) -> dict[str, tuple[Any, Any]]:
    """Return where two plans differ: dotted path to (value in `one`, value in `other`).

    Where only matrices differ, a path that ends in ``difference`` holds 0 and the largest absolute
    difference. How a plan was made (``made``) is left out: plans that store and compute the same
    are equal.
    """
    left, right = structure(one), structure(other)
    left.pop("made")
    right.pop("made")
    found: dict[str, tuple[Any, Any]] = {}
    _differences("", left, right, found)
    if found:
        return found
    for index, (a, b) in enumerate(zip(one.layers, other.layers, strict=True)):
        means = {"key_mean": (a.key_mean, b.key_mean)}
        if a.centre is not None and b.centre is not None:
            means["centre.keys"] = a.centre.keys, b.centre.keys
            means["centre.values"] = a.centre.values, b.centre.values
        for name, (x, y) in means.items():
            if x is not None and y is not None and not x.equal(y):
                path = f"layers.{index}.{name}.difference"
                found[path] = (0.0, float((x - y).abs().max()))
        for name in ("keys", "values"):
            groups = zip(getattr(a, name).groups, getattr(b, name).groups, strict=True)
            for number, pair in enumerate(groups):
                for matrix in ("down", "up"):
                    x, y = (getattr(group, matrix) for group in pair)
                    if x is not None and not x.equal(y):
                        path = f"layers.{index}.{name}.{number}.{matrix}.difference"
                        found[path] = (0.0, float((x - y).abs().max()))
    if one.across is not None and other.across is not None:
        for number, coded in enumerate(zip(one.across.groups, other.across.groups, strict=True)):
            for matrix in ("basis", "mean"):
                x, y = (getattr(group, matrix) for group in coded)
                if x is not None and not x.equal(y):
                    path = f"across.{number}.{matrix}.difference"
                    found[path] = (0.0, float((x - y).abs().max()))
    return found


def _differences(path: str, a: Any, b: Any, found: dict[str, tuple[Any, Any]]) -> None:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        entries = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        entries = [(str(i), x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        if a != b:
            found[path] = (a, b)
        return
    for name, x, y in entries:
        _differences(f"{path}.{name}" if path else name, x, y, found)


def _sentences(plan: Plan) -> list[str]:
    """Say what is stored, what is folded, and what runs online."""
    return [
        *_key_sentences(plan),
        *_value_sentences(plan),
        *_centre_sentences(plan),
        *_token_sentences(plan),
        *_quantiser_sentences(plan),
        *_eviction_sentences(plan),
        *_across_sentences(plan),
        *_reading_sentences(plan),
        *_made_sentences(plan),
    ]


def _made_sentences(plan: Plan) -> list[str]:
    """Say what a paper's own setting does otherwise than the paper, and what calibration lacked."""
    paper = plan.made.get("paper") or {"name": "", "differs": []}
    return [
        *(f"{paper['name']} differs from the paper: {one}" for one in paper["differs"]),
        *(f"{note}." for note in plan.made.get("notes", ())),
    ]


def _key_sentences(plan: Plan) -> list[str]:
    if plan.online_bases:
        return [
            "Keys and values are projected on bases that prefill finds per sequence and head, and "
            "rebuilt in full at every decode step (the strawman)."
        ]
    if plan.across is not None:
        return []  # what becomes of keys and values is told together
    treatments = {
        Placement.NONE: "stored as they are, after RoPE",
        Placement.POST_ROPE: "projected after RoPE; queries meet them in the latent",
        Placement.PRE_ROPE: "projected before RoPE and rebuilt at every use",
    }
    found = []
    for placement, words in treatments.items():
        layers = [x.keys for x in plan.layers if x.keys.placement is placement]
        for folds in ((False, False), (True, False), (False, True), (True, True)):
            count = sum((x.fold_down, x.fold_up) == folds for x in layers)
            if not count:
                continue
            where = [name for name, on in zip(("W_K", "W_Q"), folds, strict=True) if on]
            how = "" if placement is Placement.NONE else "; online"
            if where:
                how = f"; folded into {' and '.join(where)}"
            found.append(f"Keys of {count} of {len(plan.layers)} layers are {words}{how}.")
    copies = sorted({x.key_copies for x in plan.layers if x.keys.per_query_head})
    if copies:
        found.append(
            "Each query head has a basis and a stored key of its own: "
            f"{' or '.join(map(str, copies))} keys per KV head where the model stores one."
        )
    return found


def _value_sentences(plan: Plan) -> list[str]:
    if plan.online_bases or plan.across is not None:
        return []
    found = []
    count = sum(not layer.values.projected for layer in plan.layers)
    if count:
        found.append(f"Values of {count} of {len(plan.layers)} layers are stored as they are.")
    for folds in ((False, False), (True, False), (False, True), (True, True)):
        sides = [
            layer.values
            for layer in plan.layers
            if layer.values.projected and (layer.values.fold_down, layer.values.fold_up) == folds
        ]
        if not sides:
            continue
        heads = max(group.heads for side in sides for group in side.groups)
        where = [name for name, on in zip(("W_V", "W_O"), folds, strict=True) if on]
        online = [
            name
            for name, on in zip(("the projection", "its inverse"), folds, strict=True)
            if not on
        ]
        how = [f"folded into {' and '.join(where)}"] if where else []
        how += [f"{' and '.join(online)} online"] if online else []
        shared = f", latents shared by up to {heads} heads" if heads > 1 else ""
        found.append(
            f"Values of {len(sides)} of {len(plan.layers)} layers are projected{shared}: "
            f"{'; '.join(how)}."
        )
    return found


def _centre_sentences(plan: Plan) -> list[str]:
    centres = [layer.centre for layer in plan.layers if layer.centre is not None]
    if not centres:
        free = sum(layer.key_mean is not None for layer in plan.layers)
        text = "layers project keys without their constant mean, which leaves the softmax"
        return [f"{free} of {len(plan.layers)} {text}."] if free else []
    found = []
    counts = sorted({int(n) + 1 >> 1 for x in centres for n in (x.keys != 0).sum(-1)})
    if counts[-1]:
        pairs = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        most = max(x.keys.shape[-1] // 2 for x in centres)
        found.append(f"keys without their rotated mean, of {pairs} of a head's {most} pairs")
    if any(bool(x.values.any()) for x in centres):
        found.append("values without their mean")
    what = " and ".join(found or ["keys and values with means of 0"])
    if plan.made.get("centre") == "bias":
        what = "keys and values without what their projections add as a bias"
    back = "scores and outputs get back what they lack"
    return [f"{len(centres)} of {len(plan.layers)} layers store {what}; {back}."]


def _reading_sentences(plan: Plan) -> list[str]:
    if not plan.by_age:
        return [
            "The tokens of a pass read one another before any is evicted, moved down or quantised "
            "(prefill uncompressed)."
        ]
    return ["Queries read older tokens as stored by then, in a prompt too (by age)."]


def _token_sentences(plan: Plan) -> list[str]:
    levels = plan.levels
    found = []
    left = [str(index) for index, layer in enumerate(plan.layers) if layer.left_out]
    if left:
        found.append(
            f"Left out (uncompressed, every token stored): layer{'s' if len(left) > 1 else ''} "
            f"{', '.join(left)}."
        )
    if levels.sink:
        found.append(f"The first {levels.sink} tokens stay uncompressed, at top rank.")
    if len(levels.shares) > 1:
        shares = ", ".join(f"{share:.0%}" for share in levels.shares)
        found.append(
            f"Tokens have {len(levels.shares)} rank levels, oldest first ({shares}); they move "
            f"down in batches of {levels.batch}."
        )
    if plan.lazy:
        found.append("Prefill attends exactly; only the cached copy is compressed (lazy).")
    return found


def _quantiser_sentences(plan: Plan) -> list[str]:
    quantiser = plan.quantiser
    if quantiser is None:
        return []
    found = []
    for name, side in (("Keys", quantiser.keys), ("Values", quantiser.values)):
        kind = quantiser.kind if side is None else quantiser.kind_of(side)
        own = ARITHMETICS.get(kind)
        if side is None:
            found.append(f"{name} are not quantised.")
        elif own is not None and not own.kept:
            found.append(f"{name} are stored in {own.words}, {_scale_words(plan, name.lower())}.")
        elif kind in ROW_RMS and not side.bits:
            found.append(f"{name} have {_own_bits(plan, name.lower())} by column.")
        else:
            bits = "/".join(map(str, side.bits)) + " bits"
            if not side.bits:
                bits = f"{_own_bits(plan, name.lower())} by head"
            unit = "tokens" if side.axis == "channel" else "columns"
            size = f"{side.group} {unit}" if side.group else "a token's whole row"
            if own is not None:
                scales = f"a {' and a '.join(own.kept)} in {quantiser.scale_dtype}"
            else:
                size = f"up to {size}" if side.group else size
                # quanto has no zero point at 8 bits
                every = side.bits or [bits for bits in _columns_of(plan, name.lower()) if bits]
                zeros = any(row_layout(kind, b, 64, side.group).zeros for b in every)
                scales = f"a scale{' and a zero point' if zeros else ''} in the model's dtype"
            found.append(
                f"{name} have {bits} ({kind}, per {side.axis}); {size} "
                f"{'share' if side.group else 'shares'} {scales}."
            )
            if side.clip is not None:
                found.append(
                    f"{name} are clipped: of each row {side.clip:.0%} of the magnitudes stay as "
                    "they are."
                )
        columns = _columns_of(plan, name.lower())
        if side is not None and side.bits and None in columns:
            share = columns[None] / sum(columns.values())
            found.append(f"Of the columns of {name.lower()} {share:.0%} are not quantised.")
    if quantiser.kind in ROW_RMS and any(
        side is not None and not side.bits for side in (quantiser.keys, quantiser.values)
    ):
        found.append(
            f"Bits by column are codes of {quantiser.kind}; a token's whole row shares a scale in "
            f"{quantiser.scale_dtype}."
        )
    if quantiser.outliers:
        found.append(f"{quantiser.outliers:.1%} of each row are kept apart as outliers.")
    if quantiser.window or quantiser.block > 1:
        most = quantiser.window + quantiser.block - 1
        count = f"{quantiser.window} to {most}" if quantiser.block > 1 else f"{most}"
        found.append(f"The newest {count} tokens stay uncompressed.")
    if "engine" in plan.made:
        found.append(f"{plan.made['engine']} stores it so with {plan.made['flag']}.")
    return found


def _scale_words(plan: Plan, side: str) -> str:
    layers = [layer for layer in plan.layers if not layer.left_out]
    groups = [group for layer in layers for group in getattr(layer, side).groups]
    exponents = [math.frexp(group.scale)[1] - 1 for group in groups]
    if not any(exponents):
        return "without scales"
    low, high = min(exponents), max(exponents)
    values = f"2^{low}" if low == high else f"2^{low} … 2^{high}"
    back = {"keys": "queries", "values": "outputs"}[side]
    return (
        f"each KV head's over a scale of its own ({values}) that {back} take back; it is the "
        "plan's, and no byte of any token"
    )


def _columns_of(plan: Plan, name: str) -> Counter[int | None]:
    """Return how many columns of a side have which bits at the top level; None: not quantised."""
    found: Counter[int | None] = Counter()
    side = getattr(plan.quantiser, name)
    for layer in plan.layers:
        for group in () if layer.left_out or layer.shared else getattr(layer, name).groups:
            for width, bits in group.runs(side, -1) or ((group.rank, None),):
                found[bits] += width
    return found


def _own_bits(plan: Plan, name: str) -> str:
    """Say which share of the columns has how many bits, and the mean of the quantised ones."""
    columns = _columns_of(plan, name)
    total, exact = sum(columns.values()), columns.pop(None, 0)
    shares = [f"{bits} bits ({count / total:.0%})" for bits, count in sorted(columns.items())[::-1]]
    mean = sum(bits * count for bits, count in columns.items() if bits) / (total - exact)
    shares = [f"uncompressed ({exact / total:.0%})"] * bool(exact) + shares
    return f"{', '.join(shares)}, {mean:.2f} on average,"


def _eviction_sentences(plan: Plan) -> list[str]:
    eviction = plan.eviction
    if eviction is None:
        return []
    order = {"evict_first": "before", "compress_first": "after"}[eviction.order]
    how = f"{eviction.kind}, {eviction.sink} sinks, {eviction.recent_share:.0%} of them the newest"
    if eviction.kind == "snapkv":
        how = f"snapkv: what a pass's last {eviction.window} queries read, and their own tokens"
    return [
        f"Of all tokens {eviction.keep:.1%} are kept ({how}); a prompt's tokens are chosen {order} "
        "compression."
    ]


def _across_sentences(plan: Plan) -> list[str]:
    across = plan.across
    if across is None:
        return []
    if not across.at_rest:
        return _latents_across(across)
    found = [
        "A prompt's cache is coded once, after its prefill, to be stored or moved; decoding "
        "continues uncompressed from the decoded cache."
    ]
    for side in ("keys", "values"):
        groups = [group for group in across.groups if group.side == side]
        if not groups:
            continue
        sizes = sorted({len(group.layers) for group in groups})
        layers = f"{' or '.join(map(str, sizes))} layer{'' if sizes == [1] else 's'}"
        rows = "one row" if len(groups) == 1 else f"one row, of {len(groups)}"
        columns = sum(group.width for group in groups)
        kept = sum(group.kept for group in groups)
        size = float(sum(group.token_bytes for group in groups))
        before = " before RoPE" if side == "keys" else ""
        found.append(
            f"{side.capitalize()}{before} of {layers} are {rows}: in all "
            f"{kept:,} of {columns:,} principal components have integers of 2 to 8 bits, "
            f"{size:,.1f} bytes a token."
        )
    source, tokens = across.sample.get("source"), across.sample.get("tokens")
    if across.deflate:
        found.append(
            f"These bytes are after DEFLATE, measured on {tokens:,} tokens of {source} that the "
            "components have not seen; another text takes others."
        )
    found.append(f"The newest {across.window} tokens of the prompt stay uncompressed.")
    return found


def _latents_across(across: Across) -> list[str]:
    own = any(group.basis is None for group in across.groups)
    whose = "that each sequence finds in its first coded tokens" if own else "of the plan's"
    found = [f"Tokens have a latent for several layers together, on bases {whose}."]
    for side in ("keys", "values"):
        groups = [group for group in across.groups if group.side == side]
        sizes = sorted({len(group.layers) for group in groups})
        ranks = sorted({(group.rank, group.width) for group in groups})
        before = " before RoPE" if side == "keys" else ""
        found.append(
            f"{side.capitalize()}{before} of {' or '.join(map(str, sizes))} layers are a latent of "
            f"rank {', '.join(f'{rank:,} of {width:,}' for rank, width in ranks)}, and rebuilt at "
            "every use."
        )
    most = across.window + across.block - 1
    found.append(f"The newest {across.window} to {most} tokens stay as they are.")
    return found


def least_ranks(plan: Plan) -> dict[str, list[list[int]]]:
    """Return the ranks of the lowest token level, ``{"keys": [layer][group], "values": …}``.

    Without token levels these are the ranks of all tokens.
    """
    return {
        "keys": [[group.ranks[0] for group in layer.keys.groups] for layer in plan.layers],
        "values": [[group.ranks[0] for group in layer.values.groups] for layer in plan.layers],
    }


def plan_report(
    plan: Plan,
    tokens: int,
    *,
    layout: ModelLayout | None = None,
    fine: Plan | None = None,
    knob: str | None = None,
) -> dict[str, Any]:
    """Return everything that is reported about a plan, as JSON values."""
    described = describe(plan, tokens, layout=layout)
    if layout is not None:
        described["weights"]["running"] = running_weights(plan, layout, itemsize=SERVED_BYTES).added
    folded, online = _folded_and_online(plan)
    levels = None
    if len(plan.levels.shares) > 1:
        levels = {
            "shares": list(plan.levels.shares),
            "sink": plan.levels.sink,
            "least_ranks": least_ranks(plan),
        }
    rounding = None
    if fine is not None:
        lost = bytes_at(plan, tokens, itemsize=SERVED_BYTES).total
        lost -= bytes_at(fine, tokens, itemsize=SERVED_BYTES).total
        options = plan.made.get("options", {})
        rounding = {
            "knob": knob,
            "value": plan.made.get(knob) if knob is not None else None,
            "grid": options.get("grid"),
            "minimum": options.get("minimum"),
            "requested": least_ranks(fine),
            "stored": least_ranks(plan),
            "requested_rate": rate(fine, tokens),
            "bytes_lost": lost,
        }
    return {
        **described,
        "fingerprint": plan.fingerprint,
        "levels": levels,
        "folded": folded,
        "online": online,
        "rounding": rounding,
    }


def comparison(plan: Plan, other: Plan, tokens: int) -> dict[str, Any]:
    """Return what another plan has different, as JSON values."""
    described = describe(other, tokens)
    found = compare_plans(plan, other)
    return {
        **{key: described[key] for key in ("method", "rate", "bytes")},
        "differences": [
            {"path": path, "this": this, "other": that} for path, (this, that) in found.items()
        ],
    }


def _folded_and_online(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Count the layers in which each matrix was folded, and each step runs online."""
    folded: dict[str, int] = {}
    online: dict[str, int] = {}

    def count(where: dict[str, int], name: str, holds: bool) -> None:
        if holds:
            where[name] = where.get(name, 0) + 1

    together = frozenset[int]()
    if plan.across is not None and not plan.across.at_rest:
        together = coded_layers(plan.across, "keys")
    for index, layer in enumerate(plan.layers):
        keys, values = layer.keys, layer.values
        count(online, "K and V into latents of several layers", index in together)
        count(online, "K and V rebuilt from them at every use", index in together)
        if _based(keys.groups):
            count(folded, "W_K", keys.fold_down)
            count(folded, "W_Q", keys.fold_up)
            count(online, "K into its latent", not keys.fold_down)
            pre = keys.placement is Placement.PRE_ROPE
            count(online, "K rebuilt from its latent at every use", pre)
            count(online, "Q into the latent", not pre and not keys.fold_up)
        if _based(values.groups):
            count(folded, "W_V", values.fold_down)
            count(folded, "W_O", values.fold_up)
            count(online, "V into its latent", not values.fold_down)
            count(online, "outputs out of the latent", not values.fold_up)
        coded = plan.across is not None and keys.placement is Placement.PRE_ROPE
        count(online, "K rotated at every use", coded)
        if plan.online_bases:
            lossy = not all(group.identity for group in (*keys.groups, *values.groups))
            count(online, "SVD of each sequence, K and V rebuilt at every step", lossy)
    return folded, online


def _based(groups: tuple[HeadGroup, ...]) -> bool:
    return any(group.down is not None for group in groups)
