"""Who imports whom, read from the sources: `python -m tests.support.import_graph` prints it and fails on a cycle.

Every import counts: those inside functions, and those for type checkers alone.
"""

import ast
import sys
from collections.abc import Container, Iterator, Mapping, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("plugins", "model_defs", "kvforge")
Graph = Mapping[str, Set[str]]


def imported_names(file: Path) -> set[tuple[str, str]]:
    """Return what a file imports: (module, name taken from it), the name empty where the module itself is imported."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def imported_modules(file: Path, known: Container[str] = frozenset()) -> set[str]:
    """Return the modules that a file imports; a name that is a module of ``known`` counts as that, not its package."""
    names = {(module, f"{module}.{name}") for module, name in imported_names(file)}
    return {full if full in known else module for module, full in names}


def module_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return for each module of the product the modules of the product that it imports."""
    files = {module_name(file.relative_to(root)): file for top in TOPS for file in sorted((root / top).rglob("*.py"))}
    return {module: imported_modules(file, files) & files.keys() - {module} for module, file in files.items()}


def module_name(path: Path) -> str:
    """Return the dotted name of a file below the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms(graph: Graph) -> dict[str, set[str]]:
    """Return the same graph between rooms, which :func:`room` tells."""
    between: dict[str, set[str]] = {}
    for module, imports in graph.items():
        here = room(module, graph)
        between.setdefault(here, set()).update({room(other, graph) for other in imports} - {here})
    return between


def room(module: str, graph: Graph) -> str:
    """Return the folder of a module, at most three deep: `kvforge.runtime.step`; modules that lie beside rooms, such as
    `kvforge.runtime.engine`, stand for themselves."""
    parts = module.split(".")
    if parts[0] != "kvforge":
        return parts[0]
    beside_rooms = parts[:2] in (["kvforge", "runtime"], ["kvforge", "serving"], ["kvforge", "gateway"])
    return ".".join(parts[: 3 if beside_rooms else 2])


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other, by repeatedly leaving out what imports nothing that is left, or
    is imported by nothing that is left."""
    left = {node: set(imports) for node, imports in graph.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        ends = {node for node, imports in left.items() if not imports & left.keys() or node not in imported}
        if not ends:
            return [sorted(left)] if left else []
        left = {node: imports - ends for node, imports in left.items() if node not in ends}


def layers(graph: Graph) -> Iterator[list[str]]:
    """Yield the nodes of an acyclic graph, each after all that it imports."""
    done: set[str] = set()
    while len(done) < len(graph):
        ready = sorted(node for node, imports in graph.items() if node not in done and imports <= done)
        assert ready, "the graph has a cycle"
        yield ready
        done |= set(ready)


def main() -> int:
    """Print the rooms, each after all that it imports, then the cycles among modules; 1 where there is any."""
    modules = module_graph()
    between = rooms(modules)
    found = cycles(modules) + cycles(between)
    if not found:
        for number, layer in enumerate(layers(between)):
            for name in layer:
                print(f"{number:2} {name:32} {' '.join(sorted(between[name])) or '-'}")
    num_imports = sum(map(len, modules.values()))
    print(f"{len(modules)} modules, {num_imports} imports among them, {len(between)} rooms, {len(found)} cycles")
    for cycle in found:
        print("cycle:", " ".join(cycle))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
