"""Writes the BUILD files: one Bazel target a Python file, its dependencies read from its imports.

    python tools/gen_build.py

A module becomes a py_library, a file that runs as a program a py_binary, tests/**/test_*.py a
py_test, and a command in bin/ a py_binary under its installed name. Run it after adding, moving or
deleting a file or an import; `tests/test_build.py` fails until it has been run.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Import name -> distribution, where the names differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "grpc": "grpcio",
    "tensorflow_serving": "tensorflow-serving-api",
}

# What programs that compare with others import, in environments of their own: not ours to bring.
PEERS = {"ctranslate2", "opennmt", "tokenizers", "torch", "transformers"}

# The commands as tests run them.
COMMANDS = "//bin:commands"

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
        elif top not in sys.stdlib_module_names:
            distributions.add(DISTRIBUTIONS.get(top, top))
    return Imports(frozenset(files - {path}), frozenset(distributions - PEERS))


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


def _package(file: Path) -> str:
    return file.parent.as_posix() if file.parent != Path(".") else ""


def _label(file: Path) -> str:
    folder = _package(file)
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


def _runs_commands(file: Path, root: Path) -> bool:
    """Whether a file under tests/ names bin/ and so needs its commands when it runs."""
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return file.parts[0] == "tests" and any(
        isinstance(string, str) and (string == "bin" or string.startswith("bin/"))
        for string in strings
    )


def _kind(file: Path, root: Path) -> str:
    if file.parts[0] == "tests" and file.name.startswith("test_"):
        return "py_test"
    program = "if __name__ ==" in (root / file).read_text(encoding="utf-8")
    return "py_binary" if program else "py_library"


def _rule(kind: str, **attributes: str | bool | list[str]) -> str:
    """A call in BUILD's syntax, without the attributes that are empty or false."""
    lines = [f"{kind}("]
    for name, value in attributes.items():
        if isinstance(value, list) and len(value) > 1:
            lines += [f"    {name} = [", *(f'        "{item}",' for item in value), "    ],"]
        elif isinstance(value, list) and value:
            lines.append(f'    {name} = ["{value[0]}"],')
        elif isinstance(value, str):
            lines.append(f'    {name} = "{value}",')
        elif value:
            lines.append(f"    {name} = {value},")
    return "\n".join([*lines, ")"])


def _dependencies(file: Path, kind: str, graph: Mapping[Path, Imports]) -> list[str]:
    """Labels in buildifier's order: this package's, this project's, third-party ones."""
    files, distributions = set(graph[file].files), set(graph[file].distributions)
    if kind == "py_test":
        distributions.add("pytest")
        files |= {
            other for other in graph if other.name == "conftest.py" and other.parent in file.parents
        }
    if kind != "py_library":
        reached = {name for member in _closure(file, graph) for name in graph[member].distributions}
        for needs, runtime in RUNTIME.items():
            if needs in reached:
                reached.add(runtime)
                distributions.add(runtime)
    labels = [_local(_label(other), _package(file)) for other in files]
    labels += map(_pip, distributions)
    return sorted(labels, key=lambda label: (":/@".index(label[0]), label.split(":")))


def _rules(file: Path, graph: Mapping[Path, Imports], root: Path) -> list[str]:
    """The targets of one file."""
    kind = _kind(file, root)
    name = _label(file).rpartition("/")[2].rpartition(":")[2]
    dependencies = _dependencies(file, kind, graph)
    if file.parent == Path("bin"):
        # A program's source must end in .py, and no target may be called as a file is.
        copy = f"{name.replace('-', '_')}.py"
        return [
            _rule("genrule", name=f"{name}_py", srcs=[file.name], outs=[copy], cmd="cp $< $@"),
            _rule("py_binary", name=name, srcs=[copy], main=copy, deps=dependencies),
        ]
    commands = [COMMANDS] if _runs_commands(file, root) else []
    if kind == "py_test":
        rule = _rule(
            kind,
            name=name,
            srcs=[file.name],
            args=[f"$(rootpath {file.name})"],
            data=[*commands, "//:pyproject.toml"],
            main_module="pytest",
            tags=["manual"] if file.as_posix() in WHOLE_CHECKOUT else [],
            deps=dependencies,
        )
    else:
        rule = _rule(
            kind,
            name=name,
            testonly=file.parts[0] == "tests",
            srcs=[file.name],
            data=commands,
            deps=dependencies,
        )
    return [rule]


def build_files(root: Path = ROOT) -> dict[Path, str]:
    """Text of every BUILD file, by its path relative to `root`.

    Raises:
        ValueError: an import of this project's names that leads to no file.
    """
    graph = {file: imports(file, root) for file in source_files(root)}
    texts = {}
    for folder in sorted({file.parent for file in graph}):
        members = [file for file in graph if file.parent == folder]
        kinds = ", ".join(f'"{kind}"' for kind in sorted({_kind(file, root) for file in members}))
        blocks = [
            f'load("@rules_python//python:defs.bzl", {kinds})',
            'package(default_visibility = ["//visibility:public"])',
        ]
        if folder == Path("."):
            blocks.append('exports_files(["pyproject.toml", "requirements_lock.txt"])')
        blocks += [rule for file in members for rule in _rules(file, graph, root)]
        if folder == Path("bin"):
            # For tests: the files as they are, and all that these import.
            files = [file.name for file in members]
            programs = [_local(_label(file), "bin") for file in members]
            blocks.append(_rule("filegroup", name="commands", srcs=files, data=programs))
        head = "# Written by tools/gen_build.py.\n"
        texts[folder / "BUILD"] = head + "\n\n".join(blocks) + "\n"
    return texts


def main():
    for path, text in build_files().items():
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
