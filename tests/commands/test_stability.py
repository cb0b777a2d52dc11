import json
import math
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, press_ctrl_c, result_of, words_of

SWEEP = ("--tokens", "128,256,512", "--seq-len", "64")
CURVE_KEYS = {
    "pair", "source", "target", "tokens", "seq_len_source", "seq_len_target", "seed", "layer",
    "kv_head", "rank", "removal_rate", "ratio", "ratio_sign_aligned", "ratio_cluster_aligned",
    "subspace_distance", "principal_angle", "extra_energy_loss", "extra_score_error",
    "extra_output_error",
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two texts that are long enough for the sweep."""
    folder = tmp_path_factory.mktemp("texts")
    prose, code = folder / "notes.txt", folder / "code.txt"
    prose.write_text(
        "".join(f"Line {i} of a text about caches, keys and values.\n" for i in range(400))
    )
    code.write_text("".join(f"def f{i}(x): return x * {i} + 1\n" for i in range(400)))
    return prose, code


stability_json = partial(result_of, "stability")


def averages(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["data"]["curves"] if row["layer"] is None]


def test_every_curve_has_its_keys_and_the_noise_floor_is_among_them(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    result = stability_json(
        tmp_path, tiny_folder, *SWEEP, "--against", texts[0], "--against", texts[1], "--seeds", 2
    )
    rows = result["data"]["curves"]
    assert all(row.keys() >= CURVE_KEYS for row in rows)
    assert {row["target"] for row in rows} == {"notes.txt", "code.txt", "random, another seed"}
    assert {row["tokens"] for row in rows} == {128, 256, 512}
    heads = [row for row in rows if row["layer"] is not None]
    # 2 pairs, 3 targets, 3 counts, 2 seeds, 4 rank choices, 3 layers of 2 heads
    assert len(heads) == 2 * 3 * 3 * 2 * 4 * 6
    assert all(row["spread"] for row in averages(result))
    for row in rows:
        assert (row["extra_score_error"] is None) == (row["pair"] == "vo")
        assert (row["extra_output_error"] is None) == (row["pair"] == "qk")
        assert row["ratio_cluster_aligned"] < 1.6


def test_a_source_against_itself_differs_in_nothing(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    result = stability_json(
        tmp_path, tiny_folder, *SWEEP, "--source", texts[0], "--against", texts[0]
    )
    assert result["data"]["claims"] == []
    assert any("both source" in line for line in result["warnings"])
    own = [row for row in averages(result) if row["target"] == "notes.txt" and row["tokens"] == 512]
    assert own
    for row in own:
        for figure in ("ratio", "subspace_distance", "principal_angle", "extra_energy_loss"):
            assert row[figure] == pytest.approx(0, abs=1e-7), (figure, row)
    fewer = [r for r in averages(result) if r["target"] == "notes.txt" and r["tokens"] == 128]
    assert all(row["subspace_distance"] > 1e-3 for row in fewer)


def test_claims_are_judged_and_fail_the_run_only_when_asked(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = (tiny_folder, *SWEEP, "--against", texts[0], "--seeds", 2)
    claims = stability_json(tmp_path, *arguments)["data"]["claims"]
    measured = [claim for claim in claims if claim["measured"] is not None]
    assert measured
    for claim in measured:
        assert claim["holds"] is (claim["measured"] < claim["threshold"])
        assert claim["interval"][0] <= claim["measured"] <= claim["interval"][1]
    # 8K tokens were never reached: Fig. 14 is not judged, and that is no failure.
    assert [claim["verdict"] for claim in claims if claim["measured"] is None]
    kept = tmp_path / "kept.json"
    done = kvprof("stability", *arguments, "--fail-on-claim", "--json", kept)
    assert done.code == 4
    assert "FDC" in done.error
    assert json.loads(kept.read_text())["complete"] is True


def test_lengths_are_told_apart_from_content(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    result = stability_json(
        tmp_path,
        *words_of(f"{tiny_folder} --tokens 128,256 --seq-len 16 --against-seq-len 128"),
        *words_of(f"--against {texts[0]} --seeds 1"),
    )
    lengths = result["data"]["lengths"]
    assert {row["pair"] for row in lengths} == {"qk", "vo"}
    for row in lengths:
        assert (row["seq_len_source"], row["seq_len_target"]) == (16, 128)
        assert math.isfinite(row["cost"])
        assert math.isfinite(row["cost_same_length"])
    worse = [row for row in lengths if row["cost"] - row["cost_same_length"] > 0.01]
    warned = [line for line in result["warnings"] if ": extra lost energy" in line]
    assert len(warned) == len(worse)


def test_saved_moments_serve_on_either_side(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    moments = tmp_path / "random.safetensors"
    arguments = ("--tokens", 512, "--seq-len", 64, "--save", moments)
    assert kvprof("spectrum", tiny_folder, *arguments).code == 0
    target = stability_json(tmp_path, tiny_folder, *SWEEP, "--against", moments, "--seeds", 1)
    # Seed 0 at 512 tokens is what was saved: at the end of the sweep nothing differs.
    last = [r for r in averages(target) if r["target"] == moments.name and r["tokens"] == 512]
    assert all(row["extra_energy_loss"] == pytest.approx(0, abs=1e-9) for row in last)
    source = stability_json(
        tmp_path,
        *words_of(f"{tiny_folder} --source {moments} --against {texts[0]} --against-tokens 512"),
        *words_of("--seq-len 64 --tokens 512"),
    )
    assert {row["tokens"] for row in source["data"]["curves"] if row["target"] == "notes.txt"} == {
        512
    }
    assert source["data"]["recommendation"] is None


def test_ctrl_c_keeps_the_passes_that_were_done(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "partial.json"

    presser = threading.Thread(target=press_ctrl_c)
    presser.start()
    done = kvprof(
        *words_of(f"stability {tiny_folder} --tokens 64,128 --seq-len 64 --against {texts[0]}"),
        *words_of(f"--seeds 5000 --json {path} --against-tokens 256"),
    )
    presser.join()
    assert done.code == 130
    result = json.loads(path.read_text())
    validate_result(result)
    assert result["complete"] is False
    assert 1 <= len(result["inputs"]["seeds"]) < 5000
    assert result["data"]["curves"]


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("after", "kept"), [(64, []), (512 + 256, [128, 256])])
def test_every_signal_keeps_what_can_be_compared(
    tiny_folder: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    after: int,
    kept: list[int],
) -> None:
    """A dataset's pass comes first, so that the first counts of the source are worth something."""
    from kvprof.moments import collect

    seen = 0
    run_batch = collect.run_batch

    def signalled(model: Any, ids: Any) -> None:
        nonlocal seen
        run_batch(model, ids)
        seen += ids.numel()
        if seen == after:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(collect, "run_batch", signalled)
    path = tmp_path / "kept.json"
    arguments = (*SWEEP, "--batch-size", 1, "--against", texts[0], "--json", path)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        done = kvprof("stability", tiny_folder, *arguments)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.code == 130, done.stderr
    if not kept:
        assert "no result" in done.error
        assert not path.exists()
        return
    result = json.loads(path.read_text())
    validate_result(result)
    assert result["complete"] is False
    assert sorted({row["tokens"] for row in averages(result)}) == kept


def test_interrupted_moments_serve_and_are_named(
    tiny_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    from kvprof.moments.files import load_moments, save_moments

    moments = tmp_path / "cut.safetensors"
    done = kvprof("spectrum", tiny_folder, "--tokens", 512, "--seq-len", 64, "--save", moments)
    assert done.code == 0
    cut = load_moments(moments)
    cut.complete = False
    save_moments(cut, moments, force=True)
    result = stability_json(tmp_path, tiny_folder, *SWEEP, "--against", moments, "--seeds", 1)
    assert {r["target"] for r in averages(result)} == {moments.name, "random, another seed"}
    assert any("interrupted" in line for line in result["warnings"])
