"""``kvprof warm``: the kernels of a plan, compiled before anything waits for them."""

import time
from typing import Annotated

import typer

from kvprof import console
from kvprof.commands.options import (
    AllocationOption,
    CalibrateOption,
    CalibrateTokensOption,
    ContextOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
    GridOption,
    MethodOption,
    MethodOptionsOption,
    MinimumOption,
    ModelArgument,
    PlanFileOption,
    RateOption,
    RemovalOption,
    RevisionOption,
    TrustOption,
    checked_choice,
    one_method,
)
from kvprof.errors import LackingError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.sizes import parse_count


def warm(
    model: ModelArgument = None,
    batch: Annotated[str, typer.Option("--batch", help="Sequences at once.")] = "1",
    method: MethodOption = None,
    rate: RateOption = None,
    removal: RemovalOption = None,
    plan_file: PlanFileOption = None,
    calibrate: CalibrateOption = None,
    calibrate_tokens: CalibrateTokensOption = None,
    allocation: AllocationOption = None,
    grid: GridOption = None,
    minimum: MinimumOption = None,
    option: MethodOptionsOption = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Compile the kernels that a plan runs on a GPU, on all cores at once.

    Every process that runs the plan afterwards finds them on disk; without this the first prompt
    waits for them.

    Examples
    --------
    kvprof warm reference --plan kq.plan
    kvprof warm reference --method fdc --rate 0.5 --batch 8
    """
    rows = parse_count(batch, what="--batch")
    choice = checked_choice(
        method=one_method(method),
        plan_file=plan_file,
        rate=rate,
        removal=removal,
        calibrate=calibrate,
        calibrate_tokens=calibrate_tokens,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        option=option,
    )

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.steps import load_to_compress, make_plan, resolve_context
        from kvprof.runtime.compressed import compressed

    loaded = load_to_compress(
        model,
        choice,
        device=device,
        dtype=dtype,
        revision=revision,
        gguf=gguf,
        trust_remote_code=trust_remote_code,
    )
    if loaded.device.type != "cuda":
        raise LackingError(
            f"kernels are compiled for an NVIDIA GPU, and {loaded.spec} is on {loaded.device}: "
            "torch's own kernels run there, and nothing has to be compiled"
        )
    with graceful_interrupt() as stop:
        plan = make_plan(
            loaded, **choice, context=resolve_context(context, loaded), seq_len=None, stop=stop
        )
        with compressed(loaded, plan) as session:
            if not session.route.used:
                raise UsageError(
                    f"{plan.method} runs on no kernel here, so there is nothing to compile: "
                    f"{session.kernel_reasons[0]}"
                )
            begun = time.perf_counter()
            count = session.compile_ahead(rows, console.track)
            seconds = time.perf_counter() - begun
    console.note(
        f"{count} kernels of {plan.method} for {rows} sequence{'s' * (rows != 1)} are there, "
        f"compiled or found on disk in {seconds:.1f} s"
    )
