"""What `__all__` names is there, and comes from where type checkers look."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from support.source import all_modules


def bound_names(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """Names that exist once a module was imported, and names → modules imported for type checkers only."""
    bound: set[str] = set()
    for_checkers: dict[str, str] = {}

    def visit(statements: list[ast.stmt]) -> None:
        for node in statements:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for child in node.body:
                    if isinstance(child, ast.ImportFrom) and child.module:
                        for_checkers.update({alias.asname or alias.name: child.module for alias in child.names})
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for name in ("body", "orelse", "finalbody"):
                    visit(getattr(node, name, []))
                for handler in getattr(node, "handlers", []):
                    visit(handler.body)
            else:
                targets = [child for child in ast.walk(node) if isinstance(child, ast.Name)]
                bound.update(target.id for target in targets if isinstance(target.ctx, ast.Store))

    visit(tree.body)
    return bound, for_checkers


def exported_names(tree: ast.Module) -> list[str] | None:
    """The names in `__all__`; None without one."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value
            and "__all__" in [ast.unparse(item) for item in targets]
        ):
            names = ast.literal_eval(node.value)
            assert all(isinstance(name, str) for name in names)
            return list(names)
    return None


MODULES_WITH_ALL = [
    (module, path) for _, module, path in all_modules() if "__all__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize(("module", "path"), MODULES_WITH_ALL, ids=[module for module, _ in MODULES_WITH_ALL])
def test_exported_names_exist(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    exported = exported_names(tree)
    assert exported is not None, f"{module}: __all__ must be a plain list"
    assert len(set(exported)) == len(exported)
    bound, for_checkers = bound_names(tree)
    files = {name: file for _, name, file in all_modules()}
    for name in exported:
        if name in bound:
            continue
        # Imported on first use: the module must have `__getattr__`, and the home that type checkers see must be right.
        assert "__getattr__" in bound, f"{module}.{name} does not exist"
        assert name in for_checkers, f"{module}.{name} does not exist"
        home = for_checkers[name]
        assert home in files, f"{module}.{name}: there is no module {home}"
        bound_there, _ = bound_names(ast.parse(files[home].read_text(encoding="utf-8")))
        assert name in bound_there, f"{home}.{name} does not exist"


@pytest.mark.parametrize("name", ["quire_engine", "quire_engine.models"])
def test_names_loaded_on_first_use_come_from_where_type_checkers_look(name: str) -> None:
    face = import_module(name)
    assert face.__file__ is not None
    _, for_checkers = bound_names(ast.parse(Path(face.__file__).read_text(encoding="utf-8")))
    assert for_checkers == face._HOMES
    assert {getattr(face, one).__name__ for one in face.__all__} == {*face.__all__}


def test_engine_has_no_attribute_that_it_does_not_name() -> None:
    import quire_engine

    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = quire_engine.LLMM
