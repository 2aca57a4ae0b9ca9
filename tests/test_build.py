"""BUILD owns every Python file once, and its dependencies are what the compiled code imports."""

import ast
import modulefinder
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tools import gen_build

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "bin", "examples", "tasks", "tests", "tf_teaforn", "tools")
DISTRIBUTIONS = {
    "absl": "absl_py",
    "grpc": "grpcio",
    "tensorflow_serving": "tensorflow_serving_api",
}
# Of environments beside ours, for comparison.
PEERS = {"ctranslate2", "opennmt", "tokenizers", "torch", "transformers"}
# May be asked for without being imported: keras' backend, tf.summary's writer, the test runner.
RUNTIME = {"@pip//tensorflow", "@pip//tensorboard", "@pip//pytest"}


def python_files():
    files = [Path("setup.py")]
    for folder in FOLDERS:
        files += [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
    files += [p.relative_to(ROOT) for p in (ROOT / "bin").iterdir() if not p.suffix and p.is_file()]
    return sorted(set(files) - {Path("bin/BUILD")})


def parse(build_file):
    """[(kind, {attribute: value})] of the calls in a BUILD file: Starlark reads as Python."""
    calls = []
    for statement in ast.parse((ROOT / build_file).read_text(encoding="utf-8")).body:
        call = statement.value
        attributes = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        calls.append((call.func.id, attributes))
    return calls


def absolute(label, folder):
    """The one spelling of a label that names its target too."""
    if label.startswith(":"):
        return f"//{folder}{label}"
    if label.startswith("//") and ":" not in label:
        return f"{label}:{label.rpartition('/')[2]}"
    return label


@pytest.fixture(scope="module")
def rules():
    """{label: (kind, attributes, folder)} over all BUILD files."""
    build_files = [Path("BUILD")]
    for folder in FOLDERS:
        build_files += [path.relative_to(ROOT) for path in (ROOT / folder).rglob("BUILD")]
    rules = {}
    for build_file in build_files:
        folder = build_file.parent.as_posix().removeprefix(".")
        for kind, attributes in parse(build_file):
            if "name" in attributes:
                label = f"//{folder}:{attributes['name']}"
                assert label not in rules, f"{label} is declared twice"
                rules[label] = (kind, attributes, folder)
    return rules


@pytest.fixture(scope="module")
def owners(rules):
    """{file: label} of the Python rules' sources; a genrule's copy stands for what it copies."""
    copies = {
        f"{folder}/{attributes['outs'][0]}": f"{folder}/{attributes['srcs'][0]}"
        for kind, attributes, folder in rules.values()
        if kind == "genrule"
    }
    owners = {}
    for label, (kind, attributes, folder) in rules.items():
        if not kind.startswith("py_"):
            continue
        for source in attributes["srcs"]:
            file = (Path(folder) / source).as_posix()
            file = Path(copies.get(file, file))
            assert file not in owners, f"{file} is owned by {owners[file]} and by {label}"
            owners[file] = label
    return owners


def compiled_imports(file):
    """Dotted names that the byte code of `file` and of all functions in it imports."""
    finder = modulefinder.ModuleFinder()
    queue = [compile((ROOT / file).read_bytes(), str(file), "exec", dont_inherit=True)]
    while queue:
        code = queue.pop()
        queue += [value for value in code.co_consts if isinstance(value, types.CodeType)]
        for what, details in finder.scan_opcodes(code):
            if what == "absolute_import":
                names, module = details
            elif what == "relative_import":
                level, names, module = details
                above = file.parts[: len(file.parts) - level]
                module = ".".join([*above, *([module] if module else [])])
            else:
                continue
            yield from [f"{module}.{name}" for name in names] if names else [module]


def expected_dependencies(file, owners):
    dependencies = set()
    for name in compiled_imports(file):
        top = name.partition(".")[0]
        if top in FOLDERS:
            parts = name.split(".")
            # The longest prefix that is a file: the rest is a name inside the module.
            candidates = [
                candidate
                for length in range(len(parts), 0, -1)
                for candidate in (
                    Path(*parts[:length]).with_suffix(".py"),
                    Path(*parts[:length]) / "__init__.py",
                )
            ]
            target = next(candidate for candidate in candidates if candidate in owners)
            dependencies.add(owners[target])
        elif top not in sys.stdlib_module_names and top not in PEERS:
            dependencies.add(f"@pip//{DISTRIBUTIONS.get(top, top)}")
    return dependencies - {owners[file]}


def test_every_python_file_is_owned_once_by_the_package_it_lies_in(owners):
    assert sorted(owners) == python_files()
    assert {file: label.partition(":")[0] for file, label in owners.items()} == {
        file: "//" + file.parent.as_posix().removeprefix(".") for file in owners
    }


def test_no_python_file_lies_elsewhere():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()}
    assert tracked <= set(python_files())


