"""A sweep finds settings, each trial follows its simulation, and what was chosen is reported on other seeds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tailopt
from tailopt.engines.configuration_rounds import ConfigurationBatch
from tailopt.sweeps import Range
from tailopt.sweeps.training import Trainer
from tailopt.tasks.synthetic import Synthetic

TASK = Synthetic(samples=120, dimension=6, dtype=torch.float64)
SPACE = {"ilr": [0.01, 0.1, 0.3, 1e308], "i_u": [0.5, 5.0], "i_d": [0.0, 1.0]}
OPTIONS = {"rounds": 6, "nodes": 3, "local_steps": 2, "batch_size": 8, "progress": False}


def simulated(settings: dict[str, float], seed: int, name: str = "avg-biclip") -> list[dict]:
    options = {key: value for key, value in OPTIONS.items() if key != "nodes"}
    return tailopt.simulate(
        TASK.model(seed), tailopt.algorithm(name, **settings), loss=TASK.loss, data=TASK.nodes(seed, OPTIONS["nodes"]),
        evaluate=lambda model: TASK.evaluate(model, seed), seed=seed, **options
    ).history  # fmt: skip


def test_a_sweep_over_a_task() -> None:
    with pytest.warns(UserWarning, match="4 points of the space were dropped"):
        result = tailopt.sweep(TASK, "avg-biclip", space=SPACE, seeds=[3, 4], report_seeds=[7, 8, 9], **OPTIONS)
    assert (result.dropped, result.route.name, result.metric) == (4, "vmap", "error")
    assert [(t.number, t.seed) for t in result.trials] == [(n, s) for n in range(12) for s in (3, 4)]
    for trial in result.trials:
        diverging = trial.settings["ilr"] > 1e100
        assert bool(trial.ended) == diverging
        if not diverging:
            last = simulated(trial.settings, trial.seed)[-1]
            assert trial.rungs[-1].loss == pytest.approx(last["loss"], rel=1e-9)
            assert trial.value("error") == pytest.approx(last["metrics"]["error"], rel=1e-6)
    best = result.best
    values = {n: [t.value("error") for t in result.trials if t.number == n] for n in range(12)}
    assert best.value == min(sum(v) / 2 for v in values.values() if not any(map(math.isnan, v)))
    assert best.spread == pytest.approx(abs(best.values[0] - best.values[1]) / math.sqrt(2))
    assert [t.seed for t in result.reports] == [7, 8, 9]
    assert best.report == pytest.approx(sum(simulated(best.settings, s)[-1]["metrics"]["error"] for s in (7, 8, 9)) / 3)
    assert f"| 1 | {best.settings['ilr']:.4g} |" in result.table()
    assert [p.trials for p in result.budget_curve()] == [5]
    assert result.budget_curve([12])[0].mean == best.value
    assert "best: " in result.summary() and "3 fresh seeds" in result.summary()


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()


class Refusing(nn.Linear):
    """A model with a branch on a value, which vmap refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) < 1e9 else x


def own(model: type[nn.Linear] = nn.Linear, **more):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 3, generator=generator, dtype=torch.float64)
    data = [TensorDataset(x[i::2], x[i::2].sum(-1)) for i in range(2)]
    torch.manual_seed(0)
    start = model(3, 1).double()
    options = {"loss": squares, "data": data, "batch_size": 4, "rounds": 9, "local_steps": 2, "progress": False}
    return tailopt.sweep(start, "avg-sgd", **{**options, **more})


def test_an_own_model_and_the_sequential_route() -> None:
    def distance(model: nn.Linear) -> dict[str, float]:
        return {"distance": float((model.weight - 1).norm())}

    def far(model: nn.Linear) -> dict[str, float]:
        return {"distance": 100.0}

    space = {"ilr": Range(1e-3, 0.5)}
    arguments = {"evaluate": distance, "metric": "distance", "lower_is_better": True, "budget": 9, "halving": True}
    found = own(space=space, test=far, **arguments)
    refused = own(Refusing, space=space, **arguments)
    assert (found.route.name, refused.route.name) == ("vmap", "sequential")
    assert "vmap refuses" in refused.route.reason and "float(x.sum())" in refused.route.reason
    for mine, its in zip(found.trials, refused.trials, strict=True):
        assert (mine.ended, mine.settings) == (its.ended, its.settings)
        assert [r.round for r in mine.rungs] == [r.round for r in its.rungs]
        assert mine.value("distance") == pytest.approx(its.value("distance"), rel=1e-9)
    assert [sum(len(t.rungs) == n for t in found.trials) for n in (1, 2, 3)] == [12, 4, 2]
    assert found.best.reported == (100.0,) * 5 and refused.best.report < 1.0
    with pytest.raises(RuntimeError, match="vmap refuses"):
        own(Refusing, space=space, engine="vectorized")


