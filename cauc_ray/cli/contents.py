"""What a file or folder that cauc-ray writes or reads holds: `cauc show`, and a policy for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cauc_ray.api.tables import (
    Grid,
    add_row,
    cost_with_interval,
    line,
    new_table,
    number,
    percent,
    print_rows,
    print_table,
    relative,
    with_interval,
)
from cauc_ray.cli.show import comparison as show_comparison
from cauc_ray.comparison.result import Comparison
from cauc_ray.data.logits import FAILED, LogitTable
from cauc_ray.errors import CaucError, DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import count_rows, parquet_files, read_footer
from cauc_ray.files.paths import hive_values
from cauc_ray.models.pool import load_pool
from cauc_ray.numbers.intervals import Share
from cauc_ray.policies.evidence import ChainSearch, RiskCertificate
from cauc_ray.policies.methods.base import BaseStage
from cauc_ray.policies.methods.rf import RFStage
from cauc_ray.policies.methods.stacked import StackedStage
from cauc_ray.policies.policy import Policy

# By the columns that a table of the kind has; the first that fits.
_TABLES = {
    "predictions": {"example_id", "prediction", "confidence", "stage", "cost"},
    "ledger": {"run_id", "stage", "replica", "started_at", "batch", "accepted", "deferred"},
    "failed rows": {"example_id", "stage", "reason"},
    "comparison": {"method", "paradigm", "accuracy", "setup_s"},
    "curves of a comparison": {"method", "setting", "validation_accuracy", "accuracy", "cost"},
    "summary of a comparison": {"method", "budget", "accuracy_mean", "accuracy_std"},
    "logits": {"example_id", "label", "logits"},
    "embeddings": {"example_id", "embedding"},
    "input": {"example_id"},
}
_CALIBRATED = {
    "temperature": "",
    "offsets": ", calibrated by temperature and offsets",
    "isotonic": ", calibrated by temperature and isotonic maps",
}
# Of a folder that holds several things, so many are named.
_MOST = 50


def contents(path: str | Path) -> dict[str, Any]:
    """Return what a file or folder holds: its kind, its path, and what there is to know of that kind.

    Kinds: policy, pool, logit table, run, comparison, the tables of these, and a folder with any of them.
    Raises CaucError for anything else.
    """
    path = Path(path)
    if path.is_dir():
        found = _folder(path)
    elif not path.is_file():
        raise DataError(f"there is no file {path}")
    elif path.suffix == ".json":
        found = _document(path)
    elif path.suffix in (".yaml", ".yml"):
        pool = load_pool(path)
        stages = [
            f"{s.name}: {s.model.kind}, batches of {s.batch_size}, {s.replicas.min}-{s.replicas.max} replicas"
            for s in pool.stages
        ]
        prompts = _prompts({stage.name: stage.model.shown for stage in pool.stages})
        found = {"kind": "pool", "name": pool.name, "task": pool.task, "stages": stages, **prompts}
    elif path.suffix == ".parquet":
        found = _table(path)
    else:
        raise DataError(
            f"{path} is not a file of cauc-ray: a policy (.json), a pool (.yaml), a Parquet file, a logit table or the "
            "folder of a run or a comparison was expected"
        )
    return {"kind": found["kind"], "path": str(path), **found}


def _folder(path: Path) -> dict[str, Any]:
    for name in ("summary.json", "comparison.json"):
        if (path / name).is_file():
            return _document(path / name)
    if any(path.glob("model=*")) or any(path.glob("embedding=*")):
        return _logit_table(path)
    if (path / "run.json").is_file():
        return {"kind": "run", "state": "not finished; --resume continues it"}
    parts = [each for each in path.iterdir() if not each.name.startswith((".", "_"))]
    if parts and all(each.suffix == ".parquet" for each in parts):
        return _table(path, len(parts))
    found = []
    for each in sorted(path.iterdir()):
        with suppress(CaucError, OSError):  # not ours
            found.append(f"{each.name}: {contents(each)['kind']}")
    if not found:
        raise DataError(f"{path} holds nothing of cauc-ray")
    return {"kind": "folder", "holds": found[:_MOST]}


def _document(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds, by the keys that documents of a kind have."""
    content: Any = None
    with suppress(DataError):  # the errors below say what was expected
        content = read_json(path)
    keys = content.keys() if isinstance(content, dict) else set()
    if keys >= {"run_id", "stages"}:
        return {**content, "kind": "run"}
    if keys >= {"rows", "conventions", "summary"}:
        about = {key: content[key] for key in ("budget", "seeds") if key in content}
        return {"kind": "comparison", **about, "n_rows": len(content["rows"])}
    if path.name == "pool.json" and "models" in keys:
        return {**_logit_table(path.parent), "path": str(path.parent)}
    if path.name == "summary.json":
        raise DataError(f"{path} is not the summary of a run")
    policy = Policy.load(path)
    return {"kind": "policy", "policy_id": policy.id, **policy.model_dump(mode="json")}


