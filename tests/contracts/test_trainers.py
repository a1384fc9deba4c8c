"""Other people's training loops: HF Trainer, Accelerate and Lightning train, save and resume with BiClip.

"Resume" means: the weights after loading a checkpoint and going on are those of the run that never stopped, bit for
bit. Models are built from a configuration of a few hundred parameters; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tailopt

SETTINGS: dict[str, Any] = {"lr": 0.1, "u": 1e-1, "d": 1e-3}

# Advice on loggers, workers and the like, raised as warnings by the libraries under test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, no network, and the generators as they were."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def norms_seen(optimizer: torch.optim.Optimizer) -> list[float]:
    """The global norm of the gradient at each step of `optimizer`, filled while it runs."""
    seen: list[float] = []

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))))

    optimizer.register_step_post_hook(look)  # Lightning computes the gradient within the step
    return seen


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


# --- HF Trainer -------------------------------------------------------------------------------------------------------


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


def tiny_gpt2(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 16, (24, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def hf_trainer(transformers: Any, folder: Path, model: nn.Module, steps: int = 6, **settings: Any) -> Any:
    keys = ("optimizers", "optimizer_cls_and_kwargs")
    ours = {key: settings.pop(key) for key in keys if key in settings}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **{"save_strategy": "no", "logging_strategy": "no", **settings},
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=sentences(), **ours)


def test_trainer_resumes_as_if_it_had_not_stopped(transformers: Any, tmp_path: Path) -> None:
    def run(resume: Path | None) -> tuple[nn.Module, Any]:
        model = tiny_gpt2(transformers)  # with its dropout: the generators are part of a checkpoint
        optimizer = tailopt.BiClip(model.parameters(), **SETTINGS)
        trainer = hf_trainer(
            transformers, tmp_path, model, optimizers=(optimizer, None), save_strategy="steps", save_steps=3
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return model, trainer

    whole, trainer = run(None)
    assert isinstance(trainer.optimizer.optimizer, tailopt.BiClip)
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").exists()
    resumed, trainer = run(tmp_path / "checkpoint-3")
    assert trainer.state.global_step == 6
    assert_equal_weights(whole, resumed)
    assert not torch.equal(next(whole.parameters()), next(tiny_gpt2(transformers).parameters()))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_trainer_schedules_our_learning_rate(transformers: Any, tmp_path: Path, kind: Callable[[float], Any]) -> None:
    model = tiny_gpt2(transformers)
    optimizer = tailopt.BiClip(model.parameters(), **{**SETTINGS, "lr": kind(0.1)})
    trainer = hf_trainer(
        transformers,
        tmp_path,
        model,
        steps=4,
        optimizers=(optimizer, None),
        logging_strategy="steps",
        logging_steps=1,
    )
    trainer.train()
    logged = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert logged == pytest.approx([0.1, 0.075, 0.05, 0.025])  # linear to 0, from our lr and not args.learning_rate
    assert float(trainer.optimizer.param_groups[0]["lr"]) == 0.0


def test_trainer_clips_the_norm_to_one_unless_told_otherwise(transformers: Any, tmp_path: Path) -> None:
    def norms(**settings: Any) -> list[float]:
        model = tiny_gpt2(transformers)
        for p in model.parameters():
            p.data.mul_(20.0)  # gradients far above 1
        optimizer = tailopt.BiClip(model.parameters(), **{**SETTINGS, "lr": 1e-3})
        seen = norms_seen(optimizer)
        hf_trainer(transformers, tmp_path, model, steps=2, optimizers=(optimizer, None), **settings).train()
        return seen

    assert len(norms()) == 2
    assert max(norms()) <= 1.0 + 1e-5
    assert min(norms(max_grad_norm=0)) > 2.0


def test_trainer_builds_the_optimizer_with_the_lr_of_the_kwargs(transformers: Any, tmp_path: Path) -> None:
    def built(kwargs: dict[str, Any]) -> torch.optim.Optimizer:
        trainer = hf_trainer(
            transformers,
            tmp_path,
            tiny_gpt2(transformers),
            optimizer_cls_and_kwargs=(tailopt.BiClip, kwargs),
            learning_rate=0.25,
            weight_decay=0.5,
        )
        return trainer.create_optimizer()

    optimizer = built(SETTINGS)
    assert isinstance(optimizer, tailopt.BiClip)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    # Without it the class default holds, and args.learning_rate is not asked.
    default = tailopt.BiClip([nn.Parameter(torch.zeros(1))], u=1.0).param_groups[0]["lr"]
    (first, _) = built({"u": 1e-1, "d": 1e-3}).param_groups
    assert first["lr"] == default != 0.25


# --- Accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Any]]:
    """Makes accelerators that know nothing of one another: their state is a singleton."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    def fresh(**settings: Any) -> Any:
        reset()
        return accelerate.Accelerator(cpu=True, **settings)

    yield fresh
    reset()


