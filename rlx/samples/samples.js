"use strict";
// Filters, order, pairs and colours of completions. Elements are made for what is in view, and texts are never HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const controls = document.querySelector("form.controls");
const list = document.querySelector("main");
const end = document.querySelector(".end");
const tokenBar = document.querySelector(".token");
const BATCH = 30;  // rows that are made at once
const AHEAD = 600;  // pixels below the window that have rows already
const QUANTITIES = {
  advantages: {name: "advantage", zero: 0},
  mismatch: {name: "engine minus trainer", zero: 0},
  ratios: {name: "ratio", zero: 1},
  logprobs: {name: "log-probability", zero: 0},
};

const textOf = reference => data.texts[reference];
const completionOf = row => (row.completion ??= row.tokens.map(textOf).join(""));
const valueAt = (row, quantity, place) => {
  const values = row[quantity];
  return Array.isArray(values) ? values[place] : values;
};
const numberText = value => (value === null || value === undefined ? "-" : String(value).replace("-", "\u2212"));

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---------------------------------------------------------------------------------------------------------------------
// Which rows

function largest(row, quantity) {
  const values = row[quantity];
  if (values === null) return -1;
  const zero = QUANTITIES[quantity].zero;
  return [values].flat().reduce((most, value) => Math.max(most, value === null ? 0 : Math.abs(value - zero)), 0);
}

const ORDERS = {
  made: null,
  worst: (a, b) => a.score - b.score,
  best: (a, b) => b.score - a.score,
  longest: (a, b) => b.tokens.length - a.tokens.length,
  mismatch: (a, b) => largest(b, "mismatch") - largest(a, "mismatch"),
};

function matches(row, words, chosen) {
  if (chosen.answers && row.correct !== (chosen.answers === "right")) return false;
  if (chosen.finish && textOf(row.finish) !== chosen.finish) return false;
  if (!words.length) return true;
  row.searched ??= `${textOf(row.question)}\n${textOf(row.expected)}\n${completionOf(row)}`.toLowerCase();
  return words.every(word => row.searched.includes(word));
}

// Completions of the same prompt and number; a source may have a prompt twice, in two epochs.
const keyOf = row => `${row.question} ${row.sample}`;

function pairsOf(first, second) {
  const waiting = new Map();
  for (const row of second) waiting.set(keyOf(row), [...(waiting.get(keyOf(row)) ?? []), row]);
  return first.map(row => [row, waiting.get(keyOf(row))?.shift()]).filter(pair => pair[1]);
}

const ofSource = number => data.rows.filter(row => number === "" || row.source === Number(number));

function chosenRows() {
  const chosen = Object.fromEntries(new FormData(controls));
  const words = chosen.search.toLowerCase().split(/\s+/).filter(Boolean);
  const first = ofSource(chosen.show);
  const groups = chosen.beside === "" ? first.map(row => [row]) : pairsOf(first, ofSource(chosen.beside));
  const kept = groups.filter(group => group.some(row => matches(row, words, chosen)) &&
    !(chosen.differ && group.length > 1 && group[0].correct === group[1].correct));
  const order = ORDERS[chosen.order];
  if (order) kept.sort((a, b) => order(a[0], b[0]));
  return {kept, of: groups.length, unit: chosen.beside === "" ? "completions" : "pairs on the same prompts"};
}

// ---------------------------------------------------------------------------------------------------------------------
// Colours

const scales = {};

// The value of which 2 of 100 tokens have a larger one: a few extremes do not make all others pale.
function scaleOf(quantity) {
  if (quantity in scales) return scales[quantity];
  const zero = QUANTITIES[quantity].zero, sizes = [];
  for (const row of data.rows) {
    for (const value of [row[quantity]].flat()) if (value !== null) sizes.push(Math.abs(value - zero));
  }
  sizes.sort((a, b) => a - b);
  return (scales[quantity] = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1);
}

function colourFor(difference, scale) {
  const share = 0.6 * Math.min(1, Math.abs(difference) / scale);
  return `rgba(${difference > 0 ? "33, 102, 172" : "217, 95, 2"}, ${share.toFixed(3)})`;
}

