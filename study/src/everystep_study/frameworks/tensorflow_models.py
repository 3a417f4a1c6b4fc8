"""The models of the study in Keras 3, on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from everystep_study.frameworks.models import Gpt, Mlp, ResNet, Size, Vgg


@keras.saving.register_keras_serializable("everystep")
class TiedEmbedding(layers.Layer):
    """An embedding whose weight is also that of the output."""

    def __init__(self, count: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.count, self.width = count, width
        self.table = self.add_weight(shape=(count, width), initializer="uniform", name="table")

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            return ops.matmul(inputs, ops.transpose(self.table))
        return ops.take(self.table, inputs, axis=0)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "count": self.count, "width": self.width}


def _norm(x: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9)(x)


def _bottleneck(x: Any, width: int, stride: int) -> Any:
    y = layers.ReLU()(_norm(layers.Conv2D(width, 1, use_bias=False)(x)))
    y = layers.ReLU()(_norm(layers.Conv2D(width, 3, stride, "same", use_bias=False)(y)))
    y = _norm(layers.Conv2D(4 * width, 1, use_bias=False)(y))
    if stride != 1 or x.shape[-1] != 4 * width:
        x = _norm(layers.Conv2D(4 * width, 1, stride, use_bias=False)(x))
    return layers.ReLU()(x + y)


def _resnet(size: ResNet) -> Any:
    inputs = keras.Input((size.image, size.image, 3))
    x = layers.ReLU()(_norm(layers.Conv2D(size.width, 7, 2, "same", use_bias=False)(inputs)))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for stage, count in enumerate(size.blocks):
        for index in range(count):
            x = _bottleneck(x, size.width << stage, 2 if stage and not index else 1)
    return keras.Model(inputs, layers.Dense(size.classes)(layers.GlobalAveragePooling2D()(x)))


def _vgg(size: Vgg) -> Any:
    x = inputs = keras.Input((size.image, size.image, 3))
    for item in size.channels:
        conv = isinstance(item, int)
        x = layers.Conv2D(item, 3, padding="same", activation="relu")(x) if conv else layers.MaxPooling2D()(x)
    x = layers.Flatten()(layers.Resizing(7, 7)(x))
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.Dense(size.dense, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(size.classes)(x))


def _gpt(size: Gpt) -> Any:
    tokens = keras.Input((size.sequence,), dtype="int32")
    words, places = TiedEmbedding(size.vocabulary, size.width), layers.Embedding(size.context, size.width)
    x = words(tokens) + places(ops.arange(size.sequence))
    for _ in range(size.layers):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(size.width // 64, 64)(y, y, use_causal_mask=True)
        wide = layers.Dense(4 * size.width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(size.width)(wide)
    return keras.Model(tokens, words(layers.LayerNormalization()(x), reverse=True))


def _mlp(size: Mlp) -> Any:
    x = inputs = keras.Input((size.inputs,))
    for width in size.hidden:
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(size.classes)(x))


def build(size: Size) -> tuple[Any, Any]:
    """A model and its optimizer."""
    if isinstance(size, Gpt):
        return _gpt(size), keras.optimizers.AdamW(1e-4)
    if isinstance(size, Mlp):
        return _mlp(size), keras.optimizers.Adam()
    model = _resnet(size) if isinstance(size, ResNet) else _vgg(size)
    return model, keras.optimizers.SGD(0.01, momentum=0.9)