def _logit_table(path: Path) -> dict[str, Any]:
    info = LogitTable(path).info
    about = {} if info is None else {"cost_unit": info.cost_unit, "logit_kind": info.logit_kind, "note": info.note}
    parts = {
        "models": _rows_by_split(path, "model"),
        "failed": _rows_by_split(path / FAILED, "model"),
        "embeddings": _rows_by_split(path, "embedding"),
    }
    about |= _prompts({model.name: model.prompt for model in info.models} if info else {})
    return {"kind": "logit table", **about, **{name: rows for name, rows in parts.items() if rows}}


def _prompts(by_model: Mapping[str, str | None]) -> dict[str, str]:
    """Return the prompts of language models; once where all have the same."""
    prompts = {name: prompt for name, prompt in by_model.items() if prompt is not None}
    if len(prompts) > 1 and len(set(prompts.values())) == 1:
        return {"prompt": next(iter(prompts.values()))}
    return {f"prompt of {name}": prompt for name, prompt in prompts.items()}


def _rows_by_split(path: Path, kind: str) -> list[str]:
    """Return for each model (or encoder) how many rows it has in each split."""
    found = []
    for name in hive_values(path, kind) if path.is_dir() else ():
        of_name = path / f"{kind}={name}"
        sizes = {
            split: map(count_rows, parquet_files(of_name / f"split={split}")) for split in hive_values(of_name, "split")
        }
        found.append(f"{name}: {', '.join(f'{split} {sum(counts):,}' for split, counts in sizes.items())}")
    return found


def _table(path: Path, n_files: int = 1) -> dict[str, Any]:
    n, columns, metadata = 0, list[str](), dict[bytes, bytes]()
    for file in parquet_files(path):
        footer = read_footer(file)
        n += footer.n_rows
        columns, metadata = footer.schema.names, footer.metadata.metadata or {}
    kind = next((kind for kind, needed in _TABLES.items() if needed <= set(columns)), "Parquet")
    about = {key.decode(): metadata[key].decode() for key in (b"cost_unit", b"models", b"split") if key in metadata}
    return {"kind": kind, "rows": n, "files": n_files, "columns": json.dumps(columns), **about}


def show_contents(found: Mapping[str, Any]) -> None:
    """Show what was found in a file, key by key."""
    if found["kind"] == "policy":
        show_policy(Policy.load(found["path"]))
        for guard in found["guards"]:
            if guard["fired"]:
                line(f"warning: {guard['name']}: {guard['says']}")
        return
    if found["kind"] == "comparison" and not found["path"].endswith(".parquet"):
        show_comparison(Comparison.load(found["path"]))
        return
    about = {key: value for key, value in found.items() if key not in ("kind", "path")}
    table = new_table(f"{found['path']}: {found['kind']}", ["", ""])
    table.show_header, table.columns[1].justify = False, "left"
    for key, value in about.items():
        add_row(table, key, "\n".join(map(str, value)) if isinstance(value, list) else str(value))
    print_table(table)


