"""Imports stand at the top of a file, but for those that cost time or that a platform may lack."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "kvprof").rglob("*.py")
}

#: Packages that take tenths of a second or more to load, or that an extra or a platform may lack.
COSTLY = {
    *("torch", "transformers", "numpy", "scipy", "textual", "plotext", "matplotlib"),
    *("huggingface_hub", "triton", "ray", "gguf", "lm_eval", "vllm"),
    *("jinja2", "markupsafe"),
    "resource",  # of Unix alone
}
#: Modules that run before kvprof, or where there may be none.
EARLY = {"kvprof", "kvprof.__main__", "kvprof.cli", "kvprof.interrupt"}


@cache
def imports(module: str) -> tuple[tuple[bool, int, str], ...]:
    """Return whether an import stands inside of a function, its line, and what it loads."""

    def found(node: ast.AST, inside: bool) -> Iterator[tuple[bool, int, str]]:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test):
                continue
            if isinstance(one, ast.Import):
                yield from ((inside, one.lineno, name.name) for name in one.names)
            elif isinstance(one, ast.ImportFrom):
                for name in one.names:
                    whole = f"{one.module}.{name.name}"
                    yield inside, one.lineno, whole if whole in FILES else str(one.module)
            yield from found(one, inside or isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))

    return tuple(found(ast.parse(FILES[module].read_text()), False))


@cache
def reaches(module: str) -> frozenset[str]:
    """Return all that loading a module loads."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in FILES:
            waiting += [loaded for inside, _, loaded in imports(name) if not inside]
        if (parent := name.rpartition(".")[0]) in FILES:
            waiting.append(parent)
    return frozenset(seen)


def loads(module: str) -> frozenset[str]:
    """Return the costly packages that loading a module loads."""
    return frozenset(name.partition(".")[0] for name in reaches(module)) & COSTLY


def test_an_import_inside_of_a_function_spares_something():
    """Every one loads a costly package, or a module, that its module has not loaded."""
    idle = [
        f"{FILES[module].relative_to(ROOT)}:{line} loads {loaded}"
        for module in FILES
        if module not in EARLY
        for inside, line, loaded in imports(module)
        if inside
        and not loads(loaded) - loads(module)
        and not (reaches(loaded) - reaches(module)) & FILES.keys()
    ]
    assert not idle, "move these to the top:\n" + "\n".join(idle)


def test_modules_import_each_other_in_no_circle():
    """Not inside of functions either, but where a name is only said in an annotation."""
    needs = {
        module: {loaded for _, _, loaded in imports(module) if loaded in FILES} - {module}
        for module in FILES
    }
    assert len(list(TopologicalSorter(needs).static_order())) == len(FILES)


def test_what_runs_before_kvprof_loads_little():
    for module in EARLY:
        assert not loads(module), module
        top = {loaded for inside, _, loaded in imports(module) if not inside}
        third = {name.partition(".")[0] for name in top} - sys.stdlib_module_names
        assert third <= {"kvprof", "typer", "click", "rich"}, module
