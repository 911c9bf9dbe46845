"""The results of work on Ray and of services: figures by name, which display themselves."""

from __future__ import annotations

from collections.abc import Iterator

from cauc_ray.display import Figures, Grid, Sheet, amount, count_text, number, percent, relative, with_interval
from cauc_ray.errors import DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.chain import cost_text


class CollectSummary(Figures):
    """The result of a collection: its table, its splits, and its models."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return what was collected, model by model."""
        unit, splits, models = self["cost_unit"], self["splits"], self["models"]
        columns: list[tuple[str, ...]] = [("model", "text", "name")]
        columns += [(split, "count", f"n_{split}") for split in splits]
        if unit is not None:
            columns += [
                ("accuracy (95 %)", "share", "accuracy", "accuracy_interval"),
                (f"cost ({unit})", "number", "cost"),
            ]
        columns += [("failed", "count", "n_failed"), ("rows/s", "number", "rows_per_s")]
        rows = [model | {f"n_{split}": model["splits"][split]["rows"] for split in splits} for model in models]
        lines = [f"{model['name']}: {n:,} {what}" for model in models for what, n in model["counts"].items()]
        if any(model["n_failed"] for model in models):
            lines.append(f"why rows failed: {self['logits']}/failed")
        return Sheet(f"{self['dataset']}: {self['rule']}", [Grid.of("", rows, columns), *lines])


class RunSummary(Figures):
    """The summary of a run, as its summary.json has it."""

    __slots__ = ()

    @classmethod
    def load(cls, path: AnyPath) -> RunSummary:
        """Load a summary.json. Raises DataError where it is malformed."""
        content = read_json(path)
        summary = cls(content if isinstance(content, dict) else {})
        try:
            summary.sheet()
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise DataError(f"{path} is not the summary of a run of this version") from error
        return summary

    def sheet(self) -> Sheet:
        """Return what a run saved, its stages, and what went wrong if anything did."""
        columns = [
            ("stage", "text", "name"),
            ("reached", "count", "reached"),
            ("answered", "count", "answered"),
            ("fill", "percent", "batch_fill"),
            (f"cost ({self['cost_unit']})", "amount", "cost"),
            ("share", "percent", "cost_share"),
            ("compute (s)", "amount", "compute_s"),
            ("busy", "percent", "busy_share"),
            ("queue (s)", "amount", "queue_s"),
        ]
        title = f"run {self['run_id']}, policy {self['policy_id']}"
        return Sheet(title, [*self._lines(), Grid.of("", self["stages"], columns)], list(self._details()))

    def _lines(self) -> Iterator[str]:
        share, last = self["accuracy"], self["stages"][-1]["name"]
        accuracy = f"accuracy {with_interval(share['value'], [share['low'], share['high']])}, " if share else ""
        cost = f"cost {cost_text(self['cost'], self['cost_unit'])} a row"
        rows = count_text(f"{self['n']:,}", "row")
        yield f"{rows}: {accuracy}{cost}{relative(self['relative_cost'], last)}"
        yield (
            f"saved {percent(self['saving'])} of the cost of {last} ({percent(self['expected_saving'])} expected); "
            f"{percent(self['last_stage_avoided'])} of answered rows never called {last} "
            f"({percent(self['expected_last_stage_avoided'])} expected)"
        )
        trouble = {
            "failed rows (see failed/)": self["n_failed"],
            "rows answered without a stage that was down": self["degraded"],
            "failed calls": sum(stage["lost_calls"] for stage in self["stages"]),
        }
        if any(trouble.values()):
            yield "; ".join(f"{what}: {n:,}" for what, n in trouble.items() if n)
        for guard in self["guards"]:
            if guard["fired"]:
                yield f"warning: {guard['name']}: {guard['message']}"

    def _details(self) -> Iterator[str]:
        waiting_s, compute_s = (sum(stage[key] for stage in self["stages"]) for key in ("waiting_s", "compute_s"))
        yield (
            f"{self['run_s']:.1f} s of work, {self['elapsed_s']:.1f} s with Ray and the models started; "
            f"replicas waited {amount(waiting_s)} of {amount(waiting_s + compute_s)} s"
        )
        for stage in self["stages"]:
            if stage["bytes_out"] is not None:
                sent, received = stage["bytes_out"] / 1e6, stage["bytes_in"] / 1e6
                yield f"{stage['name']} is remote: {number(sent)} MB sent, {number(received)} MB received"


class PolicyInForce(Figures):
    """The policies of a service after a change."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return which policy is in force, which was before, and the shares of the requests."""
        previous = f" after {self['previous']}" if self["previous"] != self["policy_id"] else ""
        shares = [f"{policy_id} has {share:.4g} of the requests" for policy_id, share in self["shares"].items()]
        return Sheet(f"policy {self['policy_id']} is in force{previous}", shares if len(shares) > 1 else ())
