from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprof.errors import UsageError
from kvprof.moments.tokens import check_separate, content_digest, content_sketch, shared_content
from kvprof.sources.grammar import parse_source

TEXT = np.random.default_rng(1).integers(3, 5000, 300_000)


@dataclass(frozen=True)
class Rows:
    name: str
    ids: torch.Tensor


def cut(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    return list(tokens[: len(tokens) // length * length].reshape(-1, length))


def rows(name: str, tokens: np.ndarray, length: int) -> Rows:
    return Rows(name, torch.from_numpy(np.stack(cut(tokens, length))))


def made(tokens: np.ndarray, length: int = 512, **more: object) -> dict[str, object]:
    parts = cut(tokens, length)
    data = {"source": "notes.txt", "digest": content_digest(parts), "files": []}
    return {"calibration": {**data, "sketch": content_sketch(parts), **more}}


def test_the_same_text_is_known_however_it_is_cut() -> None:
    calibrated = made(TEXT[:8192])
    for other in (rows("eval", TEXT[:8192], 512), rows("eval", TEXT[5:8192], 300)):
        with pytest.raises(UsageError, match=r"eval was calibrated on \(notes.txt"):
            check_separate(calibrated, samples=[other])


def test_a_small_part_of_a_large_text_is_found_on_either_side() -> None:
    large, small = TEXT, TEXT[100_000:116_000]
    with pytest.raises(UsageError, match="of the text is the same"):
        check_separate(made(large), samples=[rows("eval", small, 400)])
    with pytest.raises(UsageError, match="of the text is the same"):
        check_separate(made(small), samples=[rows("eval", large, 400)])


def test_the_share_is_that_of_the_smaller_text() -> None:
    half = np.concatenate([TEXT[:4096], TEXT[50_000:54_096]])
    share = shared_content(content_sketch(cut(TEXT[:8192], 1024)), cut(half, 1024))
    assert share == pytest.approx(0.5, abs=0.08)


def test_other_text_passes_even_with_a_quotation_in_it() -> None:
    quoted = np.concatenate([TEXT[200_000:208_000], TEXT[:150]])
    check_separate(made(TEXT[:8192]), samples=[rows("eval", quoted, 50)])
    permuted = np.random.default_rng(2).permutation(TEXT[:8192])
    check_separate(made(TEXT[:8192]), samples=[rows("eval", permuted, 512)])
    # Sequences too short to leave a trace are known only when they are the very same.
    check_separate(made(TEXT[:100], 20), samples=[rows("eval", TEXT[1:101], 20)])
    with pytest.raises(UsageError, match="the same tokens"):
        check_separate(made(TEXT[:100], 20), samples=[rows("eval", TEXT[:100], 20)])


def test_the_same_file_is_known_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some text")
    (tmp_path / "folder").mkdir()
    again = parse_source(str(tmp_path / "folder" / ".." / "notes.txt"))
    with pytest.raises(UsageError, match="the same file"):
        check_separate(made(TEXT[:1024], files=[str(path.resolve())]), [again])
    check_separate(made(TEXT[:1024]), [again])


def test_saved_moments_that_do_not_tell_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some text")
    with pytest.raises(UsageError, match="do not record their tokens"):
        check_separate({"calibration": {"source": "notes.txt"}}, [parse_source(str(path))])
    check_separate({"calibration": {"source": "other.txt"}}, [parse_source(str(path))])


def test_embedded_names_mean_other_splits() -> None:
    calibrated = made(TEXT[:8192], source="tasks")
    check_separate(calibrated, [parse_source("tasks")], [rows("tasks", TEXT[:8192], 512)])
    with pytest.raises(UsageError):
        check_separate(calibrated, samples=[rows("tasks.txt", TEXT[:8192], 512)])


def test_text_that_gradients_or_probes_saw_counts_too() -> None:
    parts = made(TEXT[:4096])
    for name in ("fisher", "sensitivity"):
        with pytest.raises(UsageError):
            check_separate({name: parts["calibration"]}, samples=[rows("eval", TEXT[:4096], 256)])


def test_a_plan_without_calibration_passes() -> None:
    check_separate({"model": "m"}, [parse_source("prose")], [rows("prose", TEXT[:512], 64)])
