"""Power cuts of a real file system: ext4 in a file, copied while a training saves in it.

The training is stopped at random moments (SIGSTOP) and the image is copied. Each copy is repaired and mounted
as after a power cut. Every checkpoint that had been reported durable, and was not retired since, must be
there with every bit, and a training must resume from the newest. Then the training that was stopped goes on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from everystep import Checkpointer, Keep, Options
from everystep.checkpointer.events import Event, Saved
from everystep.store import list_steps, step_name
from support.crashes.ext4_images import (
    SYNCS,
    Journal,
    copy_if_still,
    device_under,
    ignore_syncs,
    mounted,
    repair,
    why_not,
)
from support.processes.child_processes import Child, Pipe, forked
from support.states.small_trainings import advance, build, digest

pytestmark = [
    pytest.mark.crash_large,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=f"no images of file systems: {why_not()}"),
]

SECONDS = 15.0
"""For each configuration; at least `LEAST` images, however slow the machine is."""
LEAST = 4
LAST = 2

JOURNALS = {
    "ordered": Journal("ordered"),
    "journal": Journal("journal"),
    "writeback": Journal("writeback"),
    "no journal": Journal(None),
}
# How wide the model is, and how it is saved. The narrow one fits into a single small file.
WAYS: dict[str, tuple[int, Any, Options]] = {
    "overlap": (300, "overlap", Options()),
    "sync": (300, "sync", Options(backend="buffered", small_nbytes=0)),
    "snapshot": (300, "snapshot", Options()),
    "small": (40, "overlap", Options()),
}


def train(pipe: Pipe, run: Path, width: int, mode: Any, options: Options, seed: int) -> None:
    """Says what each step is before it is saved, and each step that is durable. Never ends by itself."""
    draw = random.Random(seed)
    state = build(width)
    with Checkpointer(run, state, mode=mode, options=options, keep=Keep(last=LAST)) as ckpt:

        def told(event: Event) -> None:
            if isinstance(event, Saved):
                pipe.send(event.step)

        ckpt.events.subscribe(told)
        assert ckpt.restore() == 0
        step = 0
        while True:
            advance(state, width)
            step += 1
            pipe.send((step, digest(state)))
            ckpt.save(step)
            time.sleep(draw.choice([0.0, 0.0, 0.02]))


@dataclass
class Heard:
    """What the training has said so far."""

    digests: dict[int, str] = field(default_factory=dict)
    durable: int = 0

    def listen(self, pipe: Pipe) -> None:
        while pipe.ready():
            said = pipe.receive()
            if isinstance(said, int):
                self.durable = max(self.durable, said)
            else:
                self.digests[said[0]] = said[1]


@contextlib.contextmanager
def stopped(child: Child, heard: Heard, seconds: float) -> Iterator[None]:
    """Lets the training run for so long, and stops it for as long as the block lasts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        heard.listen(child.pipe)
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1]), "the training has ended"
        heard.listen(child.pipe)
        yield
    finally:
        os.kill(child.pid, signal.SIGCONT)


def check(run: Path, width: int, mode: Any, options: Options, heard: Heard) -> int:
    """What must hold in a copy. Returns how many checkpoints were read."""
    found = list_steps(run) if run.exists() else []
    newest = max(found, default=0)
    assert newest >= heard.durable, f"step {heard.durable} was reported durable; there are {found}"
    # A step that became durable but was not reported yet may have retired one that was.
    expected = set(range(max(1, newest - LAST + 1), newest + 1))
    assert expected <= set(found), f"{sorted(expected)} must be there; there are {found}"
    for step in found:
        report = everystep.verify(run / step_name(step))
        assert report.intact, f"step {step}: {report.problems}"
        state = build(width)
        with everystep.open(run / step_name(step)) as checkpoint:
            checkpoint.load(into=state)
        assert digest(state) == heard.digests[step], f"wrong bits in step {step}"
    state = build(width)
    with Checkpointer(run, state, mode=mode, options=options, keep=Keep(last=LAST)) as ckpt:
        assert ckpt.restore() == newest
        assert newest == 0 or digest(state) == heard.digests[newest]
        advance(state, width)
        ckpt.save(newest + 1)
    assert max(list_steps(run)) == newest + 1
    return len(found)


@dataclass
class Tried:
    images: int = 0
    checkpoints: int = 0


def cut_power(place: Path, kind: Journal, way: str, least: int, work: Callable[..., None] = train) -> Tried:
    """Checks images for some seconds, and at least so many."""
    torch.set_num_threads(1)  # a forked child has no worker threads
    width, mode, options = WAYS[way]
    seed = zlib.crc32(f"{kind} {way}".encode())
    draw, heard, tried = random.Random(seed), Heard(), Tried()
    image = place / "image"
    kind.format(image)
    with (
        warnings.catch_warnings(),
        mounted(image, place / "live", kind.options) as live,
        forked(work, live / "run", width, mode, options, seed) as child,
    ):
        warnings.simplefilter("error", RuntimeWarning)  # a checkpoint that is passed over
        device = device_under(live)
        heard.digests.update([child.pipe.receive()])  # it has begun
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline or tried.images < least:
            # A new file each time: a loop device that another process looks at remembers the one before.
            copy = place / f"copy-{tried.images}"
            with stopped(child, heard, draw.uniform(0.0, 0.15)):
                # What is in the middle of a system call goes on in the kernel until that ends.
                if not any(copy_if_still(image, copy, device) for _ in range(5)):
                    continue
                repair(copy)
                with mounted(copy, place / "after", kind.options) as after:
                    tried.checkpoints += check(after / "run", width, mode, options, heard)
                copy.unlink()
                tried.images += 1
    print(f"\next4, {kind}, {way}: {tried}, {heard.durable} steps saved")
    return tried


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("journal", JOURNALS)
def test_every_checkpoint_reported_durable_survives_a_power_cut(
    tmp_path: Path, journal: str, way: str, record_property: Callable[[str, object], None]
) -> None:
    tried = cut_power(tmp_path, JOURNALS[journal], way, LEAST)
    record_property("crash-images", tried.images)
    record_property("crash-image-checkpoints", tried.checkpoints)


def train_without_syncs(pipe: Pipe, *arguments: Any) -> None:
    ignore_syncs()
    train(pipe, *arguments)


@pytest.mark.skipif(platform.machine() not in SYNCS, reason="the numbers of system calls are needed")
@pytest.mark.parametrize("way", WAYS)
def test_a_training_whose_syncs_do_nothing_is_found_out(tmp_path: Path, way: str) -> None:
    """The planted bug that shows that these images tell."""
    with pytest.raises(AssertionError, match=r"reported durable|must be there|step \d+: |wrong bits|e2fsck"):
        cut_power(tmp_path, JOURNALS["ordered"], way, 100, train_without_syncs)
