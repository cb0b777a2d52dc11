"""On a GPU the kernels are what runs, and steps can be captured and models compiled."""

from typing import Any

import pytest
import torch

from kvprof.methods.plan import Placement
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.runtime.compressed import compressed
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_columns import by_column
from tests.runtime.test_kernel_generation import PLANS
from tests.runtime.test_kernel_segments import PLANS as AGING
from tests.runtime.test_kernel_segments import QUANTISED, plan_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ARCHITECTURES = ["Llama", "Qwen3", "Gemma2", "GptOss", "SmolLM3"]
PROMPT, STEPS = 13, 8


def model_of(arch: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return wrap_model(tiny(arch, head_dim=32).to("cuda", dtype))


def generated(
    model: LoadedModel,
    plan: Any,
    kernels: str | None,
    *,
    prompt: int = PROMPT,
    padded: bool = True,
    graphs: bool = True,
    **options: Any,
) -> Any:
    ids, mask = token_ids(3, prompt).cuda(), torch.ones(3, prompt, dtype=torch.long)
    if padded:
        mask[1, :4] = 0
        mask[2, :1] = 0
    torch.manual_seed(3)
    settings = {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
        **options,
    }
    with compressed(model, plan, kernels, graphs=graphs) as session:
        found = model.model.generate(ids, attention_mask=mask.cuda(), **settings)
        assert session.cache is not None
        found.nbytes = session.cache.nbytes
        found.reasons = session.kernel_reasons
        found.graph_reason = session.graph_reason
        found.replays = session.graphs.replays if session.graphs is not None else 0
        found.graph_bytes = session.graph_bytes
    return found


def error(found: Any, wanted: Any) -> float:
    mine, other = torch.stack(found.logits).float(), torch.stack(wanted.logits).float()
    return float((mine - other).norm() / other.norm())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}],
    ids=["greedy", "beams", "static"],
)
def test_float32_says_what_the_torch_path_says(arch: str, options: dict[str, Any]) -> None:
    model = model_of(arch)
    for name, settings in PLANS.items():
        plan = make_plan(model, **settings)
        found = generated(model, plan, "on", **options)
        wanted = generated(model, plan, "off", **options)
        assert found.reasons == [None] * len(plan.layers), name
        assert torch.equal(found.sequences, wanted.sequences), name
        assert error(found, wanted) < 1e-4, name
        assert found.nbytes == wanted.nbytes, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_a_long_prompt_of_equal_widths_may_take_torchs_kernels(
    dtype: torch.dtype, padded: bool
) -> None:
    """Where torch has no kernel for them, in float32, or a row is padded, Triton runs."""
    tall = {"head_dim": 64, "max_position_embeddings": 1024}
    model = wrap_model(tiny("Llama", **tall).to("cuda", dtype))
    exact = wrap_model(tiny("Llama", **tall).to(dtype).to("cuda", torch.float32))
    plan = make_plan(model, placement=Placement.NONE, project_values=False)
    options: dict[str, Any] = {"prompt": 600, "padded": padded}
    wanted = generated(
        exact, make_plan(exact, placement=Placement.NONE, project_values=False), "off", **options
    ).logits[0]
    errors = [
        float((generated(model, plan, kernels, **options).logits[0].float() - wanted).norm())
        / float(wanted.norm())
        for kernels in ("on", "off")
    ]
    assert errors[0] < 1.5 * errors[1] + (5e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_the_torch_path(arch: str, dtype: torch.dtype) -> None:
    """Both against float32; tokens may part, so the prompt's last logits are compared."""
    model = model_of(arch, dtype)
    exact = wrap_model(tiny(arch, head_dim=32).to(dtype).to("cuda", torch.float32))
    plan = make_plan(model, **PLANS["ragged"])
    wanted = generated(exact, make_plan(exact, **PLANS["ragged"]), "off").logits[0]
    errors = [
        (generated(model, plan, kernels).logits[0].float() - wanted).norm() / wanted.norm()
        for kernels in ("on", "off")
    ]
    assert errors[0] < 1.5 * errors[1] + 5e-3


def steps(model: LoadedModel, session: Any, run: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Prefill a static cache with `model`, decode with `run`; return the steps' logits."""
    cache = session.new_cache(PROMPT + STEPS)
    with torch.no_grad():
        model.model(token_ids(2, PROMPT).cuda(), past_key_values=cache)
        found = []
        for step in range(STEPS):
            position = torch.full((2, 1), PROMPT + step, device="cuda")
            found.append(
                run(tokens[:, step : step + 1], position_ids=position, past_key_values=cache).logits
            )
    assert cache.get_seq_length() == PROMPT + STEPS
    return torch.cat(found, 1)


# Not gpt-oss, whose own choice of experts asks the host.
@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "Gemma2", "SmolLM3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_counts_for_itself(arch: str, dtype: torch.dtype) -> None:
    """One capture, many replays, through windows that go round."""
    model = model_of(arch, dtype)
    replayed(model, make_plan(model, **PLANS["ragged"]))


@pytest.mark.parametrize("name", ["levels", "tale"])
@pytest.mark.parametrize("kinds", [AGING, QUANTISED], ids=["plain", "quantised"])
def test_a_captured_step_moves_tokens_on(name: str, kinds: dict[str, Any]) -> None:
    model = model_of("Llama", torch.bfloat16)
    replayed(model, plan_for(model, kinds[name]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_captured_step_gives_columns_their_bits(dtype: torch.dtype) -> None:
    """The token that leaves the window becomes codes inside of the graph."""
    model = model_of("Llama", dtype)
    replayed(model, by_column(model=model))


@pytest.mark.parametrize("padded", [False, True])
def test_generate_replays_steps_over_columns_with_bits_of_their_own(padded: bool) -> None:
    model = model_of("Llama", torch.bfloat16)
    plan, ways = by_column(model=model), {"padded": padded, "max_new_tokens": 40}
    found = generated(model, plan, "on", **ways)
    wanted = generated(model, plan, "on", graphs=False, **ways)
    other = generated(model, plan, "off", **ways)
    assert found.replays > 30, found.graph_reason
    assert error(found, wanted) < 2e-2
    assert found.nbytes == wanted.nbytes == other.nbytes
    first = [one.logits[0].float() for one in (found, other)]
    assert float((first[0] - first[1]).norm() / first[1].norm()) < 5e-2


def replayed(model: LoadedModel, plan: Any) -> None:
    """Compare steps of one captured graph with the same steps launched one by one."""
    tokens = token_ids(2, STEPS, seed=5).cuda()
    with compressed(model, plan, "on") as session, torch.no_grad():
        wanted = steps(model, session, model.model, tokens)

        cache = session.new_cache(PROMPT + STEPS)
        model.model(token_ids(2, PROMPT).cuda(), past_key_values=cache)
        token, position = tokens[:, :1].clone(), torch.full((2, 1), PROMPT, device="cuda")
        found = [model.model(token, position_ids=position, past_key_values=cache).logits]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            output = model.model(token, position_ids=position, past_key_values=cache).logits
        assert cache.get_seq_length() == PROMPT + 1
        for step in range(1, STEPS):
            token.copy_(tokens[:, step : step + 1])
            position.fill_(PROMPT + step)
            graph.replay()
            cache.replayed()
            found.append(output.clone())
        assert cache.get_seq_length() == PROMPT + STEPS
        stored = cache.nbytes
        steps(model, session, model.model, tokens)
        assert session.cache is not None
        assert stored == session.cache.nbytes
    captured = torch.cat(found, 1)
    limit = 1e-5 if wanted.dtype == torch.float32 else 2e-2
    assert (captured - wanted).float().norm() / wanted.float().norm() < limit


@pytest.mark.parametrize("arch", ["Llama", "Gemma2"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_goes_through(arch: str, mode: str) -> None:
    model = model_of(arch)
    tokens = token_ids(2, STEPS, seed=5).cuda()
    torch._dynamo.reset()
    with compressed(model, make_plan(model, **PLANS["ragged"]), "on") as session:
        wanted = steps(model, session, model.model, tokens)
        compiled = torch.compile(model.model, mode=mode)

        def run(*args: Any, **kwargs: Any) -> Any:
            # What a graph of Inductor's returns lasts until its next replay.
            output = compiled(*args, **kwargs)
            output.logits = output.logits.clone()
            return output

        found = steps(model, session, run, tokens)
    assert (found - wanted).norm() / wanted.norm() < 1e-4


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "not padded": {"padded": False},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "longer": {"max_new_tokens": 80},
}


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "Gemma2", "SmolLM3"])
@pytest.mark.parametrize("way", list(WAYS))
def test_generate_replays_its_steps_and_says_the_same(arch: str, way: str) -> None:
    model = model_of(arch)
    for name, settings in PLANS.items():
        plan = make_plan(model, **settings)
        found = generated(model, plan, "on", **WAYS[way])
        wanted = generated(model, plan, "on", graphs=False, **WAYS[way])
        steps = WAYS[way].get("max_new_tokens", STEPS)
        assert found.graph_reason is None, name
        # The prompt gives the first token and the model itself runs one step; so it does again
        # where a window's ring first grows to its size.
        assert steps - 6 <= found.replays <= steps - 2, name
        assert found.graph_bytes > 0
        assert wanted.replays == 0
        assert torch.equal(found.sequences, wanted.sequences), name
        assert error(found, wanted) < 1e-5, name
        assert found.nbytes == wanted.nbytes, name


# A test for each: of all in one, the first that fails would hide those after it.
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=f"{kind} {name}")
        for kind, plans in (("plain", AGING), ("quantised", QUANTISED))
        for name, settings in plans.items()
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_generate_replays_steps_that_move_tokens_on(settings: dict[str, Any], padded: bool) -> None:
    model = model_of("Llama", torch.bfloat16)
    plan = plan_for(model, settings)
    ways: dict[str, Any] = {"padded": padded, "max_new_tokens": 40}
    found = generated(model, plan, "on", **ways)
    wanted = generated(model, plan, "on", graphs=False, **ways)
    assert found.replays > 30, found.graph_reason
    assert error(found, wanted) < 2e-2
    assert found.nbytes == wanted.nbytes


def test_a_model_that_asks_its_states_runs_as_it_is() -> None:
    model = model_of("Llama")
    plan = make_plan(model, **PLANS["ragged"])
    wanted = generated(model, plan, "off")
    asking = model.model.get_submodule(model.layout.layers[1].attention.rpartition(".")[0]).mlp
    own = asking.forward

    def forward(states: torch.Tensor) -> torch.Tensor:
        assert float(states.float().sum()) is not None  # which no graph can hold
        return own(states)

    asking.forward = forward
    found = generated(model, plan, "on")
    assert found.replays == 0
    assert found.graph_reason is not None
    assert "captured" in found.graph_reason
    assert torch.equal(found.sequences, wanted.sequences)


def looped(model: LoadedModel, *, graphs: bool, watched: bool = False) -> tuple[Any, int, int]:
    """Decode step by step into a cache that nobody has told how long it will be."""
    plan = make_plan(model, **PLANS["ragged"])
    tokens = token_ids(2, 150, seed=5).cuda()
    seen = []
    with compressed(model, plan, "on", graphs=graphs) as session, torch.no_grad():
        cache = session.new_cache()
        model.model(input_ids=tokens[:, :50], past_key_values=cache)
        found = []
        for step in range(50, 150):
            if watched and step == 100:
                layer = model.model.get_submodule(model.layout.layers[1].attention)
                layer.register_forward_hook(lambda *_: seen.append(1))
            output = model.model(input_ids=tokens[:, step : step + 1], past_key_values=cache)
            found.append(output.logits)
        replays = session.graphs.replays if session.graphs is not None else 0
        assert cache.get_seq_length() == 150
    return torch.cat(found, 1), replays, len(seen)


def test_a_growing_cache_is_captured_anew() -> None:
    model = model_of("Llama")
    found, replays, _ = looped(model, graphs=True)
    wanted, none, _ = looped(model, graphs=False)
    assert none == 0
    assert 90 <= replays <= 98
    assert error_of(found, wanted) < 1e-5


def test_steps_that_somebody_watches_are_not_replayed() -> None:
    model = model_of("Llama")
    _, replays, seen = looped(model, graphs=True, watched=True)
    assert seen == 50
    assert 40 <= replays <= 49


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).float().norm() / wanted.float().norm())


