"""Where logits come from: a table's folder, or arrays that are here; both are read as chains by the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np

from cauc_ray.data.logits import ChainHeads, LogitKinds, LogitTable
from cauc_ray.data.splits import split_shares
from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.front.options import EvaluateOptions, FitOptions
from cauc_ray.numbers.arrays import array_chain, rows_of
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import UNNAMED_UNIT, Costs
from cauc_ray.numbers.logits import LOGIT_KINDS, LogitKind
from cauc_ray.policies.policy import Policy

# A table by its path or URI, or arrays by model.
Logits: TypeAlias = str | Path | Mapping[str, Any]


class LogitArrays:
    """Arrays of logits by model, read as a LogitTable is."""

    def __init__(
        self,
        splits: Mapping[str, tuple[Mapping[str, Any], Any]],
        logit_kind: LogitKinds = None,
        *,
        undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
    ) -> None:
        """Take arrays with their labels, or None, by split; arguments are else those of LogitTable."""
        self.path = "the arrays"
        self._splits = splits
        self.models = list(next(iter(splits.values()))[0])
        given = dict.fromkeys(self.models, logit_kind) if isinstance(logit_kind, str) else dict(logit_kind or {})
        for model, kind in given.items():
            if model not in self.models:
                raise ConfigError(f"{self.path}: {unknown_name('model', model, self.models)}")
            if kind not in LOGIT_KINDS:
                raise ConfigError(unknown_name("logit kind", kind, LOGIT_KINDS))
        self._kinds = {
            model: cast("LogitKind", given.get(model) or undeclared.get(model, "raw")) for model in self.models
        }

    def splits(self, model: str) -> list[str]:
        """Return the names of the splits."""
        return list(self._splits)

    def declared_costs(self) -> dict[str, float]:
        """Return nothing: arrays do not say what calls cost."""
        return {}

    def read_chain(
        self,
        models: Sequence[str],
        split: str,
        *,
        costs: Sequence[float] | None = None,
        per_call_costs: bool | None = None,
    ) -> ChainLogits:
        """Return a chain on a split, in the order of example ids, as a table has it. Raises as LogitTable."""
        if costs is None:
            raise ConfigError("arrays do not say what a call of each model costs; give costs={model: cost}")
        arrays, labels = self._splits[split]
        source = f"{self.path}, split {split!r}"
        priced = Costs(UNNAMED_UNIT, np.array(costs, dtype=np.float64))
        chain = array_chain(arrays, models, labels, costs=priced, kinds=self._kinds, source=source)
        return rows_of(chain, np.argsort(chain.example_ids))


class FittingSource:
    """What a policy is fitted on: calibration and validation examples of any of a source's models.

    models: the chain that options ask for.   costs: of calls, where options give them.   declared: those, else what
    the table declares.
    """

    def __init__(
        self,
        logits: Logits,
        labels: Any,
        validation: Any,
        options: FitOptions,
        undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
    ) -> None:
        """Open a table or take arrays.

        validation: of arrays, a pair (logits, labels).   undeclared: as LogitTable has it.
        """
        self._options = options
        self._source: LogitTable | LogitArrays
        if isinstance(logits, Mapping):
            splits = dict(zip(options.splits, [(logits, labels), validation], strict=True))
            given = {split: pair for split, pair in splits.items() if pair is not None}
            self._source = LogitArrays(given, options.logit_kind, undeclared=undeclared)
        else:
            _require_no_arrays(labels, validation)
            self._source = LogitTable(logits, options.logit_kind, undeclared=undeclared)
        self.costs = self._given_costs()
        self.declared = self.costs if self.costs is not None else self._source.declared_costs()
        self.models = options.models or tuple(
            # Where a cost is missing, whoever reads the chain says so.
            sorted(self._source.models, key=lambda model: self.declared.get(model, 0.0))
        )

    def _given_costs(self) -> dict[str, float] | None:
        """Return what calls cost by model, None where options do not give it."""
        models, costs = self._options.models, self._options.costs
        if not isinstance(costs, tuple):
            return costs
        if models is None and isinstance(self._source, LogitTable):
            raise ConfigError("costs in a list are in the order of models; name the models, or give {model: cost}")
        models = models or tuple(self._source.models)
        if len(costs) != len(models):
            raise ConfigError(f"{len(costs)} costs for {len(models)} models: give one for each, in their order")
        return dict(zip(models, costs, strict=True))

    def read(
        self,
        models: Sequence[str],
        costs: Mapping[str, float] | None,
        *,
        per_call_costs: bool | None = None,
    ) -> tuple[ChainLogits, ChainLogits | None]:
        """Read calibration, and validation where there is one, in the order of example ids, as a table has them.

        models: of the source.   costs: of their calls, None for the source's.   per_call_costs: as LogitTable has it.
        """
        priced = _in_order(costs, models)
        calibration, validation = (
            self._read(models, split, priced, per_call_costs)
            if place == 0 or split in self._source.splits(models[0])
            else None
            for place, split in enumerate(self._options.splits)
        )
        assert calibration is not None
        share = self._options.validation
        return (calibration, validation) if share is None else _cut(calibration, share, self._options.seed)

    def read_heads(self) -> list[ChainHeads]:
        """Read what a table has of calibration, and of validation where there is one, but the logits."""
        assert isinstance(self._source, LogitTable)
        calibration, validation = self._options.splits
        splits = [calibration, *({validation} & set(self._source.splits(self.models[0])))]
        priced, unit = _in_order(self.costs, self.models), self._options.cost_unit
        chains = [self._source.read_chain_heads(self.models, split, costs=priced) for split in splits]
        if unit is not None:
            chains = [replace(c, known={**c.known, "costs": Costs(unit, c.known["costs"].per_call)}) for c in chains]
        return chains

    def _read(
        self, models: Sequence[str], split: str, costs: Sequence[float] | None, per_call_costs: bool | None
    ) -> ChainLogits:
        chain = self._source.read_chain(models, split, costs=costs, per_call_costs=per_call_costs)
        unit = self._options.cost_unit
        return chain if unit is None else replace(chain, costs=Costs(unit, chain.costs.per_call))


def _in_order(costs: Mapping[str, float] | None, models: Sequence[str]) -> list[float] | None:
    """Return costs in the order of models, None where there are none. Raises ConfigError naming one that is missing."""
    if costs is None:
        return None
    missing = next((model for model in models if model not in costs), None)
    if missing is not None:
        raise ConfigError(f"costs: {unknown_name('model', missing, costs)}")
    return [costs[model] for model in models]


def _require_no_arrays(labels: Any, validation: Any) -> None:
    if labels is not None or validation is not None:
        raise ConfigError("a logit table has its own labels and splits; labels and a validation pair go with arrays")


def _cut(chain: ChainLogits, share: float, seed: int) -> tuple[ChainLogits, ChainLogits]:
    """Cut a share of the examples off at random, for validation."""
    # By length, then as text: the ids of arrays are then in the order of their rows.
    order = np.array(sorted(range(len(chain)), key=lambda row: (len(chain.example_ids[row]), chain.example_ids[row])))
    parts = split_shares(len(chain), {"calibration": 1 - share, "validation": share}, seed)
    if not all(len(rows) for rows in parts.values()):
        raise ConfigError(f"validation: a share of {share:g} of {len(chain)} examples leaves one of two parts empty")
    calibration, validation = (rows_of(chain, np.sort(order[rows])) for rows in parts.values())
    return calibration, validation


def read_policy_chain(
    logits: Logits, policy: Policy, split: str, logit_kind: LogitKinds = None, labels: Any = None
) -> ChainLogits:
    """Read a policy's models on a split of a table, or from arrays, with costs counted as the policy counts them.

    labels: of arrays, None where there are none.   logit_kind: as for evaluate. Calls cost the policy's means there.
    """
    source: LogitTable | LogitArrays
    if isinstance(logits, Mapping):
        source = LogitArrays({split: (logits, labels)}, logit_kind, undeclared=policy.kinds_by_model)
    else:
        _require_no_arrays(labels, None)
        source = LogitTable(logits, logit_kind, undeclared=policy.kinds_by_model)
    per_call = policy.costs == "per-call" and isinstance(source, LogitTable)
    chain = source.read_chain(policy.models, split, costs=_costs_of(policy, per_call), per_call_costs=per_call)
    if isinstance(source, LogitTable):
        return chain
    return replace(chain, costs=Costs(policy.cost_unit, chain.costs.per_call))


def read_policy_heads(logits: str | Path, policy: Policy, options: EvaluateOptions) -> ChainHeads:
    """Read a policy's models on a split of a table as read_policy_chain does, but the logits."""
    table = LogitTable(logits, options.logit_kind, undeclared=policy.kinds_by_model)
    per_call = policy.costs == "per-call"
    return table.read_chain_heads(
        policy.models, options.split, costs=_costs_of(policy, per_call), per_call_costs=per_call
    )


def _costs_of(policy: Policy, per_call: bool) -> list[float] | None:
    return None if per_call else [stage.cost for stage in policy.stages]