def test_buffers_are_evaluated_with_their_point() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    common = {
        "loss": squares, "data": [TensorDataset(x[i::2], x[i::2].sum(-1)) for i in range(2)], "batch_size": 8,
        "evaluate": lambda model: {"squares": squares(model, (x, x.sum(-1)))}, "rounds": 3, "local_steps": 2,
        "progress": False,
    }  # fmt: skip
    found = tailopt.sweep(
        model, "avg-sgd", space={"ilr": [0.01, 0.1]}, seeds=[5], report_seeds=0, metric="squares", lower_is_better=True,
        **common,
    )  # fmt: skip
    for trial in found.trials:
        algo = tailopt.algorithm("avg-sgd", **trial.settings)
        alone = tailopt.simulate(model, algo, seed=5, **common).history[-1]["metrics"]["squares"]
        assert trial.value("squares") == pytest.approx(alone, rel=1e-9)
    assert found.trials[0].value("squares") != found.trials[1].value("squares")


def test_halving_leaves_the_survivors_as_they_are() -> None:
    options = {"space": {"ilr": [0.001, 0.01, 0.03, 0.1]}, "settings": {"i_u": 5.0, "i_d": 0.0}, **OPTIONS}
    plain = tailopt.sweep(TASK, "avg-biclip", report_seeds=0, **options)
    halved = tailopt.sweep(TASK, "avg-biclip", report_seeds=0, halving=2, **options)
    assert plain.varied_settings == ["ilr"] and plain.best.settings["i_u"] == 5.0
    ran = [t for t in halved.trials if not t.ended]
    assert [r.round for r in ran[0].rungs] == [2, 3, 6]
    assert len(ran) == 2 and halved.reports == ()
    for trial in ran:
        (same,) = [t for t in plain.trials if (t.number, t.seed) == (trial.number, trial.seed)]
        assert trial.value("error") == pytest.approx(same.value("error"), rel=1e-12)
    assert all(t.halved for t in halved.trials if t.ended)


def test_thresholds_that_are_auto_run_one_after_another_and_the_reason_is_kept() -> None:
    settings = {"i_u": "auto", "i_d": "auto"}
    result = tailopt.sweep(TASK, "avg-biclip", space={"ilr": [0.01, 0.1]}, settings=settings, seeds=1, **OPTIONS)
    assert result.route.name == "sequential" and 'thresholds that are "auto"' in result.route.reason
    last = simulated(result.trials[1].settings, seed=0)[-1]["metrics"]["error"]
    assert result.trials[1].value("error") == pytest.approx(last, rel=1e-12)
    with pytest.raises(ValueError, match='Invalid engine: "vectorized", but thresholds that are "auto"'):
        tailopt.sweep(TASK, "avg-biclip", space={"ilr": [0.1]}, settings=settings, engine="vectorized", **OPTIONS)


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), "0.5", None, 1j, torch.ones(1, dtype=torch.complex64)])
def test_a_metric_that_is_no_number_is_refused_before_anything_is_recorded(value, tmp_path) -> None:
    options = {"space": {"ilr": [0.01, 0.1]}, "seeds": 1, "rounds": 2, "local_steps": 1, "loss": squares}
    options |= {"data": TASK.nodes(0, 2), "batch_size": 8, "metric": "x", "lower_is_better": True, "progress": False}
    options["run"], model = tmp_path / "a", nn.Linear(6, 1).double()
    with pytest.raises(ValueError, match="Invalid evaluate: its 'x' is .*; need a number"):
        tailopt.sweep(model, "avg-sgd", evaluate=lambda model: {"x": value}, **options)
    found = tailopt.sweep(model, "avg-sgd", evaluate=lambda model: {"x": 1.0}, **options)
    assert found.best.value == 1.0


def test_a_loss_that_is_not_a_number_leaves_the_metric() -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return squares(model, batch) + float("nan")

    found = tailopt.sweep(
        nn.Linear(6, 1).double(), "avg-sgd", space={"ilr": [0.01]}, seeds=1, report_seeds=0, rounds=2, local_steps=1,
        loss=loss, data=TASK.nodes(0, 2), batch_size=8, evaluate=lambda model: {"x": 3.0}, metric="x",
        lower_is_better=True, progress=False,
    )  # fmt: skip
    assert found.best.value == 3.0 and math.isnan(found.trials[0].rungs[-1].loss)