_TITLES = {"base": "CAUC Base", "rf": "CAUC RF", "stacked": "stacked cascade"}


def show_policy(policy: Policy) -> None:
    """Show a policy: its numbers by stage, how its threshold came about, what to expect."""
    choice, whole, unit = policy.threshold_choice, policy.expected, policy.cost_unit
    title = f"{_TITLES.get(policy.method, policy.method)}, policy {policy.id}, costs in {unit}"
    rows = [
        {
            "stage": stage.name,
            "cost": number(stage.cost),
            **_fitted(stage),
            **_figures(policy, stage.name),
            "answered": percent(None if whole is None else whole.stages[place].answered / whole.n),
            "accuracy": _share(None if whole is None else whole.stages[place].accepted_accuracy),
        }
        for place, stage in enumerate(policy.stages)
    ]
    print_rows(f"{title}{_CALIBRATED[policy.calibrator_kind]}", rows, [(key, "text", key) for key in rows[0]])
    how = {
        "reference-accuracy": f"the last model's accuracy on {choice.split}",
        "best": f"best {choice.objective} on {choice.split}",
        "budget": f"best {choice.objective} on {choice.split} within a budget of {policy.budget or 0:g} {unit}",
        "given": "given",
        "price": f"1 less the last error on {choice.split} and the calls to come at {choice.price} errors per {unit}",
        "certified": f"certified on {choice.split}",
    }[choice.rule]
    for stage in policy.stages:
        if stage.floor is not None:
            line(f"probabilities of {stage.name} below {stage.floor:.4g} count as {stage.floor:.4g}")
    line(f"threshold {policy.threshold_text(6)}: {how}")
    if choice.certificate is not None:
        line(_certified(choice.certificate))
    if whole is None:
        line("what to expect at this threshold was not measured")
    else:
        line(
            f"on {whole.split} ({whole.n:,} examples): accuracy {_share(whole.accuracy)}, "
            f"cost {cost_with_interval(whole.cost, whole.cost_interval)} {unit}{relative(whole.relative_cost)}"
        )
    if (chosen := policy.on_selection) is not None:
        line(
            "accuracy is that of each half with thresholds chosen on the other; on the rows that chose them it is "
            f"{_share(chosen.accuracy)}"
        )
    for alone in policy.offline or ():
        line(f"offline, {', '.join(policy.models[: alone.stages])} alone: accuracy {_share(alone.accuracy)}")
    if policy.reference is None:
        line("answers cannot be watched at this threshold: nothing is kept that they could be compared with")
    if policy.curve:
        first, last = policy.curve[0], policy.curve[-1]
        n = len(policy.curve)
        quality = f"{choice.objective or 'accuracy'} {percent(first.quality)} at {number(first.cost)} {unit}"
        line(
            f"curve of {n} points: {quality} to {percent(last.quality)} at {number(last.cost)}"
            if n > 1
            else f"curve of 1 point: {quality}"
        )
    if policy.search is not None:
        _search(policy.search, unit)
    if policy.safe is not None:
        line(f"safe: {policy.safe.says}")
    if policy.noise is not None:
        moved = ", ".join(f"{name} {number(size)}" for name, size in policy.noise.logits.items())
        line(
            f"a row's logits differ with its neighbours in a call by up to: {moved}; so {policy.noise.may_flip:,} of "
            f"{policy.noise.n:,} answers on {policy.noise.split} may differ"
        )
    for title, prompt in _prompts({stage.name: stage.prompt for stage in policy.stages}).items():
        line(f"{title}:\n{prompt}")
    if policy.guards:
        fired = [at.name if at.stage is None else f"{at.name} ({at.stage})" for at in policy.guards if at.fired]
        warned = f"{len(fired)} warning{'s' if len(fired) > 1 else ''}: {', '.join(fired)}"
        line(f"guards: {len(policy.guards)} checked, {warned if fired else 'no warnings'}")


