"""The models of the study in PyTorch, written out: no other package, and no weights to download."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from everystep_study.frameworks.models import Gpt, Mlp, ResNet, Size, Vgg, data
from everystep_study.mechanisms.states import HEAD_WIDTH

Batch = tuple[torch.Tensor, torch.Tensor]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a short cut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if stride != 1 or inputs != 4 * width
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def resnet(size: ResNet) -> nn.Module:
    width = size.width
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers: list[nn.Module] = [*stem]
    inputs = width
    for stage, count in enumerate(size.blocks):
        for index in range(count):
            stride = 2 if stage and not index else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, size.classes))


def vgg(size: Vgg) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for item in size.channels:
        if isinstance(item, int):
            layers += [nn.Conv2d(inputs, item, 3, padding=1), nn.ReLU()]
            inputs = item
        else:
            layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(inputs * 49, size.dense), nn.ReLU(), nn.Dropout(), nn.Linear(size.dense, size.dense)]
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        *dense,
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(size.dense, size.classes),
    )


def mlp(size: Mlp) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = size.inputs
    for width in size.hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, size.classes))


def gpt(size: Gpt) -> nn.ModuleDict:
    """GPT-2's parameters by GPT-2's names; the output shares the weight of the input embedding, as there."""
    width = size.width

    def embedding(count: int) -> nn.Embedding:
        made = nn.Embedding(count, width)
        nn.init.normal_(made.weight, std=0.02)
        return made

    blocks = nn.ModuleList(
        nn.ModuleDict(
            {
                "ln_1": nn.LayerNorm(width),
                "c_attn": nn.Linear(width, 3 * width),
                "attn_proj": nn.Linear(width, width),
                "ln_2": nn.LayerNorm(width),
                "c_fc": nn.Linear(width, 4 * width),
                "mlp_proj": nn.Linear(4 * width, width),
            }
        )
        for _ in range(size.layers)
    )
    return nn.ModuleDict(
        {
            "wte": embedding(size.vocabulary),
            "wpe": embedding(size.context),
            "h": blocks,
            "ln_f": nn.LayerNorm(width),
        }
    )


def gpt_loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    count, length = inputs.shape
    hidden = model["wte"](inputs) + model["wpe"](torch.arange(length))
    width = hidden.shape[-1]
    for block in model["h"]:
        mixed = block["c_attn"](block["ln_1"](hidden))
        query, key, value = (
            part.view(count, length, -1, HEAD_WIDTH).transpose(1, 2) for part in mixed.split(width, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + block["attn_proj"](seen.transpose(1, 2).reshape(count, length, width))
        wide = functional.gelu(block["c_fc"](block["ln_2"](hidden)), approximate="tanh")
        hidden = hidden + block["mlp_proj"](wide)
    logits = functional.linear(model["ln_f"](hidden), model["wte"].weight)
    loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss


def build(size: Size, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """A model, its optimizer and one batch. The weights come from torch's global random numbers."""
    inputs, targets = (torch.from_numpy(array) for array in data(size, seed, channels_first=True))
    batch = (inputs, targets.long())
    if isinstance(size, Gpt):
        model: nn.Module = gpt(size)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch
    if isinstance(size, Mlp):
        model = mlp(size)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3), batch
    model = resnet(size) if isinstance(size, ResNet) else vgg(size)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    if isinstance(model, nn.ModuleDict):
        return gpt_loss(model, *batch)
    return functional.cross_entropy(model(batch[0]), batch[1])
