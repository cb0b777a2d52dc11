"""Of a vision-language model the text decoder is measured, as if nothing were around it."""

import json
from pathlib import Path

import pytest
import torch

from kvprof.models.load import load_model
from kvprof.runtime.compressed import compressed
from tests.commands.running import kvprof
from tests.models.tiny import token_ids
from tests.models.wrapped import WRAPPERS, alone, save, wrapped
from tests.runtime.plans import make_plan


@pytest.mark.parametrize("kind", WRAPPERS)
def test_its_answers_to_text_are_the_wrappers_own(kind: str, tmp_path: Path) -> None:
    model = wrapped(kind)
    found = load_model(str(save(model, tmp_path / kind)), device="cpu")
    ids, options = token_ids(2, 12), {"max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        wanted, written = model(input_ids=ids).logits, model.generate(ids, **options)
        assert torch.equal(found.model(input_ids=ids).logits, wanted)
        with compressed(found, make_plan(found)):
            assert torch.allclose(found.model(input_ids=ids).logits, wanted, atol=1e-3)
            assert torch.equal(found.model.generate(ids, **options), written)
    assert found.vocab_size - 3 in found.special_ids  # an image


def test_commands_say_of_it_what_they_say_of_its_decoder(tmp_path: Path) -> None:
    model = wrapped("llava")
    plan = ("--method", "kq", "--rate", "0.3", "--grid", "4", "--minimum", "4")
    few = ("--sequences", "1", "--seq-len", "32", "--tasks", "none")
    said = []
    for one in (model, alone(model)):
        name = type(one).__name__
        folder, result = save(one, tmp_path / name), tmp_path / f"{name}.json"
        data = []
        for command in (
            ("spectrum", folder, "--source", "prose", "--tokens", "256", "--seq-len", "64"),
            ("eval", folder, *plan, *few),
            ("generate", folder, *plan, "--prompt", "a prompt", "--max-new-tokens", "4"),
        ):
            done = kvprof(*command, "--json", result, "--force")
            assert done.code == 0, done.stderr
            data.append(json.loads(result.read_text())["data"])
            if command[0] == "eval":  # names and times are its own
                keep = ("method", "rate", "perplexity", "kl", "sources")
                data[-1] = [{key: x[key] for key in keep} for x in data[-1]["evaluations"]]
            elif command[0] == "generate":
                data[-1] = data[-1]["text"]
        said.append(data)
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_its_decoders_layers_are_what_is_offloaded(kind: str, tmp_path: Path) -> None:
    found = load_model(str(save(wrapped(kind), tmp_path / kind)), device="offload")
    away = [name for name, where in found.model.hf_device_map.items() if where in ("disk", "cpu")]
    decoder = found.model.get_decoder()
    layers = {id(layer) for layer in decoder.layers}
    assert sum(id(found.model.get_submodule(name)) in layers for name in away) == 2
