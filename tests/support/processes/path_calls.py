"""Every public call that takes a path, as a function of that path.

`path_parameters` finds them by their signatures, `CALLS` has one entry for each. Those of frameworks run
where the framework is installed (`FRAMEWORKS`), also in the environments of `make peers`.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from support.public_source import FRAMEWORKS, MODULES, definition, is_error, public_names

Call = Callable[[Any], object]

_NAMES = {"checkpoint_path", "directory", "dst", "filepath", "folder", "output", "path", "run", "runs", "src"}
_TYPES = ("PathLike", "Path |", "ShelfLike")


def path_parameters() -> set[str]:
    """``module.name.parameter`` of all public functions, classes and methods that take a path.

    Read from the source, since most frameworks are not installed.
    """
    return {
        found for module in MODULES for name in public_names(module) for found in _parameters(module, name)
    }


def _parameters(module: str, name: str) -> Iterator[str]:
    node = definition(module, name)
    label = f"{module.removeprefix('integrations.')}.{name}".lstrip(".")
    if isinstance(node, ast.FunctionDef):
        yield from _paths_of(label, node)
    elif isinstance(node, ast.ClassDef) and not is_error(node):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and (
                item.name == "__init__" or not item.name.startswith("_")
            ):
                yield from _paths_of(label if item.name == "__init__" else f"{label}.{item.name}", item)
            elif isinstance(item, ast.AnnAssign) and _is_path("", item.annotation):
                yield f"{label}.{ast.unparse(item.target)}"


def _paths_of(label: str, function: ast.FunctionDef) -> Iterator[str]:
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if _is_path(argument.arg, argument.annotation):
            yield f"{label}.{argument.arg}"


def _is_path(name: str, annotation: ast.expr | None) -> bool:
    text = "" if annotation is None else ast.unparse(annotation)
    return name in _NAMES or text == "Path" or any(kind in text for kind in _TYPES)


def _state() -> dict[str, Any]:
    import numpy as np

    return {"w": np.zeros(3)}


def _elsewhere() -> str:
    """A checkpoint that is there, outside of the directory that is looked at."""
    import everystep

    return everystep.save(tempfile.mkdtemp() + "/there", _state()).path


def _new(name: str) -> str:
    return f"{tempfile.mkdtemp()}/{name}"


def _everystep(call: str, *arguments: Any, **options: Any) -> Any:
    """Calls a public name, such as ``inspect.prune`` or, of the integrations, ``jax.save``."""
    import importlib

    module, _, name = call.rpartition(".")
    module = f"integrations.{module}" if f"integrations.{module}" in MODULES else module
    return getattr(importlib.import_module(f"everystep.{module}".rstrip(".")), name)(*arguments, **options)


def _init_from(url: Any) -> None:
    with closing(_everystep("Checkpointer", tempfile.mkdtemp(), _state(), mode="snapshot")) as checkpointer:
        checkpointer.restore(init_from=url)


def _fit(kind: str) -> Call:
    import numpy as np

    rows = np.arange(20.0).reshape(10, 2)
    return lambda url: _everystep(f"sklearn.{kind}", 2, random_state=0, shelf=url).fit(rows)


def _stream(url: Any) -> None:
    import numpy as np
    from sklearn.linear_model import SGDRegressor

    rows = [(np.ones((2, 2)), np.ones(2))]
    _everystep("sklearn.stream", SGDRegressor(), rows, shelf=url)


def _shelf() -> str:
    path = _new("a.shelf")
    with _everystep("Shelf", path) as shelf:
        shelf["w"] = 1
    return path


def _load_spec(url: Any) -> None:
    from everystep.universal import Spec

    Spec.load(url)


def _drill(url: Any) -> None:
    _everystep("drill.run_drill", _everystep("drill.DrillOptions", ("true",), directory=url))


def _lightning_sharded(method: str) -> Call:
    def call(url: Any) -> None:
        from everystep.integrations.lightning import EverystepSharded

        class Sharded(EverystepSharded):
            optimizers: tuple[()] = ()
            model = None
            is_global_zero = True

            def broadcast(self, value: Any) -> Any:
                return value

        if method == "save":
            Sharded().save_checkpoint({}, url)
        else:
            Sharded().load_checkpoint(url)

    return call


def _model_checkpoint(url: Any) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    # Of fsspec only what needs no further package. Others become paths: Lightning knows no Path of a URL.
    dirpath = url.replace("s3:", "memory:") if isinstance(url, str) else url
    torch.manual_seed(0)
    trainer = L.Trainer(
        plugins=[_everystep("lightning.EverystepIO")],
        callbacks=[ModelCheckpoint(dirpath=dirpath)],
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        devices=1,
    )
    trainer.fit(BoringModel())


def _accelerate(call: str) -> Call:
    def run(url: Any) -> None:
        import torch
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        if call in ("automatic_save", "automatic_load"):
            settings = ProjectConfiguration(project_dir=str(url), automatic_checkpoint_naming=True)
        else:
            settings = ProjectConfiguration()
        accelerator = Accelerator(project_config=settings)
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        name, option = {
            "save": ("save_state", {"output_dir": url}),
            "load": ("load_state", {"input_dir": url}),
            "automatic_save": ("save_state", {}),
            "automatic_load": ("load_state", {}),
        }[call]
        _everystep(f"accelerate.{name}", accelerator, model, **option)

    return run


def _trainer(url: Any) -> Any:
    import torch
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(url), use_cpu=True, report_to=[], max_steps=1)
    return _everystep(
        "transformers.EverystepTrainer",
        model=torch.nn.Linear(2, 2),
        args=arguments,
        train_dataset=[],
    )


def _keras_weights(url: Any) -> None:
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    _everystep("keras.load_weights", model, url)


def _chainer(name: str) -> Call:
    def call(url: Any) -> None:
        import chainer

        _everystep(f"chainer.{name}", url, chainer.links.Linear(2, 2))

    return call


def _jax(name: str) -> Call:
    def call(url: Any) -> None:
        import jax.numpy as jnp

        _everystep(f"jax.{name}", url, {"w": jnp.zeros(3)})

    return call


def _deepspeed(method: str, *arguments: Any) -> Call:
    """An engine of DeepSpeed needs a process group; of it, only what is asked before a path is looked at."""

    def call(url: Any) -> None:
        from types import SimpleNamespace

        from everystep.integrations.deepspeed import EverystepEngine

        def save_checkpoint(save_dir: Any, tag: Any = None) -> None:
            raise AssertionError("DeepSpeed was asked to save")

        def load_checkpoint(load_dir: Any, tag: Any = None) -> None:
            raise AssertionError("DeepSpeed was asked to load")

        engine = SimpleNamespace(
            save_checkpoint=save_checkpoint,
            load_checkpoint=load_checkpoint,
            load_module_state_dict=None,
            _take_model_step=None,
            local_rank=0,
            global_rank=0,
            use_node_local_storage=lambda: False,
        )
        made: Any = EverystepEngine(engine, overlap=False)  # type: ignore[arg-type]
        if hasattr(engine, method):
            getattr(engine, method)(url)
        else:
            getattr(made, method)(*arguments, url)

    return call


CALLS: dict[str, Call] = {
    "save.path": lambda url: _everystep("save", url, _state()),
    "load.path": lambda url: _everystep("load", url),
    "load.path into": lambda url: _everystep("load", url, into=_state()),
    "open.path": lambda url: _everystep("open", url),
    "verify.path": lambda url: _everystep("verify", url),
    "Checkpointer.run": lambda url: _everystep("Checkpointer", url, _state()),
    "Checkpointer.restore.init_from": _init_from,
    "Options.volumes": lambda url: _everystep("Options", volumes=[url]),
    "Shelf.path": lambda url: _everystep("Shelf", url),
    "Shelf.path to read": lambda url: _everystep("Shelf", url, mode="r"),
    "shelf.Shelf.path": lambda url: _everystep("shelf.Shelf", url),
    "shelf.contents.listing.path": lambda url: _everystep("shelf.contents.listing", url),
    "shelf.contents.values.path": lambda url: _everystep("shelf.contents.values", url),
    "shelf.contents.verify.path": lambda url: _everystep("shelf.contents.verify", url),
    "shelf.contents.export.path": lambda url: _everystep("shelf.contents.export", url, _new("a.npz")),
    "shelf.contents.export.output": lambda url: _everystep(
        "shelf.contents.export", _shelf(), f"{url}.npz" if isinstance(url, str) else url / "a.npz"
    ),
    "sklearn.KMeans.shelf": lambda url: _fit("KMeans")(url),
    "sklearn.MiniBatchKMeans.shelf": lambda url: _fit("MiniBatchKMeans")(url),
    "sklearn.GaussianMixture.shelf": lambda url: _fit("GaussianMixture")(url),
    "sklearn.stream.shelf": _stream,
    "drill.DrillOptions.directory": _drill,
    "inspect.compare.a": lambda url: _everystep("inspect.compare", url, _elsewhere()),
    "inspect.compare.b": lambda url: _everystep("inspect.compare", _elsewhere(), url),
    "inspect.describe.path": lambda url: _everystep("inspect.describe", url),
    "inspect.diagnose.directory": lambda url: _everystep("inspect.diagnose", url),
    "inspect.export.path": lambda url: _everystep("inspect.export", url, _new("a.safetensors")),
    "inspect.export.output": lambda url: _everystep("inspect.export", _elsewhere(), url),
    "inspect.list_run.path": lambda url: _everystep("inspect.list_run", url),
    "inspect.prune.run": lambda url: _everystep("inspect.prune", url, _everystep("Keep", last=1)),
    "inspect.summarize.run": lambda url: _everystep("inspect.summarize", url),
    "inspect.verify_all.path": lambda url: _everystep("inspect.verify_all", url),
    "view.view_runs.runs": lambda url: _everystep("view.view_runs", [url]),
    "view.serve_page.runs": lambda url: _everystep("view.serve_page", [url]),
    "view.write_page.runs": lambda url: _everystep("view.write_page", [url], _new("a.html")),
    "view.write_page.path": lambda url: _everystep("view.write_page", [_elsewhere()], url),
    "dcp.Reader.path": lambda url: _everystep("dcp.Reader", url),
    "dcp.Reader.reset.checkpoint_id": lambda url: _everystep("dcp.Reader").reset(url),
    "dcp.Writer.path": lambda url: _everystep("dcp.Writer", url),
    "dcp.Writer.reset.checkpoint_id": lambda url: _everystep("dcp.Writer").reset(url),
    "universal.convert.src": lambda url: _everystep("universal.convert", url, _new("there")),
    "universal.convert.src of a kind": lambda url: _everystep(
        "universal.convert", url, _new("there"), kind="npz"
    ),
    "universal.convert.dst": lambda url: _everystep("universal.convert", _elsewhere(), url),
    "universal.convert.spec": lambda url: _everystep(
        "universal.convert", _elsewhere(), _new("there"), spec=url
    ),
    "universal.convert.copy_from": lambda url: _everystep(
        "universal.convert", _elsewhere(), _new("there"), to="hf", copy_from=url
    ),
    "universal.describe.path": lambda url: _everystep("universal.describe", url),
    "universal.recognise.path": lambda url: _everystep("universal.recognise", url),
    "universal.Spec.load.path": _load_spec,
    "accelerate.save_state.output_dir": _accelerate("save"),
    "accelerate.load_state.input_dir": _accelerate("load"),
    "accelerate.save_state of a project": _accelerate("automatic_save"),
    "accelerate.load_state of a project": _accelerate("automatic_load"),
    "chainer.save.path": _chainer("save"),
    "chainer.load.path": _chainer("load"),
    "chainer.snapshot.run": lambda url: _everystep("chainer.snapshot", url),
    "chainer.Snapshot.run": lambda url: _everystep("chainer.Snapshot", url, autoload=True),
    "deepspeed.EverystepEngine.makedirs.path": _deepspeed("makedirs"),
    "deepspeed.EverystepEngine.save.path": _deepspeed("save", {}),
    "deepspeed.EverystepEngine.load.path": _deepspeed("load"),
    "deepspeed.use, to save": _deepspeed("save_checkpoint"),
    "deepspeed.use, to load": _deepspeed("load_checkpoint"),
    "jax.save.path": _jax("save"),
    "jax.load.path": _jax("load"),
    "jax.Checkpointer.run": lambda url: _everystep("jax.Checkpointer", url),
    "keras.EverystepCallback.run": lambda url: _everystep("keras.EverystepCallback", url),
    "keras.load_weights.path": _keras_weights,
    "lightning.EverystepCallback.run": lambda url: _everystep("lightning.EverystepCallback", url),
    "lightning.EverystepIO.save_checkpoint.path": lambda url: _everystep(
        "lightning.EverystepIO"
    ).save_checkpoint({}, url),
    "lightning.EverystepIO.load_checkpoint.path": lambda url: _everystep(
        "lightning.EverystepIO"
    ).load_checkpoint(url),
    "lightning.EverystepIO.remove_checkpoint.path": lambda url: _everystep(
        "lightning.EverystepIO"
    ).remove_checkpoint(url),
    "lightning.EverystepSharded.save_checkpoint.filepath": _lightning_sharded("save"),
    "lightning.EverystepSharded.load_checkpoint.checkpoint_path": _lightning_sharded("load"),
    "lightning.load_from_checkpoint.path": lambda url: _everystep(
        "lightning.load_from_checkpoint", None, url
    ),
    "lightning.ModelCheckpoint with EverystepIO": _model_checkpoint,
    "transformers.EverystepTrainer of an output_dir": _trainer,
    "transformers.EverystepMixin.train.resume_from_checkpoint": lambda url: _trainer(
        tempfile.mkdtemp()
    ).train(resume_from_checkpoint=str(url)),
}
"""By the names of `path_parameters`; further ones are other ways to the same path."""


def framework_of(call: str) -> str | None:
    module = call.partition(".")[0]
    return module if module in FRAMEWORKS else None
