from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvprof.analysis.moments import Moments
from kvprof.errors import Interrupted, UsageError
from kvprof.methods.family import CalibrationNeeds, plan_for_rate
from kvprof.models.load import LoadedModel, load_model, wrap_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator, MomentStore
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.moments.files import save_moments
from kvprof.sources.grammar import parse_source
from tests.models.folder import save_tiny
from tests.models.tiny import VOCABULARY, tiny


@dataclass
class Passes:
    """Remembers every stage, and how far it got."""

    titles: list[str] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    @contextmanager
    def __call__(self, description: str, total: int, /) -> Iterator["Passes"]:
        self.titles.append(description)
        self.totals.append(total)
        self.done.append(0)
        yield self

    def advance(self, amount: int = 1) -> None:
        self.done[-1] += amount


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny(tmp_path_factory.mktemp("shallow"), num_hidden_layers=2)
    return load_model(str(folder), device="cpu")


@pytest.fixture
def passes() -> Passes:
    return Passes()


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.npy"
    generator = np.random.default_rng(3)
    np.save(path, generator.integers(3, VOCABULARY, (10, 64)))
    return path


def calibrator(loaded: LoadedModel, passes: Passes, source: Any = None, **more: Any) -> Calibrator:
    parsed = parse_source(str(source)) if source is not None else None
    options = CalibrationOptions(parsed, **{"seq_len": 64, **more})
    return Calibrator(loaded, options, progress=passes)


def kept(inputs: Any) -> set[str]:
    return set(inputs.moments.layers[0].rest)


def test_a_source_is_run_once_and_no_wider_than_needed(loaded: LoadedModel, passes: Passes) -> None:
    given = calibrator(loaded, passes, "random:512")
    assert kept(given.inputs("kq")) == {"q", "k", "v"}
    assert given.inputs("fdc").moments is given.inputs("kq-4bit").moments
    assert passes.totals == passes.done == [512]
    # Palu wants more of it; what it has is enough for everybody after it.
    wide = given.inputs("palu", heads=2)
    assert kept(wide) == {"q", "k", "v", "q_pre", "k_pre", "v_joint", "k_pre_joint"}
    assert given.inputs("tale", heads=2).moments is wide.moments
    assert given.inputs("palu", heads=0).moments is wide.moments
    assert passes.totals == [512, 512]


def test_what_is_announced_is_collected_in_one_pass(loaded: LoadedModel, passes: Passes) -> None:
    given = calibrator(loaded, passes, "random:512")
    given.expect("kivi")
    given.expect("fp8")
    given.expect("tale", heads=2)
    given.expect("palu", heads=1)
    given.expect("oscar")
    first = given.inputs("kq")
    assert kept(first) == {"q", "k", "v", "q_pre", "k_pre", "v_joint", "k_pre_joint", "o"}
    assert given.inputs("oscar").moments is first.moments
    assert given.inputs("palu", heads=2).moments is first.moments
    assert given.inputs("fp8").moments is first.moments
    assert len(passes.totals) == 1


def test_fp8_shares_the_data_of_whatever_is_calibrated_beside_it(
    loaded: LoadedModel, passes: Passes
) -> None:
    """Alone it takes few tokens of its own; beside another method no pass more."""
    alone = calibrator(loaded, passes)
    for name in ("fp8", "kivi"):
        alone.expect(name)
    made = alone.family("fp8").build(8.0).made
    assert (made["calibration"]["source"], made["calibration"]["tokens"]) == ("calibration", 1024)
    assert "notes" not in made
    assert passes.totals == [1024]
    beside = calibrator(loaded, passes)
    for name in ("fp8", "kivi", "tale", "kq"):
        beside.expect(name)
    assert beside.inputs("fp8").moments is beside.inputs("tale", heads=1).moments
    assert beside.inputs("fp8").moments.info["source"] == "calibration"
    # One pass of 8k tokens for all three.
    assert len(passes.totals) == 2
    # The user's own data are everybody's, as many tokens of them as the other method takes.
    given = calibrator(loaded, passes, "random")
    given.expect("fp8")
    given.expect("kq")
    assert given.inputs("fp8").moments.tokens == 8192
    assert given.inputs("kq").moments is given.inputs("fp8").moments
    # What another method cannot have is no reason to go without.
    odd = calibrator(wrap_model(tiny("Llama", num_key_value_heads=4)), passes, "random:256")
    odd.expect("fp8")
    odd.expect("palu", heads=3)
    assert odd.inputs("fp8").moments.info["source"] == "random"