function paint(span, row, place, quantity) {
  const value = quantity ? valueAt(row, quantity, place) : null;
  const difference = value === null || value === undefined ? 0 : value - QUANTITIES[quantity].zero;
  span.style.background = difference ? colourFor(difference, scaleOf(quantity)) : "";
}

function showLegend(quantity) {
  const legend = document.querySelector(".legend");
  legend.replaceChildren();
  if (!quantity) return;
  const {name, zero} = QUANTITIES[quantity], scale = scaleOf(quantity);
  legend.append(`${name}: `);
  for (const sign of quantity === "logprobs" ? [-1, 0] : [-1, 0, 1]) {
    const mark = element("i", "", numberText(Number((zero + sign * scale).toPrecision(3))));
    mark.style.background = sign ? colourFor(sign * scale, scale) : "";
    legend.append(mark);
  }
  if (!shown.kept.some(([row]) => row[quantity] !== null)) legend.append(" (not known of these)");
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows on the screen

function factsOf(row) {
  const line = element("p", "facts");
  const add = (name, value) => {
    const item = element("span", "", `${name} `);
    item.append(element("b", "", value));
    line.append(item);
  };
  line.append(element("span", row.correct ? "right" : "wrong", row.correct ? "\u2713 right" : "\u2717 wrong"));
  add("", data.sources[row.source]);
  add("prompt", `${row.prompt}.${row.sample}`);
  add("score", numberText(row.score));
  data.rewards.forEach((name, place) => row.rewards[place] !== null && add(name, numberText(row.rewards[place])));
  const advantage = Array.isArray(row.advantages) ? null : row.advantages;
  if (advantage !== null) add("advantage", numberText(advantage));
  add("finish", textOf(row.finish));
  add("tokens", String(row.tokens.length));
  if (row.episode) {
    add("turns", String(row.episode.rewards.length));
    if (row.episode.calls) add("tool calls", `${row.episode.calls}${row.episode.errors ? ` (${row.episode.errors} failed)` : ""}`);
    add("environment", `${numberText(row.episode.seconds)} s`);
    if (row.episode.failure) line.append(element("span", "wrong", `environment: ${row.episode.failure}`));
  }
  if (row.staleness) add("weights older by", `${row.staleness} steps`);
  if (row.leftOut) line.append(element("span", "", "not trained on"));
  if (row.dataSource !== null) add("source", textOf(row.dataSource));
  add("answer", row.answer === null ? "none found" : textOf(row.answer));
  return line;
}

function questionOf(row) {
  const part = element("div");
  const question = element("p", "question", textOf(row.question));
  if (textOf(row.expected)) question.append(element("span", "", `   expected: ${textOf(row.expected)}`));
  const details = element("details");
  details.append(element("summary", "", "\u25b8 what the policy read"));
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(element("pre", "", textOf(row.read)));
  });
  part.append(question, details);
  return part;
}

function turnName(row, turn) {
  if (turn < 0) return "environment";
  const reward = row.episode ? row.episode.rewards[turn] : 0;
  return `turn ${turn + 1}${reward ? `, reward ${numberText(reward)}` : ""}`;
}

function tokensOf(row, quantity) {
  const body = element("div", "tokens");
  body.row = row;
  row.tokens.forEach((reference, place) => {
    const turn = row.turns ? row.turns[place] : 0;
    if (row.turns && (place === 0 || turn !== row.turns[place - 1])) body.append(element("p", "turn", turnName(row, turn)));
    const span = element("span", turn < 0 ? "said" : "", textOf(reference));
    span.dataset.place = place;
    paint(span, row, place, quantity);
    body.append(span);
  });
  if (row.episode && row.episode.last) {
    body.append(element("p", "turn", "environment, at the end"), element("span", "said", row.episode.last));
  }
  return body;
}

function foldIfLong(body) {
  body.classList.add("folded");
  requestAnimationFrame(() => {
    if (body.scrollHeight <= body.clientHeight + 4) return body.classList.remove("folded");
    const more = element("button", "more", "show all");
    more.type = "button";
    more.addEventListener("click", () => {
      more.textContent = body.classList.toggle("folded") ? "show all" : "show less";
    });
    body.after(more);
  });
}

