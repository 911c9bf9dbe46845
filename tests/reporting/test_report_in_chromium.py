"""A report in a real browser: the slider, screens of all sizes, the keyboard, and hostile names."""

import json
import re

import pytest
from chromium import CHROMIUM, Browser
from reported import at_budget, require_evaluated

from cauc_ray.policies.policy import Policy

pytestmark = [
    pytest.mark.soak("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


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


def require_a_slider(page, folder):
    """Require that the slider shows what fitting and evaluating at its budget give."""
    logits, policy = folder / "LOGITS", Policy.load(folder / "policy.json")
    data = json.loads(page.run("document.getElementById('points').textContent"))
    cost = data["points"][len(data["points"]) // 2]["cost"]
    for budget in (0.4 * data["low"] + 0.6 * data["high"], cost, cost * (1 - 2e-9)):
        type_budget(page, repr(budget))
        require_evaluated(shown(page), *at_budget(logits, policy, budget))
    type_budget(page, "0.5")
    message = page.run("document.getElementById('budget-says').textContent")
    assert "below the cheapest operating point, 1 GFLOPs" in message
    assert all(text == "–" for _, text in shown(page).values())
    page.run("document.getElementById('budget').focus()")
    for key, times in (("End", 1), ("ArrowLeft", 20), ("Home", 1), ("ArrowRight", 7)):
        page.press(key, times)
        budget = float(page.run("document.getElementById('budget-number').value"))
        require_evaluated(shown(page), *at_budget(logits, policy, budget))


def require_text(page, report, names):
    """Require that names, ids and answers are text, whatever markup they hold."""
    assert page.run("[...document.querySelectorAll('h1 .model')].map(m => m.textContent)") == names
    assert page.run("document.querySelectorAll('img, i, u, b').length") == 0
    assert page.run("document.scripts.length") == 2
    ids = page.run("[...document.querySelectorAll('.examples td:first-child')].map(t => t.textContent)")
    assert ids
    assert all(re.fullmatch(r"</script><img src=x onerror=alert\(test-\d+\)>", id_) for id_ in ids)
    columns = "'.examples td:nth-child(2), .examples td:nth-child(3)'"
    answers = set(page.run(f"[...document.querySelectorAll({columns})].map(t => t.textContent)"))
    assert answers
    assert answers <= {name.replace("\n", "") for name in report.measured.evaluation.names}


def test_a_page_in_a_browser(homes, hostile, browser):
    report, names = hostile
    page = browser.open(homes["rf"] / "report.html")
    page.press("Tab")
    assert page.run("document.activeElement.textContent") == "Skip to the report"
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in tree if node.get("role", {}).get("value") in ("image", "slider", "table", "textbox")]
    assert {node["role"]["value"] for node in controls} == {"image", "slider", "table", "textbox"}
    assert all(node.get("name", {}).get("value") for node in controls)
    require_a_slider(page, homes["rf"])
    assert (page.requests(), page.complaints()) == ([page.url], [])
    page.close()
    for width in (320, 1200):
        page = browser.open(report.page, width=width)
        page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        require_text(page, report, names)
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = "[...document.querySelectorAll('td, tbody th')].filter(c => c.getBoundingClientRect().right > {})"
        assert width > 600 or page.run(f"{outside.format(width + 1)}.map(c => c.textContent)") == []
        assert (page.requests(), page.complaints()) == ([page.url], [])
        page.close()
