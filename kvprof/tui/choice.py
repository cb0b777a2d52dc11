"""What the person at the screen has chosen to look at; nothing of it changes the measurement."""

from dataclasses import dataclass, field

from kvprof.tui.layer_rows import LayerFilter
from kvprof.tui.state import CaseState, RunState

__all__ = ["Choice"]

Request = tuple[int, int, int]


@dataclass
class Choice:
    """The chosen request, method, baseline, order and filter; None leaves it to the run.

    Attributes
    ----------
    request : tuple or None
        None follows what is being measured.
    method : str or None
        None follows what is being measured.
    baseline : str or None
        None is the run's own.
    sort, descending : str, bool
        Column of the table of layers, and its direction.
    layers : LayerFilter
    parts_by_size, processors_by_load : bool
        Order of the parts and of the multiprocessors; otherwise as they are numbered.
    small_parts : bool
        Whether parts of little time have rows of their own.
    """

    request: Request | None = None
    method: str | None = None
    baseline: str | None = None
    sort: str = "layer"
    descending: bool = False
    layers: LayerFilter = field(default_factory=LayerFilter)
    parts_by_size: bool = False
    processors_by_load: bool = False
    small_parts: bool = False

    def shown_request(self, state: RunState) -> Request | None:
        """Return the request on the screen."""
        requests = state.requests()
        if self.request in requests:
            return self.request
        return requests[-1] if requests else None

    def shown_cases(self, state: RunState) -> list[CaseState]:
        """Return the cases on the screen: every method at one request."""
        request = self.shown_request(state)
        return state.cases_of(request) if request is not None else []

    def shown_case(self, state: RunState) -> CaseState | None:
        """Return the chosen case, or the one that is being measured, or the last one."""
        cases = self.shown_cases(state)
        for case in cases:
            if case.method == self.method:
                return case
        return cases[-1] if cases else None

    def baseline_method(self, state: RunState) -> str | None:
        """Return the method that others are held against."""
        if self.baseline is not None:
            return self.baseline
        return state.run.baseline if state.run is not None else None

    def baseline_case(self, state: RunState) -> CaseState | None:
        """Return the baseline at the shown request; None where it was not measured."""
        wanted = self.baseline_method(state)
        return next((c for c in self.shown_cases(state) if c.method == wanted), None)

    def next_method(self, state: RunState) -> str | None:
        """Choose the next method of the shown request, and return it."""
        case = self.shown_case(state)
        methods = [c.method for c in self.shown_cases(state)]
        self.method = _after(methods, case.method if case is not None else None)
        return self.method

    def next_baseline(self, state: RunState) -> str | None:
        """Choose the next method as the baseline, and return it."""
        methods = [c.method for c in self.shown_cases(state)]
        self.baseline = _after(methods, self.baseline_method(state))
        return self.baseline

    def move_request(self, state: RunState, by: int) -> Request | None:
        """Choose the request before or after the shown one, and return it."""
        requests, shown = state.requests(), self.shown_request(state)
        if shown is None:
            return None
        self.request = requests[(requests.index(shown) + by) % len(requests)]
        return self.request


def _after(names: list[str], name: str | None) -> str | None:
    """Return the name that follows `name` in a circle; the first where it is not among them."""
    if not names:
        return None
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]
