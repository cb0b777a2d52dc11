"""Plans on disk: safetensors with metadata, refused when damaged or of another model."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from torch import Tensor

from kvprof.analysis.centring import Centre
from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.methods.across import Across, LayerGroup
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.soundness import check_fits, check_kinds
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.models.layout import ModelLayout
from kvprof.records.files import parse_json
from kvprof.records.result import to_plain
from kvprof.records.schema import refuse_first
from kvprof.tensor_files import FORMER_NOTE, UNKNOWN, load_tensors, other_model, save_tensors

__all__ = ["FORMAT", "check_made", "load_plan", "save_plan", "structure"]

FORMAT = "kvprof-plan/4"  # since 4, a model is known by its files
_FORMER = ("kvprof-plan/1", "kvprof-plan/2", "kvprof-plan/3")
_LONGEST_MESSAGE = 300


def _head_groups(
    validator: Any, _wanted: bool, groups: Any, _schema: dict[str, Any]
) -> Iterator[ValidationError]:
    """Look at head groups, of which there are tens of thousands: jsonschema's way takes seconds."""
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        if _is_group(group):
            continue
        found = list(validator.descend(group, _GROUP, path=number))
        yield from found
        if found:  # one of them tells enough
            return


def _is_group(group: Any) -> bool:
    """Whether a group is plainly one; what is not, the schema `_GROUP` decides."""
    if type(group) is not dict or type(group.get("based")) is not bool:
        return False
    ranks, first = group.get("ranks"), group.get("first")
    if type(ranks) is not list or not 1 <= len(ranks) <= _LEVELS or type(first) is not int:
        return False
    if type(group.get("scale", 1.0)) is not float or type(group.get("quantised", True)) is not bool:
        return False
    runs = group.get("column_bits", [])
    if type(runs) is not list or not all(type(run) is list and len(run) == 2 for run in runs):
        return False
    counts = (first + 1, group.get("heads"), group.get("head_dim"), *ranks, *(n for n, _ in runs))
    if not all(type(bits) is int and 0 <= bits <= _MOST_BITS for _, bits in runs):
        return False
    return all(type(one) is int and 1 <= one < 2**31 for one in counts)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _with(schema: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Describe keys too that only some have."""
    return {**schema, "properties": {**schema["properties"], **optional}}


def _integer(least: int, most: int = 2**31 - 1) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, schema]}


def _list(entry: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": entry, "minItems": least, "maxItems": most}


_YES_OR_NO, _WORDS, _NUMBER = {"type": "boolean"}, {"type": "string"}, {"type": "number"}
_LEVELS = 64  # more than any plan has
_MOST_BITS = 16  # of a code
_FOLDS = {"fold_down": _YES_OR_NO, "fold_up": _YES_OR_NO}
_RUN = {
    "type": "array",
    "prefixItems": [_integer(1), _integer(0, _MOST_BITS)],
    "minItems": 2,
    "maxItems": 2,
}
_GROUP = _with(
    _object(
        first=_integer(0),
        heads=_integer(1),
        head_dim=_integer(1),
        ranks=_list(_integer(1), 1, _LEVELS),
        based=_YES_OR_NO,
    ),
    scale=_NUMBER,
    column_bits=_list(_RUN, 1, 2**16),
    quantised=_YES_OR_NO,
)
_GROUPS = {"type": "array", "minItems": 1, "maxItems": 2**16, "headGroups": True}
_SIDE = _with(
    _object(
        bits=_list(_integer(1, _MOST_BITS), 0, _LEVELS), axis=_WORDS, group=_or_null(_integer(1))
    ),
    clip=_NUMBER,
    kind=_WORDS,
)
# What calibration tells of its data. Methods may add keys of their own to all of `made`.
_DATA = {
    "type": "object",
    "properties": {
        "source": _WORDS,
        "digest": _WORDS,
        "model": _WORDS,
        "sketch": {"type": "string", "pattern": "^([0-9a-f]{8})*$"},
        "files": {"type": "array", "items": _WORDS},
        "tokens": _integer(0, 2**62),
        "seq_len": _integer(0, 2**62),
        "seed": {"type": ["integer", "null"]},
    },
}
_LAYER_GROUP = _object(
    side=_WORDS,
    layers=_list(_integer(0), 1, 10_000),
    width=_integer(1),
    rank=_integer(0),
    based=_YES_OR_NO,
    blocks=_list(_RUN, 0, 2**16),
    measured=_list(_integer(1, 2**62), 0, 2),
)
_ACROSS = _object(
    groups=_list(_LAYER_GROUP, 1, 20_000),
    window=_integer(0),
    block=_integer(0),
    deflate=_YES_OR_NO,
    sample=_with(_object(), source=_or_null(_WORDS), tokens=_integer(1)),
)
_SCHEMA = _with(
    _object(
        method=_WORDS,
        fingerprint=_WORDS,
        layers=_list(
            _with(
                _object(
                    keys=_with(
                        _object(placement=_WORDS, groups=_GROUPS, **_FOLDS),
                        per_query_head=_YES_OR_NO,
                    ),
                    values=_object(groups=_GROUPS, **_FOLDS),
                    sliding_window=_or_null(_integer(1)),
                ),
                shared=_YES_OR_NO,
                left_out=_YES_OR_NO,
                centred=_YES_OR_NO,
                key_mean=_YES_OR_NO,
            ),
            1,
            10_000,
        ),
        levels=_object(sink=_integer(0), shares=_list(_NUMBER, 1, _LEVELS), batch=_integer(1)),
        quantiser=_or_null(
            _object(
                kind=_WORDS,
                keys=_or_null(_SIDE),
                values=_or_null(_SIDE),
                window=_integer(0),
                block=_integer(1),
                outliers=_NUMBER,
                scale_dtype=_WORDS,
            )
        ),
        eviction=_or_null(
            _with(
                _object(
                    kind=_WORDS,
                    keep=_NUMBER,
                    sink=_integer(0),
                    recent_share=_NUMBER,
                    order=_WORDS,
                    tau=_list(_NUMBER, 2, 2),
                    seed=_integer(0, 2**63 - 1),
                ),
                window=_integer(1),
                pool=_integer(1),
            )
        ),
        lazy=_YES_OR_NO,
        online_bases=_YES_OR_NO,
        made={
            "type": "object",
            "properties": {
                "model": _WORDS,
                "architecture": _WORDS,
                "dtype": _WORDS,
                "rate_asked": _NUMBER,
                "context": _integer(1, 2**62),
                "options": {"type": "object", "properties": {"kinds": _integer(0)}},
                "calibration": _or_null(_DATA),
                "fisher": _DATA,
                "sensitivity": _DATA,
                "cells": {
                    "type": "object",
                    "properties": {
                        "measured_on": {"type": "object", "additionalProperties": _DATA}
                    },
                },
            },
        },
    ),
    across=_ACROSS,
    prefill_uncompressed=_YES_OR_NO,
)
# By the standard 4.0 is an integer too; no head has that many dimensions.
_whole = Draft202012Validator.TYPE_CHECKER.redefine(
    "integer", lambda _checker, value: type(value) is int
)
_Validator = extend(Draft202012Validator, {"headGroups": _head_groups}, type_checker=_whole)
_VALIDATOR = _Validator(_SCHEMA)
_MADE_VALIDATOR = _Validator(_SCHEMA["properties"]["made"])


def save_plan(plan: Plan, path: Path, *, force: bool = False) -> None:
    """Write a plan so that `load_plan` finds it unchanged, or not at all.

    Raises
    ------
    UsageError
        When the file exists and `force` is not given.
    """
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(plan.layers):
        if layer.centre is not None:
            tensors[f"layers.{index}.centre.keys"] = layer.centre.keys
            tensors[f"layers.{index}.centre.values"] = layer.centre.values
        if layer.key_mean is not None:
            tensors[f"layers.{index}.key_mean"] = layer.key_mean
        for name, side in (("keys", layer.keys), ("values", layer.values)):
            for number, group in enumerate(side.groups):
                if group.down is not None and group.up is not None:
                    tensors[f"layers.{index}.{name}.{number}.down"] = group.down
                    tensors[f"layers.{index}.{name}.{number}.up"] = group.up
    for number, coded in enumerate(plan.across.groups if plan.across is not None else ()):
        for matrix in ("basis", "mean"):
            # Of a group that keeps its mean alone the basis is nothing, as its rank says.
            if (one := getattr(coded, matrix)) is not None and one.numel():
                tensors[f"across.{number}.{matrix}"] = one
    save_tensors(
        path, tensors, {"plan": json.dumps(structure(plan))}, format_name=FORMAT, force=force
    )


def load_plan(
    path: Path, *, fingerprint: str | None = None, layout: ModelLayout | None = None
) -> Plan:
    """Read a saved plan.

    Parameters
    ----------
    path : Path
        Written by `save_plan`.
    fingerprint : str or None
        Of the model that it must be for; None accepts any.
    layout : ModelLayout, optional
        Of that model; the plan's layers and heads must be its own.

    Raises
    ------
    FailedError
        When the file is damaged, from another version, or no plan.
    UsageError
        When it is for another model, or does not exist.
    """
    tensors, metadata = load_tensors(
        path, format_name=FORMAT, what="plans", made_by="kvprof plan --save", former=_FORMER
    )
    try:
        stored = parse_json(metadata["plan"])
        refuse_first(_VALIDATOR.iter_errors(stored), "the plan")
        if metadata["format"] in _FORMER:
            stored["fingerprint"] = UNKNOWN
            stored["made"]["notes"] = [*stored["made"].get("notes", []), FORMER_NOTE]
        plan = _plan(stored, tensors)
        check_kinds(plan)
    except (KeyError, ValueError, TypeError, KvprofError) as cause:
        said = str(cause)[:_LONGEST_MESSAGE]  # a forged file may name thousands of letters
        raise FailedError(f"{path.name}: damaged plan: {said}") from None
    if fingerprint is not None and other_model(plan.fingerprint, fingerprint):
        raise UsageError(
            f"{path.name}: this plan is for {plan.made.get('model', 'another model')} "
            f"({plan.fingerprint[:12]}), not for the model given ({fingerprint[:12]})"
        )
    if layout is not None:
        try:
            check_fits(plan, layout, plan.fingerprint)
        except UsageError as problem:
            raise UsageError(f"{path.name}: {problem}") from None
    return plan


def check_made(made: Any) -> None:
    """Make sure that what a plan says of its making can be written down and read again.

    Raises
    ------
    TypeError, ValueError
        Naming the place.
    """
    refuse_first(_MADE_VALIDATOR.iter_errors(to_plain(made, "made")), "made")


def structure(plan: Plan) -> dict[str, Any]:
    """Return a plan without its tensors, as JSON values; also what two plans are compared by."""
    layers = []
    for layer in plan.layers:
        layers.append(
            {
                "keys": {
                    "placement": layer.keys.placement.value,
                    **_side(layer.keys),
                    # Only where it is so: digests and files of all other plans stay what they were.
                    **({"per_query_head": True} if layer.keys.per_query_head else {}),
                },
                "values": _side(layer.values),
                "sliding_window": layer.sliding_window,
                **({"shared": True} if layer.shared else {}),
                **({"left_out": True} if layer.left_out else {}),
                **({"centred": True} if layer.centre is not None else {}),
                **({"key_mean": True} if layer.key_mean is not None else {}),
            }
        )
    return {
        "method": plan.method,
        "fingerprint": plan.fingerprint,
        "layers": layers,
        "levels": asdict(plan.levels),
        "quantiser": _stored_quantiser(plan.quantiser) if plan.quantiser else None,
        "eviction": _stored_eviction(plan.eviction) if plan.eviction else None,
        "lazy": plan.lazy,
        "online_bases": plan.online_bases,
        "made": plan.made,
        # As above.
        **({"across": _stored_across(plan.across)} if plan.across is not None else {}),
        **({"prefill_uncompressed": True} if plan.prefill_uncompressed else {}),
    }


def _stored_across(across: Across) -> dict[str, Any]:
    groups = [
        {
            "side": group.side,
            "layers": list(group.layers),
            "width": group.width,
            "rank": group.rank,
            "based": group.basis is not None,
            "blocks": [*map(list, group.blocks)],
            "measured": list(group.measured),
        }
        for group in across.groups
    ]
    return {
        "groups": groups,
        "window": across.window,
        "block": across.block,
        "deflate": across.deflate,
        "sample": across.sample,
    }


def _stored_quantiser(quantiser: Quantiser) -> dict[str, Any]:
    found = asdict(quantiser)
    for side in (found["keys"], found["values"]):
        for name in ("clip", "kind") if side is not None else ():
            if side[name] is None:
                del side[name]  # digests and files of all other plans stay what they were
    return found


def _stored_eviction(eviction: Eviction) -> dict[str, Any]:
    found = asdict(eviction)
    if eviction.kind != "snapkv":
        del found["window"], found["pool"]  # as above
    return found


def _side(side: KeyPlan | ValuePlan) -> dict[str, Any]:
    return {
        "groups": [
            {
                "first": group.first,
                "heads": group.heads,
                "head_dim": group.head_dim,
                "ranks": list(group.ranks),
                "based": group.down is not None,
                # Only where there are: digests and files of all other plans stay what they were.
                **({"scale": group.scale} if group.scale != 1 else {}),
                **({"column_bits": [*map(list, group.column_bits)]} if group.column_bits else {}),
                **({} if group.quantised else {"quantised": False}),
            }
            for group in side.groups
        ],
        "fold_down": side.fold_down,
        "fold_up": side.fold_up,
    }


def _plan(stored: dict[str, Any], tensors: dict[str, Tensor]) -> Plan:
    layers = []
    for index, layer in enumerate(stored["layers"]):
        keys, values = layer["keys"], layer["values"]
        layers.append(
            LayerPlan(
                KeyPlan(
                    Placement(keys["placement"]),
                    _groups(keys, tensors, f"layers.{index}.keys"),
                    keys["fold_down"],
                    keys["fold_up"],
                    keys.get("per_query_head", False),
                ),
                ValuePlan(
                    _groups(values, tensors, f"layers.{index}.values"),
                    values["fold_down"],
                    values["fold_up"],
                ),
                layer["sliding_window"],
                layer.get("shared", False),
                layer.get("left_out", False),
                Centre(*(tensors[f"layers.{index}.centre.{x}"].float() for x in ("keys", "values")))
                if layer.get("centred", False)
                else None,
                tensors[f"layers.{index}.key_mean"].float() if layer.get("key_mean") else None,
            )
        )
    levels = stored["levels"]
    eviction = stored["eviction"]
    return Plan(
        method=stored["method"],
        fingerprint=stored["fingerprint"],
        layers=tuple(layers),
        levels=Levels(**{**levels, "shares": tuple(levels["shares"])}),
        quantiser=_quantiser(stored["quantiser"]),
        eviction=Eviction(**{**eviction, "tau": tuple(eviction["tau"])}) if eviction else None,
        lazy=stored["lazy"],
        online_bases=stored["online_bases"],
        made=stored["made"],
        across=_across(stored["across"], tensors) if "across" in stored else None,
        prefill_uncompressed=stored.get("prefill_uncompressed", False),
    )


def _across(stored: dict[str, Any], tensors: dict[str, Tensor]) -> Across:
    at_rest = not stored["block"]

    def matrix(number: int, name: str) -> Tensor:
        return tensors[f"across.{number}.{name}"].to(torch.float32)

    def basis(number: int, one: dict[str, Any]) -> Tensor | None:
        if not one["based"]:
            return None
        return matrix(number, "basis") if one["rank"] else torch.zeros(one["width"], 0)

    groups = tuple(
        LayerGroup(
            one["side"],
            tuple(one["layers"]),
            one["width"],
            one["rank"],
            basis(number, one),
            matrix(number, "mean") if at_rest else None,
            tuple((columns, bits) for columns, bits in one["blocks"]),
            tuple(one["measured"]),
        )
        for number, one in enumerate(stored["groups"])
    )
    sample = stored["sample"]
    if stored["deflate"] and "tokens" not in sample:
        raise ValueError("the number of tokens on which bytes were measured is missing")
    return Across(groups, stored["window"], stored["block"], stored["deflate"], sample)


def _groups(side: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> tuple[HeadGroup, ...]:
    groups = []
    for number, group in enumerate(side["groups"]):
        down = up = None
        if group["based"]:
            down = tensors[f"{prefix}.{number}.down"].to(torch.float32)
            up = tensors[f"{prefix}.{number}.up"].to(torch.float32)
        groups.append(
            HeadGroup(
                group["first"],
                group["heads"],
                group["head_dim"],
                tuple(group["ranks"]),
                down,
                up,
                float(group.get("scale", 1.0)),
                tuple((columns, bits) for columns, bits in group.get("column_bits", ())),
                group.get("quantised", True),
            )
        )
    return tuple(groups)


def _quantiser(stored: dict[str, Any] | None) -> Quantiser | None:
    if stored is None:
        return None

    def side(name: str) -> SideQuantiser | None:
        one = stored[name]
        if not one:
            return None
        return SideQuantiser(**{**one, "bits": tuple(one["bits"])})

    return Quantiser(**{**stored, "keys": side("keys"), "values": side("values")})
