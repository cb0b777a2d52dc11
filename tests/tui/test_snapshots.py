"""Whole screens as SVG, in dark, light and without colour, at every width that must work.

They hold for the versions in ``snapshots/versions.json``; under others they are skipped, because
another Textual draws other pixels. After a change that is meant, look at what it changed:

    KVPROF_SNAPSHOTS=write pytest -n0 tests/tui/test_snapshots.py
"""

import json
import os
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from kvprof.records.events import CaseStarted, TelemetrySample
from tests.records.streams import stream
from tests.tui.loads import load
from tests.tui.running import press, recorded, settle, show

FOLDER = Path(__file__).parent / "snapshots"
VERSIONS = {name: version(name) for name in ("textual", "rich", "plotext")}
WRITE = os.environ.get("KVPROF_SNAPSHOTS") == "write"

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def gpu(events):
    """Return the events as a GPU would have sent them."""
    values = {
        "sm_mhz": 1980.0,
        "power_w": 612.0,
        "temperature_c": 61.0,
        "memory_bytes": 3.4e10,
        "utilisation": 0.97,
    }
    for index, event in enumerate(events):
        if isinstance(event, TelemetrySample):
            power = 600.0 + index % 90
            reasons = ("power cap",) if index > len(events) * 0.8 else ()
            yield replace(
                event, device="gpu 0", values=values | {"power_w": power}, throttled=reasons
            )
        else:
            yield event


def under_way():
    """Return the events of a run whose third method has just begun."""
    events = stream(("full", "palu", "fdc"), layers=6, steps=24)
    starts = [index for index, event in enumerate(events) if isinstance(event, CaseStarted)]
    return list(gpu(events[: starts[2] + 160]))


def finished():
    """Return the events of a finished run of four methods."""
    return list(gpu(stream(("full", "palu", "fdc", "tale"), layers=16, steps=24)))


def load_under_way():
    """Return the events of a load whose second method is at its second rate."""
    events = load()
    return events[: len(events) * 3 // 4]


SCREENS = {
    "overview-80": (under_way, (80, 24), "dark", ()),
    "overview-120": (under_way, (120, 40), "dark", ()),
    "overview-120-mono": (finished, (120, 50), "mono", ("b", "s")),
    "layers-120": (finished, (120, 40), "dark", ("2", "m", "m", "s", "slash", "0", "minus", "9")),
    "cache-120": (finished, (120, 44), "dark", ("3",)),
    "log-80": (finished, (80, 24), "dark", ("4",)),
    "help-80-light": (under_way, (80, 40), "light", ("question_mark",)),
    "load-80": (load_under_way, (80, 24), "dark", ()),
    "load-120": (load, (120, 44), "dark", ()),
    "load-120-mono": (load, (120, 40), "mono", ("N", "m")),
    "narrow-40": (under_way, (40, 16), "dark", ()),
}


def normal(svg):
    """Return an SVG without what is not the screen's: the fonts, and a name made of its content."""
    svg = _FONTS.sub("", svg)
    svg = re.sub(r"terminal-\d+", "terminal", svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def drawn(folder, make, size, look, keys):
    found = {}

    async def steps(app, pilot):
        await press(app, pilot, *keys)
        # Until nothing moves any more: on a busy machine a layout comes late.
        before = ""
        for _ in range(20):
            await pilot.pause()
            await settle(app, pilot)
            found["svg"] = normal(app.export_screenshot(simplify=True))
            if found["svg"] == before:
                break
            before = found["svg"]

    session = recorded(folder, make)
    # An unfinished record that lies on disk is a killed run; here it is one under way.
    session.source.age = lambda: 0.0
    show(session, folder, steps, size=size, light=look == "light")
    return found["svg"]


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_looks_as_it_did(name, tmp_path, monkeypatch):
    make, size, look, keys = SCREENS[name]
    monkeypatch.delenv("NO_COLOR", raising=False)
    if look == "mono":
        monkeypatch.setenv("NO_COLOR", "1")
    path = FOLDER / f"{name}.svg"
    if WRITE:
        path.write_text(drawn(tmp_path, make, size, look, keys))
        (FOLDER / "versions.json").write_text(json.dumps(VERSIONS, indent=1) + "\n")
        return
    pinned = json.loads((FOLDER / "versions.json").read_text())
    if pinned != VERSIONS:
        pytest.skip(f"the snapshots are of {pinned}, here are {VERSIONS}")
    now = drawn(tmp_path, make, size, look, keys)
    if now != path.read_text():
        (tmp_path / path.name).write_text(now)
        pytest.fail(f"{name} looks different; compare {tmp_path / path.name} with {path}")


def test_every_snapshot_is_looked_at():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(SCREENS)


def test_without_colour_nothing_has_one():
    """What NO_COLOR leaves is the picture's own ground and ink (a grey), and shades of them."""
    for path in FOLDER.glob("*-mono.svg"):
        screen = path.read_text().split("<svg", 1)[1]
        for colour in set(re.findall(r"fill: #([0-9a-f]{6})", screen)):
            channels = [int(colour[i : i + 2], 16) for i in (0, 2, 4)]
            assert max(channels) - min(channels) <= 3, (path.name, colour)
