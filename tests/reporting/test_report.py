"""Reports: what is found in a folder, what the page says, and what it is in a real browser."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chromium import CHROMIUM, Browser
from markdown_it import MarkdownIt
from synthetic import write_table

import cauc_ray
from cauc_ray.api.offline import save_table
from cauc_ray.cli.command import main
from cauc_ray.comparison.comparing import save_comparison
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import ConfigError, DataError, PolicyError
from cauc_ray.policies.policy import Policy
from cauc_ray.reporting.showing import figures_of

MODELS = ["m0", "m1", "m2"]
HOSTILE = ["<script>alert(1)</script>", "a\"b'c`&amp;|*_", "модель-" + "x" * 90]


def fitted(folder, *, table=None, **options):
    """Write a table and a policy that is fitted on it into a folder."""
    chains = write_table(folder / "LOGITS", **(table or {"n": 400}))
    policy = cauc_ray.fit(folder / "LOGITS", models=options.pop("models", MODELS), **options)
    (folder / "policy.json").write_text(policy.to_json())
    return chains


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Return folders with a policy each, and their pages."""
    tables = {
        "base": ({"n": 500}, {"method": "base"}),
        "rf": ({"n": 500}, {"method": "rf", "budget": 9.0}),
        "ragged": ({"n": 400, "ragged": True}, {"method": "rf"}),
        "per-call": ({"n": 400, "per_call": True}, {"method": "base", "budget": 12.0}),
        "macro-f1": ({"n": 400}, {"method": "rf", "budget": 8.0, "objective": "macro-f1"}),
    }
    folders = {}
    for name, (table, options) in tables.items():
        folders[name] = tmp_path_factory.mktemp(name)
        fitted(folders[name], table=table, **options)
        cauc_ray.report(folders[name])
    return folders


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Return a folder whose models, ids, unit and paths hold what markup is made of."""
    folder = tmp_path_factory.mktemp("a <b> & 'c'")
    chains = write_table(folder / "plain", n=300, strengths=(1.0, 1.7, 2.4))
    names = [name.replace("/", "\N{DIVISION SLASH}") for name in HOSTILE]
    for split, chain in chains.items():
        ids = [f"</script><img src=x onerror=alert({split}-{row})>" for row in range(len(chain))]
        for name, logits in zip(names, chain.logits, strict=True):
            write_logits(folder / "LOGITS", name, split, example_ids=ids, labels=chain.labels, logits=logits)
    models = [{"name": name, "cost": cost} for name, cost in zip(names, (1.0, 3.0, 9.0), strict=True)]
    info = {"cost_unit": "<i>USD</i> & ]]> `x`", "logit_kind": "<u>raw", "models": models}
    (folder / "LOGITS" / "pool.json").write_text(json.dumps(info))
    shutil.rmtree(folder / "plain")
    policy = cauc_ray.fit(folder / "LOGITS", models=names, method="rf", budget=3.0)
    (folder / "policy.json").write_text(policy.to_json())
    return cauc_ray.report(folder), names


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def opened(browser):
    """Return a function that opens a page, which is closed afterwards."""
    pages = []

    def opened(path, **options):
        pages.append(browser.open(path, **options))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


def cauc(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return exit_.value.code, said.out, said.err


def shown(page):
    """Return the figures at the budget by key: the exact value and the text."""
    cells = "[...document.querySelectorAll('data[data-shows]')].map(c => [c.dataset.shows, c.value, c.textContent])"
    return {key: (value, text) for key, value, text in page.run(cells)}


def type_budget(page, budget):
    page.run("document.getElementById('budget-number').focus(); document.getElementById('budget-number').select()")
    page.write(budget)


def require_evaluated(found, policy, evaluation):
    """Require that the page shows what fitting at the budget and evaluating on test give, to the last digit."""
    assert float(found["threshold"][0]) == policy.threshold
    assert found["threshold"][1] == f"{policy.threshold:.6g}"
    assert float(found["validation_accuracy"][0]) == policy.expected.accuracy.value
    assert float(found["validation_cost"][0]) == policy.expected.cost
    assert float(found["accuracy"][0]) == evaluation["accuracy"]
    low, high = evaluation["accuracy_interval"]
    assert found["accuracy"][1] == f"{100 * evaluation['accuracy']:.1f} % ({100 * low:.1f} – {100 * high:.1f})"
    assert float(found["cost"][0]) == evaluation["cost"]
    assert found["cost"][1] == f"{evaluation['cost']:.4g}"
    assert float(found["relative_cost"][0]) == evaluation["relative_cost"]
    assert float(found["macro_f1"][0]) == evaluation["macro_f1"]
    for place, stage in enumerate(evaluation["stages"]):
        share = stage["answered"] / evaluation["n"]
        assert found[f"answered_{place}"] == (str(stage["answered"]), f"{100 * share:.1f} % ({stage['answered']:,})")


@pytest.mark.parametrize("name", ["base", "rf", "ragged", "per-call", "macro-f1"])
def test_the_slider_shows_what_fitting_and_evaluating_at_its_budget_give(homes, opened, capsys, tmp_path, name):
    page, folder = opened(homes[name] / "report.html"), homes[name]
    own = Policy.load(folder / "policy.json")
    told = json.loads(page.run("document.getElementById('points').textContent"))
    assert len(told["points"]) > 20
    rng = random.Random(name)
    low, high = told["places"][0], told["places"][-1]
    budgets = [repr(rng.uniform(low, 1.3 * high)) for _ in range(4)]
    # Exactly at a point, by as little below it as rounding may be, and by what is more than that.
    cost = rng.choice(told["points"][1:])["cost"]
    budgets += [repr(cost), repr(cost * (1 - 0.9e-9)), repr(cost * (1 - 2e-9))]
    options = ["--objective", own.threshold_choice.objective] if name == "macro-f1" else []
    thresholds = []

    def require_the_same(budget):
        fit = ["fit", folder / "LOGITS", "--models", ",".join(MODELS), "--method", own.method, *options]
        file = tmp_path / "at-budget.json"
        assert cauc(capsys, *fit, "--budget", budget, "-o", file)[0] == 0
        code, out, _ = cauc(capsys, "evaluate", folder / "LOGITS", "--policy", file, "--json")
        assert code == 0
        require_evaluated(shown(page), Policy.load(file), json.loads(out))
        thresholds.append(shown(page)["threshold"][1])

    for budget in budgets:
        type_budget(page, budget)
        require_the_same(budget)
    assert thresholds[-3] == thresholds[-2] != thresholds[-1]
    page.run("document.getElementById('budget').focus()")
    for key, times in (("End", 1), ("ArrowLeft", rng.randrange(1, 60)), ("Home", 1), ("ArrowRight", 7)):
        page.press(key, times)
        require_the_same(page.run("document.getElementById('budget-number').value"))
    assert page.complaints() == []


@pytest.mark.parametrize(
    ("table", "models", "method", "tone"),
    [
        ("cifar10", "resnet20,resnet56", "base", "good"),
        ("cifar10", "resnet20,resnet56,densenet_bc_100_12,wrn_28_10", "rf", None),
        ("emotion10k_base_icl1", "llama-2-7b-hf,llama-2-13b-hf", "rf", "bad"),
        ("priced_mmlu", "llama3.2-1b,gpt-4o-mini,llama3.1-70b,llama3.1-405b", "rf", None),
    ],
)
def test_the_slider_is_exact_on_real_tables(shared_logits, opened, capsys, tmp_path, table, models, method, tone):
    fit = ["fit", shared_logits / table, "--models", models, "--method", method, "-o"]
    assert cauc(capsys, *fit, tmp_path / "policy.json")[0] == 0
    report = cauc_ray.report(tmp_path, logits=shared_logits / table)
    page = opened(report.page)
    assert (page.requests(), page.complaints()) == ([page.url], [])
    if tone is not None:
        assert report.content.verdict.tone == tone
        assert any(guard.fired for guard in report.content.guards) == (tone == "bad")
    rng = random.Random(table)
    places = report.content.budgets.places
    budgets = [repr(rng.uniform(places[0], places[-1])) for _ in range(3)]
    budgets.append(repr(rng.choice(report.content.budgets.points).cost))
    for budget in budgets:
        type_budget(page, budget)
        assert cauc(capsys, *fit, tmp_path / "at-budget.json", "--budget", budget)[0] == 0
        at_budget = ["--policy", tmp_path / "at-budget.json", "--json"]
        code, out, _ = cauc(capsys, "evaluate", shared_logits / table, *at_budget)
        assert code == 0
        require_evaluated(shown(page), Policy.load(tmp_path / "at-budget.json"), json.loads(out))


def test_print_is_dark_on_white_whatever_the_screen_is(homes, opened):
    page = opened(homes["base"] / "report.html", scheme="dark")
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(page.run(CONTRASTS))[0] >= 4.5
    assert page.run("document.querySelector('form.budget').checkVisibility()") is False
    page.send("Page.printToPDF")


def test_the_slider_starts_at_the_policys_own_budget(homes, opened):
    page = opened(homes["rf"] / "report.html")
    assert page.run("document.getElementById('budget-number').value") == "9"
    own = Policy.load(homes["rf"] / "policy.json")
    assert float(shown(page)["threshold"][0]) == own.threshold
    assert "Within 9 GFLOPs" in page.run("document.getElementById('budget-says').textContent")


@pytest.mark.parametrize("typed", ["0.5", "-1", "", "cheap", "NaN", "Infinity"])
def test_a_budget_that_buys_nothing_is_refused_in_words(homes, opened, typed):
    page = opened(homes["rf"] / "report.html")
    page.run("document.getElementById('budget-number').focus(); document.getElementById('budget-number').select()")
    if typed:
        page.write(typed)
    else:
        page.send("Input.dispatchKeyEvent", type="rawKeyDown", key="Delete", code="Delete", windowsVirtualKeyCode=46)
    says = page.run("document.getElementById('budget-says').textContent")
    assert ("below the cheapest operating point, 1 GFLOPs" in says) == (typed in ("0.5", "-1"))
    assert says
    assert all(text == "–" for _, text in shown(page).values())
    assert page.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_asks_for_nothing_and_complains_of_nothing(homes, opened, scheme):
    page = opened(homes["base"] / "report.html", scheme=scheme)
    assert page.requests() == [page.url]
    assert page.complaints() == []
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.run("document.querySelectorAll('button[data-band]').forEach(b => b.click())")
    assert page.run("document.querySelectorAll('path.band.shown').length") > 0
    assert (page.requests(), page.complaints()) == ([page.url], [])


def test_a_page_that_does_ask_and_complain_is_noticed(opened, tmp_path):
    (tmp_path / "loud.html").write_text("<img src='http://127.0.0.1:9/x.png'><script>console.log(1); oh()</script>")
    page = opened(tmp_path / "loud.html")
    assert len(page.requests()) == 2
    assert len(page.complaints()) >= 2


# Every piece of text against what is painted behind it, by the formula of WCAG 2.
CONTRASTS = """
(() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255; return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgb(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest("script, noscript, title, desc")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ink = light(rgb(element instanceof SVGElement ? style.fill : style.color));
    const paper = light(rgb(behind(element)));
    found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), walker.currentNode.textContent]);
  }
  return found;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_what_is_behind_it(homes, opened, scheme):
    page = opened(homes["rf"] / "report.html", scheme=scheme)
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 200
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    dark = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_a_phone_needs_not_scroll_sideways(homes, hostile, opened, width):
    for path in (homes["rf"] / "report.html", hostile[0].page):
        page = opened(path, width=width)
        assert page.run("document.documentElement.scrollWidth") <= width
        page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.run("document.documentElement.scrollWidth") <= width
        visible = "[...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length).length"
        assert page.run(visible) == 1


