"""Reports in a real browser: the slider, screens of all sizes, dark, print, keyboards, and hostile names."""

import json
import random
import re

import pytest
from chromium import CHROMIUM, Browser
from reported import at_budget, require_evaluated

from cauc_ray.policies.policy import Policy

pytestmark = [
    pytest.mark.soak("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
]


@pytest.fixture(scope="module")
def browser():
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


def shown(page):
    """Return the figures at the budget by label: the exact value and the text."""
    cells = (
        "[...document.querySelectorAll('data.shown')]"
        ".map(c => [c.closest('tr').cells[0].textContent, [c.value, c.textContent]])"
    )
    return dict(page.run(cells))


def type_budget(page, budget):
    page.run("document.getElementById('budget-number').focus(); document.getElementById('budget-number').select()")
    page.write(budget)


@pytest.mark.parametrize("name", ["rf", "per-call"])
def test_the_slider_shows_what_fitting_and_evaluating_at_its_budget_give(homes, opened, name):
    page, logits = opened(homes[name] / "report.html"), homes[name] / "LOGITS"
    own = Policy.load(homes[name] / "policy.json")
    data = json.loads(page.run("document.getElementById('points').textContent"))
    rng = random.Random(name)
    cost = rng.choice(data["points"][1:])["cost"]
    for budget in (rng.uniform(data["low"], data["high"]), cost, cost * (1 - 2e-9)):
        type_budget(page, repr(budget))
        require_evaluated(shown(page), *at_budget(logits, own, budget))
    type_budget(page, "0.5")
    message = page.run("document.getElementById('budget-says').textContent")
    assert "below the cheapest operating point, 1 GFLOPs" in message
    assert all(text == "–" for _, text in shown(page).values())
    page.run("document.getElementById('budget').focus()")
    for key, times in (("End", 1), ("ArrowLeft", rng.randrange(1, 60)), ("Home", 1), ("ArrowRight", 7)):
        page.press(key, times)
        budget = float(page.run("document.getElementById('budget-number').value"))
        require_evaluated(shown(page), *at_budget(logits, own, budget))
    assert page.complaints() == []


def test_the_page_asks_for_nothing_and_complains_of_nothing(homes, hostile, opened):
    for path in (homes["base"] / "report.html", hostile[0].page):
        page = opened(path)
        page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        drawn = (
            "[...document.querySelectorAll('.wide [id*=-band-]')].filter(b => b.getBoundingClientRect().width).length"
        )
        assert page.run(drawn) == 1
        page.run("document.querySelectorAll('button[data-band][aria-pressed=false]').forEach(b => b.click())")
        assert page.run(drawn) == page.run("document.querySelectorAll('button[data-band]').length") > 3
        assert (page.requests(), page.complaints()) == ([page.url], [])


def test_names_are_text_whatever_they_hold(hostile, opened):
    report, names = hostile
    page = opened(report.page)
    assert page.run("[...document.querySelectorAll('h1 .model')].map(m => m.textContent)") == names
    assert page.run("document.querySelectorAll('img, i, u, b').length") == 0
    assert page.run("document.scripts.length") == 2
    ids = page.run("[...document.querySelectorAll('.example')].map(t => t.textContent)")
    assert ids
    assert all(re.fullmatch(r"</script><img src=x onerror=alert\(test-\d+\)>", id_) for id_ in ids)
    answers = set(page.run("[...document.querySelectorAll('.stage td.words')].map(t => t.textContent)"))
    assert answers
    assert answers <= set(report.labels.values())
    assert page.run("document.title").startswith(names[0])


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
    if (!walker.currentNode.textContent.trim() || element.closest("script, noscript")) continue;
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
def test_all_text_stands_out_from_what_is_behind_it_also_in_print(homes, opened, scheme):
    page = opened(homes["rf"] / "report.html", scheme=scheme)
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 200
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    colour = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 200) == (scheme == "dark")
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(page.run(CONTRASTS))[0] >= 4.5
    assert page.run("document.querySelector('form.budget').checkVisibility()") is False
    page.send("Page.printToPDF")


@pytest.mark.parametrize("width", [320, 375, 1200])
def test_every_column_is_within_the_screen(homes, hostile, opened, width):
    for path in (homes["rf"] / "report.html", hostile[0].page):
        page = opened(path, width=width)
        page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = "[...document.querySelectorAll('td, tbody th')].filter(c => c.getBoundingClientRect().right > {})"
        assert width > 600 or page.run(f"{outside.format(width + 1)}.map(c => c.textContent)") == []
        visible = "[...document.querySelectorAll('#curves svg.chart')].filter(s => s.getClientRects().length).length"
        assert page.run(visible) == 1


def test_the_page_is_usable_by_keyboard_and_named_for_who_hears_it(homes, opened):
    page = opened(homes["base"] / "report.html")
    page.press("Tab")
    assert page.run("document.activeElement.textContent") == "Skip to the report"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    named = [node for node in tree if node.get("role", {}).get("value") in ("image", "slider", "table", "textbox")]
    assert {node["role"]["value"] for node in named} >= {"image", "slider", "table", "textbox"}
    assert all(node.get("name", {}).get("value") for node in named)
    assert page.run("[...document.querySelectorAll('table')].every(t => t.caption && t.tHead)")
