"""Image classification: CIFAR-100 with a vision transformer.

    x = (pixel / 255 - mean) / standard deviation, of the training images, per channel;    cross entropy of 100 classes

Images stay bytes until a batch is used. A pretrained model sees them enlarged to the size that it was trained on; a
model from scratch sees 32 by 32 pixels in square patches. Files that have to be unpickled are refused.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tailopt.evaluation import evaluating
from tailopt.optional import require
from tailopt.seeds import derive_seed, generator
from tailopt.splits.partitions import iid
from tailopt.tasks import files, hub, pretrained
from tailopt.tasks.dataset_options import HELD_OUT, check_dataset_options, held_out_share
from tailopt.tasks.task import Baseline, Defaults

CLASSES, SIDE = 100, 32
ROW = 2 + 3 * SIDE * SIDE  # bytes of an image in the binary version: coarse label, fine label, planes R, G, B
BATCH = 250  # of an evaluation
NEED = "train.bin and test.bin of the binary version, or classes.txt with folders train and test of strips"
# for the preset "small": a model from scratch that two cores can train in minutes
SMALL: Mapping[str, Any] = {
    "pretrained": "",
    "width": 96,
    "layers": 3,
    "patch": 8,
    "stem": True,
    "evaluated": 1000,
    "defaults": Defaults(nodes=1, rounds=5, local_steps=100, batch_size=64, metric="accuracy", lower_is_better=False),
}


@dataclass(frozen=True)
class Cifar100:
    """CIFAR-100: 50,000 training and 10,000 test images of 100 classes; the test images are the validation split.

    `data` is a public name, or the path of
    - the binary version: a folder or a zip with train.bin and test.bin, or cifar-100-binary.tar.gz itself;
    - strips: a folder or a zip with classes.txt (one class per line, in label order) and train/CLASS.webp,
      test/CLASS.webp (or .png): images of 32 by 32 pixels below one another. This format is for a part of the images,
      or for other images.

    Args:
        pretrained: a folder or public name of an image model; "" trains one from scratch.
        data: as above.
        limit: that many training images, the same for all seeds; 0: all.
        evaluated: evaluate on at most that many images; 0: all.
        judge: evaluate on "validation", or on "held-out", a share of train that the nodes then do not get.
        hold_out: that share.
        augment: random shifts by up to 4 pixels and reflections, while training.
        width, layers, heads, patch: of a model from scratch; its feed-forward layers are twice as wide.
        stem: two convolutions before its patches, which halve the sides of the image each.
    """

    pretrained: str = "google/vit-base-patch16-224-in21k"
    data: str = "uoft-cs/cifar100"
    limit: int = 0
    evaluated: int = 0
    judge: str = "validation"
    hold_out: float = 0.1
    augment: bool = False
    width: int = 128
    layers: int = 4
    heads: int = 4
    patch: int = 4
    stem: bool = False
    defaults: Defaults = Defaults(
        nodes=1, rounds=20, local_steps=500, batch_size=128, metric="accuracy", lower_is_better=False
    )

    def __post_init__(self) -> None:
        check_dataset_options(self)
        if SIDE % self.patch or self.width % self.heads or (self.stem and (self.patch % 4 or self.width % 4)):
            raise ValueError(
                f"Invalid model: got patch={self.patch}, width={self.width}, heads={self.heads}; need a patch that "
                f"divides {SIDE}, heads that divide the width, and with a stem multiples of 4 of both."
            )

    @property
    def name(self) -> str:
        """The name in the table of tasks."""
        return "cifar100"

    @property
    def data_description(self) -> str:
        """The numbers of images."""
        images = load(self.data)
        part = " (complete)" if (len(images.train), len(images.test)) == (50_000, 10_000) else " (of 50,000 + 10,000)"
        return f"{images.name}: {len(images.train):,} training and {len(images.test):,} test images{part}"

    @property
    def baseline(self) -> Baseline:
        """The accuracy of the most frequent class of the training images."""
        train = load(self.data).train_labels[self._train_and_held_out()[0]]
        labels = self._evaluated_images()[1]
        share = (labels == train.bincount(minlength=CLASSES).argmax()).double().mean()
        return Baseline("majority class", {"accuracy": 100 * float(share)})

    def model(self, seed: int) -> torch.nn.Module:
        """The pretrained model with a new head, or a vision transformer from scratch, without dropout."""
        if self.pretrained:
            return pretrained.model("images", self.pretrained, seed, num_labels=CLASSES)
        configuration = pretrained.transformers().ViTConfig(
            image_size=SIDE,
            patch_size=self.patch,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=2 * self.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
        model = pretrained.fresh("images", configuration, seed)
        if self.stem:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(seed, "stem"))
                model.vit.embeddings.patch_embeddings.projection = Stem(self.width, self.patch)  # type: ignore[union-attr]
        return model

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training images, dealt out at random."""
        images, (train, _) = load(self.data), self._train_and_held_out()
        parts = [train[part] for part in iid(len(train), n, seed)]
        return [TensorDataset(images.train[part], images.train_labels[part]) for part in parts]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        pixels, labels = batch
        if self.augment and model.training:
            pixels = shifted_and_flipped(pixels)
        return torch.nn.functional.cross_entropy(self._logits(model, pixels), labels)

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """Accuracy in percent, and the loss."""
        pixels, labels = self._evaluated_images()
        device, right, loss = next(model.parameters()).device, 0, 0.0
        with evaluating(model):
            for part in torch.arange(len(labels)).split(BATCH):
                truth = labels[part].to(device)
                logits = self._logits(model, pixels[part].to(device))
                right += int((logits.argmax(1) == truth).sum())
                loss += float(torch.nn.functional.cross_entropy(logits, truth, reduction="sum"))
        return {"accuracy": 100 * right / len(labels), "loss": loss / len(labels)}

    def _logits(self, model: torch.nn.Module, pixels: Tensor) -> Tensor:
        images = load(self.data)
        x = (pixels.float() / 255 - images.mean.to(pixels.device)) / images.deviation.to(pixels.device)
        side = int(model.config.image_size)  # type: ignore[union-attr, arg-type]
        if side != SIDE:
            x = torch.nn.functional.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)
        logits: Tensor = model(pixel_values=x).logits
        return logits

    def _train_and_held_out(self) -> tuple[Tensor, Tensor]:
        """Return positions among the training images: of those that the nodes share, and of those held out."""
        total = len(load(self.data).train)
        shuffled = torch.randperm(total, generator=generator(0, "cifar100 parts"))
        cut = total - round(held_out_share(self) * total)
        train = shuffled[:cut]
        return train[: self.limit or len(train)], shuffled[cut:]

    def _evaluated_images(self) -> tuple[Tensor, Tensor]:
        images = load(self.data)
        pixels, labels = images.test, images.test_labels
        if self.judge == HELD_OUT:
            held_out = self._train_and_held_out()[1]
            pixels, labels = images.train[held_out], images.train_labels[held_out]
        if self.evaluated and self.evaluated < len(labels):
            some = torch.randperm(len(labels), generator=generator(0, "cifar100 evaluated"))[: self.evaluated]
            pixels, labels = pixels[some], labels[some]
        return pixels, labels