def regression() -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def epoch(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def test_accelerate_resumes_as_if_it_had_not_stopped(accelerator: Callable[..., Any], tmp_path: Path) -> None:
    def prepared() -> tuple[Any, Any, Any, Any]:
        context = accelerator()
        model, loader = regression()
        return (context, *context.prepare(model, tailopt.BiClip(model.parameters(), **SETTINGS), loader))

    context, whole, optimizer, loader = prepared()
    assert isinstance(optimizer.optimizer, tailopt.BiClip)
    epoch(context, whole, optimizer, loader)
    optimizer.param_groups[0]["lr"] = 0.05  # the checkpoint's, not the constructor's
    context.save_state(str(tmp_path))
    epoch(context, whole, optimizer, loader)

    context, resumed, optimizer, loader = prepared()
    context.load_state(str(tmp_path))
    assert optimizer.param_groups[0]["lr"] == 0.05
    epoch(context, resumed, optimizer, loader)
    assert_equal_weights(whole, resumed)


def test_accelerate_accumulates_gradients(accelerator: Callable[..., Any]) -> None:
    context = accelerator(gradient_accumulation_steps=4)
    model, loader = regression()
    ours = tailopt.BiClip(model.parameters(), **SETTINGS)
    seen = norms_seen(ours)
    prepared, optimizer, batches = context.prepare(model, ours, loader)
    epoch(context, prepared, optimizer, batches)
    assert len(seen) == 2  # 8 batches

    plain, loader = regression()
    optimizer = tailopt.BiClip(plain.parameters(), **SETTINGS)
    for i, (x, y) in enumerate(loader, start=1):
        (nn.functional.mse_loss(plain(x), y) / 4).backward()
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(plain, prepared)


def test_accelerate_saves_by_parameter_name(accelerator: Callable[..., Any]) -> None:
    context = accelerator()
    bare, loader = regression()
    model, optimizer, _ = context.prepare(bare, tailopt.BiClip(bare.parameters(), **SETTINGS), loader)
    state = tailopt.named_state_dict(model, optimizer)
    fresh = tailopt.BiClip(bare.parameters(), lr=1.0, u=1.0, d=0.0)
    tailopt.load_named_state_dict(bare, fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.1


# --- Lightning --------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")


def lightning_run(lightning: Any, folder: Path, epochs: int, resume: Path | None = None, **settings: Any) -> Any:
    """Train the regression for so many epochs in all; the trainer, its model and the norms that BiClip saw."""

    class Regression(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loader = regression()
            self.seen: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = tailopt.BiClip(self.parameters(), **SETTINGS)
            self.seen = norms_seen(optimizer)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]  # once an epoch

        def train_dataloader(self) -> Any:
            return self.loader

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = Regression()
    trainer.fit(module, ckpt_path=resume)
    return trainer, module


def test_lightning_resumes_as_if_it_had_not_stopped(lightning: Any, tmp_path: Path) -> None:
    _, whole = lightning_run(lightning, tmp_path, epochs=2)
    trainer, half = lightning_run(lightning, tmp_path, epochs=1)
    assert isinstance(half.optimizers().optimizer, tailopt.BiClip)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer, resumed = lightning_run(lightning, tmp_path, epochs=2, resume=tmp_path / "half.ckpt")
    assert trainer.global_step == 16
    assert len(resumed.seen) == 8
    assert resumed.optimizers().param_groups[0]["lr"] == 0.1 * 0.5 * 0.5
    assert_equal_weights(whole, resumed)


def test_lightning_loads_by_parameter_name_through_its_wrapper(lightning: Any, tmp_path: Path) -> None:
    _, module = lightning_run(lightning, tmp_path, epochs=1)
    wrapper = module.optimizers()
    state = tailopt.named_state_dict(module, wrapper)
    state["groups"][0]["lr"] = 0.75
    tailopt.load_named_state_dict(module, wrapper, state)
    assert wrapper.optimizer.param_groups[0]["lr"] == wrapper.param_groups[0]["lr"] == 0.75


def test_lightning_accumulates_gradients(lightning: Any, tmp_path: Path) -> None:
    _, module = lightning_run(lightning, tmp_path, epochs=1, accumulate_grad_batches=4)
    assert len(module.seen) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_clips_before_biclip(lightning: Any, tmp_path: Path, precision: str) -> None:
    # Lightning refuses gradient_clip_val for optimizers that unscale by themselves, scaler or not.
    raw = lightning_run(lightning, tmp_path, epochs=1, precision=precision)[1].seen
    clipped = lightning_run(lightning, tmp_path, epochs=1, precision=precision, gradient_clip_val=0.01)[1].seen
    assert min(raw) > 0.01
    assert max(clipped) <= 0.01 * (1 + 1e-5)
