"""The models of the study in JAX, with Flax's layers and Optax's optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from everystep_study.frameworks.models import Gpt, Mlp, ResNet, Size, Vgg


class MlpModel(nn.Module):
    size: Mlp

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in self.size.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.size.classes)(x)


class ResNetModel(nn.Module):
    size: ResNet

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = self.size.width
        x = nn.relu(_norm(nn.Conv(width, (7, 7), 2, use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.size.blocks):
            for index in range(count):
                x = _bottleneck(x, width << stage, 2 if stage and not index else 1)
        return nn.Dense(self.size.classes)(x.mean((1, 2)))


def _norm(x: Any) -> Any:
    return nn.BatchNorm(use_running_average=False)(x)


def _bottleneck(x: Any, width: int, stride: int) -> Any:
    y = nn.relu(_norm(nn.Conv(width, (1, 1), use_bias=False)(x)))
    y = nn.relu(_norm(nn.Conv(width, (3, 3), stride, use_bias=False)(y)))
    y = _norm(nn.Conv(4 * width, (1, 1), use_bias=False)(y))
    if stride != 1 or x.shape[-1] != 4 * width:
        x = _norm(nn.Conv(4 * width, (1, 1), stride, use_bias=False)(x))
    return nn.relu(x + y)


class VggModel(nn.Module):
    size: Vgg

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for item in self.size.channels:
            x = nn.relu(nn.Conv(item, (3, 3))(x)) if isinstance(item, int) else nn.max_pool(x, (2, 2), (2, 2))
        x = jax.image.resize(x, (x.shape[0], 7, 7, x.shape[-1]), "nearest").reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(self.size.dense)(x)))
        return nn.Dense(self.size.classes)(x)


class GptModel(nn.Module):
    size: Gpt

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        width, heads = self.size.width, self.size.width // 64
        count, length = tokens.shape
        words = nn.Embed(self.size.vocabulary, width)
        x = words(tokens) + nn.Embed(self.size.context, width)(jnp.arange(length))
        for _ in range(self.size.layers):
            mixed = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(count, length, 3, heads, 64)
            seen = jax.nn.dot_product_attention(
                mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2], is_causal=True
            )
            x = x + nn.Dense(width)(seen.reshape(count, length, width))
            x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return words.attend(nn.LayerNorm()(x))


def build(size: Size) -> tuple[Any, Any]:
    """A model and its optimizer."""
    if isinstance(size, Gpt):
        return GptModel(size), optax.adamw(1e-4)
    if isinstance(size, Mlp):
        return MlpModel(size), optax.adam(1e-3)
    model = ResNetModel(size) if isinstance(size, ResNet) else VggModel(size)
    return model, optax.sgd(0.01, momentum=0.9)