def test_the_page_is_usable_by_keyboard_and_named_for_who_hears_it(homes, opened):
    page = opened(homes["base"] / "report.html")
    page.press("Tab")
    assert page.run("document.activeElement.textContent") == "Skip to the report"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0
    reached = []
    for _ in range(60):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id"))
    assert {"budget", "budget-number"} <= set(reached)
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    named = [node for node in tree if node.get("role", {}).get("value") in ("image", "slider", "table", "textbox")]
    assert {node["role"]["value"] for node in named} >= {"image", "slider", "table", "textbox"}
    assert all(node.get("name", {}).get("value") for node in named)
    slider = next(node for node in named if node["role"]["value"] == "slider")
    says = {each["name"]: each["value"].get("value") for each in slider["properties"]}
    assert says["valuetext"].endswith(" GFLOPs")
    assert page.run("[...document.querySelectorAll('table')].every(t => t.caption && t.tHead)")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    page.run("document.getElementById('budget').focus()")
    page.press("ArrowRight")
    assert page.run(outline) == "solid"


def test_names_are_text_whatever_they_hold(hostile, opened):
    report, names = hostile
    page = opened(report.page)
    assert (page.requests(), page.complaints()) == ([page.url], [])
    assert page.run("[...document.querySelectorAll('h1 .model')].map(m => m.textContent)") == names
    assert page.run("document.querySelectorAll('img, i, u, b').length") == 0
    assert page.run("document.scripts.length") == 2
    ids = page.run("[...document.querySelectorAll('.stage tbody th')].map(t => t.textContent)")
    assert ids
    assert all(re.fullmatch(r"</script><img src=x onerror=alert\(test-\d+\)>", id_) for id_ in ids)
    assert page.run("document.title").startswith(names[0])


