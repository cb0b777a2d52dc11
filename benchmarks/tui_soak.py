"""The live view under 100,000 events: what a frame costs, and whether memory stays flat.

python benchmarks/tui_soak.py --out docs/benchmarks

Another process writes the events, as a measurement would; the view follows without a terminal, on
each screen in turn. A frame is drawing the screen and laying out and painting what changed; the
first three of a screen that was switched to lay all of it out and are counted apart. A pause is how
long the view could not have answered a key.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from recording import keep
from textual.screen import Screen

from kvprof.records.events import Event, PartSample, RunFinished, StepFinished
from kvprof.records.journal import Journal
from kvprof.tui.app import LiveApp
from kvprof.tui.frame import SCREENS, RunScreen
from kvprof.tui.session import Session
from kvprof.tui.sources import Live
from kvprof.tui.state import RunState

ROOT = Path(__file__).parents[1]
METHODS = ("full", "palu", "fdc")
LAYERS = 32
AIM_SECONDS = 0.016
_FIRST = 3  # frames of a screen that was switched to: drawn, laid out, drawn for its widths


def events(count: int) -> list[Event]:
    """Return so many events of three methods on a model of 32 layers."""
    sys.path.insert(0, str(ROOT))
    from tests.records.streams import stream

    per_step = 6 * LAYERS  # at least
    found = stream(METHODS, layers=LAYERS, steps=-(-count // (per_step * len(METHODS))) + 20)
    end = found[-1]
    assert len(found) > count
    assert isinstance(end, RunFinished)
    return [*found[: count - 1], end]


def write(path: Path, count: int, rate: float) -> None:
    """Write events at a rate, in slices of a fiftieth of a second."""
    made = events(count)
    with Journal(path) as journal:
        for index, event in enumerate(made):
            ahead = index / rate - journal.now()
            if ahead > 0.02:
                time.sleep(ahead)
            journal.emit(event)


async def watch(
    path: Path, count: int, size: tuple[int, int], writer: "subprocess.Popen[bytes]"
) -> dict[str, Any]:
    """Follow the events to their end and return what it cost."""
    session = Session("soak", Live(path), record=path)
    app = LiveApp(session, save_to=path.parent)
    process = psutil.Process()
    frames: dict[str, list[float]] = {name: [] for name in SCREENS}
    memory: list[tuple[int, int]] = []
    pauses: list[float] = []
    switched: list[float] = []
    spent, fresh = 0.0, 0

    # Textual paints what a drawing has changed in a callback of the screen's own.
    paint = Screen._on_timer_update

    def timed_paint(screen: Screen[Any]) -> None:
        nonlocal spent
        start = time.perf_counter()
        paint(screen)
        spent += time.perf_counter() - start

    draw = RunScreen.refresh_all
    label = ("", True)  # of the drawing that is being painted: its screen, and whether it is new

    def timed_draw(screen: RunScreen) -> None:
        nonlocal spent, label, fresh
        name, new = label
        if name:
            (switched if new else frames[name]).append(spent)
        if screen.called != name:
            fresh = _FIRST
        label, fresh = (screen.called, fresh > 0), max(0, fresh - 1)
        start = time.perf_counter()
        draw(screen)
        spent = time.perf_counter() - start

    async def listen() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - start - 0.001)

    # Textual has no hook for a frame's time: its own methods are wrapped, and put back below.
    Screen._on_timer_update = timed_paint  # type: ignore[method-assign]
    RunScreen.refresh_all = timed_draw  # type: ignore[method-assign]
    names = list(SCREENS)
    try:
        async with app.run_test(size=size) as pilot:
            listening = asyncio.create_task(listen())
            shown = 0
            while session.state.end is None:
                if writer.poll():
                    raise RuntimeError("the process that writes the events failed")
                await asyncio.sleep(0.05)
                seen = session.state.version
                if not memory or seen - memory[-1][0] >= count // 40:
                    memory.append((seen, process.memory_info().rss))
                if seen * 3 * len(names) // count > shown:  # each screen three times
                    shown = seen * 3 * len(names) // count
                    await pilot.press(str(shown % len(names) + 1))
            listening.cancel()
            memory.append((session.state.version, process.memory_info().rss))
    finally:  # Textual's own methods, as they were
        Screen._on_timer_update = paint  # type: ignore[method-assign]
        RunScreen.refresh_all = draw  # type: ignore[method-assign]
    return {
        "frames": {name: summary(of) for name, of in frames.items() if of},
        "all_frames": summary([one for of in frames.values() for one in of]),
        "switches": summary(switched),
        "pauses": summary(pauses),
        "memory_bytes": [{"events": seen, "rss": rss} for seen, rss in memory],
    }


def summary(seconds: Sequence[float]) -> dict[str, float | int]:
    """Return the quantiles that a person would notice."""
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "most": ordered[-1],
    }


def cost_of_events(made: Sequence[Event]) -> list[float]:
    """Return seconds per event of each tenth of them, taken by a state alone."""
    state, tenth = RunState(), len(made) // 10
    costs = []
    for first in range(0, tenth * 10, tenth):
        start = time.perf_counter()
        state.add_all(made[first : first + tenth])
        costs.append((time.perf_counter() - start) / tenth)
    return costs


def main() -> None:
    """Soak the view and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=2000.0, help="events per second")
    parser.add_argument("--size", type=int, nargs=2, default=(120, 40), metavar=("COLS", "ROWS"))
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write, arguments.events, arguments.rate)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        command = [
            sys.executable,
            __file__,
            "--write",
            str(path),
            "--events",
            str(arguments.events),
            "--rate",
            str(arguments.rate),
        ]
        with subprocess.Popen(command) as writer:
            found = asyncio.run(watch(path, arguments.events, tuple(arguments.size), writer))
        assert writer.returncode == 0
    made = events(arguments.events)
    kinds = {
        "part": sum(isinstance(event, PartSample) for event in made),
        "step": sum(isinstance(event, StepFinished) for event in made),
    }
    found["seconds_per_event"] = cost_of_events(made)
    keep(
        arguments.out / "tui.json",
        inputs={
            "benchmark": "tui_soak",
            "events": arguments.events,
            "kinds": kinds,
            "rate": arguments.rate,
            "size": list(arguments.size),
            "layers": LAYERS,
            "methods": list(METHODS),
            "aim_seconds": AIM_SECONDS,
            "cores": len(os.sched_getaffinity(0)),
            "terminal": "none: nothing is sent to one",
        },
        data=found,
    )
    shown = {**found["frames"], "all": found["all_frames"], "switches": found["switches"]}
    for name, of in shown.items():
        sys.stdout.write(
            f"{name:<9} median {1e3 * of['median']:.1f} ms, 95 % {1e3 * of['p95']:.1f} ms, "
            f"99 % {1e3 * of['p99']:.1f} ms, most {1e3 * of['most']:.1f} ms, of {of['count']}\n"
        )
    memory = found["memory_bytes"]
    for entry in memory[:: max(1, len(memory) // 8)]:
        sys.stdout.write(f"{entry['events']:>7} events: {entry['rss'] / 2**20:.0f} MiB\n")


if __name__ == "__main__":
    main()
