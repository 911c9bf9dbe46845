"use strict";

// Each point is the best that validation has within some budgets. They rise in cost, and with it in quality.
const told = JSON.parse(document.getElementById("points").textContent);
const slider = document.getElementById("budget");
const field = document.getElementById("budget-number");
const says = document.getElementById("budget-says");

// As the library does it: a mean cost equal to the budget shall not miss it by rounding.
function bestWithin(budget) {
  const most = budget + told.tolerance * Math.abs(budget);
  return told.points.findLast((point) => point.cost <= most);
}

function show(budget) {
  const point = Number.isFinite(budget) ? bestWithin(budget) : undefined;
  for (const cell of document.querySelectorAll("data[data-shows]")) {
    const [value, text] = point ? point.figures[cell.dataset.shows] : [null, "–"];
    cell.value = value ?? "";
    cell.textContent = text;
  }
  document.querySelectorAll("#answered rect").forEach((bar, stage) => {
    const [x, width] = point ? point.shares[stage] : [0, 0];
    bar.setAttribute("x", x);
    bar.setAttribute("width", width);
  });
  for (const mark of document.querySelectorAll("[data-mark]")) {
    mark.toggleAttribute("hidden", !point);
    if (point) mark.setAttribute("transform", `translate(${point.at[mark.dataset.mark].join(" ")})`);
  }
  for (const word of document.querySelectorAll("[data-budget]")) word.textContent = point ? budget : "B";
  says.textContent = point ? inWords(budget, point.figures) : refusal(budget);
  field.setAttribute("aria-invalid", !point);
  slider.setAttribute("aria-valuetext", `${point ? budget : told.places[slider.value]} ${told.unit}`);
}

function inWords(budget, figures) {
  const [accuracy, cost, threshold] = ["accuracy", "cost", "threshold"].map((name) => figures[name][1]);
  return `Within ${budget} ${told.unit}: threshold ${threshold}, accuracy ${accuracy}, cost ${cost} ${told.unit}.`;
}

function refusal(budget) {
  if (!Number.isFinite(budget)) return "A budget is a number: the mean cost per example.";
  return `${budget} ${told.unit} is below the cheapest operating point, ${told.cheapest} ${told.unit}, ` +
    "where the first stage answers everything.";
}

slider.addEventListener("input", () => {
  field.value = told.places[slider.value];
  show(Number(field.value));
});

field.addEventListener("input", () => {
  const budget = field.value.trim() === "" ? NaN : Number(field.value);
  const above = told.places.findIndex((place) => place > budget);
  slider.value = above < 0 ? told.places.length - 1 : Math.max(0, above - 1);
  show(budget);
});

// Which method's interval is drawn.
for (const button of document.querySelectorAll("button[data-band]")) {
  button.addEventListener("click", () => {
    const pressed = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", pressed);
    for (const band of document.querySelectorAll(`path[data-band="${button.dataset.band}"]`)) {
      band.classList.toggle("shown", pressed);
    }
  });
}

// A browser that goes back to the page may have kept what was typed.
slider.value = slider.defaultValue;
field.value = told.places[slider.value];
show(Number(field.value));
