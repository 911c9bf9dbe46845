"use strict";

// A narrow screen shows each row as a list, where every cell has its column's name.
for (const table of document.querySelectorAll("table")) {
  const names = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, column) => { cell.dataset.column = names[column]; });
  }
  table.classList.toggle("reflows", names.length > 3);
}

// Each point is the best that validation has within some budgets. They rise in cost, and with it in quality.
function follow(data) {
  const [slider, field, says, mark] = ["budget", "budget-number", "budget-says", "mark"]
    .map((id) => document.getElementById(id));

  function show(budget) {
    // As in the library: a mean cost equal to the budget must not miss it by rounding.
    const point = data.points.findLast((of) => of.cost <= budget + data.tolerance * Math.abs(budget));
    document.querySelectorAll("data.shown").forEach((cell, row) => {
      const [value, text] = point?.figures[row] ?? [null, "–"];
      cell.value = value ?? "";
      cell.textContent = text;
    });
    document.querySelectorAll(".stack span").forEach((bar, stage) => { bar.style.flexGrow = point?.answered[stage] ?? 0; });
    mark.toggleAttribute("hidden", !point);
    if (point) mark.setAttribute("transform", `translate(${point.at.join(" ")})`);
    for (const word of document.querySelectorAll("[data-budget]")) word.textContent = point ? budget : "B";
    says.textContent = point ? "" : Number.isFinite(budget)
      ? `${budget} ${data.unit} is below the cheapest operating point, ${data.low} ${data.unit}, where the first stage answers everything.`
      : "A budget is a number: the mean cost per example.";
    field.setAttribute("aria-invalid", !point);
    slider.setAttribute("aria-valuetext", `${field.value} ${data.unit}`);
  }

  slider.oninput = () => {
    const budget = data.low + ((data.high - data.low) * slider.value) / data.steps;
    field.value = Math.min(data.high, Math.max(data.low, Number(budget.toFixed(data.digits))));
    show(Number(field.value));
  };

  field.oninput = () => {
    const budget = field.value.trim() === "" ? NaN : Number(field.value);
    if (data.high > data.low) slider.value = ((budget - data.low) / (data.high - data.low)) * data.steps || 0;
    show(budget);
  };

  field.value = data.start; // a browser that goes back to the page may have kept what was typed
  field.oninput();
}

const points = document.getElementById("points");
if (points) follow(JSON.parse(points.textContent));