class WithConstant(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 1)
        self.register_buffer("seen", torch.zeros(()))


def test_an_evaluation_that_writes_into_a_buffer_does_not_change_the_next_one() -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        model.seen += 1.0
        return {"seen": float(model.seen)}

    found = tailopt.sweep(
        WithConstant().double(), "avg-sgd", space=[{"ilr": 0.1}] * 3, seeds=1, report_seeds=0, rounds=1, local_steps=1,
        loss=squares, data=TASK.nodes(0, 2), batch_size=8, evaluate=evaluate, metric="seen", lower_is_better=True,
        progress=False,
    )  # fmt: skip
    assert found.route.name == "vmap" and [t.value("seen") for t in found.trials] == [1.0, 1.0, 1.0]


def test_where_nothing_is_finite_the_result_says_so() -> None:
    found = tailopt.sweep(TASK, "avg-sgd", space={"ilr": [1e308, 1e307]}, **OPTIONS)
    assert "No point has a finite error" in found.summary()
    with pytest.raises(ValueError, match="nothing to draw: no point has a finite error"):
        found.plot()


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_halving_compares_all_points_however_many_run_side_by_side(batch: int) -> None:
    space = {"ilr": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1e308]}  # of which the last one diverges
    options = {"space": space, "settings": {"i_u": 5.0, "i_d": 0.0}, "report_seeds": 0, "halving": 2, **OPTIONS}
    together = tailopt.sweep(TASK, "avg-biclip", **options)
    parts = tailopt.sweep(TASK, "avg-biclip", batch=batch, **options)
    assert parts.route.name == together.route.name == "vmap"
    for trial, same in zip(parts.trials, together.trials, strict=True):
        assert (trial.number, trial.seed, trial.ended) == (same.number, same.seed, same.ended)
        assert [r.round for r in trial.rungs] == [r.round for r in same.rungs]
        assert trial.value("error") == pytest.approx(same.value("error"), rel=1e-9, nan_ok=True)


def test_a_sweep_in_parts_goes_on_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    train = ConfigurationBatch.train

    def limited(batch: ConfigurationBatch) -> None:
        if len(batch._alive) > 2:
            raise torch.OutOfMemoryError("not enough")
        train(batch)

    options = {"space": {"ilr": [0.001, 0.003, 0.01, 0.03, 0.1]}, "settings": {"i_u": 5.0, "i_d": 0.0}}
    options |= {"report_seeds": 0, "halving": 2, **OPTIONS}
    want = tailopt.sweep(TASK, "avg-biclip", **options).trials
    monkeypatch.setattr(ConfigurationBatch, "train", limited)
    with pytest.warns(UserWarning, match="Not enough memory: from here on 2 configurations") as said:
        found = tailopt.sweep(TASK, "avg-biclip", batch=4, **options).trials
    assert len([w for w in said if "Not enough memory" in str(w.message)]) == 1
    for trial, same in zip(found, want, strict=True):
        assert (trial.number, trial.ended) == (same.number, same.ended)
        assert trial.value("error") == pytest.approx(same.value("error"), rel=1e-9)


def test_settings_that_cannot_run_side_by_side_run_in_turn() -> None:
    space = {"ilr": [0.03, 0.1], "i_u": 5.0, "i_d": 0.0, "inner_momentum": [0.0, 0.5]}
    result = tailopt.sweep(TASK, "avg-biclip", space=space, seeds=[0], report_seeds=0, **OPTIONS)
    for trial in result.trials:
        expected = simulated(trial.settings, 0)[-1]["metrics"]["error"]
        assert trial.value("error") == pytest.approx(expected, rel=1e-6)


