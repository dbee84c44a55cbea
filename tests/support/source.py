"""The product's source, parsed: its modules and what each imports.

Imports inside functions count, and nothing has to be importable here. An import under `if TYPE_CHECKING:` counts as an
arrow like any other, but it is never executed.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ROOTS", "Import", "all_modules", "imports_in_file", "imports_of", "modules_of"]

_ROOT = Path(__file__).resolve().parents[2]

ROOTS = {
    "quire_kernels": _ROOT / "kernels",
    "quire_engine": _ROOT / "engine",
    "quire_monitoring": _ROOT / "monitoring",
    "quire_backend": _ROOT / "backend",
    "quire_client": _ROOT / "backend",
    "quire_gateway": _ROOT / "backend",
    "quire_cli": _ROOT / "deploy",
    "quire_load": _ROOT / "deploy",
    "quire_dashboard": _ROOT / "dashboard",
}
"""Package → the folder that it stands in."""


@dataclass(frozen=True)
class Import:
    """One imported module, or name of a module."""

    name: str
    """Absolute and dotted; `from a import b` gives `a.b`."""
    line: int
    type_checking: bool


def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    """All imports of a module, at whatever depth, relative ones resolved; `import_module("…")` counts as well."""
    found: list[Import] = []

    def visit(node: ast.AST, type_checking: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, type_checking) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")
                anchor = anchor[: len(anchor) - node.level + is_package]
                base = ".".join([*anchor, base] if base else anchor)
            found.extend(Import(f"{base}.{alias.name}", node.lineno, type_checking) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(Import(node.args[0].value, node.lineno, type_checking))
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                visit(statement, True)
            for statement in node.orelse:
                visit(statement, type_checking)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, type_checking)

    visit(ast.parse(source), False)
    return found


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of a package."""
    for path in sorted((ROOTS[package] / package).rglob("*.py")):
        parts = list(path.relative_to(ROOTS[package]).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def all_modules() -> list[tuple[str, str, Path]]:
    return [(package, module, path) for package in ROOTS for module, path in modules_of(package)]


@cache
def imports_in_file(module: str, path: Path) -> list[Import]:
    return imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