def test_the_card_is_markdown_in_which_names_are_text(hostile, homes):
    report, names = hostile
    for card, own in ((report.card, names), (homes["base"] / "policy-card.md", MODELS)):
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(card.read_text())
        flat = [*tokens, *(child for token in tokens for child in token.children or ())]
        assert not [token for token in flat if token.type in ("html_block", "html_inline", "image", "link_open")]
        rows = [token for token in tokens if token.type == "tr_open"]
        assert len(rows) >= 15
        title = tokens[1].children
        assert "".join(child.content for child in title).endswith(" → ".join(own))
        headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
        assert headings[1:] == [
            "Intended use",
            "Figures",
            "Data",
            "Guards",
            "Limitations",
            "Watching it",
            "Making it again",
        ]
        (code,) = [token.content for token in tokens if token.type == "fence"]
        assert [line.split()[:2] for line in code.splitlines()] == [["cauc", v] for v in ("fit", "evaluate", "report")]


@pytest.mark.slow
def test_the_commands_make_the_policy_and_the_page_again(homes, capsys, monkeypatch, tmp_path):
    import shlex

    options = {
        "search": {"search": True, "method": "rf", "budget": 6.0},
        "safe": {"safe": True},
        "certify": {"certify": "risk<=0.4@0.9"},
        "threshold": {"threshold": 0.625, "costs": [1.0, 2.5, 7.0]},
    }
    for name in ("base", "macro-f1", "per-call", *options):
        folder = tmp_path / name
        shutil.copytree(homes[name if name in homes else "base"], folder)
        if name in options:
            policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, **options[name])
            (folder / "policy.json").write_text(policy.to_json())
        report = cauc_ray.report(folder)
        before = {path: path.read_bytes() for path in (report.page, report.card, folder / "policy.json")}
        origin = report.content.origin
        for command in (origin.fit, origin.evaluate, origin.report):
            assert cauc(capsys, *shlex.split(command)[1:])[0] == 0
        assert {path: path.read_bytes() for path in before} == before


