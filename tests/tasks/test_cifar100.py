from __future__ import annotations

import io
import math
import os
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.tasks import cifar100
from tailopt.tasks.cifar100 import Cifar100, load, shifted_and_flipped
from tailopt.tasks.table import task

pytest.importorskip("transformers", reason="the studies' extra is not installed")
pillow = pytest.importorskip("PIL.Image", reason="the studies' extra is not installed")

SHARED = os.environ.get("TAILOPT_TEST_DATA")
real = pytest.mark.skipif(not SHARED, reason="TAILOPT_TEST_DATA names no folder of data")
# (0.5071, 0.4867, 0.4408) and (0.2675, 0.2565, 0.2761): as commonly published for the 50,000 training images
MEAN, DEVIATION = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 3, 32, 32), generator=source, dtype=torch.uint8)
    return pixels, torch.arange(n) * 7 % 100


def rows(pixels: Tensor, labels: Tensor) -> bytes:
    """As in the binary version; the coarse label, which nobody reads, is 255."""
    parts = [bytes([255, int(label)]) + bytes(p.flatten().tolist()) for p, label in zip(pixels, labels, strict=True)]
    return b"".join(parts)


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar") / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(rows(*images(60)))
    (folder / "test.bin").write_bytes(rows(*images(20, seed=1)))
    return folder


def tiny(path: Path, **settings: Any) -> Cifar100:
    return Cifar100(pretrained="", data=str(path), width=16, layers=1, heads=2, patch=8, **settings)


# ---- data ----