def test_text_calibrates_unless_the_paper_says_random(loaded: LoadedModel, passes: Passes) -> None:
    given = calibrator(loaded, passes, tokens=1024)
    assert given.inputs("fdc:paper").moments.info["source"] == "random"
    assert given.inputs("fdc").moments.info["source"] == "calibration"
    assert given.inputs("palu", heads=2).moments.info["source"] == "calibration"
    assert given.inputs("kivi").moments is None
    assert given.inputs("fp8").moments.info["source"] == "calibration"  # fdc's told no magnitudes
    assert passes.totals == [1024] * 4
    # Announced for text, so of no concern to random tokens.
    other = calibrator(loaded, passes, tokens=1024)
    other.expect("palu")
    assert kept(other.inputs("fdc:paper")) == {"q", "k", "v"}
    # Not announced, so it takes a pass of its own.
    assert kept(other.inputs("oscar")) == {
        "q",
        "k",
        "v",
        "q_pre",
        "k_pre",
        "k_pre_joint",
        "v_joint",
        "o",
    }
    assert kept(calibrator(loaded, passes, tokens=512).inputs("oscar")) == {"q", "k", "v", "o"}


def test_defaults_are_8k_tokens_and_at_most_what_a_text_has(
    loaded: LoadedModel, passes: Passes, ids: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a long line of text\n" * 1000)
    for source, count in (("random", 8192), ("random:640", 640), (long, 8192), (ids, 640)):
        moments = calibrator(loaded, passes, source).inputs("kq").moments
        assert moments is not None
        assert moments.tokens == count
    with pytest.raises(UsageError):
        calibrator(loaded, passes, ids, tokens=1024).inputs("kq")


def test_a_papers_own_count_is_taken_and_what_falls_short_is_said(
    loaded: LoadedModel, passes: Passes, ids: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a long line of text\n" * 6000)
    told: list[str] = []
    given = Calibrator(
        loaded,
        CalibrationOptions(parse_source(str(long)), seq_len=64),
        progress=passes,
        notice=told.append,
    )
    given.expect("zack:paper")
    assert given.inputs("kq").moments.tokens == 8192  # nobody else pays for it
    plan = given.family("zack:paper").build(0.0)
    assert plan.made["calibration"]["tokens"] == 57_344
    assert not told
    assert "notes" not in plan.made
    short = Calibrator(
        loaded,
        CalibrationOptions(parse_source(str(ids)), seq_len=64),
        progress=passes,
        notice=told.append,
    )
    made = short.family("zack:paper").build(0.0).made
    note = "zack:paper was calibrated on 640 ids.npy tokens (the paper's setting: 57,344)"
    assert made["notes"] == [note]
    short.family("zack:paper")
    assert told == [note]  # once


def test_fisher_takes_as_many_tokens_as_asked_for_and_says_what_it_lacks(
    loaded: LoadedModel, passes: Passes, ids: Path
) -> None:
    asked = calibrator(loaded, passes, tokens=9216).inputs("palu", heads=2, allocation="fisher")
    assert asked.made["fisher"]["tokens"] == asked.moments.tokens == 9216
    short = calibrator(loaded, passes, ids).inputs("palu:paper", heads=2, allocation="fisher")
    assert [note.split(" tokens")[0] for note in short.made["notes"]] == [
        "palu:paper was calibrated on 640 ids.npy",
        "Fisher information was computed on 640",
    ]
    budget = calibrator(loaded, passes, "random", tokens=4096).inputs(
        "kq", allocation="budget", grid=8, minimum=8
    )
    assert "probed on 2,048 tokens" in budget.made["notes"][0]


def test_wide_or_long_text_gets_more_tokens(loaded: LoadedModel, passes: Passes) -> None:
    store = MomentStore(loaded, CalibrationOptions(seq_len=64), passes, lambda: False)
    narrow = CalibrationNeeds("calibration", joint_heads=2)
    assert store.width(narrow) == 32
    assert store.wanted(narrow) == 8192
    heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64}
    wide = wrap_model(tiny("Llama", hidden_size=64, max_position_embeddings=4096, **heads))
    longer = MomentStore(wide, CalibrationOptions(seq_len=16384), passes, lambda: False)
    assert longer.wanted(narrow) == 4 * 4096  # no sequence is longer than the model's context
    store = MomentStore(wide, CalibrationOptions(seq_len=64), passes, lambda: False)
    assert store.wanted(replace(narrow, joint_heads=64)) == 16 * 4096
    moments = Moments([], "x", tokens=1000, info={"source": "prose"})
    said = store.notes("palu", replace(narrow, joint_heads=64), moments)
    assert "65,536" in said[0]
    assert "fewer than 4,096 columns" in said[1]


def test_sequences_are_no_longer_than_the_context(loaded: LoadedModel, passes: Passes) -> None:
    inputs = calibrator(loaded, passes, "random:512", seq_len=100_000).inputs("kq")
    assert inputs.moments is not None
    assert inputs.moments.info["seq_len"] == loaded.context_length == 128


def test_a_plan_tells_what_it_was_made_from(loaded: LoadedModel, passes: Passes, ids: Path) -> None:
    family = calibrator(loaded, passes, ids).family("kq")
    made = plan_for_rate(family, 0.0, 96).made
    assert made["model"] == loaded.spec
    assert made["calibration"]["files"] == [str(ids)]
    assert made["calibration"]["tokens"] == 640
    copy = ids.with_name("copy.npy")
    copy.write_bytes(ids.read_bytes())
    again = calibrator(loaded, passes, copy).inputs("kq").moments
    other = calibrator(loaded, passes, "random:640").inputs("kq").moments
    assert again.info["digest"] == made["calibration"]["digest"] != other.info["digest"]


def test_saved_moments_are_taken_as_they_are(
    loaded: LoadedModel, passes: Passes, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    *_, moments = collect_moments(loaded, parse_source("random"), CollectOptions(512, 64))
    save_moments(moments, path)
    given = calibrator(loaded, passes, path)
    assert given.inputs("kq").moments.tokens == 512
    assert passes.totals == []
    with pytest.raises(UsageError, match="calibrate with that group size"):
        given.family("palu", heads=2)
    # Nor do they tell how large values are: that is counted on fp8's own source, once.
    assert given.inputs("fp8").moments.tokens == given.inputs("fp8").moments.tokens == 1024
    assert passes.totals == [1024]
    with pytest.raises(UsageError):
        calibrator(wrap_model(tiny("Llama", seed=4)), passes, path).inputs("kq")
    with pytest.raises(UsageError, match="leave out --calibrate-tokens"):
        calibrator(loaded, passes, path, tokens=512)


def test_fisher_and_budget_are_measured_once_on_text(loaded: LoadedModel, passes: Passes) -> None:
    given = calibrator(loaded, passes, "random:512")
    family = given.family("kq", allocation="fisher", grid=4, minimum=4)
    assert "gradients of calibration text" in passes.titles
    plan = plan_for_rate(family, 0.3, 96)
    assert plan.made["fisher"]["form"] == "paper"
    assert plan.made["fisher"]["tokens"] == 8192
    given.family("fdc", allocation="fisher")
    assert len(passes.titles) == 2
    flat = given.inputs("fdc", allocation="fisher", fisher_form="code")
    assert flat.made["fisher"]["form"] == "code"

    before = len(passes.titles)
    budget = given.family("kq", allocation="budget", grid=4, minimum=4)
    assert passes.titles[before:] == ["probing 8 targets of kq on calibration text"]
    assert passes.done[-1] == 8
    ranks = plan_for_rate(budget, 0.3, 96)
    assert ranks.made["sensitivity"]["tokens"] == 2048
    # Another grid, and the same method quantised, have the same bases.
    given.family("kq", allocation="budget", grid=2)
    quantised = given.family("kq-4bit", allocation="budget", grid=4, minimum=4)
    given.family("kq+per-token", allocation="budget", bits=8)
    assert len(passes.titles) == before + 1
    assert plan_for_rate(quantised, 0.7, 96).made["sensitivity"] == ranks.made["sensitivity"]
    given.family("fdc", allocation="budget")
    assert len(passes.titles) == before + 2


def test_moments_of_the_loss_are_taken_once_for_the_same_exact_tokens(
    loaded: LoadedModel, passes: Passes, ids: Path
) -> None:
    given = calibrator(loaded, passes, ids, tokens=256)
    plan = plan_for_rate(given.family("kq-wf", grid=4, window=8), 0.6, 96)
    assert passes.titles[-1] == "gradients of ids.npy text"
    assert passes.done[-1] == plan.made["loss"]["tokens"] == 256
    assert plan.made["options"]["allocation"] == "loss"
    before = len(passes.titles)
    given.family("kq-wf", grid=8, window=8, heads=2)
    assert "gradients of ids.npy text" not in passes.titles[before:]
    given.family("kq-wf", grid=4, window=16)
    assert passes.titles[-1] == "gradients of ids.npy text"
    # What has other pairs is probed by those of the products.
    given.family("kq-wf", grid=4, allocation="budget")
    assert passes.titles[-1].endswith("targets of kq-wf on ids.npy text")


def test_gradients_and_probes_take_the_text_that_was_given(
    loaded: LoadedModel, passes: Passes, ids: Path
) -> None:
    given = calibrator(loaded, passes, ids, tokens=256)
    made = given.inputs("kq", allocation="fisher").made
    assert made["fisher"]["source"] == "ids.npy"
    assert made["fisher"]["tokens"] == 256
    assert given.inputs("kq", allocation="budget").made["sensitivity"]["tokens"] == 256


def test_an_interruption_leaves_nothing_to_plan_with(loaded: LoadedModel, passes: Passes) -> None:
    options = CalibrationOptions(parse_source("random:512"), seq_len=64, batch_size=1)
    stop = {"now": True}
    given = Calibrator(loaded, options, progress=passes, should_stop=lambda: stop["now"])
    with pytest.raises(Interrupted, match="after 0 of 512"):
        given.family("kq")
    assert passes.titles == []  # none is begun any more
    stop["now"] = False
    assert given.inputs("kq").moments.complete
    stop["now"] = True
    with pytest.raises(Interrupted, match="gradients"):
        given.family("kq", allocation="fisher")
    with pytest.raises(Interrupted, match="gradients"):
        given.inputs("kq-wf", allocation="loss")
    with pytest.raises(Interrupted, match="probing"):
        given.family("kq", allocation="budget")


def test_a_pass_that_nobody_waits_for_ends_within_its_batch(
    loaded: LoadedModel, passes: Passes
) -> None:
    options = CalibrationOptions(parse_source("random:512"), seq_len=64, batch_size=4)
    layers = len(loaded.layout.layers)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 1 + layers + 1  # before the pass, in all of its first batch, and once

    given = Calibrator(loaded, options, progress=passes, should_stop=stop)
    with pytest.raises(Interrupted, match="after 256 of 512"):
        given.family("kq")
    assert len(asked) == 1 + layers + 2
    logits = loaded.model(torch.arange(8)[None]).logits
    assert bool(torch.isfinite(logits).all())  # its attention is as it was


def test_a_form_of_fisher_needs_its_allocation(loaded: LoadedModel, passes: Passes) -> None:
    for options in ({"fisher_form": "code"}, {"allocation": "fisher", "fisher_form": "sum"}):
        with pytest.raises(UsageError, match="fisher_form"):
            calibrator(loaded, passes, "random:512").family("kq", **options)
    assert passes.titles == []