def test_equal_input_gives_equal_pages(homes, tmp_path):
    first = (homes["rf"] / "report.html").read_bytes()
    again = cauc_ray.report(homes["rf"], output=tmp_path / "again.html")
    assert again.page.read_bytes() == first
    assert again.card == tmp_path / "policy-card.md"
    assert again.card.read_bytes() == (homes["rf"] / "policy-card.md").read_bytes()


def test_the_page_loads_nothing_by_its_text_either(homes):
    text = (homes["base"] / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*(?![\"']?(?:#|data:))", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text


def test_mistakes_add_up_to_a_loop_over_the_answers(homes):
    report = cauc_ray.report(homes["ragged"])
    content = report.content
    chain, replay = content.measured.test, content.measured.evaluation.replay
    alone = [logits.argmax(axis=1) for logits in chain.logits]
    for place, stage in enumerate(content.mistakes):
        counts = dict.fromkeys(("n", "wrong", "avoidable", "hopeless", "elsewhere", "spoilt", "rescued"), 0)
        pairs = {}
        for row in range(len(chain)):
            if replay.stages[row] != place:
                continue
            label, answer = int(chain.labels[row]), int(replay.predictions[row])
            rights = [int(model[row]) == label for model in alone]
            counts["n"] += 1
            if answer == label:
                counts["rescued"] += not rights[place]
                continue
            counts["wrong"] += 1
            counts["avoidable"] += rights[-1]
            counts["hopeless"] += not any(rights)
            counts["elsewhere"] += any(rights) and not rights[-1]
            counts["spoilt"] += rights[place]
            pairs[label, answer] = pairs.get((label, answer), 0) + 1
        assert {key: getattr(stage, key) for key in counts} == counts
        assert sum(stage.bars) == stage.wrong == stage.avoidable + stage.hopeless + stage.elsewhere
        assert all(pairs[pair.label, pair.answer] == pair.n for pair in stage.pairs)
        assert [pair.n for pair in stage.pairs] == sorted(pairs.values(), reverse=True)[: len(stage.pairs)]
    assert sum(stage.n for stage in content.mistakes) == len(chain)


def test_the_policys_own_figures_are_its_evaluation(homes, capsys):
    for name, folder in homes.items():
        report = cauc_ray.report(folder)
        _, out, _ = cauc(capsys, "evaluate", folder / "LOGITS", "--policy", folder / "policy.json", "--json")
        evaluation = json.loads(out)
        own = {key: (str(s.value), s.text) for key, s in figures_of(report.content.budgets.own).items()}
        require_evaluated(own, Policy.load(folder / "policy.json"), evaluation)
        assert report.as_json()["accuracy"] == evaluation["accuracy"], name
        curve = report.content.curves.curves[0]
        assert curve.is_own
        assert np.all(np.diff([point.cost for point in report.content.budgets.points]) > 0)


def test_what_is_not_there_is_said_in_a_sentence_with_the_command_that_makes_it(tmp_path):
    fitted(tmp_path)
    cauc_ray.report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    for command in ("cauc run POOL", "cauc compare", "cauc fit --search", "cauc fit --certify"):
        assert command in text


def test_guards_that_fired_stand_out_and_the_others_are_folded(tmp_path, opened):
    # The second model adds nothing but its cost, and its noise.
    chains = fitted(tmp_path, table={"n": 600, "strengths": (2.6, 0.2)}, models=MODELS[:2], method="rf")
    policy = Policy.load(tmp_path / "policy.json")
    fired = [guard for guard in policy.guards if guard.fired]
    assert fired
    report = cauc_ray.report(tmp_path)
    assert len(chains) == 3
    assert report.content.verdict.tone == "bad"
    page = opened(report.page)
    shown = page.run("[...document.querySelectorAll('.fired li p')].map(p => p.textContent)")
    assert [guard.says for guard in fired] == shown[: len(fired)]
    assert page.run("document.querySelector('.alarm').textContent").startswith(f"{len(shown)} guard")
    quiet = page.run("[...document.querySelectorAll('details .quiet li')].map(p => p.textContent)")
    assert len(quiet) + len(shown) == len(policy.guards) + len(report.content.measured.evaluation.guards)
    assert all(any(guard.says in line for line in quiet) for guard in policy.guards if not guard.fired)
    assert page.run("document.querySelector('details .quiet').checkVisibility()") is False
    card = report.card.read_text()
    assert all(f"**{guard.name.replace('-', ' ')}**" in card for guard in fired)


def test_a_policy_that_is_as_good_for_less_elsewhere_is_told_so(homes, tmp_path):
    shutil.copytree(homes["base"], tmp_path / "home")
    wasteful = cauc_ray.fit(tmp_path / "home" / "LOGITS", models=MODELS, threshold=2.0)
    (tmp_path / "home" / "policy.json").write_text(wasteful.to_json())
    budgets = cauc_ray.report(tmp_path / "home").content.budgets
    assert budgets.better.quality >= wasteful.expected.accuracy.value
    assert budgets.better.cost < wasteful.expected.cost
    assert "does not spend well" in (tmp_path / "home" / "report.html").read_text()
    best = cauc_ray.fit(tmp_path / "home" / "LOGITS", models=MODELS, budget=9.0)
    (tmp_path / "home" / "policy.json").write_text(best.to_json())
    assert cauc_ray.report(tmp_path / "home").content.budgets.better is None


def test_without_validation_there_is_no_slider_but_a_page(tmp_path, opened):
    write_table(tmp_path / "LOGITS", n=200)
    shutil.rmtree(tmp_path / "LOGITS" / "model=m0" / "split=validation")
    policy = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", threshold=0.7)
    (tmp_path / "policy.json").write_text(policy.to_json())
    page = opened(cauc_ray.report(tmp_path).page)
    assert page.complaints() == []
    assert page.run("document.getElementById('budget')") is None
    assert "nothing to choose a threshold on" in page.run("document.body.textContent")


def test_a_policy_of_one_model_has_a_page(tmp_path, opened):
    fitted(tmp_path, models=["m2"], method="base")
    page = opened(cauc_ray.report(tmp_path).page)
    assert page.complaints() == []
    assert "A policy of one model" in page.run("document.body.textContent")
    assert page.run("document.getElementById('budget')") is None
    assert page.run("document.querySelectorAll('.tiles dd').length") == 8


def test_a_sweep_and_a_comparison_lend_their_other_methods(tmp_path):
    fitted(tmp_path, table={"n": 200})
    sweep = cauc_ray.sweep(tmp_path / "LOGITS", models=MODELS, methods=["benchmark-routing", "margin"])
    save_table(sweep, tmp_path / "sweep.parquet")
    names = [curve.name for curve in cauc_ray.report(tmp_path).content.curves.curves]
    assert names.count("benchmark-routing") == names.count("margin") == 1
    compared = cauc_ray.compare(tmp_path / "LOGITS", models=MODELS, methods=["frugalgpt", "oracle", "single"])
    save_comparison(compared, tmp_path / "comparison")
    curves = {curve.name: curve for curve in cauc_ray.report(tmp_path).content.curves.curves}
    assert set(curves) - set(names) == {"frugalgpt"}
    row = compared.row("frugalgpt")
    assert any(np.isclose(curves["frugalgpt"].accuracy, row["accuracy"]))
    # What was measured on other examples is not lent either, nor what does not say what it is of.
    shutil.copytree(tmp_path, tmp_path / "other", ignore=shutil.ignore_patterns("LOGITS", "other"))
    write_table(tmp_path / "other" / "LOGITS", n=150)
    again = cauc_ray.fit(tmp_path / "other" / "LOGITS", models=MODELS)
    (tmp_path / "other" / "policy.json").write_text(again.to_json())
    assert len(cauc_ray.report(tmp_path / "other").content.curves.curves) == 6
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "comparison" / "comparison.json").write_text("[1]")
    assert "frugalgpt" not in [curve.name for curve in cauc_ray.report(tmp_path).content.curves.curves]
    # Of other models nothing is lent.
    other = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS[:2])
    (tmp_path / "policy.json").write_text(other.to_json())
    assert len(cauc_ray.report(tmp_path).content.curves.curves) == 6


def test_the_run_in_the_folder_says_which_policy_is_meant(tmp_path):
    fitted(tmp_path)
    other = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", budget=6.0)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "other.json").write_text(other.to_json())
    with pytest.raises(ConfigError, match=r"holds 2 policies .*policies/other.json.*name one with --policy"):
        cauc_ray.report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    priced = other.model_copy(update={"budget": 7.0})  # of one id, as it answers alike, but not the same policy
    (tmp_path / "policies" / "priced.json").write_text(priced.to_json())
    write_run(tmp_path / "run", other)
    with pytest.raises(ConfigError, match=r"holds 3 policies .*name one with --policy"):
        cauc_ray.report(tmp_path)
    (tmp_path / "policies" / "priced.json").unlink()
    report = cauc_ray.report(tmp_path)
    assert report.as_json()["policy_id"] == other.id
    assert report.content.timing.run_id == "20260101T000000-abcdef"
    text = report.page.read_text()
    assert "20260101T000000-abcdef" in text
    named = cauc_ray.report(tmp_path, policy=tmp_path / "policy.json")
    assert named.content.timing is None
    assert f"{tmp_path / 'run'} is of another policy" in named.page.read_text()


def lend(folder, logits, **options):
    """Put a comparison and a sweep of a table into a folder."""
    compared = cauc_ray.compare(logits, models=MODELS, methods=["frugalgpt", "single"], **options)
    save_comparison(compared, folder / "comparison")
    save_table(
        cauc_ray.sweep(logits, models=MODELS, methods=["benchmark-routing"], **options), folder / "sweep.parquet"
    )


@pytest.mark.parametrize("how", ["own", "logits", "labels", "validation", "costs", "unknown"])
def test_curves_of_another_table_are_left_out_and_named(tmp_path, how):
    """Another prompt's table, say: of the same models and as many examples."""
    chains = fitted(tmp_path, table={"n": 150}, method="rf")
    other, options = tmp_path.with_name(f"{tmp_path.name}-other"), {}
    shutil.copytree(tmp_path / "LOGITS", other)
    if how in ("logits", "labels"):
        changed = chains["test"]
        ids = [f"test-{example}" for example in changed.example_ids]
        labels = (changed.labels + 1) % 5 if how == "labels" else changed.labels
        for model, logits in zip(MODELS, changed.logits, strict=True):
            moved = logits[:, ::-1].copy() if (how, model) == ("logits", "m1") else logits
            write_logits(other, model, "test", example_ids=ids, labels=labels, logits=moved)
    elif how == "validation":
        for model, logits in zip(MODELS, chains["validation"].logits, strict=True):
            ids = [f"validation-{example}" for example in chains["validation"].example_ids]
            logits = logits + np.float32(0.5) * np.eye(5, dtype=np.float32)[0]
            write_logits(other, model, "validation", example_ids=ids, labels=chains["validation"].labels, logits=logits)
    elif how == "costs":
        options = {"costs": [1.0, 4.0, 16.0]}
    lend(tmp_path, other, **options)
    if how == "unknown":  # as earlier versions wrote them
        path = tmp_path / "comparison" / "comparison.json"
        about = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in about.items() if key != "fingerprints"}))
        pq.write_table(
            pq.read_table(tmp_path / "sweep.parquet").replace_schema_metadata(
                {"models": ",".join(MODELS), "split": "test", "cost_unit": "GFLOPs"}
            ),
            tmp_path / "sweep.parquet",
        )
    report = cauc_ray.report(tmp_path)
    said, names = report.as_json(), {curve.name for curve in report.content.curves.curves}
    if how == "own":
        assert said["left_out"] == []
        assert {"frugalgpt", "benchmark-routing"} <= names
        assert (said["comparison"], said["sweep"]) == (str(tmp_path / "comparison"), str(tmp_path / "sweep.parquet"))
        return
    assert not {"frugalgpt", "benchmark-routing"} & names
    assert (said["comparison"], said["sweep"]) == (None, None)
    words = {"logits": "other logits", "labels": "other examples", "validation": "other logits", "costs": "other costs"}
    assert len(said["left_out"]) == 2
    for path, why in zip((tmp_path / "comparison", tmp_path / "sweep.parquet"), said["left_out"], strict=True):
        assert why.startswith(str(path))
        assert words.get(how, "fingerprints") in why
        assert why in report.page.read_text()


