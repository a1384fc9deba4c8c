"""`release_gradients` and what a backward pass can do: tied weights, checkpoints, errors, threads, wrappers."""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tailopt import BiClip, L2Clip, release_gradients
from tests.optimizers.released import Decoder, batches, decoder, loss_of, pair, same_bits, train

NUMBERS = {"lr": 0.03, "u": 0.02, "d": 0.005}


def biclip(model: nn.Module, **settings: Any) -> Any:
    return BiClip(model.named_parameters(), **{**NUMBERS, **settings})


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ZeroDivisionError("out of memory, say")


def failing_loss(model: Any, batch: Any) -> Tensor:
    """The last block has its gradients before the error, the first one has none."""
    h = model.blocks[2](Failing.apply(model.blocks[0](model.embedding(batch[0]))))
    return h.square().mean()


# ---- one gradient for each parameter ----


def checkpointed(reentrant: bool) -> Any:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model.embedding(batch[0])
        for block in model.blocks:
            h = h + model.scale * checkpoint(block, h, use_reentrant=reentrant)
        return nn.functional.cross_entropy(model.head(h).flatten(0, 1), batch[1].flatten())

    return loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, tied: bool) -> None:
    """A parameter that is used at both ends of the model, outside of the checkpoints, has one gradient."""
    with pair(decoder(tied=tied), lambda m: biclip(m, momentum=0.9)) as ((a, plain), (b, released)):
        train(a, plain, 4, release=False, loss=checkpointed(reentrant))
        train(b, released, 4, release=True, bucket_bytes=0, loss=checkpointed(reentrant))


def test_a_model_that_is_checkpointed_whole() -> None:
    """Then no gradient comes from outside of the passes that checkpoints start."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        start = torch.zeros(4, 6, 24, requires_grad=True)
        h = checkpoint(lambda x: x + model.embedding(batch[0]), start, use_reentrant=True)
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return checkpoint(lambda h: model.head(h).square().mean(), h, use_reentrant=True)

    with pair(decoder(tied=False), biclip) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False, loss=loss)
        train(b, released, 3, release=True, bucket_bytes=0, loss=loss)
        handle = release_gradients(b, released)
        loss(b, batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match="A second backward pass"):
            loss_of(b, batches(1)[0]).backward()
        plain.zero_grad()
        loss(a, batches(1)[0]).backward()
        plain.step()
        released.step()
        handle.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_in_two_checkpoints(reentrant: bool) -> None:
    """With use_reentrant=True its gradient comes in two pieces: refused, and no piece is lost in silence."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model.embedding(batch[0])
        for _ in range(2):
            h = checkpoint(model.blocks[0], h, use_reentrant=reentrant)
        return h.square().mean()

    with pair(decoder(), biclip) as ((a, plain), (b, released)):
        if not reentrant:
            train(a, plain, 3, release=False, loss=loss)
            train(b, released, 3, release=True, bucket_bytes=0, loss=loss)
            return
    with release_gradients(b, released) as handle:
        with pytest.raises(RuntimeError, match="second gradient in one backward pass.*use_reentrant=False"):
            loss(b, batches(1)[0]).backward()
        with pytest.warns(UserWarning, match="0 of 20 parameters had taken their update"):
            handle.remove()


def test_the_same_graph_twice() -> None:
    """retain_graph: two losses on one graph are two backward passes, of which the first accumulates."""
    with pair(decoder(), biclip) as ((a, plain), (b, released)):
        handle = release_gradients(b, released, bucket_bytes=0)
        for model, optimizer in ((a, plain), (b, released)):
            out = model(batches(1)[0][0])
            with handle.accumulate():
                out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()  # by a step, with release and without
            optimizer.zero_grad()
        handle.remove()


