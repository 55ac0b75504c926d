"""Draws what architecture.md shows from the code: the picture from imports, the map from docstrings.

python docs/architecture.py          writes both into docs/architecture.md
python docs/architecture.py --check  exits with 1 if the page does not show what is there
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import grimp

DOCS = Path(__file__).parent
PAGE = DOCS / "architecture.md"
SOURCE = DOCS.parent / "src"
PACKAGES = ("zerofunc", "zerofunc_testing")
BEGIN, END = "<!-- begin: docs/architecture.py -->\n", "<!-- end -->\n"


def purpose(file: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0].replace("|", "\\|")


def arrows() -> dict[str, set[str]]:
    """For each folder, those whose files its files import."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found: dict[str, set[str]] = {folder: set() for folder in folders()}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            source, target = folder_of(module), folder_of(imported)
            if source in found and target in found and source != target:
                found[source].add(target)
    return found


def folder_of(module: str) -> str:
    first, *rest = module.split(".")
    return first if first != "zerofunc" else "".join(rest[:1])


def folders() -> list[str]:
    """Folders of the package, and the other package."""
    return sorted(path.parent.name for path in (SOURCE / "zerofunc").glob("*/__init__.py")) + list(PACKAGES[1:])


def floors(edges: dict[str, set[str]]) -> dict[str, int]:
    """How many imports, at most, a folder stands above those that import no other."""
    heights: dict[str, int] = {}
    while len(heights) < len(edges):
        ready = [folder for folder, below in edges.items() if folder not in heights and below <= heights.keys()]
        assert ready, f"a circle of imports among {edges.keys() - heights.keys()}"
        heights |= {folder: max([heights[other] + 1 for other in edges[folder]], default=0) for folder in ready}
    return heights


def direct(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no other way through the picture says already."""
    reach: dict[str, set[str]] = {}
    for folder in sorted(edges, key=floors(edges).__getitem__):
        reach[folder] = edges[folder].union(*(reach[other] for other in edges[folder]))
    return [
        (folder, other)
        for folder, below in sorted(edges.items())
        for other in sorted(below)
        if not any(other in reach[between] for between in below - {other})
    ]


def picture(edges: dict[str, set[str]]) -> str:
    lines = [f"  {folder} --> {other}" for folder, other in direct(edges)]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def shown() -> str:
    """What the page shows between its marks."""
    edges = arrows()
    heights = floors(edges)
    parts = [
        f'{len(edges)} folders on {max(heights.values()) + 1} floors. An arrow means "imports"; one that follows from '
        "others is left out.",
        picture(edges),
    ]
    for folder in sorted(edges, key=lambda name: (heights[name], name)):
        place = SOURCE / (folder if folder in PACKAGES else f"zerofunc/{folder}")
        files = [file for file in sorted(place.rglob("*.py")) if file.name != "__init__.py"]
        rows = [f"| `{file.relative_to(place).as_posix()}` | {purpose(file)} |" for file in files]
        parts += [f"### {folder}", purpose(place / "__init__.py"), "\n".join(["| file | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    new = shown()
    if "--check" in sys.argv:
        if old != new:
            print("docs/architecture.md is not what the code shows: run python docs/architecture.py", file=sys.stderr)
        return int(old != new)
    PAGE.write_text(f"{before}{BEGIN}{new}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
