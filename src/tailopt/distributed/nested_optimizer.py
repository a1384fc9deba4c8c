"""Real nodes: `tailopt.NestedOptimizer` for any training loop under torchrun. Every process of a group is a node.

After exactly `local_steps` completed inner steps the nodes exchange what they moved and take the outer step together
(`exchange.py`): the same round as in a simulation, with the same bits. A node that does not take part in a round takes
no step in it: `step()` returns only when its own next round begins, and until then it serves the exchanges.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tailopt.algorithms import Algorithm
from tailopt.arguments import check_counts, check_flags
from tailopt.distributed.checkpointing import Resumed, all_excluded
from tailopt.distributed.exchange import TrainableSetsDiffer
from tailopt.distributed.exchange_types import ExchangeReport, JudgingCriteria
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.header import digest64
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.local_round import LocalRound
from tailopt.distributed.mesh import check_nodes, node_group, require_process_group
from tailopt.distributed.node import Node
from tailopt.distributed.node_records import NodeRecords, RecordOptions
from tailopt.distributed.rule_optimizer import RuleOptimizer
from tailopt.distributed.run_facts import RunFacts
from tailopt.distributed.trainable_set import TrainableSet, described_sizes, named_parameters
from tailopt.engines.model_state import Buffers, check_trainable, names_and_dimensions, trainable_parameters
from tailopt.rounds import robust
from tailopt.rounds.auto_thresholds import AutoThresholdsByLevel
from tailopt.rounds.clipping_counts import history_statistics
from tailopt.rounds.drops import DROPPED
from tailopt.rounds.guard import Bound
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters, outer_hyperparameters
from tailopt.rounds.participants import Chooser, check_weight
from tailopt.rounds.policy import RoundPolicy
from tailopt.rounds.settle import EveryoneExcluded


class NestedOptimizer(Optimizer):
    """Takes local steps by any optimizer; after every `local_steps` of them the nodes synchronise.

        x_i <- inner steps from x;    delta = sum of w_i (x_i - x);    x <- outer step(x, delta)

    `param_groups` and `state` are the inner optimizer's own, so schedulers, scalers and checkpoints see that one. Every
    process is a node, or every rank of `mesh`. Construct it on all nodes, after `torch.distributed.init_process_group`;
    the weights of node 0 are everybody's.

    Args:
        optimizer: the inner optimizer.
        outer: a name (avg, sgd, nesterov, biclip, biclip-l2, adagrad, rmsprop, adam, yogi) or a class.
        outer_settings: its settings: olr, o_u, o_d, oeps, momentum, outer_betas, bias_correction.
        local_steps: inner steps of a round.
        model: for parameter names and buffers; without it parameters are called 0, 1, ... and buffers stay local.
        mesh: the nodes: a DeviceMesh of one dimension, such as `mesh["node"]`, or a process group; else all processes.
        weight: of this node in the mean.
        participation, participants, sampling, seed, on_drop, proximal, projection, average, guard, aggregate: as in
            `tailopt.simulate`; keep and checkpoint_every too, which may be None: then only `checkpoint()` writes.
        inner_state: "keep", or "reset" to begin every round with a new inner state.
        rounds: after this many the run is `finished`; needed where not every node takes part in every round, so that
            nobody waits for nodes that have left.
        timeout: seconds without a sign of life after which a node counts as lost; all others then raise `NodeLost`,
            which names it. A slow node shows signs of life: after this time a warning names it.
        stall_timeout: seconds for which a node may show signs of life without progress (no local step) while others
            wait for it; then they raise `NodeLost`. By default there is no such limit.
        exact: refuse nodes whose torch, instruction set or number of threads differ. By default a warning says that a
            replay of the run cannot have its exact bits.
        run: a folder that all nodes share, for configuration, history and checkpoints. `resume` continues from its last
            sound checkpoint, or begins where there is none; `resumed` then says where. Build the optimizer last: it
            restores weights, inner state, learning rates and torch's generators.
        extra: a function of no arguments that returns what this node's checkpoints at the ends of rounds hold besides,
            such as the position in the data: tensors and plain values. It comes back as `resumed.extra`.
        describe: what else the configuration contains; must be equal on all nodes, except devices and paths of data.
        statistics: as in `tailopt.simulate`, with the same counts; needs `from_algorithm`.
        loggers: called with every row of the history, at the end of its round; see `tailopt.loggers`.
        settings: hyperparameters of the inner and the outer rule that all nodes have agreed on, made from `algorithm`.
            `from_algorithm` sets both. None where the inner optimizer is the user's.

    Examples:
        Under `torchrun --nproc-per-node 2`, see examples/two_nodes.py.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        outer: str | type[Optimizer] = "avg",
        outer_settings: Mapping[str, Any] | None = None,
        *,
        local_steps: int,
        model: torch.nn.Module | None = None,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        weight: float = 1.0,
        participation: float | Chooser = 1.0,
        participants: int | None = None,
        sampling: str = "uniform",
        seed: int = 0,
        guard: bool = True,
        aggregate: str | robust.Aggregate = "mean",
        on_drop: str = "sync",
        proximal: float = 0.0,
        projection: float | None = None,
        inner_state: str = "keep",
        average: bool = False,
        rounds: int | None = None,
        timeout: float = 60.0,
        stall_timeout: float | None = None,
        exact: bool = False,
        run: str | os.PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int | None = 1,
        keep: int = 3,
        extra: Callable[[], Mapping[str, Any]] | None = None,
        describe: Mapping[str, Any] | None = None,
        statistics: bool | str = False,
        loggers: Sequence[Callable[[dict[str, Any]], None]] = (),
        settings: AlgorithmHyperparameters | None = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        check_counts(local_steps=local_steps)  # real nodes do not count epochs, so None is no choice
        policy = RoundPolicy(
            rounds=rounds,
            inner_state=inner_state,
            local_steps=local_steps,
            participation=participation,
            participants=participants,
            sampling=sampling,
            on_drop=on_drop,
            proximal=proximal,
            projection=projection,
            average=average,
            guard=guard,
            aggregate=aggregate,
            seed=seed,
        )
        options = RecordOptions(
            folder=run, resume=resume, checkpoint_every=checkpoint_every, keep=keep, extra=extra,
            describe=describe or {}, statistics=statistics, loggers=loggers,
        )  # fmt: skip
        check_flags(exact=exact)
        check_weight(weight, dist.get_rank() if dist.is_initialized() else 0)
        require_process_group()
        self.optimizer, self._agreed_hparams = optimizer, settings
        names, params = named_parameters(optimizer, model)
        self._outer = settings.outer if settings else outer_hyperparameters(outer, outer_settings or {}, names)
        inner_thresholds = None if settings is None else settings.inner.auto_thresholds
        self._auto_thresholds = AutoThresholdsByLevel(inner_thresholds, self._outer.auto_thresholds)
        facts = RunFacts(optimizer, algorithm, settings, self._outer, self._auto_thresholds, statistics)
        self._send_second_moment, self._statistics = facts.send_second_moment, statistics
        group = node_group(mesh)
        check_nodes(group, params, model)  # before the first message
        transport = GlooTransport.of(group, timeout, stall_timeout)
        buffers = Buffers(model) if model is not None else None
        policy = replace(policy, nodes=transport.nodes)
        self._peers = transport.peers
        if self._peers is not None:  # before the first exchange: gloo ends the process where sizes differ
            self._peers.agree({**described_sizes(names, params, buffers), **facts.shared(policy, options)}, exact)
        weights = blocking(transport.gather(torch.tensor([float(weight)], dtype=torch.float64))).reshape(-1).tolist()
        self._policy = replace(policy, weights=tuple(weights))
        self.node = Node(transport, names, params, buffers, average, self._auto_thresholds)
        self._begin_run(model, options, facts.config(self._policy))

    def _begin_run(self, model: torch.nn.Module | None, options: RecordOptions, config: Mapping[str, Any]) -> None:
        """Start from node 0's weights or from a checkpoint, and wait for this node's first round."""
        policy, node = self._policy, self.node
        assert policy.local_steps is not None
        self.local_steps, self.rounds = policy.local_steps, policy.rounds
        inner = None if self._agreed_hparams is None else self._agreed_hparams.inner
        can_be_excluded, keeps_state = policy.guard or policy.robust_mean is not None, policy.inner_state == "keep"
        proximal_step = node.proximal_step(policy.proximal)
        self._local_round = LocalRound(
            self.optimizer, node.params, inner, keeps_state, can_be_excluded, proximal_step, options.statistics
        )
        self._trainable_set = TrainableSet(self.optimizer, node.exchange.names, node.params)
        self._records = NodeRecords(options, node, self._local_round, policy.guard)
        self._diverged: set[int] = set()  # nodes that continue from weights of their own
        self._warned_about: set[int] = set()  # nodes that differ from the others
        self._init_hooks()
        node.start()
        self._records.open(config)
        if self._peers is not None:
            self._peers.set_checkpoint_sentence(self._records.last_checkpoint_sentence)
        in_the_middle = self._records.resume_or_start()
        for row in self.history:
            self._note_diverged(row)
        self._diverged &= set(range(min(node.nodes, self._records.writers)))  # the others start from the global weights
        if self._send_second_moment and node.round:
            node.gather_second_moment()
        self._records.watch_inputs(model, in_the_middle)
        self._records.begin_loggers()
        if in_the_middle:
            self._records.watch_first_batch()
        else:
            self._await_own_round()
        self._records.allow_extra()

    def _init_hooks(self) -> None:
        """Set what the base class would have set; the groups and the state are the inner optimizer's."""
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._optimizer_state_dict_pre_hooks: Any = OrderedDict()
        self._optimizer_state_dict_post_hooks: Any = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: Any = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: Any = OrderedDict()

    @classmethod
    def from_algorithm(
        cls, model: torch.nn.Module, algorithm: Algorithm, *, schedules: Any = None, **options: Any
    ) -> NestedOptimizer:
        """Build the inner optimizer too, from an algorithm: the way to adam2, and to the bits of the simulation."""
        check_trainable(model)
        trained = trainable_parameters(model)
        hparams = AlgorithmHyperparameters(algorithm, schedules, *names_and_dimensions(trained))
        inner = RuleOptimizer(trained.values(), hparams.inner.rule, hparams.inner.at(1))
        options.setdefault("inner_state", algorithm.inner_state)
        return cls(inner, algorithm.outer, model=model, settings=hparams, algorithm=algorithm, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param groups of the inner optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the inner optimizer."""
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as the inner optimizer does it."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer; outer state is checkpointed by round."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    # local steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one inner step; every `local_steps`-th also ends the round.

        It then returns when this node's next round begins, and serves the exchanges of other nodes until then.
        """
        t = self.node.round + 1
        if self._peers is not None:
            self._peers.report_position(t, self._local_round.steps)
            self._peers.check()
        if self._agreed_hparams is None:
            self._records.warn_if_rates_not_restored()
        loss = self._local_round.step(t, self.total_steps, closure)
        if self._local_round.steps >= self.local_steps:
            self._close_round()
            self._await_own_round()
        return loss

    def report(self, loss: float) -> None:
        """Report the loss of this round on this node, for the history."""
        self._local_round.loss = loss

    def synchronize(self) -> None:
        """End the round now, with the local steps that have been taken: after the last batch, or to evaluate."""
        if self._local_round.steps:
            self._close_round(last=True)
            self._await_own_round()

    @property
    def total_steps(self) -> int:
        """Local steps that this node has taken over the whole run."""
        return self._records.steps_before_round[self.node.number] + self._local_round.steps

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row per round, as in a simulation."""
        return self._records.history

    @property
    def resumed(self) -> Resumed | None:
        """Where the run continued from; None where it began."""
        return self._records.resumed

    @property
    def thresholds(self) -> tuple[str, ...]:
        """What "auto" has chosen, a line for each level; empty during calibration."""
        return self._auto_thresholds.choice_messages

    @property
    def finished(self) -> bool:
        """Whether all `rounds` are done; never, where their number was not given."""
        return self.rounds is not None and self.node.round >= self.rounds

    # rounds

    def _await_own_round(self) -> None:
        """Serve the rounds in which this node does not take part."""
        self._clear_round()
        while not self.finished and self.node.number not in self._policy.draw(self.node.round + 1).shares:
            self._close_round()
            self._clear_round()
        if not self.finished:
            self.node.begin_round()
            self._local_round.begin()
            self._records.watch_first_batch()

    def _clear_round(self) -> None:
        states = None
        if self._send_second_moment and self.node.round:
            # "raw": the algorithm turns off the correction of the second moment, so Adam counts its steps from 0
            states = self.node.states_with_second_moment(0 if self._send_second_moment == "raw" else self.node.round)
        self._local_round.clear(states)

    def _close_round(self, last: bool = False) -> None:
        """End the round with all nodes.

        last: it may be the last one, so that the new weights are compared at once.
        """
        t, local, policy = self.node.round + 1, self._local_round, self._policy
        if self._peers is not None:
            self._peers.report_position(t, local.steps)
        self._records.warn_if_data_restart(t)
        bound = local.bound(t, self._records.steps_before_round[self.node.number]) if policy.guard else Bound(None)
        statement = local.statement(
            bound,
            trainable_set_digest=self._trainable_set.digest(),
            auto_thresholds_digest=digest64(self._auto_thresholds.state_bytes()),
            may_be_last=last or t == self.rounds,
        )
        expected = None if self._agreed_hparams is None else functools.partial(self._bound_by_agreed_hparams, t)
        criteria = JudgingCriteria(policy.guard, expected, self._diverged, self.local_steps, policy.robust_mean)
        try:
            report = self.node.close_round(
                policy.draw(t), statement, criteria, self._outer, policy, bool(self._send_second_moment)
            )
        except EveryoneExcluded as error:
            raise all_excluded(error, self._records.coordinator) from None
        except TrainableSetsDiffer:
            raise self._trainable_set.disagreement(t, self._peers) from None
        self._record_round(report)

    def _record_round(self, report: ExchangeReport) -> None:
        settlement = report.settlement
        for node, steps in settlement.steps.items():
            self._records.steps_before_round[node] += steps
        if self.node.number in {e.node for e in settlement.excluded if e.reason != DROPPED}:
            self._local_round.undo()
        row = {**settlement.history_row({}, self._counted(report)), **self._auto_thresholds.history_entry()}
        lines = self._auto_thresholds.update_from(settlement, report.threshold_statistics, report.outer_step_statistics)
        self.history.append(row)
        self._note_diverged(row)
        self._warn_about(report, [line for line in lines if line not in self.thresholds])
        for line in self.thresholds:
            if line in lines:
                self._records.log(line)
        self._trainable_set.check_all_parameters_exchanged(settlement.round)
        self._records.tell(row)
        self._records.record(row, report, self.finished)

    def _counted(self, report: ExchangeReport) -> dict[str, Any]:
        """Return the counts of the nodes that counted in a round, for the history."""
        if not self._statistics:
            return {}
        counted = [report.clipping_counts[i] for i in sorted(report.settlement.counted_shares)]
        return history_statistics(self.node.exchange.names, counted, self._statistics)

    def _bound_by_agreed_hparams(self, t: int, node: int, steps: int) -> Bound:
        """Return how far a node can have moved in so many steps, by the hyperparameters that all nodes agreed on."""
        assert self._agreed_hparams is not None
        if not self._policy.guard:
            return Bound(None)
        return self._agreed_hparams.inner.bound(t, self._records.steps_before_round[node], steps)

    def _warn_about(self, report: ExchangeReport, about_thresholds: Sequence[str]) -> None:
        """Warn about nodes that do not count in a round, and once about each node that differs from the others."""
        settlement = report.settlement
        texts = [f"Round {settlement.round} goes on without {e}." for e in settlement.excluded if e.reason != DROPPED]
        for node, text in report.warnings_by_node.items():
            if node not in self._warned_about:
                self._warned_about.add(node)
                texts.append(text)
        texts += [*report.reloads, *about_thresholds]
        for text in texts:
            warnings.warn(text, UserWarning, stacklevel=5)
            self._records.log(text)

    def _note_diverged(self, row: Mapping[str, Any]) -> None:
        """Note which nodes continue from their own weights: on every node, since the guard has no bound for them."""
        if self._policy.dropped_nodes_diverge:
            lost = {e["node"] for e in row["excluded"] if e["reason"] == DROPPED}
            self._diverged = (self._diverged - set(row["participants"])) | lost

    # records

    def checkpoint(self, extra: Mapping[str, Any] | None = None) -> bool:
        """Write a checkpoint now, in the middle of a round or at its end; on every node, after the same local step.

        Returns whether it was written: a full disk is warned of, and the run continues with the previous one. At the
        ends of rounds checkpoints are written without asking, every `checkpoint_every` rounds if it is a number.

        Args:
            extra: what of this node comes back as `resumed.extra`, such as the position in the data: tensors and plain
                values. By default what the function `extra` returns.
        """
        if self._records.coordinator is None:
            raise ValueError("There is no run folder to write a checkpoint to. Give it as `run`.")
        if not self.finished and not self._policy.everybody_takes_part:
            raise ValueError(
                "Not every node takes part in every round, so the others could not write their part now. Checkpoints "
                "at the ends of rounds are written without asking; give what they should hold besides as `extra` when "
                "the optimizer is built."
            )
        return self._records.save(self._local_round.steps, extra)
