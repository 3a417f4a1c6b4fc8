"""The models of the study in Chainer, with its own links."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from everystep_study.frameworks.models import Gpt, Mlp, ResNet, Size, Vgg


class Bottleneck(chainer.Chain):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1, self.bn1 = _convolution(inputs, width, 1, 1), L.BatchNormalization(width)
            self.conv2, self.bn2 = _convolution(width, width, 3, stride), L.BatchNormalization(width)
            self.conv3, self.bn3 = _convolution(width, 4 * width, 1, 1), L.BatchNormalization(4 * width)
            self.short = stride != 1 or inputs != 4 * width
            if self.short:
                self.conv4 = _convolution(inputs, 4 * width, 1, stride)
                self.bn4 = L.BatchNormalization(4 * width)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (self.bn4(self.conv4(x)) if self.short else x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> Any:
    return L.Convolution2D(inputs, outputs, kernel, stride, kernel // 2, nobias=True)


def resnet(size: ResNet) -> Any:
    width = size.width
    blocks = []
    inputs = width
    for stage, count in enumerate(size.blocks):
        for index in range(count):
            blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not index else 1))
            inputs = 4 * (width << stage)
    return chainer.Sequential(
        _convolution(3, width, 7, 2),
        L.BatchNormalization(width),
        F.relu,
        lambda x: F.max_pooling_2d(x, 3, 2, 1, cover_all=False),
        *blocks,
        lambda x: F.mean(x, (2, 3)),
        L.Linear(inputs, size.classes),
    )


def vgg(size: Vgg) -> Any:
    layers: list[Any] = []
    inputs = 3
    for item in size.channels:
        if isinstance(item, int):
            layers += [L.Convolution2D(inputs, item, 3, 1, 1), F.relu]
            inputs = item
        else:
            layers.append(lambda x: F.max_pooling_2d(x, 2))
    layers.append(lambda x: F.resize_images(x, (7, 7)))
    for width in (inputs * 49, size.dense):
        layers += [L.Linear(width, size.dense), F.relu, F.dropout]
    return chainer.Sequential(*layers, L.Linear(size.dense, size.classes))


def mlp(size: Mlp) -> Any:
    layers: list[Any] = []
    inputs = size.inputs
    for width in size.hidden:
        layers += [L.Linear(inputs, width), F.relu]
        inputs = width
    return chainer.Sequential(*layers, L.Linear(inputs, size.classes))


class Block(chainer.Chain):
    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.ln1, self.ln2 = L.LayerNormalization(width), L.LayerNormalization(width)
            self.mix, self.project = L.Linear(width, 3 * width), L.Linear(width, width)
            self.wide, self.narrow = L.Linear(width, 4 * width), L.Linear(4 * width, width)

    def forward(self, x: Any, count: int) -> Any:
        """Of tokens as rows, `count` sequences one after the other."""
        length, width = x.shape[0] // count, x.shape[1]
        mixed = F.reshape(self.mix(self.ln1(x)), (count, length, 3, width // 64, 64))
        query, key, value = (mixed[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
        scores = F.matmul(query, key, transb=True) / 8
        hidden = np.triu(np.full((length, length), -1e9, np.float32), 1)
        seen = F.matmul(F.softmax(scores + np.broadcast_to(hidden, scores.shape), -1), value)
        x = x + self.project(F.reshape(seen.transpose(0, 2, 1, 3), x.shape))
        wide = self.wide(self.ln2(x))
        gelu = 0.5 * wide * (1 + F.tanh(0.7978845608 * (wide + 0.044715 * wide**3)))
        return x + self.narrow(gelu)


class Gpt2(chainer.Chain):
    def __init__(self, size: Gpt) -> None:
        super().__init__()
        with self.init_scope():
            self.words = L.EmbedID(size.vocabulary, size.width, chainer.initializers.Normal(0.02))
            self.places = L.EmbedID(size.context, size.width, chainer.initializers.Normal(0.02))
            self.blocks = chainer.ChainList(*(Block(size.width) for _ in range(size.layers)))
            self.norm = L.LayerNormalization(size.width)

    def forward(self, tokens: Any) -> Any:
        count, length = tokens.shape
        places = np.tile(np.arange(length, dtype=np.int32), count)
        x = self.words(tokens.reshape(-1)) + self.places(places)
        for block in self.blocks:
            x = block(x, count)
        return F.linear(self.norm(x), self.words.W)


def build(size: Size) -> tuple[Any, Any]:
    """A model and its optimizer."""
    if isinstance(size, Gpt):
        return Gpt2(size), chainer.optimizers.Adam(alpha=1e-4, weight_decay_rate=0.01)
    if isinstance(size, Mlp):
        return mlp(size), chainer.optimizers.Adam()
    model = resnet(size) if isinstance(size, ResNet) else vgg(size)
    return model, chainer.optimizers.MomentumSGD(0.01, 0.9)
