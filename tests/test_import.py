"""`import everystep` is cheap and brings nothing along that was not asked for."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FRAMEWORKS = ["lightning", "transformers", "accelerate", "deepspeed", "jax", "chainer", "keras", "tensorflow"]
INTEGRATIONS = [f"everystep.integrations.{name}" for name in FRAMEWORKS]
SCRIPTS = ["everystep_study.programs.zero_writer"]
"""Run in the environment of another system; nothing imports them."""
HEAVY = [
    *FRAMEWORKS,
    "torch",
    "numpy",
    "sklearn",
    "ml_dtypes",
    "safetensors",
    "matplotlib",
]
SELDOM = [*HEAVY, "msgspec", "typer", "rich", "everystep._native", "everystep.store", "everystep.engine"]


def loaded_after(script: str, names: list[str]) -> list[str]:
    code = (
        f"{textwrap.dedent(script)}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_nothing_else() -> None:
    assert loaded_after("import everystep", SELDOM) == []


def test_errors_can_be_caught_without_importing_anything() -> None:
    script = """
        import everystep
        try:
            pass
        except everystep.EverystepError:
            pass
    """
    assert loaded_after(script, SELDOM) == []


def test_saving_and_loading_numpy_arrays_imports_no_framework() -> None:
    script = """
        import os, tempfile
        import numpy as np
        import everystep
        path = os.path.join(tempfile.mkdtemp(), "one")
        everystep.save(path, {"w": np.ones(3), "n": 1, "set": {2}})
        everystep.load(path, into={"w": np.zeros(3), "n": 0, "set": set()})
    """
    assert loaded_after(script, [name for name in HEAVY if name != "numpy"]) == []


LAYERS = ["engine", "format", "state", "plan", "store", "checkpointer"]
ABOVE = ["integrations.dcp", "inspect", "drill", "view", "cli"]


@pytest.mark.parametrize("module", [*LAYERS, *ABOVE])
def test_no_layer_imports_a_framework(module: str) -> None:
    frameworks = [name for name in HEAVY if name != "numpy"]
    assert loaded_after(f"import everystep.{module}", frameworks) == []


def test_every_module_but_integrations_can_be_imported_without_a_framework() -> None:
    script = f"""
        import importlib, pkgutil, sys
        REFUSED = ("torch", "jax", "tensorflow", "sklearn", "ml_dtypes", "safetensors", "matplotlib")
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in REFUSED:
                    raise ImportError(name + " was imported")
        sys.meta_path.insert(0, Refuse())
        import everystep, everystep_study
        ours = pkgutil.walk_packages(everystep.__path__, "everystep.")
        for module in [*ours, *pkgutil.walk_packages(everystep_study.__path__, "everystep_study.")]:
            # Modules named after a framework import it, and so do those below everystep.integrations.sklearn.
            named = module.name.startswith({(*INTEGRATIONS, *SCRIPTS, "everystep.integrations.sklearn.")!r})
            # Each of these is for the framework that it is named after, mostly in a process of its own.
            worker = "_study.frameworks." in module.name
            worker &= module.name.endswith(("_worker", "_models", "_probe", "_training"))
            if not module.name.endswith("__main__") and not named and not worker:
                importlib.import_module(module.name)
    """
    assert loaded_after(script, ["torch"]) == []


def test_no_layer_imports_one_above_it() -> None:
    """Import contracts check the source; this checks what happens."""
    for number, layer in enumerate(LAYERS):
        above = [f"everystep.{name}" for name in LAYERS[number + 1 :]]
        assert loaded_after(f"import everystep.{layer}", above) == [], layer