def test_a_mask_that_hides_more_than_padding_is_seen() -> None:
    """In the middle of replayed steps, without a word to the cache."""
    model = model_of("Llama")
    plan = make_plan(model, **PLANS["ragged"])
    tokens = token_ids(1, 20, seed=5).cuda()

    def run(graphs: bool) -> torch.Tensor:
        with compressed(model, plan, "auto", graphs=graphs) as session, torch.no_grad():
            session.route.least_tokens = 0
            cache = session.new_cache()
            found = []
            for start, stop in [(0, 8), *((i, i + 1) for i in range(8, 20))]:
                mask = torch.ones(1, stop, dtype=torch.long, device="cuda")
                if stop > 14:
                    mask[0, 3] = 0
                output = model.model(
                    input_ids=tokens[:, start:stop], attention_mask=mask, past_key_values=cache
                )
                found.append(output.logits[:, -1])
        return torch.cat(found)

    assert error_of(run(True), run(False)) < 1e-5


def test_what_a_graph_cannot_hold_is_refused() -> None:
    from kvprof.errors import UsageError

    model = model_of("Llama")
    with compressed(model, make_plan(model, **PLANS["ragged"]), "on") as session, torch.no_grad():
        token, position = token_ids(1, 1).cuda(), torch.full((1, 1), 5, device="cuda")
        cache = session.new_cache()
        model.model(token_ids(1, 64).cuda(), past_key_values=cache)  # a whole tile: no room left
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with pytest.raises(UsageError, match="cannot grow"), torch.cuda.graph(graph):
            model.model(token, position_ids=position, past_key_values=cache)