def test_a_report_takes_the_largest_run_of_its_policy_and_names_the_others(tmp_path, capsys):
    fitted(tmp_path, table={"n": 150}, method="rf")
    policy = Policy.load(tmp_path / "policy.json")
    other = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", budget=6.0)
    write_run(tmp_path / "whole", policy, n=900, run_id="20260101T000000-aaaaaa", pool="large")
    write_run(tmp_path / "again", policy, n=900, run_id="20260103T000000-cccccc", pool="large")
    write_run(tmp_path / "trial", policy, n=9, run_id="20260104T000000-dddddd", pool="small")  # newer, of another pool
    write_run(tmp_path / "strange", policy, n=5000, models=["x", "y", "z"])
    write_run(tmp_path / "another", other, n=5000)
    code, out, _ = cauc(capsys, "report", tmp_path, "--policy", tmp_path / "policy.json", "--json")
    said = json.loads(out)
    assert (code, said["run"]) == (0, str(tmp_path / "again"))
    whys = dict(
        zip(
            ("another", "strange", "whole", "trial"),
            ("of another policy", "of other models, x", "is older", "fewer rows"),
            strict=True,
        )
    )
    assert len(said["left_out"]) == len(whys)
    page = (tmp_path / "report.html").read_text()
    for name, words in whys.items():
        (why,) = [each for each in said["left_out"] if each.startswith(str(tmp_path / name))]
        assert words in why
        assert why.split(" ")[0] in page
    assert "of the pool large: 900 rows" in page
    assert "'small'" in next(each for each in said["left_out"] if "trial" in each)
    out = cauc(capsys, "report", tmp_path, "--policy", tmp_path / "policy.json")[1]
    assert sum(line.startswith("left out: ") for line in out.splitlines()) == len(whys)


