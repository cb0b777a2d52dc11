"""Shapes without weights, as an engine serves them: a folder with a configuration, and plans."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvprof.benchmark.jct.layer import llama_config
from kvprof.benchmark.jct.model import check_llama
from kvprof.benchmark.jct.model_shape import ModelShape, load_model_shape
from kvprof.benchmark.shape_plans import Bare, ShapePlan, parse_method, shape_plan
from kvprof.benchmark.shapes import Shape, layout_of
from kvprof.models.locate import shape_named
from kvprof.serving.settings import load_format_of, named

__all__ = ["drawn_plan", "shape_folder", "words_for_shape", "write_shape"]

_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json",
)  # fmt: skip


def write_shape(model: ModelShape, folder: Path) -> None:
    """Write the configuration that an engine reads of a shape."""
    check_llama(model)
    config = llama_config(model)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


@contextmanager
def shape_folder(model: str, layers: int | None = None) -> Iterator[str]:
    """Give a folder that an engine can read, which for a shape's name lies there meanwhile."""
    if shape_named(model) is None and layers is None:
        yield model
        return
    shape = load_model_shape(model).of_layers(layers)
    with TemporaryDirectory(prefix="kvprof-shape-") as scratch:
        folder = Path(scratch) / shape.name
        write_shape(shape, folder)
        yield str(folder)


def words_for_shape(folder: str, given: Sequence[str]) -> list[str]:
    """Return the options of vLLM that a folder without weights, and maybe a tokenizer, asks for."""
    words = [] if load_format_of(given) else ["--load-format", "dummy"]
    if "--skip-tokenizer-init" not in named(list(given)) and not any(
        (Path(folder) / name).exists() for name in _TOKENIZERS
    ):
        words.append("--skip-tokenizer-init")
    return words


def drawn_plan(method: str, shape: Shape, rate: float, *, alone: bool = False) -> ShapePlan:
    """Return a plan for random weights: ranks of the recorded profile, unlike in every layer."""
    laid = Bare(layout_of(shape), shape.name)
    return shape_plan(parse_method(method), shape, rate, tokens=1, laid=laid, alone=alone)
