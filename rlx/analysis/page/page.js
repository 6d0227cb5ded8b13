"use strict";
// Tables that sort and filter, the metric selector, and figures on paper. Nothing is fetched.

// A column of numbers is sorted by the numbers in full, which data-key holds; other columns by what they show.
const textOf = cell => (cell.textContent === "-" ? "" : cell.textContent);
const keyOf = (row, column) => {
  const cell = row.cells[column];
  return cell.classList.contains("number") ? cell.dataset.key ?? "" : textOf(cell);
};

function compare(a, b, isNumber) {
  return isNumber ? Number(a) - Number(b) : a.localeCompare(b, "en", {numeric: true});
}

// Rows without a value stay at the end, whichever the direction.
function sortedRows(rows, column, isNumber, sign) {
  const order = (a, b) => sign * compare(keyOf(a, column), keyOf(b, column), isNumber);
  const hasValue = row => keyOf(row, column) !== "";
  return [...rows.filter(hasValue).sort(order), ...rows.filter(row => !hasValue(row))];
}

function sortBy(table, header) {
  const isAscending = header.getAttribute("aria-sort") !== "ascending";
  const body = table.tBodies[0];
  const isNumber = header.classList.contains("number");
  body.append(...sortedRows([...body.rows], header.cellIndex, isNumber, isAscending ? 1 : -1));
  for (const each of table.tHead.rows[0].cells) each.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
}

// A row stays if it contains every word.
function filterRows(table, text, status) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) {
    const shown = [...row.cells].map(cell => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every(word => shown.includes(word));
  }
  status.textContent = words.length ? `${rows.filter(row => !row.hidden).length} of ${rows.length} rows` : "";
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const header of table.tHead.rows[0].cells) {
    header.querySelector("button").addEventListener("click", () => sortBy(table, header));
  }
  const filter = table.closest("section").querySelector(".filter");
  const input = filter?.querySelector("input");
  input?.addEventListener("input", () => filterRows(table, input.value, filter.querySelector("[role=status]")));
}

// Plotly reads texts as HTML.
const literal = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function showMetric(figure, data, metric) {
  const values = {
    x: metric.curves.map(curve => (curve ? data.steps[curve.steps] : [])),
    y: metric.curves.map(curve => (curve ? curve.values : [])),
  };
  Plotly.update(figure, values, {"yaxis.title.text": literal(metric.name), "yaxis.range": metric.axis});
}

for (const explorer of document.querySelectorAll(".explorer")) {
  const data = JSON.parse(explorer.querySelector("script").textContent);
  const select = explorer.querySelector("select");
  const figure = explorer.parentElement.querySelector(".plotly-graph-div");
  const show = () => {
    const metric = data.metrics[select.selectedIndex];
    explorer.querySelector(".meaning").textContent = metric.meaning;
    showMetric(figure, data, metric);
  };
  select.addEventListener("change", show);
  show();  // a browser may remember the selection of an earlier visit
}

// In a narrow window the rank alone names a setting: the table at the top has the rest.
const rankOf = name => /^\d+(?=  )/.exec(name)?.[0] ?? name;

function shortenNames(figure) {
  Plotly.restyle(figure, {name: figure.data.map(trace => rankOf(trace.name ?? ""))});
  if (figure.layout.yaxis?.type !== "category") return;
  const labels = figure.data.flatMap(trace => trace.y);
  Plotly.relayout(figure, {"yaxis.labelalias": Object.fromEntries(labels.map(label => [label, rankOf(label)]))});
}

// Figures are as wide as their window; paper is narrower.
const figures = () => document.querySelectorAll(".plotly-graph-div");
if (innerWidth < 700) figures().forEach(shortenNames);
addEventListener("beforeprint", () => figures().forEach(each => Plotly.relayout(each, {width: 680})));
addEventListener("afterprint", () => figures().forEach(each => Plotly.relayout(each, {width: null, autosize: true})));
