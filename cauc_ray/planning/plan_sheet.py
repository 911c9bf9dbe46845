"""The display of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cauc_ray.display import Figures, Grid, Sheet, amount, count_text, percent, relative
from cauc_ray.models.resources import amounts_text
from cauc_ray.numbers.chain import cost_text

_SOURCES = {"ledger": "an earlier run's ledger", "saved": "as the pool file declares", "cost": "its cost in the pool"}


class Plan(Figures):
    """A plan: the goal, the stages, their resources and costs, and the rate that the pool can carry."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return the goal, the stages and the resources; sources as details."""
        title = f"{self['pool']} at {count_text(amount(self['rate']), 'request')} a second, policy {self['policy_id']}"
        parts: list[str | Grid] = [*self._goal(), self._stages(), *self._resources()]
        return Sheet(title, parts, [*self._sources()])

    def _goal(self) -> Iterator[str]:
        goal = f"p99 within {self['slo_p99_s']:g} s" if self["slo_p99_s"] else "the rate"
        yield f"{goal} {'holds' if self['meets_slo'] else 'does not hold'}: {_latency(self['latency_s'])}"
        if self["out_of_reach"]:
            yield self["out_of_reach"]
        carried = self["range"]
        yield (
            f"the pool's replicas (max) carry {count_text(amount(carried['max_rate']), 'request')} a second at a "
            f"load of {percent(self['most_load'])}; the bottleneck is {carried['bottleneck']!r}"
        )

    def _stages(self) -> Grid:
        columns = [
            ("stage", "text", "name"),
            ("reach", "percent", "reach"),
            ("requests/s", "amount", "requests_per_s"),
            ("replicas", "count", "replicas"),
            ("load", "percent", "load"),
            ("busy", "percent", "busy"),
            ("batch (s)", "number", "batch_s"),
            ("fill", "percent", "fill"),
            ("wait (s)", "number", "wait_s"),
            (f"cost ({self['total']['cost_unit']})", "number", "cost"),
            ("share", "percent", "cost_share"),
        ]
        note = "load: share of the capacity in full batches; busy: share of the time, more where batches are smaller"
        return Grid.of("", self["stages"], columns, notes=[note])

    def _resources(self) -> Iterator[str]:
        router, total, alone = self["router"], self["total"], self["most_expensive_alone"]
        yield (
            f"router: {router['replicas']:,} at a load of {percent(router['load'])}; it takes "
            f"{1e3 * router['per_request_s']:.2f} ms a request and {1e3 * router['per_call_s']:.2f} ms a call"
        )
        for stage in self["stages"]:
            yield f"{stage['name']}: {amounts_text(stage['resources'])} in all; each replica {stage['each']}"
        yield (
            f"in all {count_text(total['replicas'], 'replica')}, {amounts_text(total['resources'])}; a request costs "
            f"{cost_text(total['cost'], total['cost_unit'])}{relative(alone['relative_cost'], alone['name'])}"
        )
        yield (
            f"every request at {alone['name']} alone: {count_text(alone['replicas'], 'replica')}, "
            f"{amounts_text(alone['resources'])}, {cost_text(alone['cost'], total['cost_unit'])} a request"
        )

    def _sources(self) -> Iterator[str]:
        for stage in self["stages"]:
            seconds, observed = stage["seconds"], stage["ledger_deferral"]
            fit = f", {seconds['n_calls']:,} calls, off by {percent(seconds['error'])}" if seconds["n_calls"] else ""
            ledger = "" if observed is None else f", in the ledger {percent(observed)}"
            yield (
                f"{stage['name']}: a batch takes {seconds['per_call']:.4g} s and {seconds['per_row']:.4g} s a row "
                f"({_SOURCES[seconds['source']]}{fit}); defers {percent(stage['deferral'])}{ledger}"
            )


def _latency(latency: Mapping[str, Any] | None) -> str:
    if latency is None:
        return "the queue grows without bound"
    return f"latency p50 {latency['p50']:.3g} s, p99 {latency['p99']:.3g} s, mean {latency['mean']:.3g} s"