def test_derivatives_that_no_hook_sees() -> None:
    """torch.autograd.grad, also of higher order: a penalty on the gradient of the input, and one on a weight's."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model.embedding(batch[0]).detach().requires_grad_()
        value = model.head(model.blocks[0](h)).square().mean()
        slopes = torch.autograd.grad(value, [h, model.blocks[0][1].weight], create_graph=True)
        return value + sum(slope.square().sum() for slope in slopes)

    with pair(decoder(), biclip) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False, loss=loss)
        train(b, released, 3, release=True, bucket_bytes=0, loss=loss)


def test_create_graph_is_refused_before_anything_moves() -> None:
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = biclip(model)
    with release_gradients(model, optimizer, bucket_bytes=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that create_graph makes
        with pytest.raises(RuntimeError, match=r"backward\(create_graph=True\) keeps gradients"):
            loss_of(model, batches(1)[0]).backward(create_graph=True)
        same_bits(before, [p.detach() for p in model.parameters()])
        optimizer.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()


def test_backward_for_some_parameters() -> None:
    with pair(decoder(), biclip) as ((a, plain), (b, released)), release_gradients(b, released):
        for model, optimizer in ((a, plain), (b, released)):
            some = list(model.blocks[1].parameters())
            loss_of(model, batches(1)[0]).backward(inputs=some)
            optimizer.step()
            optimizer.zero_grad()


def test_a_weight_that_is_needed_after_its_update_is_noticed_by_torch() -> None:
    """It is used without a gradient before its layer: its own gradient is complete first."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = biclip(model)
    x = torch.randn(2, 4, requires_grad=True)
    with release_gradients(model, optimizer, bucket_bytes=0) as handle:
        h = nn.functional.linear(model[0](x), model[1].weight.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model[1](h).sum().backward()
        with pytest.warns(UserWarning, match="1 of 2 parameters had taken their update"):
            handle.remove()


def test_sparse_gradients() -> None:
    def sparse(model: Any) -> Any:
        model.embedding.sparse = True
        return biclip(model)

    with pair(decoder(tied=False), sparse) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False)
        train(b, released, 3, release=True, bucket_bytes=0)


def test_complex_parameters_and_those_that_are_not_contiguous() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return (model.z * torch.arange(4.0)).abs().square().sum() + (model.t.T @ model.t).square().mean()

    model = nn.Module()
    torch.manual_seed(0)
    model.z = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model.t = nn.Parameter(torch.randn(5, 3).T)
    with pair(model, biclip) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False, loss=loss)
        train(b, released, 3, release=True, loss=loss)


# ---- one backward pass for each step ----


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 30])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_second_backward_without_a_step_moves_nothing(bucket_bytes: int, accumulates: bool) -> None:
    """And the first one can still be finished."""
    one, two = batches(2)
    with pair(decoder(), lambda m: biclip(m, u="auto", d="auto", momentum=0.9)) as ((a, plain), (b, released)):
        loss_of(a, one).backward()
        plain.step()
        handle = release_gradients(b, released, bucket_bytes=bucket_bytes)
        loss_of(b, one).backward()
        before = [p.detach().clone() for p in b.parameters()]
        message = "A second backward pass before optimizer.step.*20 parameters were released"
        mode = handle.accumulate() if accumulates else contextlib.nullcontext()
        with mode, pytest.raises(RuntimeError, match=message):
            loss_of(b, two).backward()
        same_bits(before, [p.detach() for p in b.parameters()])
        released.step()
        handle.remove()


def test_a_second_backward_over_other_parameters_is_one_too() -> None:
    """Two heads on one trunk: the second head's gradient comes before the trunk's, and must not be used."""
    trunk, heads = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
    model = nn.ModuleList([trunk, heads])
    optimizer = biclip(model)
    h = trunk(torch.randn(2, 3))
    with release_gradients(model, optimizer, bucket_bytes=0):
        heads[0](h).sum().backward(retain_graph=True)
        before = heads[1].weight.detach().clone()
        with pytest.raises(RuntimeError, match="A second backward pass"):
            heads[1](h).sum().backward()
        assert torch.equal(before, heads[1].weight)


def test_steps_without_a_backward_pass_are_those_of_the_optimizer() -> None:
    """Gradients that were set by hand, and none at all."""
    with pair(decoder(), lambda m: biclip(m, statistics=True, u="auto", d="auto")) as ((a, plain), (b, released)):
        with release_gradients(b, released):
            for model, optimizer in ((a, plain), (b, released)):
                optimizer.step()
                model.scale.grad = torch.ones(())
                optimizer.step()
                optimizer.zero_grad()
                model.head.weight.grad = torch.ones_like(model.head.weight)
                loss_of(model, batches(1)[0]).backward()  # adds to it, as ever
                optimizer.step()
                optimizer.zero_grad()
        assert plain.statistics() == released.statistics()