def write_run(folder, policy, *, n=9, run_id="20260101T000000-abcdef", pool="p", models=None):
    """Write what a run leaves of itself."""
    folder.mkdir()
    figures = {"reached": 9, "answered": 3, "failed": 0, "calls": 1, "batch_fill": 0.5, "compute_s": 1.5}
    figures |= {"busy_share": 0.5, "queue_s": None, "cost": 9.0, "cost_share": 0.4}
    about = {"pool": pool, "n": n, "n_failed": 0, "cost": 2.0, "cost_unit": policy.cost_unit, "relative_cost": 0.1}
    stages = [{"name": name, **figures} for name in models or policy.models]
    summary = {"run_id": run_id, "policy_id": policy.id, **about, "run_s": 1.0, "elapsed_s": 4.0}
    (folder / "summary.json").write_text(json.dumps({**summary, "stages": stages}))


def broken(folder, how):
    """Break what a folder holds in one way."""
    if how == "no policy":
        (folder / "policy.json").unlink()
    elif how == "truncated policy":
        (folder / "policy.json").write_text((folder / "policy.json").read_text()[:300])
    elif how == "no table":
        shutil.rmtree(folder / "LOGITS")
    elif how == "two tables":
        shutil.copytree(folder / "LOGITS", folder / "OTHER")
    elif how == "other logits":
        file = folder / "LOGITS" / "model=m1" / "split=calibration" / "part-0.parquet"
        shutil.copy(folder / "LOGITS" / "model=m2" / "split=calibration" / "part-0.parquet", file)
    elif how == "other examples":
        for model in MODELS:
            splits = folder / "LOGITS" / f"model={model}"
            shutil.rmtree(splits / "split=validation")
            shutil.copytree(splits / "split=test", splits / "split=validation")
    elif how == "no model":
        shutil.rmtree(folder / "LOGITS" / "model=m2")
    elif how == "no test":
        for model in MODELS:
            shutil.rmtree(folder / "LOGITS" / f"model={model}" / "split=test")
    elif how == "truncated logits":
        file = folder / "LOGITS" / "model=m1" / "split=test" / "part-0.parquet"
        file.write_bytes(file.read_bytes()[:200])
    elif how == "no ledger":
        write_run(folder / "run", Policy.load(folder / "policy.json"))
        (folder / "run" / "ledger").mkdir()
        pq.write_table(pa.table({"x": [1]}), folder / "run" / "ledger" / "part.parquet")
    elif how == "malformed summary":
        policy = Policy.load(folder / "policy.json")
        write_run(folder / "run", policy)
        (folder / "run" / "summary.json").write_text(json.dumps({"run_id": "x", "policy_id": policy.id}))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no policy", "holds no policy"),
        ("truncated policy", "policy.json is not a readable policy file"),
        ("no table", "holds no logit table"),
        ("two tables", "holds 2 logit tables"),
        ("other logits", "the logits of 'm1'"),
        ("other examples", "split 'validation' .* holds other examples"),
        ("no model", "has no model 'm2'"),
        ("no test", "unknown split 'test'"),
        ("truncated logits", "part-0.parquet is not a readable Parquet file"),
        ("malformed summary", "is not the summary of a run"),
        ("no ledger", "is no ledger: it lacks"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(tmp_path, capsys, how, says):
    fitted(tmp_path, table={"n": 120}, method="rf", budget=9.0)
    broken(tmp_path, how)
    code, out, err = cauc(capsys, "report", tmp_path)
    assert (code, out) == (2, "")
    assert re.search(says, err)
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("*.html")) + list(tmp_path.glob("*.md"))