def test_seeds_that_cannot_run_side_by_side_run_one_after_another() -> None:
    def frozen(seed: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
        nn.init.constant_(model[0].weight, 0.1 + seed)
        model[0].requires_grad_(False)
        return model

    data = [TensorDataset(torch.ones(8, 3).double(), torch.ones(8).double())]
    options = {"loss": squares, "data": data, "batch_size": 4, "rounds": 2, "local_steps": 1, "progress": False}
    result = tailopt.sweep(frozen, "avg-sgd", space={"ilr": [0.01, 0.02]}, report_seeds=0, **options)
    assert result.route.name == "sequential" and "has another 0.weight" in result.route.reason
    assert len({t.value("loss") for t in result.trials}) == 4
    single = tailopt.sweep(frozen, "avg-sgd", space={"ilr": [0.01, 0.02]}, seeds=1, report_seeds=2, **options)
    assert [t.route for t in (*single.trials, *single.reports)] == ["vmap"] * 2 + ["sequential"] * 2


def test_out_of_memory_makes_smaller_batches_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    train, sizes = ConfigurationBatch.train, []

    def scarce(self: ConfigurationBatch) -> None:
        sizes.append(len(self._alive))
        if len(self._alive) > 2:
            raise torch.OutOfMemoryError("full")
        train(self)

    monkeypatch.setattr(ConfigurationBatch, "train", scarce)
    with pytest.warns(UserWarning, match="Not enough memory: from here on 2") as said:
        result = own(space={"ilr": [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]}, batch=4, report_seeds=0)
    assert len(said) == 1 and len(result.trials) == 14
    assert sizes == [4, 2, 2, 2, 1], "later batches begin at the smaller size"


def test_tasks_that_hold_out_data_are_tuned_on_these() -> None:
    @dataclasses.dataclass(frozen=True)
    class Judged(Synthetic):
        judge: str = "validation"

        def evaluate(self, model: nn.Module, seed: int) -> dict[str, float]:
            return {"error": 1.0 if self.judge == "held-out" else 2.0}

    result = tailopt.sweep(
        Judged(samples=120, dimension=6), "avg-sgd", space={"ilr": [0.1]}, seeds=1, report_seeds=2, **OPTIONS
    )
    assert (result.best.value, result.best.report) == (1.0, 2.0)


def test_one_point_is_reported_without_tuning(tmp_path) -> None:
    point = {"ilr": 0.1, "i_u": 0.5, "i_d": 0.1}
    run = {"space": [point], "seeds": 0, "report_seeds": [7, 8], "curves": True, "run": tmp_path / "run", **OPTIONS}
    result = tailopt.sweep(TASK, "avg-biclip", **run)
    assert result.trials == () and result.best.settings == point and result.budget_curve() == []
    for trial in result.reports:
        history = simulated(point, trial.seed)
        assert [rung.round for rung in trial.rungs] == [row["round"] for row in history]
        for rung, row in zip(trial.rungs, history, strict=True):
            assert rung.metrics["error"] == pytest.approx(row["metrics"]["error"], rel=1e-6)
    assert "on 2 fresh seeds" in result.summary() and "| 1 | 0.1 |" in result.table()
    again = tailopt.sweep(TASK, "avg-biclip", **{**run, "report_seeds": [7, 8, 9]})
    assert again.reports[:2] == result.reports and len(again.reports) == 3


def test_curves_of_the_sequential_route() -> None:
    def measure(model: nn.Linear) -> dict[str, float]:
        return {"norm": float(model.weight.norm())}

    more = {"evaluate": measure, "metric": "norm", "lower_is_better": False, "curves": True, "report_seeds": [5]}
    result = own(Refusing, space={"ilr": [0.01, 0.1]}, seeds=1, **more)
    assert result.route.name == "sequential"
    assert [rung.round for rung in result.reports[0].rungs] == list(range(1, 10))
    assert [len(trial.rungs) for trial in result.trials] == [1, 1]


def test_reports_run_side_by_side_after_a_resume_too(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of which all points were one batch has no batch: the report took few seeds at a time."""
    run = {"space": {"ilr": [0.01, 0.1]}, "seeds": 1, "run": tmp_path / "run", **OPTIONS}
    tailopt.sweep(TASK, "avg-sgd", report_seeds=0, **run)
    batches: list[int] = []
    real = Trainer.train

    def counting(self: Trainer, points, at_once=None):
        batches.append(len(points) * len(self.job.seeds))
        return real(self, points, at_once)

    monkeypatch.setattr(Trainer, "train", counting)
    tailopt.sweep(TASK, "avg-sgd", report_seeds=4, **run)
    assert batches == [2, 2]


def test_a_figure(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    result = own(space={"ilr": [0.01, 0.02, 0.1]}, seeds=1, report_seeds=0)
    result.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": None}, "Invalid loss: a model needs it"),
        ({"rounds": None}, "Invalid rounds: a model needs it"),
        ({"evaluate": dict, "metric": "accuracy"}, "say whether accuracy is better when lower"),
        ({"evaluate": dict}, "name the number of evaluate"),
        ({"metric": "accuracy"}, "there is no evaluate"),
        ({"report_seeds": [1, 5]}, "1 is one of seeds as well"),
        ({"seeds": [1, 1]}, "need 0 or more, each once"),
        ({"halving": 1}, "Invalid halving: 1"),
        ({"engine": "fast"}, "Invalid engine: 'fast'"),
        ({"executor": "threads"}, "Invalid executor: 'threads'"),
        ({"space": {"olr": [1.0]}}, "unknown 'olr'"),
        ({"seeds": 0, "report_seeds": 0}, "Invalid seeds: 0, and report_seeds is 0 too"),
        ({"seeds": 0, "space": {"ilr": [0.1, 0.2]}}, "Invalid seeds: 0, but the space has 2 points"),
        ({"curves": 1}, "Invalid curves: 1"),
        ({"seeds": -1}, "Invalid seeds: got -1; need a whole number, 0 or more. Or give a list"),
        ({"report_seeds": -2}, "Invalid report_seeds: got -2"),
        ({"memory_limit": 0}, "Invalid memory_limit: 0"),
        ({"memory_limit": "1GB"}, "Invalid memory_limit: '1GB'"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        own(**{"space": {"ilr": [0.1]}, **arguments})


def test_a_task_brings_its_own_loss() -> None:
    with pytest.raises(ValueError, match="the task syntoken has its own"):
        tailopt.sweep(TASK, "avg-sgd", loss=squares)
    with pytest.raises(ValueError, match="'nothing' is not what evaluate returned"):
        tailopt.sweep(TASK, "avg-sgd", space={"ilr": [0.1]}, metric="nothing", **OPTIONS)


# --- FedProx ----------------------------------------------------------------------------------------------------------


def test_a_proximal_term_is_searched_with_the_settings_of_the_algorithm() -> None:
    space = {"ilr": [0.05, 0.3], "proximal": [0.0, 5.0]}
    result = tailopt.sweep(TASK, "avg-sgd", space=space, seeds=[3, 4], report_seeds=[7], **OPTIONS)
    assert result.route.name == "vmap" and len(result.trials) == 8
    for trial in result.trials:
        settings = {"ilr": trial.settings["ilr"]}
        alone = tailopt.sweep(
            TASK, "avg-sgd", space=[settings], proximal=trial.settings["proximal"], seeds=[trial.seed], report_seeds=0,
            **OPTIONS,
        )  # fmt: skip
        assert trial.value("error") == pytest.approx(alone.trials[0].value("error"), rel=1e-12)
    errors = {(t.settings["ilr"], t.settings["proximal"]): t.value("error") for t in result.trials if t.seed == 3}
    assert len(set(errors.values())) == 4  # the term does something
    assert result.best.settings.keys() == {"ilr", "proximal"}
    reported = tailopt.sweep(
        TASK, "avg-sgd", space=[{"ilr": result.best.settings["ilr"]}], proximal=result.best.settings["proximal"],
        seeds=[7], report_seeds=0, **OPTIONS,
    )  # fmt: skip
    assert result.best.report == pytest.approx(reported.trials[0].value("error"), rel=1e-12)


def test_a_search_with_a_proximal_term_goes_on_from_its_record(tmp_path) -> None:
    space = {"ilr": Range(0.01, 0.3), "proximal": Range(0.01, 10.0)}
    options = {**OPTIONS, "space": space, "seeds": [3], "report_seeds": 0, "run": tmp_path / "sweep"}
    few = tailopt.sweep(TASK, "avg-sgd", budget=2, **options)
    more = tailopt.sweep(TASK, "avg-sgd", budget=4, **options)
    assert [t.settings for t in more.trials][:2] == [t.settings for t in few.trials] and len(more.trials) == 4


def test_a_proximal_term_that_cannot_be_searched_is_refused() -> None:
    space = {"ilr": Range(0.01, 0.3), "proximal": Range(0.01, 10.0)}
    with pytest.raises(ValueError, match="Invalid proximal: 0.5 is given, and the space has it too"):
        tailopt.sweep(TASK, "avg-sgd", space=space, proximal=0.5, **OPTIONS)
    with pytest.raises(ValueError, match="Invalid halving: True, and the space has proximal"):
        tailopt.sweep(TASK, "avg-sgd", space=space, halving=True, **OPTIONS)
    with pytest.raises(ValueError, match="Invalid proximal: -1.0; need a finite number of 0 or more"):
        tailopt.sweep(TASK, "avg-sgd", space=[{"ilr": 0.1, "proximal": -1.0}], **OPTIONS)