def test_an_accumulated_gradient_that_the_last_pass_does_not_reach() -> None:
    one, two = batches(2)
    with pair(decoder(), biclip) as ((a, plain), (b, released)), release_gradients(b, released) as handle:
        for model, optimizer in ((a, plain), (b, released)):
            with handle.accumulate():
                loss_of(model, one).backward()
            model.blocks[1](model.embedding(two[0])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# ---- errors ----


@pytest.mark.parametrize("u", [0.02, "auto"])
def test_an_error_inside_backward_is_reported_and_does_not_count(u: float | str) -> None:
    """The parameters that moved stay where they are; everything that is counted is as if the pass had not been."""
    settings: dict[str, Any] = {"u": u, "d": "auto", "statistics": True}
    model = decoder()
    optimizer = biclip(model, **settings)
    other = decoder()
    counts = biclip(other, **settings)
    with release_gradients(model, optimizer, bucket_bytes=0), release_gradients(other, counts, bucket_bytes=0):
        first = model.blocks[0][1].weight.detach().clone()
        last = model.blocks[2][1].weight.detach().clone()
        with pytest.raises(ZeroDivisionError):
            failing_loss(model, batches(1)[0]).backward()
        assert torch.equal(first, model.blocks[0][1].weight)
        assert not torch.equal(last, model.blocks[2][1].weight)
        with pytest.warns(UserWarning, match="ended with an error. 6 of 20 parameters had taken their update") as seen:
            loss_of(model, batches(1)[0]).backward()
        assert seen[0].filename == __file__
        other.load_state_dict(model.state_dict())
        optimizer.step()
        # the counts of the same gradients, without the pass that failed
        with torch.no_grad():
            for p, q in zip(other.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        model.load_state_dict(decoder().state_dict())
        other.load_state_dict(decoder().state_dict())
        optimizer.statistics()
        loss_of(model, batches(1)[0]).backward()
        loss_of(other, batches(1)[0]).backward()
        optimizer.step()
        counts.step()
        got, wanted = optimizer.statistics(), counts.statistics()
        assert [c.elements for c in got.values()] == [c.elements for c in wanted.values()]
        calibration = optimizer.param_groups[0]["calibration"]
        assert u != "auto" or calibration["steps"] == calibration["seen"] == 2


def test_a_step_after_an_error_inside_backward_is_refused_once() -> None:
    model = decoder()
    optimizer = biclip(model)
    with release_gradients(model, optimizer):
        with pytest.raises(ZeroDivisionError):
            failing_loss(model, batches(1)[0]).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="0 of 20 parameters had taken.*Compute the gradients again"):
            optimizer.step()
        same_bits(before, [p.detach() for p in model.parameters()])  # what was in a bucket is gone
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        assert not torch.equal(before[0], next(model.parameters()))


def test_an_error_in_a_hook_of_the_user() -> None:
    model = decoder()
    optimizer = biclip(model)
    hook = model.blocks[1][1].weight.register_hook(lambda g: 1 / 0)
    with release_gradients(model, optimizer) as handle:
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batches(1)[0]).backward()
        hook.remove()
        with pytest.warns(UserWarning, match="A backward pass ended with an error"):
            handle.remove()
        assert optimizer._released is None