function cardOf(group, quantity, before) {
  const card = element("article", group.length === 1 ? (group[0].correct ? "right" : "wrong") : "");
  const isSame = before && before[0].question === group[0].question && before[0].source === group[0].source;
  if (isSame) card.classList.add("same");
  else card.append(questionOf(group[0]));
  const place = group.length === 1 ? card : element("div", "pair");
  for (const row of group) {
    const column = group.length === 1 ? card : element("div", row.correct ? "right" : "wrong");
    column.append(factsOf(row), tokensOf(row, quantity));
    if (column !== card) place.append(column);
  }
  if (place !== card) card.append(place);
  return card;
}

let shown = {kept: [], of: 0, unit: ""};

function showMore() {
  const quantity = controls.elements.colour.value, from = list.children.length;
  for (let place = from; place < Math.min(from + BATCH, shown.kept.length); place++) {
    const card = cardOf(shown.kept[place], quantity, shown.kept[place - 1]);
    list.append(card);
    for (const body of card.querySelectorAll(".tokens")) foldIfLong(body);
  }
}

// Makes rows until the window is full, and some ahead.
function fillView() {
  while (list.children.length < shown.kept.length && end.getBoundingClientRect().top < innerHeight + AHEAD) showMore();
}

function sumUp(rows) {
  if (!rows.length) return "";
  const mean = rows.reduce((sum, row) => sum + row.score, 0) / rows.length;
  return `${rows.filter(row => row.correct).length} right, mean score ${numberText(Number(mean.toPrecision(3)))}`;
}

function showAll() {
  shown = chosenRows();
  const told = [0, 1].map(place => sumUp(shown.kept.map(group => group[place]).filter(Boolean))).filter(Boolean);
  const count = `${shown.kept.length.toLocaleString("en")} of ${shown.of.toLocaleString("en")} ${shown.unit}`;
  document.querySelector("[role=status]").textContent = [count, told.join("; beside it ")].filter(Boolean).join(": ");
  controls.elements.differ.closest("label").hidden = controls.elements.beside.value === "";
  list.replaceChildren();
  showLegend(controls.elements.colour.value);
  showMore();
  fillView();
}

function repaint() {
  const quantity = controls.elements.colour.value;
  showLegend(quantity);
  for (const body of list.querySelectorAll(".tokens")) {
    for (const span of body.querySelectorAll("[data-place]")) paint(span, body.row, Number(span.dataset.place), quantity);
  }
}

function describe(event) {
  const span = event.target.closest?.(".tokens [data-place]");
  if (!span) return;
  const row = span.parentElement.row, place = Number(span.dataset.place);
  const [old, mismatch] = [valueAt(row, "logprobs", place), valueAt(row, "mismatch", place)];
  const parts = [JSON.stringify(span.textContent), `token ${place + 1}`];
  for (const [quantity, {name}] of Object.entries(QUANTITIES)) {
    const value = valueAt(row, quantity, place);
    if (value !== null && value !== undefined) parts.push(`${name} ${numberText(value)}`);
  }
  if (typeof old === "number" && typeof mismatch === "number") {
    parts.push(`engine's ${numberText(Number((old + mismatch).toPrecision(4)))}`);
  }
  tokenBar.textContent = parts.join("  \u00b7  ");
}

// ---------------------------------------------------------------------------------------------------------------------
// Start

function fill(name, options) {
  controls.elements[name].replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

const sources = data.sources.map((name, number) => [String(number), name]);
fill("show", [["", "everything"], ...sources]);
fill("beside", [["", "nothing"], ...sources]);
const finishes = [...new Set(data.rows.map(row => textOf(row.finish)))].sort();
fill("finish", [["", "all"], ...finishes.map(name => [name, name])]);
["show", "beside"].forEach((name, place) => (controls.elements[name].value = data.opens[place] ?? ""));
for (const quantity of ["advantages", "mismatch"]) {
  if (!controls.elements.colour.value && data.rows.some(row => row[quantity] !== null)) {
    controls.elements.colour.value = quantity;
  }
}

controls.addEventListener("submit", event => event.preventDefault());
controls.addEventListener("input", event => (event.target.name === "colour" ? repaint() : showAll()));
list.addEventListener("pointerover", describe);
list.addEventListener("click", describe);
new IntersectionObserver(fillView, {rootMargin: `${AHEAD}px`}).observe(end);
addEventListener("scroll", fillView, {passive: true});
showAll();
