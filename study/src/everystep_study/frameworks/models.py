"""The models of the study as numbers, so that every framework builds the same ones.

Full sizes have the published numbers of parameters (ResNet-50 about 25.6 million, VGG-16 138 million, GPT-2
124 million). Images and sequences are small, so that a step takes a second at most on two cores: what a
checkpoint costs depends on the parameters, not on the pixels. Quick sizes have the same layers, narrower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MODELS = ("mlp", "resnet50", "vgg16", "gpt2")
TITLES = {"mlp": "MLP", "resnet50": "ResNet-50", "vgg16": "VGG-16", "gpt2": "GPT-2"}


@dataclass(frozen=True, slots=True)
class Mlp:
    """Dense layers with ReLU between them; trained with Adam."""

    inputs: int = 784
    hidden: tuple[int, ...] = (1024, 1024)
    classes: int = 10
    batch: int = 64


@dataclass(frozen=True, slots=True)
class ResNet:
    """Bottleneck blocks with batch normalization; trained with SGD and momentum."""

    width: int = 64
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000
    image: int = 64
    batch: int = 4


def _layers(width: int) -> tuple[int | str, ...]:
    counts = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
    found: list[int | str] = []
    for factor, count in counts:
        found += [*[factor * width] * count, "M"]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Vgg:
    """3 x 3 convolutions, "M" is a 2 x 2 maximum; then a mean over 7 x 7 places and three dense layers with
    dropout. Trained with SGD and momentum."""

    channels: tuple[int | str, ...] = _layers(64)
    dense: int = 4096
    classes: int = 1000
    image: int = 64
    batch: int = 4


@dataclass(frozen=True, slots=True)
class Gpt:
    """GPT-2, whose output shares the weight of its input embedding; trained with AdamW."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 50_257
    context: int = 1024
    sequence: int = 32
    batch: int = 2


Size: TypeAlias = Mlp | ResNet | Vgg | Gpt

FULL: dict[str, Size] = {
    "mlp": Mlp(),
    "resnet50": ResNet(),
    "vgg16": Vgg(),
    "gpt2": Gpt(),
}
QUICK: dict[str, Size] = {
    "mlp": Mlp(hidden=(256, 256)),
    "resnet50": ResNet(width=16, classes=100, image=32),
    "vgg16": Vgg(_layers(16), 512, 100, 32),
    "gpt2": Gpt(4, 256, 8000),
}


def size_of(model: str, quick: bool) -> Size:
    return (QUICK if quick else FULL)[model]


def data(size: Size, seed: int, *, channels_first: bool) -> tuple[Array, Array]:
    """One batch of made-up inputs and targets."""
    draw = np.random.default_rng(seed)
    if isinstance(size, Gpt):
        tokens = draw.integers(size.vocabulary, size=(size.batch, size.sequence + 1)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    labels = draw.integers(size.classes, size=size.batch).astype(np.int32)
    if isinstance(size, Mlp):
        shape: tuple[int, ...] = (size.inputs,)
    else:
        place = (size.image, size.image)
        shape = (3, *place) if channels_first else (*place, 3)
    return draw.standard_normal((size.batch, *shape)).astype(np.float32), labels