def test_an_error_in_a_part_of_the_step_is_one_inside_backward() -> None:
    """A momentum needs dense gradients: known when the sparse one comes."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = biclip(model, momentum=0.9)
    with release_gradients(model, optimizer, bucket_bytes=0):
        with pytest.raises(RuntimeError, match="Momentum needs dense gradients"):
            model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(RuntimeError, match="2 of 3 parameters had taken their update"):
            optimizer.step()


def test_step_and_remove_inside_backward_are_refused() -> None:
    model = decoder()
    optimizer = biclip(model)
    handle = release_gradients(model, optimizer, bucket_bytes=0)
    for call in (optimizer.step, handle.remove):
        hook = model.embedding.weight.register_hook(lambda g, call=call: call())
        with pytest.raises(RuntimeError, match="inside backward, whose gradients are being released"):
            loss_of(model, batches(1)[0]).backward()
        hook.remove()
        with pytest.raises(RuntimeError, match="the step does not count"):
            optimizer.step()
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    handle.remove()


def test_a_gradient_that_another_hook_takes() -> None:
    model = decoder()
    model.scale.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with release_gradients(model, biclip(model)) as handle:
        with pytest.raises(RuntimeError, match="parameter 'scale' is gone before it could be used"):
            loss_of(model, batches(1)[0]).backward()
        with pytest.warns(UserWarning, match="ended with an error"):
            handle.remove()


# ---- threads, autocast, compilers ----


def test_backward_in_another_thread() -> None:
    def elsewhere(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join(60)
        return torch.zeros((), requires_grad=True)  # its own backward pass has nothing to do with the model

    with pair(decoder(), lambda m: biclip(m, momentum=0.9)) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False)
        train(b, released, 3, release=True, bucket_bytes=0, loss=elsewhere)


def test_two_backward_passes_at_once_are_noticed() -> None:
    """One waits in its middle while the other begins and ends: it looks as if it had failed, until it goes on."""
    model = decoder()
    optimizer = biclip(model)
    inside, go = threading.Event(), threading.Event()

    def wait(g: Tensor) -> None:
        inside.set()
        assert go.wait(60)

    hook = model.blocks[0][1].weight.register_hook(wait)
    errors: list[BaseException] = []

    def run(loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(error)

    handle = release_gradients(model, optimizer, bucket_bytes=1 << 30)  # an update would stop the first by itself
    first = threading.Thread(target=run, args=(loss_of(model, batches(1)[0]),))
    second = model.blocks[2](torch.randn(2, 24)).sum()
    first.start()
    assert inside.wait(60)
    with pytest.warns(UserWarning, match="A backward pass ended with an error"):
        second.backward()
    go.set()
    first.join(60)
    hook.remove()
    assert len(errors) == 1
    assert "Two backward passes at once" in str(errors[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.remove()


def test_backward_inside_autocast() -> None:
    """The arithmetic of the step is not autocast's; norms would be."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss_of(model, batch)
            value.backward()
        return torch.zeros((), requires_grad=True)

    for build in (biclip, lambda m: L2Clip(m.parameters(), lr=0.1, u=0.1, scope="tensor", foreach=True)):
        with pair(decoder(), build) as ((a, plain), (b, released)):
            train(a, plain, 3, release=False, loss=loss)
            train(b, released, 3, release=True, bucket_bytes=0, loss=loss)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(torch.compile(model, backend="aot_eager"), batch)

    with pair(decoder(), lambda m: biclip(m, momentum=0.9)) as ((a, plain), (b, released)):
        train(a, plain, 3, release=False, loss=loss)
        train(b, released, 3, release=True, bucket_bytes=0, loss=loss)


def test_a_compiled_step() -> None:
    torch._dynamo.reset()
    with pair(decoder(), biclip) as ((a, plain), (b, released)):
        train(a, plain, 2, release=False)
        with release_gradients(b, released):
            step = torch.compile(released.step, backend="eager")
            for batch in batches(2):
                loss_of(b, batch).backward()
                step()


# ---- wrappers ----


@pytest.fixture
def one_process() -> Any:
    import torch.distributed as dist

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ddp_is_refused_also_where_it_comes_later() -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = decoder()
    optimizer = biclip(model)
    with pytest.raises(ValueError, match="DistributedDataParallel cannot be released: it averages them"):
        release_gradients(DistributedDataParallel(model), optimizer)
    other = decoder()
    optimizer = biclip(other)
    with release_gradients(other, optimizer):
        later = DistributedDataParallel(other)
        loss_of(later, batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match="came back after they were released.*DistributedDataParallel"):
            optimizer.step()


@pytest.mark.usefixtures("one_process")
def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match="FSDP1 reduces them after"):
        release_gradients(model, biclip(model))


@pytest.mark.usefixtures("one_process")
def test_inside_nested_training_the_inner_optimizer_releases() -> None:
    from tailopt import NestedOptimizer

    with pair(decoder(), biclip) as ((a, plain), (b, released)):
        for model, optimizer in ((a, plain), (b, released)):
            nested = NestedOptimizer(optimizer, "sgd", {"olr": 0.7}, local_steps=2, model=model)
            if optimizer is released:
                with pytest.raises(ValueError, match="got NestedOptimizer.*release that one"):
                    release_gradients(model, nested)
                release_gradients(model, optimizer)
            for batch in batches(5):
                nested.zero_grad()
                loss_of(model, batch).backward()
                nested.step()
            nested.synchronize()
            assert len(nested.history) == 3
            assert (model.scale.grad is None) is (optimizer is released)


def test_a_model_is_named_in_errors() -> None:
    model = Decoder()
    temperature = nn.Parameter(torch.ones(7))
    optimizer = BiClip([*model.parameters(), temperature], **NUMBERS)
    with release_gradients(model, optimizer):
        (loss_of(model, batches(1)[0]) * temperature.sum()).backward()
        with pytest.raises(RuntimeError, match=r"a parameter of shape \(7,\) has another gradient"):
            temperature.sum().backward()
