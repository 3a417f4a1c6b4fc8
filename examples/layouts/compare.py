"""One training, whose checkpoint of another system is resumed in many layouts: do all give the same losses?

    python examples/layouts/compare.py [--plot losses.svg] [--steps 60] [LAYOUT ...]

Eight processes train with tensor x pipeline x data parallelism and write Megatron files half-way. These are
converted, and every layout goes on from the result, or straight from the Megatron files. The table shows the
largest difference to the training that was not interrupted. Needs torch, and matplotlib for the plot.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import everystep

TRAINED = "tp=2,pp=2,dp=2"
LAYOUTS = [
    *(TRAINED, "tp=1", "dp=2", "dp=4", "tp=2", "tp=4", "pp=2", "pp=4", "fsdp=2", "fsdp=3"),
    *("tp=2,dp=2", "tp=2,fsdp=2", "pp=2,dp=2", "tp=2,pp=2"),
]
STRAIGHT = ("tp=1", "tp=2,fsdp=2")
"""Also resumed from the Megatron files themselves."""
TOLERANCE = 1e-4
"""Of a loss: other layouts add the same numbers in another order."""


def train(layout: str, folder: Path, name: str, *arguments: object) -> dict[int, float]:
    """Trains in a layout, such as ``tp=2,dp=2``; the loss of each step."""
    degrees = {key: int(number) for key, _, number in (part.partition("=") for part in layout.split(","))}
    world = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("dp", 1) * degrees.get("fsdp", 1)
    losses = folder / f"{name}.json"
    options = [word for key, number in degrees.items() for word in (f"--{key}", str(number))]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *options, "--losses", str(losses)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    ranks = []
    for rank in range(world):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        environment = os.environ | {key: str(value) for key, value in own.items()}
        ranks.append(subprocess.Popen([*command, *map(str, arguments)], env=environment))
    codes = [process.wait(timeout=900) for process in ranks]
    if any(codes):
        raise SystemExit(f"the training with {layout} failed")
    return {int(step): loss for step, loss in json.loads(losses.read_text()).items()}


def compare(folder: Path, layouts: list[str], steps: int) -> dict[str, dict[int, float]]:
    """The losses of the uninterrupted training (under ""), and those of each layout from half-way on."""
    half, files, converted = steps // 2, folder / "megatron", folder / "converted"
    curves = {
        "": train(TRAINED, folder, "all", "--steps", steps, "--save-at", half, "--megatron", files),
    }
    everystep.universal.convert(files, converted, verify=True)
    for layout in layouts:
        for source in (converted, files) if layout in STRAIGHT else (converted,):
            name = f"{layout}{' (straight)' if source == files else ''}"
            curves[name] = train(
                layout, folder, f"run{len(curves)}", "--steps", steps, "--resume-from", source
            )
    return curves


def table(curves: dict[str, dict[int, float]]) -> tuple[str, bool]:
    """The largest difference of each layout to the uninterrupted training; whether all are small."""
    whole = curves[""]
    lines, fine = (
        ["| resumed with | steps | largest difference | bit-exact steps |", "|---|---:|---:|---:|"],
        True,
    )
    for name, losses in curves.items():
        if name:
            apart = [abs(loss - whole[step]) for step, loss in losses.items()]
            fine &= bool(apart) and max(apart) <= TOLERANCE
            row = f"| {name} | {min(losses)} to {max(losses)} | {max(apart):.1e} "
            lines.append(f"{row}| {sum(one == 0 for one in apart)} of {len(apart)} |")
    return "\n".join(lines), fine


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2))
    whole = curves[""]
    above.plot(whole.keys(), whole.values(), color="0.75", linewidth=6, label=f"{TRAINED}, uninterrupted")
    for number, (name, losses) in enumerate(item for item in curves.items() if item[0]):
        style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "linewidth": 1}
        above.plot(losses.keys(), losses.values(), label=name, **style)
        below.plot(losses.keys(), [loss - whole[step] for step, loss in losses.items()], **style)
    for axes in (above, below):
        axes.axvline(min(losses) - 0.5, color="0.5", linestyle=":", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_ylabel("loss")
    above.legend(fontsize=7, ncol=2, frameon=False)
    above.set_title("A checkpoint in Megatron's layout, resumed in other layouts", fontsize=10)
    below.set_ylabel("difference to the\nuninterrupted training")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, help="such as tp=2,dp=2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", type=Path, help="the .svg or .png to draw")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = compare(Path(folder), options.layouts, options.steps)
    shown, fine = table(curves)
    print(shown)
    if options.plot:
        draw(curves, options.plot)
    if not fine:
        raise SystemExit(f"a loss differs by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