def test_json_says_where_the_page_is_and_what_it_says_first(homes, capsys, tmp_path):
    code, out, err = cauc(capsys, "report", homes["rf"], "-o", tmp_path / "page.html", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["page"] == str(tmp_path / "page.html")
    assert said["verdict"] in (tmp_path / "page.html").read_text()
    assert said["gain_interval"][0] <= said["gain"] <= said["gain_interval"][1]
    code, out, _ = cauc(capsys, "report", homes["rf"], "-o", tmp_path / "page.html")
    assert code == 0
    assert said["verdict"] in out


def test_other_bad_arguments_are_refused_in_one_line(homes, capsys, tmp_path):
    folder = homes["rf"]
    cases = {
        ("report", tmp_path / "nowhere"): "there is no folder",
        ("report", folder, "--split", "calibration"): "was fitted or chosen on",
        ("report", folder, "--policy", tmp_path / "none.json"): "there is no policy file",
        ("report", folder, "--logits", tmp_path): "is not a logit table",
        ("report", folder, "-o", folder / "policy.json"): "is, or lies in, the input",
        ("report", folder, "-o", folder / "LOGITS" / "report.html"): "is, or lies in, the input",
        ("report", folder, "-o", tmp_path / "no" / "report.html"): "there is no folder",
        ("report", folder, "-o", tmp_path / "policy-card.md"): "give the page another name",
    }
    for arguments, says in cases.items():
        code, out, err = cauc(capsys, *arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert says in err
    assert list(tmp_path.iterdir()) == []
    Policy.load(folder / "policy.json")


def test_a_folder_whose_name_is_no_text_has_a_report(tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    fitted(tmp_path, table={"n": 120}, method="rf")
    (tmp_path / "policy.json").rename(folder / "policy.json")
    assert "caf?" in cauc_ray.report(folder, logits=tmp_path / "LOGITS").page.read_text()


def test_other_files_in_the_folder_are_passed_over(tmp_path):
    fitted(tmp_path, table={"n": 120}, method="rf")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "summary.json").write_text(json.dumps({"run_id": 3}))
    (tmp_path / "summary.json").write_text(json.dumps(["of something else"]))
    (tmp_path / "notes.json").write_text("{")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "policy.json").write_text("{}")
    (tmp_path / "deep" / "er" / "still").mkdir(parents=True)
    shutil.copy(tmp_path / "policy.json", tmp_path / "deep" / "er" / "policy.json")
    other = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS)
    (tmp_path / "deep" / "er" / "still" / "policy.json").write_text(other.to_json())
    page = cauc_ray.report(tmp_path).page.read_text()
    assert "torn.parquet is not a readable Parquet file" in page
    assert "summary.json is not the summary of a run" in page


