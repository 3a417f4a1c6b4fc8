"""What `make dist` built: the wheels work where there is no compiler, and the sdist holds what it should.

Run by `make dist-test`, in the environment of its tools. `DIST_PYTHON` is the Python of the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
SYSTEM_LIBRARIES = {
    *("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"),
    *("libdl.so.2", "libpthread.so.0"),  # part of libc since glibc 2.34
}
TRAIN = """
import numpy, everystep
state = {"weights": numpy.arange(500_000, dtype=numpy.float32), "epoch": 3, "name": "bare"}
everystep.save("runs/first", state)
loaded = everystep.load("runs/first")
assert numpy.array_equal(loaded.pop("weights"), state.pop("weights")) and loaded == state
print(everystep.__file__)
"""


def the_one(pattern: str) -> Path:
    (found,) = DIST.glob(pattern)
    return found


class Bare:
    """An environment with nothing but pip in it, and a search path with nothing but that environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        python = os.environ.get("DIST_PYTHON") or sys.executable
        subprocess.run([python, "-m", "venv", directory / "env"], check=True)
        kept = {
            name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name
        }
        self.environment = {**kept, "PATH": str(directory / "env/bin"), "HOME": str(directory)}

    def run(self, *command: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    made = Bare(tmp_path_factory.mktemp("bare"))
    pip = made.directory / "env/bin/pip"
    made.run(pip, "install", "--quiet", "--only-binary", ":all:", the_one("everystep-*.whl"))
    return made


@pytest.mark.parametrize("compiler", ["cc", "c++", "gcc", "g++", "clang", "cmake", "ninja"])
def test_the_environment_has_no_compiler(bare: Bare, compiler: str) -> None:
    assert shutil.which(compiler, path=bare.environment["PATH"]) is None


def test_the_wheel_saves_and_loads(bare: Bare) -> None:
    where = bare.run(bare.directory / "env/bin/python", "-c", TRAIN)
    assert Path(where.strip()).is_relative_to(bare.directory)
    assert "weights" in bare.run(bare.directory / "env/bin/everystep", "show", "runs/first")
    bare.run(bare.directory / "env/bin/everystep", "verify", "runs/first")


def test_the_wheel_examines_the_machine(bare: Bare) -> None:
    report = bare.run(bare.directory / "env/bin/everystep", "doctor")
    assert "not built in" not in report
    assert "io_uring" in report


def test_without_the_study_its_commands_say_what_to_install(bare: Bare) -> None:
    for name in ("bench", "study"):
        assert "pip install everystep-study" in bare.run(bare.directory / "env/bin/everystep", name, code=2)


def test_the_study_adds_its_commands(tmp_path: Path) -> None:
    made = Bare(tmp_path)
    wheels = (the_one("everystep-*.whl"), the_one("everystep_study-*.whl"))
    made.run(tmp_path / "env/bin/pip", "install", "--quiet", "--only-binary", ":all:", *wheels)
    everystep = tmp_path / "env/bin/everystep"
    small = ("--size", "2M", "--repeat", "1", "--system", "everystep", "--system", "savez")
    assert "everystep-bench/2" in made.run(everystep, "bench", tmp_path, *small, "--json")
    assert "torch" in made.run(everystep, "study", "run", "--help")


def test_the_example_for_newcomers_runs(bare: Bare) -> None:
    assert "loaded, and equal" in bare.run(
        bare.directory / "env/bin/python", ROOT / "examples/save_and_load.py"
    )


def test_the_wheel_needs_only_what_every_linux_has(tmp_path: Path) -> None:
    from elftools.elf.elffile import ELFFile

    wheel = the_one("everystep-*.whl")
    assert wheel.stem.split("-")[-1].startswith("manylinux_2_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (module,) = [name for name in names if name.endswith(".so")]
        archive.extract(module, tmp_path)
    assert {name.partition("/")[0] for name in names} == {"everystep", "everystep-0.1.0.dist-info"}
    with (tmp_path / module).open("rb") as file:
        tags = ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        needed = {tag.needed for tag in tags}
    assert {name for name in needed if not name.startswith("ld-linux")} <= SYSTEM_LIBRARIES


def test_the_wheel_is_for_the_python_that_was_asked_for_and_from_3_12_on_for_later_ones() -> None:
    python = os.environ.get("DIST_PYTHON") or sys.executable
    asked = subprocess.check_output([python, "-c", "import sys; print(sys.version_info[1])"], text=True)
    minor = int(asked)
    tags = tuple(the_one("everystep-*.whl").stem.split("-")[2:4])
    assert tags == (("cp312", "abi3") if minor >= 12 else (f"cp3{minor}", f"cp3{minor}"))


def test_the_sdist_holds_what_builds_tests_and_documents_the_package() -> None:
    with tarfile.open(the_one("everystep-*.tar.gz")) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines())
    left_out = {name for name in tracked - held if not name.startswith((".ci/", ".github/"))}
    assert left_out == {".gitignore"}
    assert held - tracked == {"PKG-INFO"}
