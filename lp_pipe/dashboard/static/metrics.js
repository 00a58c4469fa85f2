// Plots of all metrics: one for each name, with the nodes that logged it.

import { empty, h } from "./dom.js";
import { ask, on, run } from "./data.js";
import { Chart, redraw, settings } from "./chart.js";

const MOST_NODES = 8;
const NAMES_EVERY_MS = 2000;

export async function metricsPage(main, page) {
  const search = h("input", { type: "search", placeholder: "search names and nodes", "aria-label": "search" });
  const axis = h("select", { "aria-label": "axis" }, h("option", { value: "step" }, "by step"), h("option", { value: "time" }, "by time"));
  const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "smoothing" });
  const log = h("input", { type: "checkbox", id: "log" });
  const grid = h("div", { class: "charts" });
  main.append(h("div", { class: "bar" }, search, axis, h("label", {}, "smoothing ", smoothing),
    h("label", {}, log, " log scale"), h("span", { class: "faint wide" }, "drag to zoom, double click for all")), grid);
  axis.value = settings.axis;
  smoothing.value = settings.smoothing;
  log.checked = settings.log;
  axis.addEventListener("change", () => { settings.axis = axis.value; redraw(true); });
  smoothing.addEventListener("input", () => { settings.smoothing = Number(smoothing.value); redraw(false); });
  log.addEventListener("change", () => { settings.log = log.checked; redraw(false); });

  let charts = new Map();
  let known = await ask("/api/names", { run: run.key });
  page.onLeave(() => { for (const chart of charts.values()) chart.close(); });

  function groups() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Map();
    for (const one of known) {
      const text = `${one.name} ${one.node}`.toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
      if (!found.has(one.name)) found.set(one.name, []);
      found.get(one.name).push(one.node);
    }
    for (const nodes of found.values()) nodes.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    return found;
  }

  function arrange() {
    const next = new Map();
    const wanted = groups();
    for (const [name, nodes] of wanted) {
      const key = JSON.stringify([name, nodes]);
      next.set(key, charts.get(key) || null);
    }
    for (const [key, chart] of charts) if (!next.has(key)) { chart.close(); chart.element.remove(); }
    grid.querySelector(".empty")?.remove();
    for (const [key, chart] of next) {
      if (chart) { grid.append(chart.element); continue; }
      const [name, nodes] = JSON.parse(key);
      const made = new Chart(grid, name, nodes.slice(0, MOST_NODES).map((node) => [node, name]));
      if (nodes.length > MOST_NODES) {
        made.element.append(h("p", { class: "faint" }, `${MOST_NODES} of ${nodes.length} nodes: search for others, as in “${name} ${nodes[nodes.length - 1]}”`));
      }
      next.set(key, made);
    }
    charts = next;
    if (!charts.size) grid.append(known.length ? empty("No name matches.") : empty("No node has logged metrics yet.", "`lp.log_metrics({\"loss\": 0.5}, step=1)` in a node draws a point here."));
  }

  arrange();
  search.addEventListener("input", arrange);
  let asked = performance.now();
  let timer = null;
  const refreshNames = async () => {
    timer = null;
    asked = performance.now();
    const now = await ask("/api/names", { run: run.key });
    if (now.length !== known.length) { known = now; arrange(); }
  };
  page.onLeave(on("metrics", () => {
    const wait = known.length ? NAMES_EVERY_MS : 300;
    if (timer === null) timer = setTimeout(refreshNames, Math.max(0, wait - (performance.now() - asked)));
  }));
  page.onLeave(() => clearTimeout(timer));
  await Promise.all([...charts.values()].map((chart) => chart.noticed.then(() => chart.loading)));
}
