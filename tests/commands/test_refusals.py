"""What commands refuse: words, and what the one line on stderr names; the wording is free.

Every line is tried in a folder with a model of 128 tokens (taken where a line names none), texts
and files of another model. A number behind a line is its exit code; 2 where there is none.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvprof.models import load
from tests.commands.running import kvprof
from tests.models.folder import save_tiny

KQ = "--method kq --rate 0.4 --grid 1 --minimum 1"
TEXT = "--sequences 3 --seq-len 32 --tasks none"
MIXED = "--text notes.txt --seq-len 32"
SHAPE = "ALONE --shape llama-3.1-8b --transfer --methods full"
FEW = "--prompt x --max-new-tokens 4"

#: By command: what is refused before weights are read, then what needs them.
REFUSED: dict[str, list[tuple[str, str] | tuple[str, str, int]]] = {
    "advise": [
        ("nosuch/folder/here", "nosuch/folder/here"),
        ("none.gguf", "none.gguf"),
        ("Llama-3.1-8B --save x.plan", "--minutes"),
        ("Llama-3.1-8B --gpu abacus", "--gpu"),
        ("Llama-3.1-8B --keep 2", "--keep"),
        ("Llama-3.1-8B --context none", "--context"),
        ("Llama-3.1-8B --weights much", "--weights"),
    ],
    "spectrum": [
        ("no/such/model", "no/such/model"),
        ("some-org/some-model", "some-org/some-model", 3),
        ("empty", "config.json"),
        ("--tokens 0", "--tokens"),
        ("--tokens many", "'many'"),
        ("--seq-len 1k", "--seq-len 1,024"),
        ("--pairs qk,xy", "'xy'"),
        ("--pairs ''", "pair"),
        *((f"--removal={value}", value) for value in ("1.5", "-0.1", "101%", "y", "nan")),
        ("--removal 0.1,-0.1", "-0.1"),
        ("--skip-first 200 --seq-len 64", "--skip-first"),
        ("--source nothing", "'nothing'"),
        *((f"--source random:{count}", "random:") for count in ("0", "-3", "many", "1.0001")),
        ("--text missing.txt", "missing.txt"),
        ("--text short.txt --tokens 512", "short.txt"),
        ("--text empty.txt", "empty"),
        ("--from missing.safetensors", "missing.safetensors"),
        ("--from other.safetensors", "not of this model"),
        ("--source random:1k --token-ids x.npy", "--token-ids"),
        ("--source random:1k --tokens 2k", "--tokens"),
        ("--from m.safetensors --seed 3", "--seed"),
        ("--from m.safetensors --save n.safetensors", "--save"),
        ("--per-query-head --pairs k,v", "--per-query-head"),
        ("--grid 0", "--grid"),
        ("--json /proc/no/such/place.json", "place.json", 1),
        ("--device cuda", "cuda", 3),
        ("--dtype float7", "float7"),
    ],
    "stability": [
        ("--against prose --tokens 8k", "--tokens"),
        ("--against prose --tokens 100,200 --seq-len 64", "not a multiple"),
        ("--against prose --tokens 128,256 --pairs qk,xx", "'xx'"),
        ("--against prose --tokens 128,256 --ranks 64", "--ranks"),
        ("--against prose --tokens 128,256 --ranks 16", "--ranks"),
        ("--against random:256 --tokens 128,256", "--against-tokens"),
        ("--against prose --tokens 128,256 --source random:256", "--tokens"),
        ("--against nowhere --tokens 128,256", "nowhere"),
        ("--against prose --tokens 128,256 --seeds 0", "--seeds"),
        ("--against prose --tokens 128,256 --against-seq-len 4k", "context"),
        ("--against short.txt --tokens 256,512 --seq-len 64", "short.txt"),
        ("--source short.txt --tokens 256,512", "short.txt"),
        ("--against other.safetensors --tokens 128,256 --seq-len 64", "other.safetensors"),
    ],
    "plan": [
        ("", "--method"),
        ("--method fdc", "--rate"),
        ("--method nothing --rate 0.5", "'nothing'"),
        ("--method fdc --rate 1", "--rate 1"),
        ("--fit 80GB", "kvprof advise"),
        ("--method fdc --rate 0.5 --removal 0.1", "--removal"),
        ("--method fdc --rate 0.5 --context 0", "--context"),
        ("--method fp8 --context long", "--context"),
        ("--method fp8 --rate 0.3", "one rate"),
        ("--method full --calibrate short.txt", "needs no calibration"),
        ("--method fp8 --compare other.plan", "other.plan"),
        ("--plan missing.plan", "missing.plan"),
        ("--plan a --plan b", "several"),
        ("--plan other.plan", "not for the model given"),
        ("--plan cut.plan", "cut.plan", 1),
        (f"{KQ} --compare cut.plan", "cut.plan", 1),
        (f"{KQ} --compare other.plan", "other.plan"),
        (f"{KQ} --compare missing.plan", "missing.plan"),
        *((f"--method fdc --removal={value}", value) for value in ("1.5", "-0.1", "y", "nan")),
        *((f"--method {name} --rate 0.999", "reaches rates") for name in ("kq", "fdc-4bit")),
        ("--method palu --removal 0.1", "--rate"),
        ("--method kq+h2o --rate 0.99", "kq+h2o"),
        ("--method strawman --allocation fisher --rate 0.3", "option allocation"),
        (
            "--method kq --rate 0.3 --calibrate random:8k --calibrate-tokens 1k",
            "--calibrate-tokens",
        ),
        ("--method kq --rate 0.3 --calibrate-tokens lots", "--calibrate-tokens"),
        ("--method kq --rate 0.3 --calibrate nowhere.txt", "'nowhere.txt'"),
        *(
            (f"--method {name} --rate 0.5 --servable", "cannot be served")
            for name in ("palu-4bit", "h2o", "kvtc", "tale", "xkv --option bases=calibration")
        ),
        ("--link nvlink4", "--link"),
        ("--seq 4k", "--seq"),
        ("--transfer --link quick", "'quick'"),
        ("--transfer --link nvlink4 --link nvlink4", "twice"),
        ("--transfer --seq 0", "--seq"),
        ("--transfer --save x.plan", "--save"),
        ("--transfer --shape llama-3.1-8b", "--shape"),
        (f"{SHAPE} --device cpu", "--device"),
        (f"{SHAPE} --plan x.plan", "--plan"),
        (f"{SHAPE} --dtype int8", "'int8'"),
        *(
            (f"ALONE --plan other.plan {option}", option.split()[0])
            for option in ("--device cuda:7", "--revision abc", "--trust-remote-code")
        ),
    ],
    "eval": [
        (TEXT, "--method"),
        (f"--method kq {TEXT}", "--rate"),
        (f"--method kq,kq --rate 0.5 {TEXT}", "kq"),
        (f"--method qk --rate 0.5 {TEXT}", "qk"),
        (f"--method kq --rate 0.999 --grid 1 --minimum 1 {TEXT}", "reaches rates"),
        (f"--method svd-kv --rate 0.999 {TEXT}", "reaches rates"),
        (f"--method xkv --rate 0.1 {TEXT}", "reaches rates"),
        (f"--method oscar --removal 0.1 {TEXT}", "--rate"),
        (f"--method kq --rate 0.5 --removal 0.1 {TEXT}", "--removal"),
        (f"--method kq --rate 0.5 --option width=3 {TEXT}", "option width"),
        (f"--method fp8 --grid 4 {TEXT}", "option grid"),
        (f"--method full --option scale=none {TEXT}", "full"),
        (f"--method kq --rate 0.1 --calibrate-seq-len x {TEXT}", "--calibrate-seq-len"),
        (f"--plan x --calibrate-seq-len 64 {TEXT}", "--calibrate-seq-len"),
        (f"--plan x --method kq {TEXT}", "--method"),
        (f"--plan other.plan {TEXT}", "other.plan"),
        (f"--method fp8 --option skip=3 {TEXT}", "skip=3"),
        (f"--method fp8 --rate 0.9 {TEXT}", "--rate"),
        (f"--method full,fp8 --removal 0.1 {TEXT}", "--removal"),
        (f"--method kq --rate nan {TEXT}", "--rate nan"),
        (f"--method kq --rate 30 {TEXT}", "30% or 0.3"),
        (f"--method tale --rate 0.2 --option recent=nan {TEXT}", "option recent"),
        (f"--method q8_0 {TEXT}", "q8_0"),
        ("--method fp8 --tasks needles", "'needles'"),
        ("--method fp8 --tasks vt --task-lengths 1k", "--task-lengths"),
        ("--method fp8 --tasks vt --task-lengths 1,024", "--task-lengths"),
        (f"--method fp8 --task-items 1000000000 {TEXT}", "--task-items"),
        (f"--method fp8 --text random:8k {TEXT}", "random tokens"),
        (f"--method fp8 --text no-such.txt {TEXT}", "no-such.txt"),
        (f"--method fp8 --text short.txt {TEXT}", "short.txt"),
        ("--method fp8 --seq-len 1k", "--seq-len 1,024"),
        ("--method fp8 --seq-len 3 --tasks none", "4 or more"),
        (f"--method fp8 --text calibration {TEXT}", "for calibration only"),
        (f"--method fp8 --text prose --text prose {TEXT}", "twice"),
        (f"--method fp8 --harness-limit 3 {TEXT}", "--harness"),
        (f"--method fp8 --harness-include x {TEXT}", "--harness"),
        (f"--method fp8 --harness , {TEXT}", "--harness"),
        (f"--method fp8 --json short.txt {TEXT}", "short.txt"),
        (f"{KQ} {TEXT} --text notes.txt --calibrate notes.txt", "calibrated on"),
    ],
    "frontier": [
        ("--methods nonsense", "'nonsense'"),
        ("--methods kq:colour=red", "colour"),
        ("--methods ,", "names no method"),
        ("--methods kq --allocation nonsense", "nonsense"),
        ("--methods kivi --allocation budget", "allocation=budget"),
        ("--methods fp8 --text random:8k", "--text random"),
        ("--target 0", "--target"),
        ("--target 1.5", "--target"),
        ("--target nan", "--target nan"),
        (f"{TEXT} --metric speed", "'speed'"),
        (f"{TEXT} --metric tasks", "--tasks"),
        (f"{TEXT} --metric perplexity --target accuracy=0.9 --target 0.5", "--target"),
        (f"{TEXT} --metric perplexity --target perplexity=0.9 --target 0.97", "--target"),
        (f"{TEXT} --target needle=0.9", "'needle'"),
        ("--seq-len 32 --tasks none --target vt=0.9", "'vt'"),
        ("--seq-len 32 --sequences 1", "one sequence"),
        ("--cache x --no-cache", "--no-cache"),
        ("--text missing.txt", "missing.txt"),
        ("--points 1000000000", "1000000000"),
        (f"{TEXT} --methods kq,fdc --text ids.npy --calibrate ids.npy", "calibrated on"),
    ],
    "sensitivity": [
        (f"{MIXED} --bits banana", "--bits"),
        (f"{MIXED} --bits 7", "7 bits"),
        (f"{MIXED} --bits none", "--ranks"),
        (f"{MIXED} --bits fp8 --quantiser kivi", "--quantiser kivi"),
        (f"{MIXED} --layers 3", "--layers"),
        (f"{MIXED} --layers x", "--layers"),
        (f"{MIXED} --by token", "--by token"),
        (f"{MIXED} --limit nan", "--limit"),
        (f"{MIXED} --quantiser hqq", "--quantiser hqq"),
        (f"{MIXED} --ranks 16", "--ranks"),
        (f"{MIXED} --tokens 31", "--tokens 31"),
        (f"{MIXED} --save p", "--save"),
        (f"{MIXED} --rate 0.99", "reaches rates"),
        (f"{MIXED} --rate 99", "--rate"),
        ("--text short.txt", "short.txt"),
    ],
    "generate": [
        ("--method full", "--prompt"),
        (FEW, "--method"),
        ("--method full --prompt a --prompt-file b", "--prompt-file"),
        ("--method full --prompt-file missing.txt", "missing.txt"),
        ("--method full --prompt x --max-new-tokens 0", "--max-new-tokens"),
        ("--method full --prompt x --max-new-tokens 500", "--max-new-tokens to 126"),
        ("--method fp8 --prompt x --max-new-tokens 1k", "context"),
        (f"--method full --prompt {'x' * 200}", "shorten the prompt"),
        ("--method full --prompt x --temperature 0.5", "--sample"),
        ("--method full --prompt x --sample --temperature 0", "--temperature 0"),
        ("--method full --prompt x --sample --top-p 1.5", "--top-p 1.5"),
        (f"--method full {FEW} --chat", "chat template"),
        (f"--method full {FEW} --context none", "--context"),
        (f"--method fp8 --rate 0.3 {FEW}", "one rate"),
        (f"--plan other.plan {FEW}", "not for the model given"),
        (f"--plan other.plan --rate 0.5 {FEW}", "--rate"),
    ],
}
#: What is found out with weights alone.
LATE = (
    "=0.9 --target 0.5",
    "other.safetensors",
    "--ranks 64",
    "--ranks 16",
    "skip=3",
    "--calibrate notes",
    "ids.npy",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, other_folder: Path) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("refused")
    for name in ("model", "loaded"):
        save_tiny(path / name, seed=7)
    (path / "empty").mkdir()
    (path / "short.txt").write_text("abc")
    (path / "empty.txt").touch()
    (path / "notes.txt").write_text(
        "".join(f"Line {i} of a text about caches.\n" for i in range(60))
    )
    np.save(path / "ids.npy", np.random.default_rng(0).integers(3, 90, (8, 48)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPROF_CACHE", str(path / "cache"))
        patch.chdir(path)
        assert kvprof("plan", other_folder, "--method", "fp8", "--save", "other.plan").code == 0
        asked = ("--tokens", 128, "--seq-len", 64, "--save", "other.safetensors")
        assert kvprof("spectrum", other_folder, *asked).code == 0
        (path / "cut.plan").write_bytes((path / "other.plan").read_bytes()[:-40])
        yield path


@pytest.mark.parametrize(
    ("command", "line", "named", "code"),
    [
        pytest.param(command, line, named, *(code or [2]), id=f"{command} {line}"[:60])
        for command, rows in REFUSED.items()
        for line, named, *code in rows
    ],
)
def test_it_is_refused_in_one_line_before_weights_are_read(
    folder: Path, command: str, line: str, named: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = command != "sensitivity" and any(one in line for one in LATE)
    if not late:
        monkeypatch.setattr(load, "read_weights", lambda *_, **__: pytest.fail("weights were read"))
    words = shlex.split(line.removeprefix("ALONE "))
    if line == "" or line[0] == "-":
        words = ["loaded" if late else "model", *words]
    done = kvprof(command, *words)
    assert named in (done.stderr if "--points" in words else done.error)
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert late or "calibrating: " not in done.stderr
