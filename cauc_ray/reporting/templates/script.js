"use strict";

// Which method's interval is drawn.
for (const button of document.querySelectorAll("button[data-band]")) {
  button.addEventListener("click", () => {
    const pressed = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", pressed);
    for (const band of document.querySelectorAll(`[id$="band-${button.dataset.band}"]`)) band.classList.toggle("drawn", pressed);
  });
}
document.querySelector("button[data-band]")?.click();

// A narrow screen shows each row as a list, where every cell has its column's name.
for (const table of document.querySelectorAll("table")) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, column) => { cell.dataset.column = names[column]; });
  }
  if (names.length > 4) table.classList.add("reflows");
}

// Each point is the best that validation has within some budgets. They rise in cost, and with it in quality.
function follow(data) {
  const slider = document.getElementById("budget");
  const field = document.getElementById("budget-number");
  const says = document.getElementById("budget-says");
  const cells = document.querySelectorAll("data.shown");

  // As in the library: a mean cost equal to the budget must not miss it by rounding.
  function bestWithin(budget) {
    const most = budget + data.tolerance * Math.abs(budget);
    return data.points.findLastIndex((point) => point.cost <= most);
  }

  function show(budget) {
    const place = Number.isFinite(budget) ? bestWithin(budget) : -1;
    const point = data.points[place];
    cells.forEach((cell, row) => {
      const [value, text] = point ? point.figures[row] : [null, "–"];
      cell.value = value ?? "";
      cell.textContent = text;
    });
    const total = point ? point.answered.reduce((sum, n) => sum + n) : 1;
    let x = 0;
    document.querySelectorAll(".stack rect").forEach((bar, stage) => {
      const width = point ? (100 * point.answered[stage]) / total : 0;
      bar.setAttribute("x", x);
      bar.setAttribute("width", width);
      x += width;
    });
    for (const mark of document.querySelectorAll("[data-mark]")) {
      mark.toggleAttribute("hidden", !point);
      if (point) mark.setAttribute("transform", `translate(${data.at[mark.dataset.mark][place].join(" ")})`);
    }
    for (const word of document.querySelectorAll("[data-budget]")) word.textContent = point ? budget : "B";
    says.textContent = point ? "" : refusal(budget);
    field.setAttribute("aria-invalid", !point);
    slider.setAttribute("aria-valuetext", `${field.value} ${data.unit}`);
  }

  function refusal(budget) {
    if (!Number.isFinite(budget)) return "A budget is a number: the mean cost per example.";
    return `${budget} ${data.unit} is below the cheapest operating point, ${data.low} ${data.unit}, ` +
      "where the first stage answers everything.";
  }

  slider.addEventListener("input", () => {
    const budget = data.low + ((data.high - data.low) * slider.value) / data.steps;
    field.value = Math.min(data.high, Math.max(data.low, Number(budget.toFixed(data.digits))));
    show(Number(field.value));
  });

  function typed() {
    const budget = field.value.trim() === "" ? NaN : Number(field.value);
    if (Number.isFinite(budget) && data.high > data.low) {
      slider.value = ((budget - data.low) / (data.high - data.low)) * data.steps;
    }
    show(budget);
  }
  field.addEventListener("input", typed);

  // A browser that goes back to the page may have kept what was typed.
  field.value = data.start;
  typed();
}

const points = document.getElementById("points");
if (points) follow(JSON.parse(points.textContent));