def test_unlabelled_test_examples_are_refused(tmp_path):
    chains = fitted(tmp_path, table={"n": 120})
    chain = chains["test"]
    for model, logits in zip(MODELS, chain.logits, strict=True):
        ids = [f"test-{example}" for example in chain.example_ids]
        write_logits(tmp_path / "LOGITS", model, "test", example_ids=ids, labels=None, logits=logits)
    with pytest.raises(DataError, match="has no label; a report needs labels"):
        cauc_ray.report(tmp_path)
    (tmp_path / "policy.json").write_text("{}")
    with pytest.raises(DataError, match="its format is None"):
        cauc_ray.report(tmp_path)
    with pytest.raises(PolicyError, match="its format is None"):
        cauc_ray.report(tmp_path, policy=tmp_path / "policy.json")


def test_a_report_needs_jinja_and_says_how_to_install_it(homes, monkeypatch):
    from cauc_ray.reporting import page

    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'cauc-ray\[reports\]'"):
        cauc_ray.report(homes["rf"])


@pytest.mark.parametrize(
    "options",
    [
        {"table": {"n": 60}, "costs": [0.0, 0.0, 0.0]},
        {"table": {"n": 60}, "costs": [0.0, 1.0, 1e6], "method": "rf"},
        {"table": {"n": 60}, "costs": [3.0, 2.0, 1.0]},
        {"table": {"n": 4}, "method": "rf"},
    ],
)
@pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
def test_odd_costs_and_tiny_tables_have_a_page(tmp_path, opened, options):
    fitted(tmp_path, **options)
    page = opened(cauc_ray.report(tmp_path).page)
    assert page.complaints() == []
    drawn = page.run("[...document.querySelectorAll('svg')].map(svg => svg.outerHTML).join()")
    assert not re.search(r"\b(nan|NaN|inf|Infinity|undefined|None)\b", drawn + page.run("document.body.innerText"))
