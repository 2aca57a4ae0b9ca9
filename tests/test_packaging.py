"""`pip install .` brings all that the commands need, and nothing else."""

import ast
import os
import shutil
import site
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import gen_build

ROOT = Path(__file__).resolve().parent.parent


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def packaged_files():
    return [file for file in gen_build.source_files() if file.parts[0] in ("tf_teaforn", "tasks")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy, so that no build folder is left in the checkout.
    for file in [*gen_build.source_files(), "pyproject.toml", "README.md", "LICENSE"]:
        (folder / "source" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / "source" / file)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
    done = run(sys.executable, "-m", "pip", "wheel", folder / "source", *options)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def dist_info(wheel):
    """{file name: text} of the wheel's metadata folder."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name.partition(".dist-info/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }


@pytest.fixture(scope="module")
def requirements(dist_info):
    values = Parser().parsestr(dist_info["METADATA"]).get_all("Requires-Dist")
    return [Requirement(value) for value in values]


@pytest.fixture(scope="module")
def entry_points(dist_info):
    """{command: "module:function"}."""
    head, *lines = dist_info["entry_points.txt"].split("\n")
    assert head == "[console_scripts]"
    return dict(line.split(" = ") for line in lines if line)


def test_wheel_holds_the_package_and_its_tasks_only(wheel, dist_info):
    assert wheel.name == "tf_teaforn-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = sorted(Path(name) for name in archive.namelist() if ".dist-info/" not in name)
    assert files == packaged_files()
    licenses = [text for name, text in dist_info.items() if name.endswith("LICENSE")]
    assert licenses == [(ROOT / "LICENSE").read_text(encoding="utf-8")]


def test_each_command_in_bin_is_installed(entry_points):
    commands = [file.name for file in gen_build.source_files() if file.parts[0] == "bin"]
    assert entry_points == {f"teaforn-{name}": f"tf_teaforn.cli.{name}:main" for name in commands}


def test_each_entry_point_is_a_function_without_required_arguments(entry_points):
    for target in entry_points.values():
        module, function = target.split(":")
        tree = ast.parse((ROOT / Path(*module.split(".")).with_suffix(".py")).read_text("utf-8"))
        (main,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        assert len(main.args.defaults) == len(main.args.args), f"{target} takes arguments"


def test_requirements_are_what_the_code_imports(requirements):
    required = {canonicalize_name(need.name) for need in requirements if "extra" not in str(need)}
    imported = {
        canonicalize_name(name)
        for file in packaged_files()
        for name in gen_build.imports(file).distributions
    }
    # JAX and Beam are extras; the other two are loaded by name or by tensorflow-datasets.
    extras = {"apache-beam", "jax", "jaxlib"}
    assert required == (imported - extras) | {"importlib-resources", "tensorboard"}


def test_locked_versions_meet_the_requirements(requirements):
    lines = (ROOT / "requirements_lock.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    locked = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    for need in requirements:
        if need.marker is None or need.marker.evaluate({"extra": "test"}):
            assert locked[canonicalize_name(need.name)] in need.specifier, str(need)


def test_installed_commands_work_outside_the_checkout(wheel, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (python,) = environment.glob("bin/python")
    options = ["--quiet", "--no-deps", "--no-index"]
    done = run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    assert done.returncode == 0, done.stderr
    # The dependencies, from where the tests run. A path in a .pth file brings no editable installs.
    (site_packages,) = environment.glob("lib/*/site-packages")
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (site_packages / "dependencies.pth").write_text("\n".join(parents))

    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import tasks, tf_teaforn; print(tasks.__file__, tf_teaforn.__file__, sep='\\n')"
    found = run(python, "-c", code, cwd=tmp_path, env=clean).stdout.splitlines()
    assert [Path(file).parent.parent for file in found] == [site_packages] * 2
    train = environment / "bin" / "teaforn-train"
    assert "--model_dir" in run(train, "--help", cwd=tmp_path, env=clean).stdout
    wrong = run(train, "--task=none", "--model_dir=model", cwd=tmp_path, env=clean)
    assert wrong.returncode == 2
    assert "demo_enfr" in wrong.stderr and "wmt14_ende" in wrong.stderr
