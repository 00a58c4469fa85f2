// Experiments: the table of trials, their learning curves, parallel coordinates, the best one, and what can be done.

import { color, empty, h, number, plural, s, short, table } from "./dom.js";
import { app, ask, post, run } from "./data.js";
import { WHOLE, named, plotLibrary } from "./chart.js";

const LOOK_EVERY_MS = 1000;
const INKS = 8;

// A value of a parameter that is no number, of which `text` is the JSON.
function textOf(text) {
  return text === undefined ? "" : String(JSON.parse(text));
}

export async function experimentsPage(main, page) {
  const list = await ask("/api/experiments");
  if (!list.length) {
    main.append(empty("There is no experiment here.", "`lp_pipe experiment create` starts one; its trials and their curves are shown here."));
    return;
  }
  const own = list.find((one) => run.info && one.run_dir === run.info.run_dir);
  const select = h("select", { "aria-label": "experiment" }, ...list.map((one) => h("option", { value: one.key }, one.key)));
  select.value = (own || list[list.length - 1]).key;
  const head = h("span", {});
  const said = h("span", { class: "faint" });
  const buttons = h("span", { class: "buttons" });
  const body = h("div", {});
  main.append(h("div", { class: "bar" }, select, head, buttons, said), body);
  let version = null, found = null, plot = null, timer = null, chosen = null;

  const act = async (action, trial, set) => {
    said.textContent = "…";
    try { said.textContent = (await post("/api/experiment", { id: select.value, action, trial, set })).done; } catch (error) { said.textContent = error.message; }
    version = null;
    await look();
  };

  async function look() {
    clearTimeout(timer);
    if (!document.hidden) {
      try {
        const asked = { id: select.value, ...(version ? { version } : {}) };
        const [now] = await Promise.all([ask("/api/experiment", asked), plotLibrary()]);
        if (!page.isCurrent()) return;
        if (now.version !== version) { version = now.version; found = now; render(); }
      } catch (error) { body.replaceChildren(h("p", { class: "error" }, error.message)); }
    }
    if (page.isCurrent()) timer = setTimeout(look, LOOK_EVERY_MS);
  }

  function render() {
    head.textContent = `${found.state} · ${plural(found.trials.length, "trial")} · ${found.metric} (${found.mode})` +
      (found.best === null ? "" : ` · best: trial ${found.best}, ${number(found.trials.find((one) => one.id === found.best).best)}`);
    buttons.replaceChildren();
    if (!app.readOnly && found.state === "running") buttons.append(h("button", { onclick: () => act("pause", null, []) }, "pause"));
    if (!app.readOnly && found.state === "paused") buttons.append(h("button", { onclick: () => act("resume", null, []) }, "resume"));
    if (plot) plot.destroy();
    const curves = h("div", { class: "plot" });
    const names = [...new Set(found.trials.flatMap((one) => Object.keys(one.params)))];
    body.replaceChildren(
      h("div", { class: "charts two" },
        h("figure", { class: "chart", "data-metric": found.metric || "" }, h("figcaption", {}, h("strong", {}, `${found.metric} of each trial`)), curves),
        h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, "parameters")), parallel(names))),
      trials(names));
    plot = drawCurves(curves);
  }

  function drawCurves(parent) {
    const shown = found.trials.filter((one) => one.curve.length);
    const data = shown.length ? uPlot.join(shown.map((one) => [one.curve.map((point) => point[0]), one.curve.map((point) => point[1])])) : [[], []];
    const axes = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui" };
    return new uPlot({
      width: Math.max(240, parent.clientWidth), height: 240, legend: { show: false }, scales: { x: { time: false } },
      cursor: { focus: { prox: 20 } }, focus: { alpha: 0.25 },
      axes: [{ ...axes, ...named("step"), incrs: WHOLE }, { ...axes, size: 58, values: (plot, ticks) => ticks.map((one) => one === null ? "" : number(one)) }],
      series: [{ label: "step" }, ...shown.map((one) => ({
        label: `trial ${one.id}`, spanGaps: true, points: { show: one.curve.length < 3 },
        stroke: one.id === found.best ? color("--best") : color(`--ink-${one.id % INKS}`), width: one.id === found.best ? 2.5 : 1,
      }))],
    }, data, parent);
  }

  function parallel(names) {
    const columns = [...names, "best"];
    const width = Math.max(320, columns.length * 110, main.clientWidth > 900 ? main.clientWidth / 2 - 40 : 0), height = 230, top = 26, bottom = height - 18;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "parallel", width: "100%", height });
    const values = (one) => columns.map((name) => name === "best" ? one.best : one.params[name]);
    const scales = columns.map((name, place) => {
      const all = found.trials.map((one) => values(one)[place]).filter((value) => value !== null && value !== undefined);
      if (all.every((value) => typeof value === "number")) {
        const isLog = all.length > 1 && Math.min(...all) > 0 && Math.max(...all) / Math.min(...all) > 50;
        const map = (value) => isLog ? Math.log(value) : value;
        const low = Math.min(...all.map(map)), high = Math.max(...all.map(map));
        return { of: (value) => high > low ? (map(value) - low) / (high - low) : 0.5, low: number(Math.min(...all)), high: number(Math.max(...all)) };
      }
      const kinds = [...new Set(all.map((value) => JSON.stringify(value)))];
      return { of: (value) => kinds.length > 1 ? kinds.indexOf(JSON.stringify(value)) / (kinds.length - 1) : 0.5, low: textOf(kinds[0]), high: textOf(kinds[kinds.length - 1]) };
    });
    const x = (place) => 40 + place * (width - 80) / Math.max(1, columns.length - 1);
    columns.forEach((name, place) => {
      svg.append(s("line", { x1: x(place), x2: x(place), y1: top, y2: bottom, class: "axis" }),
        s("text", { x: x(place), y: 11, class: "name" }, short(name, 16)),
        s("text", { x: x(place), y: 22, class: "tick" }, short(String(scales[place].high), 14)),
        s("text", { x: x(place), y: height - 5, class: "tick" }, short(String(scales[place].low), 14)));
    });
    for (const one of [...found.trials].sort((a, b) => (a.id === found.best) - (b.id === found.best))) {
      const points = values(one).map((value, place) => value === null || value === undefined ? null : `${x(place)},${bottom - scales[place].of(value) * (bottom - top)}`);
      if (points.filter(Boolean).length < 2) continue;
      svg.append(s("polyline", { points: points.filter(Boolean).join(" "), class: one.id === found.best ? "line best" : "line", "data-line": one.id },
        s("title", {}, `trial ${one.id}: ${number(one.best)}`)));
    }
    return svg;
  }

  function trials(names) {
    const rows = found.trials.map((one) => h("tr", { "data-trial": one.id, "data-state": one.state, class: one.id === found.best ? "best" : null },
      h("td", {}, String(one.id)), h("td", {}, h("span", { class: "badge", "data-state": one.state }, one.state)),
      h("td", {}, String(one.step)), h("td", {}, number(one.best)), h("td", {}, String(one.attempts)),
      ...names.map((name) => h("td", {}, one.params[name] === undefined ? "" : short(typeof one.params[name] === "number" ? number(one.params[name]) : String(one.params[name]), 24))),
      h("td", {}, one.error ? h("span", { class: "error", title: one.error }, short(one.error.trim().split("\n").pop(), 40)) : "",
        ...actions(one))));
    return table(["trial", "state", "step", "best", "attempts", ...names, ""], rows);
  }

  function actions(one) {
    if (app.readOnly) return [];
    const made = [];
    if (found.state !== "ended" && found.state !== "stopped" && ["running", "waiting", "paused"].includes(one.state)) {
      made.push(h("button", { class: "small", onclick: () => { if (confirm(`Kill trial ${one.id}? It ends for good.`)) act("kill", one.id, []); } }, "kill"));
    }
    made.push(h("button", { class: "small", onclick: () => {
      const text = prompt(`Fork trial ${one.id} into a new experiment. Changes, as NAME=VALUE, separated by blanks:`, "");
      if (text !== null) act("fork", one.id, text.split(/\s+/).filter(Boolean));
    } }, "fork"));
    return made;
  }

  select.addEventListener("change", () => { version = null; look(); });
  page.onLeave(() => { clearTimeout(timer); if (plot) plot.destroy(); });
  await look();
}