class Stem(torch.nn.Conv2d):
    """Patches of an image a quarter as wide, which two convolutions compute before.

    They share what they learn about edges and colours; without them every position in a patch learns it separately.
    """

    def __init__(self, width: int, patch: int) -> None:
        super().__init__(width // 2, width, kernel_size=patch // 4, stride=patch // 4)
        self.before = torch.nn.Sequential(
            torch.nn.Conv2d(3, width // 4, 3, stride=2, padding=1),
            torch.nn.GELU(),
            torch.nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1),
            torch.nn.GELU(),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return one vector per patch."""
        return super().forward(self.before(pixels))


def shifted_and_flipped(pixels: Tensor) -> Tensor:
    """Shift every image of a batch at random by up to 4 pixels, filling with black, and reflect half of them."""
    n, _, high, wide = pixels.shape
    device = pixels.device
    down, right = (torch.randint(0, 9, (n, 1), device=device) for _ in range(2))
    rows, columns = down + torch.arange(high, device=device), right + torch.arange(wide, device=device)
    reflected = torch.rand(n, 1, device=device) < 0.5
    columns = torch.where(reflected, columns.flip(1), columns)
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    return padded[torch.arange(n, device=device)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


@dataclass(frozen=True)
class Images:
    """Pixels uint8 [images, 3, 32, 32], labels int64 [images]; mean and deviation [3, 1, 1] of the training pixels."""

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    mean: Tensor
    deviation: Tensor


@lru_cache(maxsize=2)
def load(data: str) -> Images:
    """Load all images from a path, or from a data set of the hub."""
    if not data:
        raise ValueError("Invalid data: none are named. Give a path or a public name: --data PATH.")
    path = Path(data).expanduser()
    if path.exists() or pretrained.looks_like_a_path(data):
        name, (train, test) = path.name, _from_path(path)
    else:
        name, (train, test) = data, (_from_hub(data, "train"), _from_hub(data, "test"))
    for (_, labels), split in ((train, "train"), (test, "test")):
        if not len(labels):
            raise ValueError(f"Invalid data: {data} has no images in {split}. Give files that hold some.")
        wrong = ((labels < 0) | (labels >= CLASSES)).nonzero().flatten()
        if len(wrong):
            raise ValueError(
                f"Invalid data: image {int(wrong[0])} of {split} in {data} has the label {int(labels[wrong[0]])}; "
                f"need 0 to {CLASSES - 1}. Are these the fine labels of CIFAR-100?"
            )
    return Images(name, *train, *test, *statistics(train[0]))


def statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, [3, 1, 1], of values in [0, 1].

    Examples:
        >>> black_and_white = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 4, 4)
        >>> mean, deviation = statistics(black_and_white)
        >>> mean.flatten(), deviation.flatten()
        (tensor([0.5000, 0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000]))
    """
    channels = pixels.transpose(0, 1).reshape(3, -1)
    shares = torch.stack([channel.bincount(minlength=256).double() for channel in channels]) / channels.shape[1]
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    deviation = (shares @ values.square() - mean.square()).sqrt()
    return mean.float()[:, None, None], deviation.float()[:, None, None]


Split = tuple[Tensor, Tensor]


def _from_path(path: Path) -> tuple[Split, Split]:
    if path.is_file() and tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            inside = {Path(name).name: name for name in archive.getnames()}
            if not {"train.bin", "test.bin"} <= inside.keys():
                raise ValueError(_refused(path, sorted(inside)))
            return _binary(_member(archive, inside["train.bin"]), path), _binary(
                _member(archive, inside["test.bin"]), path
            )
    if path.is_dir():
        root: Any = path
    elif path.is_file() and zipfile.is_zipfile(path):
        root = zipfile.Path(path)
    else:
        raise FileNotFoundError(f"Invalid data: {str(path)!r} is no folder, zip or tar file. Give the path of one.")
    for folder in [root, *(entry for entry in root.iterdir() if entry.is_dir())]:  # archives often hold one folder
        if (folder / "train.bin").is_file() and (folder / "test.bin").is_file():
            return _binary((folder / "train.bin").read_bytes(), path), _binary((folder / "test.bin").read_bytes(), path)
        if (folder / "classes.txt").is_file():
            return _strips(folder, "train", path), _strips(folder, "test", path)
    raise ValueError(_refused(path, sorted(entry.name for entry in root.iterdir())))


def _refused(path: Path, names: list[str]) -> str:
    pickled = {"train", "test", "meta"} <= set(names)
    reason = "that is the python version, which has to be unpickled, and a pickle can run anything" if pickled else ""
    return f"Invalid data: {path} has {', '.join(names[:8]) or 'nothing'}{'; ' * pickled}{reason}; need {NEED}."


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    return file.read() if file is not None else b""


def _binary(content: bytes, path: Path) -> Split:
    if len(content) % ROW:
        raise ValueError(
            f"Invalid data: a file of {path} has {len(content):,} bytes; need a multiple of {ROW:,}, which is an image "
            "of CIFAR-100's binary version. Get it again: it may be cut short."
        )
    if not content:
        return torch.empty(0, 3, SIDE, SIDE, dtype=torch.uint8), torch.empty(0, dtype=torch.long)
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, ROW)
    return rows[:, 2:].reshape(-1, 3, SIDE, SIDE), rows[:, 1].long()


def _strips(folder: Any, split: str, path: Path) -> Split:
    classes = files.lines((folder / "classes.txt").read_text(encoding="utf-8"))
    pixels, labels = [], []
    for label, name in enumerate(classes):
        strips = [file for ending in ("webp", "png") if (file := folder / split / f"{name}.{ending}").is_file()]
        if not strips:
            raise ValueError(f"Invalid data: {path} has no {split}/{name}.webp, and classes.txt names {name}.")
        strip = _pixels(_image(strips[0].read_bytes()))
        if strip.shape[2] != SIDE or strip.shape[1] % SIDE:
            raise ValueError(
                f"Invalid data: {split}/{strips[0].name} of {path} is {strip.shape[2]} by {strip.shape[1]} pixels; "
                f"need images of {SIDE} by {SIDE} below one another."
            )
        pixels.append(strip.reshape(3, -1, SIDE, SIDE).transpose(0, 1))
        labels.append(torch.full((len(pixels[-1]),), label))
    if not classes:
        raise ValueError(f"Invalid data: classes.txt of {path} is empty; need one class per line.")
    return torch.cat(pixels).contiguous(), torch.cat(labels)


def _from_hub(name: str, split: str) -> Split:
    rows = hub.dataset(name, split=split)
    files.check_columns(rows.column_names, ("img", "fine_label"), f"{name}, {split}")
    pixels = torch.stack([_pixels(image) for image in rows["img"]])
    return pixels, torch.tensor(list(rows["fine_label"]))


def _image(content: bytes) -> Any:
    images = require("PIL.Image", "Images need pillow", extra="studies", package="pillow")
    return images.open(io.BytesIO(content))


def _pixels(image: Any) -> Tensor:
    """Return an image of PIL as bytes [3, height, width]."""
    colours = image.convert("RGB")
    return (
        torch.frombuffer(bytearray(colours.tobytes()), dtype=torch.uint8).view(*colours.size[::-1], 3).permute(2, 0, 1)
    )
