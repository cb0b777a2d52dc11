"""Unpack a GGUF model into a folder that vLLM reads: safetensors, config and tokenizer.

vLLM reads GGUF only with a plug-in; so it gets the same weights as every other command.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvprof import console
from kvprof.errors import FailedError
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.soundness import check_fits
from kvprof.models.gguf import is_gguf
from kvprof.models.load import load_model
from kvprof.models.noise import quiet
from kvprof.serving.settings import named

__all__ = ["UnpackedModel", "unpacked"]


class UnpackedModel:
    """A GGUF file's model, written into a folder."""

    def __init__(
        self,
        spec: str,  # A GGUF file, or what has one
        folder: Path,
        dtype: torch.dtype,  # what the engine computes in
        *,
        revision: str | None = None,  # as `load_model`
        gguf: str | None = None,
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        with console.status(f"writing the weights of {spec} as safetensors to {name}"):
            loaded = load_model(spec, device="cpu", dtype=name, revision=revision, gguf=gguf)
            tokenizer = loaded.tokenizer()
            self._layout, self._of_file = loaded.layout, loaded.fingerprint
            self.described = loaded.origin["gguf"]  # what a result says of the file
            self._plans = 0
            # What is written is in no blocks any more.
            if hasattr(loaded.model.config, "quantization_config"):
                del loaded.model.config.quantization_config
            loaded.model.hf_quantizer = None
            try:
                with quiet():
                    loaded.model.save_pretrained(folder)
                    tokenizer.save_pretrained(folder)
            except OSError as error:
                raise FailedError(
                    f"{spec}: cannot write its weights for the engine to {folder.parent} "
                    f"({error.strerror or error}); set TMPDIR to another folder"
                ) from error
            del loaded, tokenizer
            self.folder = folder  # is made; plans of it lie beside it
            self._written = load_model(str(folder), device="cpu", dtype=name).fingerprint

    def plan_of(self, path: Path) -> Path:
        """Write a plan of the file's model as one of the folder's, which are the same numbers."""
        plan = load_plan(path)
        check_fits(plan, self._layout, self._of_file)
        self._plans += 1
        to = self.folder.parent / f"{self._plans}.plan"
        save_plan(replace(plan, fingerprint=self._written), to)
        return to


@contextmanager
def unpacked(
    spec: str,
    dtype: torch.dtype,
    words: Sequence[str],
    *,
    revision: str | None = None,
    gguf: str | None = None,
) -> Iterator[UnpackedModel | None]:
    """Give a GGUF file's model as a folder that lies there meanwhile; None for any other model."""
    if gguf is None and not is_gguf(spec):
        yield None
        return
    written = torch.float32 if "--dtype" in named(list(words)) else dtype
    with TemporaryDirectory(prefix="kvprof-unpacked-") as scratch:
        yield UnpackedModel(spec, Path(scratch) / "model", written, revision=revision, gguf=gguf)