def test_dependencies_are_the_imports(rules, owners):
    wrong = {}
    for file, label in owners.items():
        kind, attributes, folder = rules[label]
        declared = {absolute(dependency, folder) for dependency in attributes.get("deps", [])}
        assert len(declared) == len(attributes.get("deps", [])), f"{label} repeats a dependency"
        if kind != "py_library":
            declared -= RUNTIME
            declared -= {owner for path, owner in owners.items() if path.name == "conftest.py"}
        expected = expected_dependencies(file, owners) - (
            RUNTIME if kind != "py_library" else set()
        )
        if declared != expected:
            wrong[label] = {"missing": expected - declared, "unused": declared - expected}
    assert not wrong


def test_every_dependency_exists_and_none_leads_in_a_circle(rules):
    graph = {
        label: {
            absolute(dependency, folder)
            for dependency in attributes.get("deps", []) + attributes.get("data", [])
            if not dependency.startswith("@") and dependency != "//:pyproject.toml"
        }
        for label, (_, attributes, folder) in rules.items()
    }
    assert set().union(*graph.values()) <= set(graph)
    done, trail = set(), []

    def visit(label):
        assert label not in trail, f"circle: {' -> '.join([*trail, label])}"
        if label not in done:
            trail.append(label)
            for dependency in graph[label]:
                visit(dependency)
            done.add(trail.pop())

    for label in graph:
        visit(label)


def test_every_test_is_a_py_test_that_runs_pytest_on_it(rules, owners):
    tests = {file for file in owners if file.parts[0] == "tests" and file.match("test_*.py")}
    assert tests == {file for file, label in owners.items() if rules[label][0] == "py_test"}
    for file in tests:
        _, attributes, _ = rules[owners[file]]
        assert attributes["main_module"] == "pytest"
        assert attributes["args"] == [f"$(rootpath {file.name})"]
        assert "@pip//pytest" in attributes["deps"]


def test_third_party_dependencies_are_locked(rules):
    locked = {
        re.split("[=;@ ]", line)[0].lower().replace("-", "_").replace(".", "_")
        for line in (ROOT / "requirements_lock.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    asked = {
        dependency.removeprefix("@pip//")
        for _, attributes, _ in rules.values()
        for dependency in attributes.get("deps", [])
        if dependency.startswith("@")
    }
    assert asked <= locked
    module = dict(parse_module())
    assert module["pip.parse"]["requirements_lock"] == "//:requirements_lock.txt"
    assert module["pip.parse"]["hub_name"] == "pip"


def parse_module():
    """(function, keyword arguments) of the calls in MODULE.bazel."""
    for node in ast.walk(ast.parse((ROOT / "MODULE.bazel").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.literal_eval(k.value) for k in node.keywords}


def test_build_files_are_up_to_date():
    stale = [
        str(path)
        for path, text in gen_build.build_files().items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text
    ]
    assert not stale, "Run python tools/gen_build.py"
