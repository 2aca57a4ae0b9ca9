"""Writes the BUILD files: one Bazel target a Python file, its dependencies read from its imports.

    python tools/gen_build.py

A module becomes a py_library, a file that runs as a program a py_binary, tests/**/test_*.py a
py_test, and a command in bin/ a py_binary under its installed name. Run it after adding, moving or
deleting a file or an import; `tests/test_build.py` fails until it has been run.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Import name -> distribution, where the names differ.
DISTRIBUTIONS = {"absl": "absl-py"}

# What a program needs besides what it imports: Keras loads its backend, and tf.summary its writer,
# by name.
RUNTIME = {"keras": "tensorflow", "tensorflow": "tensorboard"}

# Tests that read the checkout as a whole or install it, which Bazel's sandbox does not hold.
WHOLE_CHECKOUT = {"tests/test_build.py", "tests/test_layering.py", "tests/test_packaging.py"}


class Imports(NamedTuple):
    """What one file imports, by itself."""

    files: frozenset[Path]  # of this project, relative to its root
    distributions: frozenset[str]  # third-party ones


def source_files(root: Path = ROOT) -> tuple[Path, ...]:
    """Every Python file of the checkout, relative to `root`, sorted; commands in bin/ included.

    Hidden folders, virtual environments and build outputs are no part of it.
    """

    def walk(folder: Path) -> Iterator[Path]:
        for path in folder.iterdir():
            if path.is_dir():
                skip = path.name.startswith((".", "bazel-")) or path.name.endswith(".egg-info")
                if skip or path.name in ("build", "dist", "runs", "__pycache__"):
                    continue
                if not (path / "pyvenv.cfg").exists():
                    yield from walk(path)
            elif path.suffix == ".py" or (folder == root / "bin" and path.suffix == ""):
                if path.name != "BUILD":
                    yield path.relative_to(root)

    return tuple(sorted(walk(root)))


def imports(path: Path, root: Path = ROOT) -> Imports:
    """What `path` (relative to `root`) imports, anywhere in it, under a condition or not.

    Raises:
        ValueError: an import of this project's names that leads to no file.
    """
    files, distributions = set(), set()
    own = {entry.name for entry in root.iterdir() if entry.is_dir()}
    for name in _imported_names(path, root):
        top = name.split(".")[0]
        if top in own:
            files.add(_module_file(name, path, root))
        elif top not in sys.stdlib_module_names and top != "__future__":
            distributions.add(DISTRIBUTIONS.get(top, top))
    return Imports(frozenset(files - {path}), frozenset(distributions))


def _imported_names(path: Path, root: Path) -> Iterator[str]:
    """Dotted names: modules, and for `from m import n` m.n, which may be a module or not."""
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.parts[: len(path.parts) - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _module_file(name: str, importer: Path, root: Path) -> Path:
    """The file behind a dotted name, whose last part may be a name inside the module."""
    whole = Path(*name.split("."))
    for module in (whole, whole.parent):
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if (root / file).is_file():
                return file
    raise ValueError(f"{importer} imports {name}, which is no file of this project")


def _label(file: Path) -> str:
    folder = file.parent.as_posix() if file.parent != Path(".") else ""
    if file.parent == Path("bin"):
        return f"//bin:teaforn-{file.name}"
    name = file.parent.name if file.name == "__init__.py" else file.stem
    return f"//{folder}" if name == file.parent.name else f"//{folder}:{name}"


def _pip(distribution: str) -> str:
    return "@pip//" + distribution.lower().replace("-", "_").replace(".", "_")


def _local(label: str, folder: str) -> str:
    """A label as written inside the package `folder`."""
    if label == f"//{folder}":
        return f":{Path(folder).name}"
    return label.removeprefix(f"//{folder}") if label.startswith(f"//{folder}:") else label


def _closure(file: Path, graph: Mapping[Path, Imports]) -> frozenset[Path]:
    seen, queue = set(), [file]
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            queue.extend(graph[current].files)
    return frozenset(seen)


def _is_test(file: Path) -> bool:
    return file.parts[0] == "tests" and file.name.startswith("test_")


def _is_program(file: Path, root: Path) -> bool:
    if file.parent == Path("bin"):
        return True
    return "if __name__ ==" in (root / file).read_text(encoding="utf-8")


def _rule(kind: str, **attributes: str | bool | Iterable[str]) -> str:
    lines = [f"{kind}("]
    for name, value in attributes.items():
        if isinstance(value, str):
            lines.append(f'    {name} = "{value}",')
        elif isinstance(value, bool):
            lines.append(f"    {name} = {value},")
        elif len(items := list(value)) == 1:
            lines.append(f'    {name} = ["{items[0]}"],')
        elif items:
            lines += [f"    {name} = [", *(f'        "{item}",' for item in items), "    ],"]
    return "\n".join([*lines, ")"])


def _target(file: Path, graph: Mapping[Path, Imports], root: Path) -> Iterator[tuple[str, str]]:
    """(kind, rule) for each target of one file."""
    folder = file.parent.as_posix() if file.parent != Path(".") else ""
    label = _label(file)
    name = label.rpartition(":")[2].rpartition("/")[2]
    program, test = _is_program(file, root), _is_test(file)
    files, distributions = set(graph[file].files), set(graph[file].distributions)
    if program or test:
        if test:
            files |= {
                conftest
                for conftest in graph
                if conftest.name == "conftest.py" and conftest.parent in file.parents
            }
            distributions.add("pytest")
        reached = {name for member in _closure(file, graph) for name in graph[member].distributions}
        for needs, runtime in RUNTIME.items():
            if needs in reached:
                distributions.add(runtime)
                reached.add(runtime)
    dependencies = [_local(_label(other), folder) for other in files]
    dependencies += map(_pip, distributions)
    dependencies.sort(key=lambda label: (":/@".index(label[0]), label.split(":")))
    if file.parent == Path("bin"):
        copy = f"{name.replace('-', '_')}.py"
        yield (
            "genrule",
            _rule("genrule", name=f"{name}_py", srcs=[file.name], outs=[copy], cmd="cp $< $@"),
        )
        yield "py_binary", _rule("py_binary", name=name, srcs=[copy], main=copy, deps=dependencies)
    elif test:
        extra = {"tags": ["manual"]} if file.as_posix() in WHOLE_CHECKOUT else {}
        yield (
            "py_test",
            _rule(
                "py_test",
                name=name,
                srcs=[file.name],
                args=[f"$(rootpath {file.name})"],
                data=["//:pyproject.toml"],
                main_module="pytest",
                **extra,
                deps=dependencies,
            ),
        )
    else:
        kind = "py_binary" if program else "py_library"
        test_only = {"testonly": True} if file.parts[0] == "tests" else {}
        yield kind, _rule(kind, name=name, **test_only, srcs=[file.name], deps=dependencies)


def build_files(root: Path = ROOT) -> dict[Path, str]:
    """Text of every BUILD file, by its path relative to `root`.

    Raises:
        ValueError: an import of this project's names that leads to no file.
    """
    graph = {file: imports(file, root) for file in source_files(root)}
    texts = {}
    for folder in sorted({file.parent for file in graph}):
        members = [file for file in graph if file.parent == folder]
        targets = [target for file in members for target in _target(file, graph, root)]
        kinds = sorted({kind for kind, _ in targets} - {"genrule"})
        load = ", ".join(f'"{kind}"' for kind in kinds)
        blocks = [
            f'load("@rules_python//python:defs.bzl", {load})',
            'package(default_visibility = ["//visibility:public"])',
        ]
        if folder == Path("."):
            blocks.append('exports_files(["pyproject.toml", "requirements_lock.txt"])')
        if folder == Path("bin"):
            names = "".join(f'    "{file.name}",\n' for file in members)
            blocks.append(f"exports_files([\n{names}])")
        blocks += [rule for _, rule in targets]
        head = "# Written by tools/gen_build.py.\n"
        texts[folder / "BUILD"] = head + "\n\n".join(blocks) + "\n"
    return texts


def main():
    for path, text in build_files().items():
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
