"""Draw a screen of the live view from a recorded run, as the README shows it.

    python tools/readme_svg.py kvprof/assets/demo --to docs/images/tui.svg
    python tools/readme_svg.py RUN --to cache.svg --keys 3 --until 0.8 --light

The first line draws the README's picture, which a test holds against the view as it is. The run is
a folder with events, or its events. --until stops the replay after that share of the run's time, as
if it were being measured; --keys presses keys before the picture is taken.
"""

import argparse
import asyncio
import re
from pathlib import Path

from kvprof.commands.tui import open_run
from kvprof.records.files import write_text_atomic
from kvprof.tui.app import LiveApp
from kvprof.tui.session import Session

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_TITLE = "kvprof tui"
_SIZE = (138, 36)  # the table of four methods, and the curve beside it


async def picture(
    session: Session, until: float, keys: list[str], size: tuple[int, int], light: bool
) -> str:
    """Return the screen as SVG, without the fonts that a README may not load."""
    state = session.state
    session.source.jump()
    while events := session.source.poll(1000):
        for event in events:
            if event.time <= until:
                state.add(event)
    session.caught_up = True
    # The record lies on disk; the picture is of the moment when it was being written.
    session.source.age = lambda: 0.0  # type: ignore[method-assign]
    app = LiveApp(session, save_to=Path(), light=light)
    app.calm = 0.0
    async with app.run_test(size=size) as pilot:
        await pilot.pause(0.2)
        await pilot.press(*keys)
        for _ in range(3):
            app.draw()
            await pilot.pause(0.1)
        drawn = app.export_screenshot(title=_TITLE, simplify=True)
    return re.sub(r"terminal-\d+", "terminal", _FONTS.sub("", drawn))


def main() -> None:
    """Draw the run named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--until", type=float, default=1.0, help="share of the run's time")
    parser.add_argument("--keys", nargs="*", default=[], help="for example: m 2")
    parser.add_argument("--size", type=int, nargs=2, default=_SIZE, metavar=("COLS", "ROWS"))
    parser.add_argument("--name", help="of the run, in the picture")
    parser.add_argument("--light", action="store_true")
    arguments = parser.parse_args()
    session = open_run(arguments.run)
    if session.record is None:
        parser.error(f"{arguments.run} holds no events")
    session.name = arguments.name or Path(arguments.run).name
    last = open_run(arguments.run)
    last.source.jump()
    end = 0.0
    while events := last.source.poll(1000):
        end = max(end, events[-1].time)
    drawn = asyncio.run(
        picture(
            session, arguments.until * end, arguments.keys, tuple(arguments.size), arguments.light
        )
    )
    write_text_atomic(arguments.to, drawn, force=True)


if __name__ == "__main__":
    main()