def test_every_way_in_gives_the_same_images(binary: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as archive:
        archive.add(binary, arcname="cifar-100-binary")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as zipped:
        for name in ("train.bin", "test.bin"):
            zipped.write(binary / name, f"inside/{name}")
    (pixels, labels), (test, test_labels) = images(60), images(20, seed=1)
    for path in (binary, tmp_path / "cifar-100-binary.tar.gz", tmp_path / "some.zip"):
        found = load(str(path))
        assert torch.equal(found.train, pixels) and torch.equal(found.train_labels, labels), path
        assert torch.equal(found.test, test) and torch.equal(found.test_labels, test_labels), path


def strips(path: Path, pixels: Tensor, classes: list[str], each: int) -> None:
    """Images below one another, `each` of a class, in a zip."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("classes.txt", "\n".join(classes) + "\n")
        for number, name in enumerate(classes):
            own = pixels[number * each : (number + 1) * each]
            for split in ("train", "test"):
                below = own.permute(0, 2, 3, 1).reshape(-1, 32, 3).contiguous()
                buffer = io.BytesIO()
                pillow.fromarray(below.numpy()).save(buffer, format="PNG")
                archive.writestr(f"{split}/{name}.png", buffer.getvalue())


def test_strips_hold_the_images_in_order(tmp_path: Path) -> None:
    pixels, _ = images(6)
    strips(tmp_path / "own.zip", pixels, ["ant", "bee", "cat"], each=2)
    found = load(str(tmp_path / "own.zip"))
    assert torch.equal(found.train, pixels) and found.train_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert "6 training and 6 test images (of 50,000 + 10,000)" in tiny(tmp_path / "own.zip").data_description


@real
def test_the_subset_has_its_counts_and_the_published_mean_and_deviation() -> None:
    found = load(f"{SHARED}/cifar100/cifar100-subset.zip")
    assert found.train.shape == (15_000, 3, 32, 32) and found.test.shape == (3_000, 3, 32, 32)
    assert found.train_labels.bincount().tolist() == [150] * 100
    assert found.test_labels.bincount().tolist() == [30] * 100
    # three in ten of the images: the means are 0.0013 off at most, the deviations 0.0009
    for seen, published in ((found.mean, MEAN), (found.deviation, DEVIATION)):
        assert max(abs(a - b) for a, b in zip(seen.flatten().tolist(), published, strict=True)) < 0.002


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": b"", "test": b"", "meta": b""}, "python version, which has to be unpickled"),
        ({"train.bin": b"x" * 100, "test.bin": b""}, "has 100 bytes; need a multiple of 3,074"),
        ({"train.bin": rows(images(1)[0], torch.tensor([7])), "test.bin": b""}, "has no images in test"),
        (
            {"train.bin": rows(images(2)[0], torch.tensor([7, 100])), "test.bin": rows(*images(1))},
            "image 1 of train in .* has the label 100; need 0 to 99",
        ),
        ({"classes.txt": b"ant\n"}, "no train/ant.webp, and classes.txt names ant"),
        ({"readme": b""}, "has readme; need train.bin and test.bin"),
        ({}, "has nothing; need train.bin"),
    ],
)
def test_other_data_are_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tiny(tmp_path).nodes(0, 1)


def test_strips_of_another_width_are_refused(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("ant\n")
    (tmp_path / "train").mkdir()
    pillow.new("RGB", (16, 32)).save(tmp_path / "train" / "ant.png")
    with pytest.raises(ValueError, match="train/ant.png of .* is 16 by 32 pixels; need images of 32 by 32"):
        load(str(tmp_path))


def test_a_data_set_as_the_hub_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the studies' extra is not installed")
    pixels, labels = images(6)
    pictures = [pillow.fromarray(p.permute(1, 2, 0).contiguous().numpy()) for p in pixels]
    kinds = datasets.Features({"img": datasets.Image(), "fine_label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"img": pictures, "fine_label": labels.tolist()}, features=kinds)
    monkeypatch.setattr(cifar100.hub, "dataset", lambda name, split: made)  # the download alone is left out
    found = load("someone/cifar100")
    assert torch.equal(found.train, pixels) and torch.equal(found.test_labels, labels)
    monkeypatch.setattr(cifar100.hub, "dataset", lambda name, split: made.rename_column("fine_label", "label"))
    with pytest.raises(ValueError, match="someone/else, train has no column 'fine_label'; it has img, label"):
        load("someone/else")


def test_a_wrong_path_and_an_absent_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder, zip or tar file"):
        tiny(tmp_path / "nothing").nodes(0, 1)
    with pytest.raises(ValueError, match="none are named"):
        Cifar100(data="").nodes(0, 1)
    datasets = pytest.importorskip("datasets", reason="the studies' extra is not installed")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="Cannot get the data set 'uoft-cs/cifar100' from the hub.*--data PATH"):
        Cifar100(pretrained="").nodes(0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": "test"}, "Invalid judge: got 'test'; need one of validation, held-out"),
        ({"hold_out": 1.0}, "Invalid hold_out: got 1.0"),
        ({"limit": -1}, "Invalid limit: got -1; need a whole number, 0 or more"),
        ({"patch": 5}, "got patch=5"),
        ({"width": 30, "heads": 4}, "width=30, heads=4"),
        ({"patch": 2, "stem": True}, "got patch=2"),
    ],
)
def test_settings_are_judged_before_anything_is_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cifar100(data="/nowhere", **settings)


def test_more_nodes_than_images_are_refused(binary: Path) -> None:
    with pytest.raises(ValueError, match="Invalid nodes: got nodes=61 for 60 samples"):
        tiny(binary).nodes(0, 61)


# ---- who gets what ----


def numbers(pixels: Tensor) -> list[int]:
    """Which of the 60 training images these are."""
    everything = {bytes(p.flatten().tolist()): i for i, p in enumerate(images(60)[0])}
    return [everything[bytes(p.flatten().tolist())] for p in pixels]


def test_the_nodes_share_all_images_and_never_those_held_out(binary: Path) -> None:
    parts = [numbers(node.tensors[0]) for node in tiny(binary).nodes(3, 4)]
    assert sorted(sum(parts, [])) == list(range(60)) and [len(p) for p in parts] == [15] * 4
    held = tiny(binary, judge="held-out", hold_out=0.2)
    kept = sum((numbers(node.tensors[0]) for node in held.nodes(3, 4)), [])
    out = numbers(held._evaluated_images()[0])
    assert len(kept) == 48 and len(out) == 12 and sorted(kept + out) == list(range(60))
    assert numbers(tiny(binary, judge="held-out", hold_out=0.2).nodes(9, 1)[0].tensors[0]) != kept  # dealt by the seed
    assert sorted(out) == sorted(numbers(held._evaluated_images()[0]))


def test_the_baseline_is_the_share_of_the_most_frequent_class(binary: Path) -> None:
    made = tiny(binary)
    frequent = int(load(str(binary)).train_labels[made._train_and_held_out()[0]].bincount().argmax())
    labels = made._evaluated_images()[1]
    assert made.baseline.metrics == {"accuracy": pytest.approx(100 * labels.tolist().count(frequent) / len(labels))}


def test_a_limit_takes_the_same_images_for_every_seed(binary: Path) -> None:
    sets = [set(numbers(tiny(binary, limit=10).nodes(seed, 1)[0].tensors[0])) for seed in (0, 1)]
    assert sets[0] == sets[1] and len(sets[0]) == 10


# ---- model, loss, metric ----


class Seen(torch.nn.Module):
    """Remembers what it was shown; says that every image is of the class its first pixel says."""

    def __init__(self, side: int = 32, known: Tensor | None = None) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(100))
        self.config, self.known, self.done = SimpleNamespace(image_size=side), known, 0

    def forward(self, pixel_values: Tensor) -> Any:
        self.shown = pixel_values
        logits = self.bias.repeat(len(pixel_values), 1)
        if self.known is not None:
            own = self.known[self.done : self.done + len(pixel_values)]
            self.done += len(own)
            logits = logits + 50 * torch.nn.functional.one_hot(own, 100)
        return SimpleNamespace(logits=logits)


def test_pixels_are_normalised_by_the_training_images(binary: Path) -> None:
    shown = Seen()
    made = tiny(binary)
    loss = made.loss(shown, made.nodes(0, 1)[0].tensors)
    assert shown.shown.mean((0, 2, 3)).abs().max() < 1e-5
    assert (shown.shown.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5
    assert loss.item() == pytest.approx(math.log(100))


def test_a_model_of_larger_images_sees_them_enlarged(binary: Path) -> None:
    shown, made = Seen(side=64), tiny(binary)
    made.loss(shown, made.nodes(0, 1)[0].tensors)
    assert shown.shown.shape == (60, 3, 64, 64) and shown.shown.mean().abs() < 1e-5


def test_accuracy_is_in_percent_and_the_mode_is_put_back(binary: Path) -> None:
    labels = images(20, seed=1)[1]
    wrong = labels.clone()
    wrong[:5] = (wrong[:5] + 1) % 100
    for guesses, accuracy in ((labels, 100.0), (wrong, 75.0)):
        model = Seen(known=guesses)
        assert model.training
        assert tiny(binary).evaluate(model, 0)["accuracy"] == accuracy
        assert model.training
    assert tiny(binary, evaluated=8)._evaluated_images()[1].shape == (8,)


def test_a_frozen_module_keeps_its_mode_through_evaluation(binary: Path) -> None:
    model = Seen(known=images(20, seed=1)[1])
    model.norm = torch.nn.BatchNorm2d(3).eval()
    tiny(binary).evaluate(model, 0)
    assert model.training and not model.norm.training
    broken = Seen(known=images(3)[1])  # three labels do not fit twenty images
    with pytest.raises(RuntimeError):
        tiny(binary).evaluate(broken, 0)
    assert broken.training


def test_a_model_is_a_function_of_the_seed_and_learns_its_images(binary: Path) -> None:
    made = tiny(binary, limit=8)
    first, again, other = (made.model(seed) for seed in (0, 0, 1))
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    biclip = algorithm("avg-biclip", ilr=1.0, i_u=5e-3, i_d=5e-4)
    result = simulate(
        first, biclip, loss=made.loss, data=made.nodes(0, 1), batch_size=8, rounds=12, local_steps=5, progress=False
    )
    assert result.history[0]["loss"] > 4 and result.history[-1]["loss"] < 1


def test_a_stem_makes_as_many_patches_and_comes_from_the_seed(binary: Path) -> None:
    made = tiny(binary, stem=True)
    first, again, other = (made.model(seed) for seed in (0, 0, 1))
    weights = [m.vit.embeddings.patch_embeddings.projection.before[0].weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.vit(torch.zeros(2, 3, 32, 32)).last_hidden_state.shape == (2, 1 + 16, 16)
    made.loss(first, made.nodes(0, 1)[0].tensors).backward()
    assert all(p.grad is not None and p.grad.any() for p in first.vit.embeddings.parameters())


def test_pretrained_weights_get_a_head_for_a_hundred_classes(binary: Path, tmp_path: Path) -> None:
    tiny(binary).model(0).save_pretrained(tmp_path / "vit")  # type: ignore[operator]
    made = Cifar100(pretrained=str(tmp_path / "vit"), data=str(binary))
    model = made.model(0)
    assert made.loss(model, made.nodes(0, 1)[0].tensors).item() == pytest.approx(math.log(100), abs=0.5)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Cifar100(pretrained=str(tmp_path / "none"), data=str(binary)).model(0)


def test_augmentation_shifts_and_reflects_while_training_only(binary: Path) -> None:
    pixels = images(40)[0]
    torch.manual_seed(0)
    found = shifted_and_flipped(pixels)
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    seen = set()
    for image, whole in zip(found, padded, strict=True):
        fits = [
            (down, right, flipped)
            for down in range(9)
            for right in range(9)
            for flipped in (False, True)
            if torch.equal(image.flip(2) if flipped else image, whole[:, down : down + 32, right : right + 32])
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) > 25 and {flipped for _, _, flipped in seen} == {False, True}
    made, plain = tiny(binary, augment=True), tiny(binary)
    model, batch = made.model(0), made.nodes(0, 1)[0].tensors
    model.train()
    assert made.loss(model, batch) != plain.loss(model, batch)
    model.eval()
    assert made.loss(model, batch) == plain.loss(model, batch)


@real
@pytest.mark.slow
def test_biclip_on_one_node_is_above_ten_times_chance() -> None:
    """A small vision transformer with a convolutional stem, from scratch: 1,000 steps, a minute of one free core.

    The learning rate falls linearly from 0.3 to 0.03.
    """
    made = Cifar100(
        pretrained="",
        data=f"{SHARED}/cifar100/cifar100-subset.zip",
        width=96,
        layers=3,
        heads=4,
        patch=8,
        stem=True,
    )
    result = simulate(
        made.model(0),
        algorithm("avg-biclip", ilr=0.3, i_u=1e-2, i_d=1e-4),
        loss=made.loss,
        data=made.nodes(0, 1),
        batch_size=64,
        rounds=10,
        local_steps=100,
        schedules={"ilr": lambda t: 0.3 - 0.03 * (t - 1)},
        seed=0,
        evaluate=lambda model: made.evaluate(model, 0),
        evaluate_every=10,
        progress=False,
    )
    accuracy = result.history[-1]["metrics"]["accuracy"]
    print(f"accuracy on the 3,000 test images: {accuracy:.2f} %")
    assert accuracy > 10


def test_the_small_preset_is_a_model_from_scratch() -> None:
    made = task("cifar100", preset="small")
    assert isinstance(made, Cifar100) and made.pretrained == "" and made.defaults.nodes == 1
    assert cifar100.SMALL["defaults"].metric == "accuracy"
