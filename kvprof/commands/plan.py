"""``kvprof plan``: what a method would store, fold and run, and what moving takes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvprof import console
from kvprof.commands.options import (
    CalibrationOptions,
    ContextOption,
    LoadOptions,
    MethodOption,
    MethodOptions,
    MethodOptionsOption,
    RateOption,
    RemovalOption,
    joined,
    one_method,
    read_counts,
)
from kvprof.commands.output import Outcome, OutputOptions, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, excludes, needs
from kvprof.errors import KvprofError, UsageError
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.links import parse_links
from kvprof.methods.named import check_names, method_entries
from kvprof.sizes import DTYPE_BYTES, check_rate, long_name

if TYPE_CHECKING:
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel
    from kvprof.moments.uncalibrated import Laid


def _one_plan(request: "PlanRequest") -> str | None:
    if len(request.plan_files or ()) < 2 or request.transfer:
        return None
    return "--plan names several plans; --transfer takes them all, --compare a second one"


def _loads_nothing(request: "PlanRequest") -> str | None:
    alone = "--shape" if request.shape else ""
    if request.file is not None and request.model is None and not request.transfer:
        alone = "--plan alone"
    given = request.given("device", "revision", "gguf", "trust_remote_code")
    wrong = alone and given
    return f"{given} cannot be combined with {alone}: no model is loaded" if wrong else None


_OF_ONE = ("removal", "describe", "compare", "save", "servable")


class PlanRequest(LoadOptions, CalibrationOptions, OutputOptions):
    """Show what a method stores, folds and runs, or what moves (--transfer).

    Examples
    --------
    kvprof plan --method kq --rate 0.3 --describe
    kvprof plan --method fdc --rate 0.5 --save fdc.plan
    kvprof plan --transfer --shape Llama-3.1-8B --rate 50% --link pcie5x16 --link 100Gbit/s
    """

    method: MethodOption = None
    rate: RateOption = None
    removal: RemovalOption = None
    option: MethodOptionsOption = None
    context: ContextOption = None
    transfer: Annotated[
        bool,
        typer.Option("--transfer", help="Time to move a cache over a link, by method."),
        Mark.FREE,
    ] = False
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SHAPE|PATH",
            help="With --transfer: a shape as of bench --model, instead of MODEL.",
        ),
        Mark.READS,
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="With --transfer: pcie5x16, nvlink4, 100Gbit/s, or a measured one, rdma=46.2GB/s; "
            "repeatable.",
        ),
        Mark.FREE,
    ] = None
    seq: Annotated[
        list[int] | None,
        typer.Option("--seq", metavar="LIST", help="With --transfer: context lengths, 4k,32k."),
        Parsed(read_counts),
        Mark.FREE,
        Input(),
    ] = None
    plan_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan",
            help="A saved plan, instead of --method; repeatable with --transfer.",
        ),
        Mark.READS,
    ] = None
    describe: Annotated[
        bool,
        typer.Option("--describe", help="Print every layer's ranks too."),
        Mark.FREE,
        Input(),
    ] = False
    compare: Annotated[
        Path | None,
        typer.Option("--compare", help="Show differences from another saved plan."),
        Mark.READS,
    ] = None
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Save the plan to this file (safetensors)."),
        Mark.WRITES,
    ] = None
    servable: Annotated[
        bool,
        typer.Option("--servable", help="Refuse at once what serve cannot serve."),
        Mark.FREE,
    ] = False

    rules: ClassVar[tuple[Rule, ...]] = (
        *(needs(of_transfer, "transfer") for of_transfer in ("shape", "link", "seq")),
        excludes("transfer", *_OF_ONE),
        excludes("save", "plan_files"),
        excludes("shape", "model", "plan_files"),
        _one_plan,
        _loads_nothing,
    )

    @property
    def file(self) -> Path | None:
        """The first saved plan."""
        return self.plan_files[0] if self.plan_files else None

    @property
    def how(self) -> dict[str, Any]:
        """What `kvprof.commands.loading.load_for_command` is told beside the model."""
        return {**super().how, "compressed": True}

    def choice(self) -> dict[str, Any]:
        """Return the plan that is asked for of one method, as `steps.make_plan` takes it."""
        given = {
            name: getattr(self, name) for name in MethodOptions.model_fields if hasattr(self, name)
        }
        return MethodOptions(**given, plan_file=self.file).choice(one_method(self.method))


@measuring(PlanRequest)
def plan(request: PlanRequest) -> Outcome:
    """Plan what a request asks for."""
    if not request.transfer:
        return _one(request, request.choice())
    check_rate(request.rate)
    if (named := joined(request.method)) is not None:
        check_names(name for _, name, _ in method_entries(named))
    links = parse_links(request.link or ())
    with loading():
        from kvprof.commands.plan_transfer import plan_transfer
    return plan_transfer(request, named, links)


def _one(request: PlanRequest, choice: dict[str, Any]) -> Outcome:
    """Make or read a plan, save it, and tell what it stores."""
    with loading():
        from kvprof.commands.loading import model_inputs
        from kvprof.commands.planning import (
            check_plan_file,
            load_to_compress,
            make_plan,
            resolve_context,
        )
        from kvprof.methods.plan_files import load_plan, save_plan
        from kvprof.methods.plan_report import comparison, plan_report
        from kvprof.runtime.backends.support import kernel_facts
        from kvprof.serving.refusals import check_method, check_servable

    file, lost = request.file, list[str]()
    loaded, fine, knob = None, None, None
    if file is not None and request.model is None:
        made = load_plan(file)
        described = {
            "model": made.made.get("model"),
            "fingerprint": made.fingerprint,
            "dtype": _dtype_of(made, request.dtype, file),
        }
        context = resolve_context(request.context, None, made)
        of_model: dict[str, Any] = {"fingerprint": made.fingerprint}
    else:

        def laid(one: "Laid") -> None:
            if request.servable and file is None:
                check_method(one, choice["method"], **choice["options"])

        loaded, context = load_to_compress(
            request.model,
            choice,
            request.context,
            before=lambda opened: check_plan_file(opened, request.compare),
            laid=laid,
            **request.how,
        )
        described = model_inputs(loaded)
        of_model = {"fingerprint": loaded.fingerprint, "layout": loaded.layout}
    other = load_plan(request.compare, **of_model) if request.compare is not None else None
    if loaded is not None:
        with graceful_interrupt() as stop:
            if file is None:
                made, fine, knob = _rounded(loaded, choice, request.calibration, context, stop)
            else:
                made = make_plan(loaded, **choice, context=context, stop=stop)
    if request.servable:
        check_servable(made)
    if request.save is not None:
        try:
            save_plan(made, request.save, force=request.force)
        except KvprofError as problem:
            lost.append(str(problem))
    layout = loaded.layout if loaded is not None else None
    data = plan_report(made, context, layout=layout, fine=fine, knob=knob)
    if loaded is not None:
        data["kernel"] = kernel_facts(made, loaded)
    compared = None
    if request.compare is not None and other is not None:
        compared = {"file": request.compare.name, **comparison(made, other, context)}
    asked = choice if file is None else {"plan_file": file}
    saved = None if lost else request.save
    return Outcome(
        inputs={**described, **request.inputs(), **asked, "context": context, "saved": saved},
        data={"plan": data, "comparison": compared, "transfer": None},
        warnings=[*made.made.get("notes", ()), *_unseen(made, context)],
        lost=lost,
    )


def _unseen(made: "Plan", context: int) -> list[str]:
    """Return a warning where keys after RoPE are at positions that calibration did not see."""
    seen = (made.made.get("calibration") or {}).get("seq_len", context)
    # Up to twice what was seen needles are found; of centred plans none was seen to lose them.
    if 2 * seen >= context or all(x.centre or x.keys.placement != "post_rope" for x in made.layers):
        return []
    return [
        f"calibrated on sequences of {seen:,} tokens: needles may be lost at {context:,}; "
        "calibrate on longer ones"
    ]


def _dtype_of(made: "Plan", dtype: str, file: Path) -> str:
    """Return in which dtype a plan without its model has its bytes counted."""
    name = long_name(str(made.made.get("dtype") if dtype == "auto" else dtype))
    if name is None:
        known = ", ".join(DTYPE_BYTES)
        raise UsageError(f"{file.name}: --dtype {dtype} counts no cache; give {known}")
    return name


# --- A plan beside what was requested before its ranks were rounded up to the grid.

# Fisher and budget hand out steps of the grid; the others ask for a rank and round it up.
_ROUNDED_UP = ("removal", "uniform", "tail")


def _rounded(
    loaded: "LoadedModel",
    choice: dict[str, Any],
    calibration: dict[str, str | None],
    context: int,
    stop: Stop,
) -> "tuple[Plan, Plan | None, str | None]":
    """Make a plan; also the one without a grid, from the same calibration, and its knob's name."""
    from kvprof.commands.planning import (
        calibration_interrupts,
        calibration_options,
        method_calibrator,
        plan_of,
    )
    from kvprof.evaluation.centre_pairs import ON_CPU, ON_GPU, fewest_pairs

    method, options = choice["method"], choice["options"]
    amount = choice["rate"], choice["removal"], context
    calibrator = method_calibrator(loaded, calibration_options(**calibration), stop)
    with calibration_interrupts():
        family = calibrator.family(method, **options)
        with console.status(f"planning {method}"):
            made = plan_of(loaded, family, *amount)
        if made.made.get("centre") is True:

            def again(pairs: int) -> "Plan":
                narrow = calibrator.family(method, **{**options, "centre": pairs})
                return plan_of(loaded, narrow, *amount)

            try:
                text = calibrator.text(*(ON_CPU if loaded.device.type == "cpu" else ON_GPU))
            except UsageError as lacking:  # no tokenizer, and random tokens to calibrate on
                made.made["notes"] = [*made.made.get("notes", ()), f"all pairs: {lacking}"]
            else:
                made = fewest_pairs(
                    loaded, made, again, text, progress=console.track, should_stop=stop
                )
                options = {**options, "centre": made.made["centre"]}
        with console.status(f"planning {method}"):
            fine = _unrounded_plan(calibrator, family, made, options)
    return made, fine, family.knob if fine is not None else None


def _unrounded_plan(
    calibrator: Any, family: Any, made: "Plan", options: dict[str, Any]
) -> "Plan | None":
    """Return the plan with the ranks that its knob asks for, or None where it asks for none."""
    own, value = made.made.get("options", {}), made.made.get(family.knob)
    if own.get("allocation") not in _ROUNDED_UP or value is None:
        return None
    if own["grid"] == 1 and own["minimum"] == 1 and not own.get("kinds"):
        return made
    free = {"grid": 1, "minimum": 1, **({"kinds": 0} if "kinds" in own else {})}
    fine = calibrator.family(family.method, **{**options, **free})
    # Only the ranks: what a combination evicts was shared out with the rounded ones.
    return replace(made, layers=fine.build(value).layers)
