"""Models of timm and torchvision with the loss that they are trained with: each function gives a module whose forward gives it.

`make .venv/.ready` puts both packages into a folder of their own, where nobody else finds them: PyPI's torchvision is compiled
for CUDA, and beside a torch for CPUs alone importing it fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, PIXELS = 8, 32


# Nobody else finds the packages: ranks begin with the path of the process that starts them.
_FOLDER = str(Path(sys.prefix) / "vision")
if torch.version.cuda is None:
    # Its Python code asks for two of its compiled operators, which models that classify images do not call.
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            arguments = "Tensor dets, Tensor scores, float iou_threshold"
            torch.library.define(f"torchvision::{name}", f"({arguments}) -> Tensor")
sys.path.append(_FOLDER)
try:
    import timm
    from torchvision import models
finally:
    sys.path.remove(_FOLDER)


class Classifier(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(images), labels)


def example(samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, PIXELS, PIXELS, generator=generator, device="cpu")
    return {"images": images, "labels": torch.randint(CLASSES, (samples,), generator=generator, device="cpu")}


def _timm(name: str, **options: Any) -> nn.Module:
    return Classifier(timm.create_model(name, num_classes=CLASSES, **options))


def timm_vit() -> nn.Module:
    sizes = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _timm("vit_tiny_patch16_224", **sizes)


def timm_deit() -> nn.Module:
    sizes = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _timm("deit3_small_patch16_224", **sizes)


def timm_deit_distilled() -> nn.Module:
    sizes = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _timm("deit_tiny_distilled_patch16_224", **sizes)


def timm_swin() -> nn.Module:
    sizes = {"img_size": PIXELS, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 1)}
    return _timm("swin_tiny_patch4_window7_224", num_heads=(2, 4), drop_path_rate=0.0, **sizes)


def timm_mixer() -> nn.Module:
    made = timm.models.MlpMixer(num_classes=CLASSES, img_size=PIXELS, patch_size=8, num_blocks=2, embed_dim=32)
    return Classifier(made)


def timm_convnext() -> nn.Module:
    return _timm("test_convnext")


def timm_efficientnet() -> nn.Module:
    return _timm("test_efficientnet")


def timm_resnet() -> nn.Module:
    return _timm("test_resnet")


def timm_mobilenet() -> nn.Module:
    return _timm("mobilenetv3_small_050")


def timm_nfnet() -> nn.Module:
    return _timm("test_nfnet")


def timm_eva() -> nn.Module:
    sizes = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _timm("eva02_tiny_patch14_224", **sizes)


def timm_beit() -> nn.Module:
    sizes = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _timm("beit_base_patch16_224", **sizes)


def resnet() -> nn.Module:
    return Classifier(models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES))


def resnext() -> nn.Module:
    made = models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=4)
    return Classifier(made)


def vgg() -> nn.Module:
    made = models.VGG(models.vgg.make_layers([8, "M", 16, "M"]), num_classes=CLASSES)
    made.classifier = nn.Sequential(nn.Linear(16 * 49, 32), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(32, CLASSES))
    return Classifier(made)


def mobilenet() -> nn.Module:
    settings = [[1, 8, 1, 1], [6, 16, 2, 2]]
    return Classifier(models.MobileNetV2(CLASSES, width_mult=0.25, inverted_residual_setting=settings, dropout=0.0))


def densenet() -> nn.Module:
    return Classifier(models.DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=8, num_classes=CLASSES))


def convnext() -> nn.Module:
    blocks = [models.convnext.CNBlockConfig(8, 16, 1), models.convnext.CNBlockConfig(16, None, 1)]
    return Classifier(models.ConvNeXt(blocks, num_classes=CLASSES))


def vit() -> nn.Module:
    return Classifier(models.VisionTransformer(PIXELS, 8, 2, 4, 32, 48, num_classes=CLASSES))


def swin() -> nn.Module:
    made = models.SwinTransformer([2, 2], 16, [2, 1], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES)
    return Classifier(made)


def efficientnet() -> nn.Module:
    settings = [models.efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), models.efficientnet.MBConvConfig(6, 3, 2, 8, 16, 2)]
    return Classifier(
        models.EfficientNet(settings, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=32)
    )


def squeezenet() -> nn.Module:
    return Classifier(models.SqueezeNet(num_classes=CLASSES, dropout=0.0))


def maxvit() -> nn.Module:
    return Classifier(
        models.MaxVit((PIXELS, PIXELS), 16, 4, [16], [1], head_dim=4, stochastic_depth_prob=0.0, num_classes=CLASSES)
    )