def _fitted(stage: Any) -> dict[str, str]:
    """Return what a stage's fit found, by headings: its calibration, and the method's own numbers."""
    at = stage.diagnostics
    if at is None:
        return {"T": "–", "ECE": "encoder"}
    error = "" if at.standard_error is None else f" ± {at.standard_error:.2g}"
    clamped = "" if at.status == "converged" else f" ({at.status})"
    fitted = {
        "T": f"{stage.temperature:.4g}{error}{clamped}",
        "ECE": f"{at.calibration_error_before:.3f} → {at.calibration_error_after:.3f}",
    }
    if isinstance(stage, BaseStage):
        own = {"CR": percent(stage.complementarity_rate, sign=True), "fused": "yes" if stage.fused else "no"}
    elif isinstance(stage, StackedStage):
        own = {
            "a": number(stage.state_weight),
            "c": number(stage.logit_weight),
            "penalty": "none" if stage.penalty is None else number(stage.penalty),
        }
    elif isinstance(stage, RFStage):
        own = {"alpha": number(stage.alpha), "beta": number(stage.beta)}
        if not stage.fused:
            own = {"alpha": "–", "beta": "not fused"}
    else:
        own = {}
    return fitted | own


def _figures(policy: Policy, name: str) -> dict[str, str]:
    """Return how a model's confidence ranks right answers, and what fusion changes, by headings."""
    figures = next((at for at in policy.figures if at.name == name), None)
    if figures is None:
        return {}
    changes = f"+{figures.n_fixed:,} -{figures.n_broken:,}" if figures.n_fixed or figures.n_broken else "–"
    return {"AUROC": number(figures.ranking), "fusion": changes}


def _search(found: ChainSearch, unit: str) -> None:
    """Show what a search chose, and what else there was."""
    within = "" if found.budget is None else f" within {found.budget:g} {unit}"
    title = f"best {found.objective} on {found.split}{within}, of {found.n_chains:,} chains of {len(found.pool)} models"
    named = {"chosen": found.chosen, "best pair": found.pair, "all models": found.full, "best model": found.single}
    lines = [
        (
            *(name, " → ".join(chain.models), percent(chain.quality), number(chain.cost)),
            *(percent(chain.holdout_quality), number(chain.holdout_cost)),
        )
        for name, chain in named.items()
        if chain is not None
    ]
    lines += [
        ("next best", " → ".join(other.models), percent(other.quality), number(other.cost), "", "")
        for other in found.runners_up
    ]
    headings = ("", "models", found.split, f"cost ({unit})", "held out", "held-out cost")
    table = Grid(title, headings, tuple(lines)).rich()
    table.columns[1].justify = "left"
    print_table(table)
    line(f"{found.n_measured:,} chains measured; the best of so many looks better on {found.split} than it is")
    if found.n_halves:
        line(
            f"held out: chosen on one half of {found.split}, measured on the other, the mean of {found.n_halves}; "
            f"{found.n_same} of these halves chose the same chain"
        )


def _certified(at: RiskCertificate) -> str:
    """Say what is certified of early answers, and what coverage the promise costs."""
    answered, plug_in = at.n_accepted / at.n, at.plug_in_accepted / at.n
    return (
        f"certified with {100 * at.confidence:g} % confidence: at most {100 * at.risk:g} % of early answers are wrong "
        f"(bound {percent(at.upper_bound)}; {at.n_wrong:,} of {at.n_accepted:,} were). "
        f"{percent(answered)} are answered early, {100 * (plug_in - answered):.1f} points less than at "
        f"{at.plug_in_threshold:.6g}, which keeps to it on these examples and promises nothing"
    )


def _share(share: Share | None) -> str:
    return "–" if share is None else with_interval(share.value, [share.low, share.high])
