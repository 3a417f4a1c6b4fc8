"""One module replaces files, and one syncs, renames and removes them: over the seam, where tests can fail it.

What is replaced elsewhere is torn or lost by a crash at the wrong moment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "everystep"
CALLS = {
    *(
        f"os.{name}"
        for name in ("fsync", "fdatasync", "sync", "replace", "rename", "renames", "link", "truncate")
    ),
    *(f"os.{name}" for name in ("unlink", "remove", "rmdir", "removedirs")),
    *(f"shutil.{name}" for name in ("rmtree", "move", "copyfile")),
}
METHODS = {"write_text", "write_bytes", "unlink", "rmdir"}
EXCEPTIONS = {
    "drill/activity.py": {"os.truncate"},  # the half line of a process that was killed
    "integrations/shared/folders.py": {"os.unlink", "shutil.rmtree"},  # old checkpoints of frameworks
    "integrations/transformers/__init__.py": {"open w"},  # for Trainer to read at once
    "drill/processes.py": {"open wb"},  # what a child prints
    "cli/app.py": {"open w"},  # the null device
}


def writes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in CALLS or (name.rpartition(".")[2] in METHODS and not name.startswith("fs.")):
            yield name
        modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
        for mode in modes if name == "open" else []:
            if isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wxa+"):
                yield f"open {mode.value}"


def test_only_one_module_replaces_files() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        found.setdefault(name, set()).update(writes(ast.parse(path.read_text("utf-8"))))
    assert found.pop("engine/fs.py") == {"unlink", "rmdir"}  # over the seam
    assert {name: calls for name, calls in found.items() if calls} == EXCEPTIONS


NATIVE = Path(__file__).parents[1] / "native" / "src"
NATIVE_CALL = re.compile(
    r"(?<!\w)::(open(?:at)?|f(?:data)?sync|sync_file_range|rename\w*|unlink\w*|link\w*|mkdir\w*|rmdir|"
    r"f?truncate|fallocate|p?writev?|p?readv?|mmap|msync)\("
)
NATIVE_EXCEPTIONS = {
    "memory.cpp": {"open", "read"},  # what Linux says in /proc and /sys
    "uring.cpp": {"pwritev", "preadv"},  # the bytes that an injected short count has moved
}


def test_only_the_native_seam_calls_the_system() -> None:
    found = {path.name: set(NATIVE_CALL.findall(path.read_text())) for path in NATIVE.glob("*.?pp")}
    assert found.pop("sys.cpp") >= {"fsync", "fdatasync", "renameat2", "unlinkat", "pwritev", "mmap"}
    assert {name: calls for name, calls in found.items() if calls} == NATIVE_EXCEPTIONS
