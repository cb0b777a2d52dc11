"""A package ``vllm`` that answers at once, with stamps that are known."""

from pathlib import Path

SOURCE = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace as Space

__version__ = "0.26.9"
FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())


class SamplingParams:
    def __init__(self, **given):
        self.max_tokens = given["max_tokens"]
        assert given["ignore_eos"] and not given["detokenize"]


class LLM:
    def __init__(self, **given):
        if FACTS.get("fails"):
            print("(EngineCore pid=7) ERROR [core.py:9] ValueError: No memory of 3 GiB", flush=True)
            sys.stderr.write("ValidationError: 1 validation error for ModelConfig\\n")
            raise RuntimeError("Engine core initialization failed. See above.")
        assert given["load_format"] == "dummy" and not given["enable_prefix_caching"]
        self.longest = given["max_model_len"]
        config = json.loads((Path(given["model"]) / "config.json").read_text())
        Path(FACTS["seen"]).write_text(json.dumps(
            {"config": config, "longest": self.longest, "batch": given["max_num_seqs"]}))
        assert config["max_position_embeddings"] >= self.longest
        graphs = Space(cudagraph_mode=Space(name="NONE"))
        self.llm_engine = Space(vllm_config=Space(
            compilation_config=graphs, cache_config=Space(block_size=16)))
        self.calls = 0

    def generate(self, prompts, asked, use_tqdm):
        while FACTS.get("hangs"):
            time.sleep(0.1)
        self.calls += 1
        # The first run is slow; of the others the n-th takes n milliseconds a token.
        step = 1.0 if self.calls == 1 else 1e-3 * (self.calls - 1)
        found = []
        for prompt, one in zip(prompts, asked, strict=True):
            ids = prompt["prompt_token_ids"]
            assert max(ids) < FACTS["vocabulary"]
            assert len(ids) + one.max_tokens <= self.longest
            last = one is asked[-1]
            end = 100.0 + step * (one.max_tokens - 1) if last else 1e6
            found.append(Space(metrics=Space(
                first_token_ts=100.0, last_token_ts=end, first_token_latency=0.25)))
        return found
"""
PLATFORMS = """
from types import SimpleNamespace
current_platform = SimpleNamespace(is_cpu=lambda: {cpu})
"""


def write_engine(folder: Path, facts: str, *, cpu: bool = True) -> Path:
    """Write the package into a folder, which is to be on the path of modules.

    Parameters
    ----------
    folder : Path
    facts : str
        JSON: ``vocabulary``, ``seen`` (a file for what the engine was given), ``fails``, ``hangs``.
    cpu : bool
        What it says that it runs on.
    """
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    (package / "platforms.py").write_text(PLATFORMS.format(cpu=cpu))
    (package / "facts.json").write_text(facts)
    return folder
