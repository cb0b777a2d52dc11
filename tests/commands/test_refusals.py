"""What commands refuse: words, and what the one line on stderr names; the wording is free.

Every line is tried in a folder with a model of 128 tokens (taken where a line names none), texts,
files of another model, and what is no run. A number behind a line is its exit code; 2 where there
is none. Nothing is left there.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvprof.models import load
from kvprof.records.files import write_result
from kvprof.records.fold import result_of
from tests.commands.running import kvprof
from tests.models.folder import save_tiny
from tests.records.sample import benchmark_result, spectrum_result
from tests.records.streams import stream

KQ = "--method kq --rate 0.4 --grid 1 --minimum 1"
TEXT = "--sequences 3 --seq-len 32 --tasks none"
MIXED = "--text notes.txt --seq-len 32"
SHAPE = "ALONE --shape llama-3.1-8b --transfer --methods full"
LLAMA = "--jct --model Llama-3.1-8B"
FEW = "--prompt x --max-new-tokens 4"

#: What no command opens as a run.
NO_RUNS = [
    ("gone", "no such file"),
    ("empty", "neither result.json nor events.jsonl"),
    ("notes.txt", "damaged", 1),
    ("other.json", "not a kvprof result", 1),
    ("new.json", "newer kvprof", 1),
    ("newer/events.jsonl", "newer", 1),
    ("hello/events.jsonl", "not a recorded kvprof run", 1),
    ("blank/events.jsonl", "no event yet", 1),
]

#: By command: what is refused before weights are read, then what needs them.
REFUSED: dict[str, list[tuple[str, str] | tuple[str, str, int]]] = {
    "advise": [
        ("nosuch/folder/here", "nosuch/folder/here"),
        ("none.gguf", "none.gguf"),
        ("Llama-3.1-8B --save x.plan", "--minutes"),
        ("Llama-3.1-8B --gpu abacus", "--gpu"),
        ("Llama-3.1-8B --keep 0%", "--keep 0%"),
        ("Llama-3.1-8B --context none", "--context"),
        ("Llama-3.1-8B --weights much", "--weights"),
        ("endless", "num_hidden_layers", 1),
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
        ("--source empty", "is a folder"),
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
        ("--tokens 1000g", "--tokens"),
        ("x" * 300, "File name too long"),
        *((name, name) for name in ("a" * 200, f"x/{'a' * 200}", f"{'a' * 200}/x")),
        *((name, name) for name in ("a--b", "a.git")),
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
        *((f"--method {name}", "--rate") for name in ("fdc", "kivi")),
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
        ("--plan a --calibrate-seq-len 64", "--calibrate-seq-len"),
        (f"{KQ} --calibrate-seq-len x", "x"),
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
        ("--method kq --methods fdc --rate 30%", "kq,fdc"),
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
        ("--rate 0.25 --rate 0.75", "--rate is given 2 times"),
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
        ("--prompt x --method kq,fdc --rate 30%", "kq,fdc"),
    ],
    "serve": [
        ("--methods kq --method fdc", "kq,fdc"),
        ("--plan missing.plan", "missing.plan"),
        ("--plan cut.plan", "cut.plan", 1),
        *((f"--plan x --host '{name}'", "--host") for name in ("no name", 70 * "a", "192.0.2.1")),
        ("--plan x --host \udcff", "--host"),
    ],
    "bench": [
        ("--model Llama-9", "'Llama-9'"),
        *((f"--seq={seq}", "--seq") for seq in ("0", "-4k", "long", "''")),
        ("--seq 1,024", "1024,2048"),
        *((f"--batch {batch}", f"'{batch}'") for batch in ("0", "many")),
        *((f"--rate={rate}", f"--rate {rate}") for rate in ("1", "-0.1", "nan", "half")),
        ("--rate 0.99", "0.875"),
        ("--ranks missing.json", "--ranks missing.json"),
        ("--ranks other.plan --methods fdc", "Llama-3.1-8B has 8 of 128"),
        ("--phase training", "'training'"),
        ("--phase ,", "--phase"),
        ("--methods fcd", "'fcd'"),
        ("--methods fdc-5bit", "fdc-5bit"),
        ("--methods ,", "names no method"),
        ("--dtype int8", "'int8'"),
        ("--repeats 2", "--repeats 2"),
        ("--repeats few", "'few'"),
        *((f"--device {name}", f"'{name}'") for name in ("tpu", "balanced")),
        ("--seed -1", "--seed"),
        ("--json - --csv -", "--json and --csv"),
        ("--out theirs", "--force"),
        ("--input-len 1k", "--input-len requires --jct"),
        ("--jct --seq 4k", "--seq cannot be combined with --jct"),
        ("--jct --seq 4k --phase decode", "--seq and --phase"),
        ("--jct --trace fdc/arxiv --input-len 1k", "--input-len cannot be"),
        ("--jct --requests 10", "--trace"),
        ("--jct --composed --kernels on", "--kernels requires --real"),
        ("--jct --kernels maybe", "auto, on, off"),
        ("--jct --baseline kq", "--baseline kq is not among"),
        *((f"--jct --input-len {text}", "--input-len") for text in ("none", "''")),
        ("--jct --output-len 0", "--output-len"),
        ("--jct --tp 0", "--tp"),
        ("--jct --real --tp 2", "--tp"),
        ("--jct --trace fdc/novels", "fdc/arxiv"),
        (f"{LLAMA} --tp 3", "2, 4, 8"),
        (f"{LLAMA} --methods fdc:no-balancing", "on a CPU"),
        (f"{LLAMA} --layers 33", "1 to 32"),
        ("--jct --model Lama", "Lama", 3),
        ("--lengths arxiv", "--lengths requires --load"),
        ("--jct --slo ttft=1s --url x", "--slo and --url requires --load"),
        ("--load --jct", "--jct cannot be combined with --load"),
        ("--load --seq 4k --repeats 3", "--seq and --repeats cannot"),
        ("--load --layers 2", "--layers requires a shape"),
        ("--load --simulate --layers 2", "--layers requires a shape"),
        ("--load --model Qwen3-8B", "Qwen3-8B has QK-norm"),
        ("--load --device cuda --trace fdc/arxiv", "--trace and --device"),
        ("--load --url x --methods fdc --memory 1GB", "--methods and --memory"),
        ("--load --url x --tp 2,4", "--tp cannot be combined with --url"),
        ("--load --url x --rate 0.4", "--rate cannot be combined with --url"),
        ("--load --url x --router round-robin", "--router requires several"),
        ("--load --url http://me:pw@x", "--key-env"),
        ("--load --router round-robin", "--replicas 2"),
        ("--load --router random --replicas 2", "--router random"),
        ("--load --key-env X", "--key-env requires --url"),
        ("--load --url x --key-env NOT_THERE", "is unset or empty"),
        ("--load --request-rate 1,x", "--request-rate: 'x'"),
        ("--load --request-rate 0", "--request-rate: '0'"),
        ("--load --slo ttft=2x", "'ttft=2x'"),
        ("--load --slo tpot=50", "'tpot=50'"),
        ("--load --slo share=0.9", "--slo has no limit"),
        (f"--load --slo ttft={400 * '9'}s", "--slo: cannot read 'ttft=999"),
        ("--load --slo ttft=1s,share=2", "share 2"),
        ("--load --slo ttft=1s,ttft=2s", "--slo gives ttft twice"),
        ("--load --simulate --replicas 1000000000", "is not between 1 and 10,000"),
        ("--load --requests 5 --seconds 9", "--requests and --seconds"),
        ("--load --seconds -1", "--seconds -1"),
        ("--load --seconds 1e9 --request-rate 2", "more than 10,000,000 requests"),
        ("--load --refine 99", "--refine 99"),
        ("--load --timeout 0", "--timeout 0"),
        ("--load --memory lots", "--memory: 'lots' is not a size"),
        ("--load --arrivals weibull", "--arrivals weibull"),
        ("--load --arrivals trace", "has no times"),
        ("--load --lengths nowhere.jsonl", "--lengths nowhere.jsonl"),
        ("--load --baseline kq", "--baseline kq is not among"),
        ("--load --requests 0", "--requests 0"),
        ("--load --lengths in=9,out=9 --request-rate 0.3333333,0.33333334", "too close"),
        ("--load --arrivals gamma:cv=1e-200", "0.001 to 100"),
        ("--load --url localhost:9,http://localhost:9/v1", "localhost:9 twice"),
        ("--load", "the model has 2,048 positions"),
        ("--load --engine --api-key=sk-1", "--engine --api-key would be recorded"),
        ("--load --engine '--api-k sk-1'", "--engine --api-k would be recorded"),
        ("--load --engine '--kv-cache-dtype fp8'", ": use --methods"),
        ("--load --engine --tensor_parallel=2", ": use --tp"),
        ("--load --engine '--host 0.0.0.0'", "sets the servers' addresses"),
        ("--load --replicas 0", "--replicas"),
        ("--load --url http://" + 70 * "a", "http://127.0.0.1:8000"),
        ("--load --engine \\'", "--engine: no closing quotation"),
        ("--load --url x --engine -O0", "--engine cannot be combined with --url"),
        ("--load --methods full,fcd", "fcd"),
        ("--load --plan nowhere.plan", "--plan nowhere.plan: no such file"),
        ("--simulate", "--simulate requires --load"),
        ("--load --simulate --url x", "--url cannot be combined with --simulate"),
        ("--load --simulate --rate 0.4 --plan p", "--plan and --rate cannot"),
        ("--load --simulate --timeout 3", "--timeout cannot be combined with --simulate"),
        ("--load --simulate --methods tale", "--methods tale"),
        ("--load --simulate --model Other", "Other with --tp 1"),
        ("--load --simulate --tp 8", "Llama-3.1-70B with --tp 4"),
        ("--load --simulate --tp 1,4", "--tp 1,4: --simulate takes one number"),
        ("--load --simulate --tp 2,x", "--tp: 'x' is not a count"),
        ("--jct --tp 2,4", "--tp 2,4: --jct takes one number of GPUs"),
        ("--load --simulate --engine '--pages 3'", "--engine --pag"),
        ("--load --simulate --engine '--block-size x'", "--block-size: 'x' is no"),
        ("--load --simulate --engine --block-size", "--block-size: '' is no"),
        ("--load --simulate --engine --max-num-seqs=9k", "--max-num-batched-tokens 8192"),
        ("--load --simulate --memory 1KB", "not one page of full fits"),
        ("--load --simulate --router round-robin", "--replicas 2"),
        ("--load --simulate --baseline tale", "--baseline tale is not among"),
        ("--load --simulate --lengths in=2M,out=9", "Llama-3.1-8B has 131,072 positions"),
        (
            "--load --simulate --lengths in=64k,out=9 --memory 1GiB",
            "8,192",
        ),
    ],
    "tui": [
        *NO_RUNS,
        ("--demo run", "--demo"),
        *((f"run --speed {speed}", f"--speed {speed}") for speed in ("0", "nan")),
        ("--speed 2", "--speed requires"),
        *(
            (line, "starts bench --jct or bench --load")
            for line in ("-- bench --seq 4k", "-- spectrum --jct", "one two", "bench")
        ),
        ("-- bench --jct --out notes.txt", "is a file"),
        *((f"-- bench --jct --out{by}newer", "events.jsonl exists") for by in " ="),
    ],
    "show": [*NO_RUNS, ("--json -", "--json")],
    "compare": [
        *((f"{run} {run}", *rest) for run, *rest in NO_RUNS),
        ("jct.json", "two runs or more"),
        ("jct.json spectrum.json", "one kind"),
    ],
    "export": [
        *((f"{run} --to csv", *rest) for run, *rest in NO_RUNS),
        ("jct.json --to html", "--output"),
        ("jct.json --to csv -o notes.txt", "--force"),
        ("jct.json --to perfetto -o trace", "has no events.jsonl"),
        *((f"theirs --to {to} -o out", "html") for to in ("csv", "svg")),
        *((f"jct.json {wrong}", "--to") for wrong in ("--to pdf", "", "--schema --to csv")),
        ("--schema nothing", "jct"),
    ],
    "recipe": [
        ("run nowhere.yaml --out out", "nowhere.yaml"),
        ("run fcd-table-1 --out out", "fcd-table-1"),
        ("run example-sweep --out out --profile large", "smoke, small, paper"),
        ("run example-sweep --out out --set rate", "KEY=VALUE"),
        ("run example-sweep --out out --set colour=red", "--set colour"),
        ("run example-sweep --out theirs", "has a benchmark result"),
        ("run fdc-* --out a --out b", "--out is given 2 times"),
        ("report empty", "--out"),
        ("new x.txt", ".yaml"),
        ("new 'My Sweep.yaml'", "My Sweep"),
        ("new a/b/mine.yaml", "does not exist"),
        ("show bytes.yaml", "bytes.yaml: not UTF-8"),
    ],
}
#: Of these the model is the first word, where no line begins with it.
OF_A_MODEL = {*REFUSED} - {"advise", "bench", "tui", "show", "compare", "export", "recipe"}
#: What is found out with weights alone.
LATE = (
    "=0.9 --target 0.5",
    "other.safetensors",
    "--ranks 64",
    "--ranks 16",
    "skip=3",
    "--method kivi",
    "--calibrate notes",
    "ids.npy",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, other_folder: Path) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("refused")
    for name in ("model", "loaded"):
        save_tiny(path / name, seed=7)
    (path / "empty").mkdir()
    (path / "endless").mkdir()
    endless = '{"thinker_config": {"text_config": {"num_hidden_layers": 1000000000}}}'
    (path / "endless" / "config.json").write_text(endless)
    (path / "short.txt").write_text("abc")
    (path / "empty.txt").touch()
    (path / "notes.txt").write_text(
        "".join(f"Line {i} of a text about caches.\n" for i in range(60))
    )
    np.save(path / "ids.npy", np.random.default_rng(0).integers(3, 90, (8, 48)))
    (path / "bytes.yaml").write_bytes(b"recipe: a\nclaim: \xff\xfe\n")
    (path / "other.json").write_text("{}")
    (path / "new.json").write_text('{"schema": "kvprof/9"}')
    newer = '{"event": "run_started", "format": "kvprof-events/9"}\n'
    for name, text in (("newer", newer), ("hello", "hello\n"), ("blank", "")):
        (path / name).mkdir()
        (path / name / "events.jsonl").write_text(text)
    write_result(path / "jct.json", result_of(stream(("full",))))
    write_result(path / "spectrum.json", spectrum_result())
    write_result(path / "theirs" / "result.json", benchmark_result())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPROF_CACHE", str(tmp_path_factory.mktemp("cache")))
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
    if command in OF_A_MODEL and (line == "" or line[0] == "-"):
        words = ["loaded" if late else "model", *words]
    if command == "bench" and not {"--load", "--device"} & {*words}:
        words += ["--device", "cpu"]
    before = sorted(folder.iterdir())
    done = kvprof(command, *words)
    assert named in (done.stderr if "--points" in words else done.error)
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert late or "calibrating: " not in done.stderr
    assert sorted(folder.iterdir()) == before
