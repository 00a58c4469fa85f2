// One plot of one or more series of metrics: drawn from the server's buckets, kept up to date from the file's new points.

import { clock, color, h, number, plural } from "./dom.js";
import { ask, on, run } from "./data.js";

const LIVE_EVERY_MS = 250;
const MOST_POINTS = 6000; // of one series in the page; then the server's buckets replace them
const INKS = 8;
export const WHOLE = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power)); // steps have no halves

let loaded = null;

// Load uPlot by the first plot, or once the first page is drawn: to run its script takes longer than to draw a graph.
export function plotLibrary() {
  loaded ||= new Promise((done, failed) => {
    document.head.append(h("script", { src: new URL("./uplot.js", import.meta.url), onload: done, onerror: () => { loaded = null; failed(new Error("uplot.js was not loaded")); } }));
  });
  return loaded;
}

// An axis below a plot, with its name.
export function named(axis) {
  return { size: 30, label: axis, labelSize: 15, labelGap: -3, labelFont: "11px system-ui" };
}

export const settings = { axis: "step", smoothing: 0, log: false };
const open = new Set();
let timer = null;
let isBusy = false;
let isStale = false;

on("metrics", soon);
on("back", () => { for (const chart of open) chart.load(); });

let refreshed = 0;

function soon() {
  isStale = true;
  if (timer === null) timer = setTimeout(refresh, Math.max(0, refreshed + LIVE_EVERY_MS - performance.now()));
}

// All visible charts ask together for the points that were appended since the last time.
async function refresh() {
  timer = null;
  if (isBusy || document.hidden) return;
  const charts = [...open].filter((chart) => chart.isVisible && chart.end !== null && chart.range === null);
  if (!isStale || !charts.length) return;
  isBusy = true;
  isStale = false;
  refreshed = performance.now();
  try {
    const offset = Math.min(...charts.map((chart) => chart.end));
    const keys = charts.flatMap((chart) => chart.keys);
    const same = charts.filter((chart) => chart.end === offset);
    for (const chart of charts) if (!same.includes(chart)) chart.load();
    const found = await ask("/api/after", { run: run.key, offset, keys: JSON.stringify(same.flatMap((chart) => chart.keys)) });
    if (keys.length) deliver(same, found, offset);
  } catch { isStale = true; } finally {
    isBusy = false;
    if (isStale) soon();
  }
}

function deliver(charts, found, offset) {
  let place = 0, series = 0;
  for (const chart of charts) {
    const parts = chart.keys.map(() => {
      const size = found.sizes[series++];
      const part = found.points.slice(place, place + size);
      place += size;
      return part;
    });
    if (chart.end === offset) chart.append(parts, found.end);
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    chart.isVisible = entry.isIntersecting;
    if (chart.isVisible) chart.appear();
    chart.setNoticed();
  }
}, { rootMargin: "200px" });

export function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean * share + value * (1 - share);
    weight = weight * share + (1 - share);
    return mean / weight;
  });
}

export class Chart {
  // keys: [node, name] of each series. labels: what the legend calls them.
  constructor(parent, title, keys, options = {}) {
    this.keys = keys;
    this.labels = options.labels || keys.map(([node]) => node);
    this.height = options.height || 200;
    this.end = null;
    this.range = null;
    this.series = [];
    this.isVisible = false;
    this.plot = null;
    // Settled once it is known whether the chart is visible, and so is being loaded.
    this.noticed = new Promise((done) => { this.setNoticed = done; });
    this.body = h("div", { class: "plot" });
    this.note = h("span", { class: "faint" });
    this.reset = h("button", { class: "small", hidden: true, onclick: () => this.zoom(null) }, "all");
    this.element = h("figure", { class: "chart", "data-metric": title },
      h("figcaption", {}, h("strong", {}, title), " ", this.note, this.reset), this.body);
    this.element.chart = this;
    parent.append(this.element);
    open.add(this);
    seen.observe(this.element);
    this.resized = new ResizeObserver(() => {
      const width = this.width();
      if (this.plot && Math.abs(this.plot.width - width) > 2) this.plot.setSize({ width, height: this.height });
    });
    this.resized.observe(this.body);
  }

  close() {
    open.delete(this);
    seen.unobserve(this.element);
    this.resized.disconnect();
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  width() { return Math.max(200, Math.floor(this.body.clientWidth)); }

  appear() {
    if (this.end === null) this.load();
    else soon();
  }

  load() {
    this.loading = this.fetch();
    return this.loading;
  }

  async fetch() {
    const asked = {
      run: run.key, keys: JSON.stringify(this.keys), axis: settings.axis,
      buckets: Math.min(1000, Math.max(200, this.width())),
    };
    if (this.range) [asked.low, asked.high] = this.range;
    const turn = this.turn = (this.turn || 0) + 1;
    const [found] = await Promise.all([ask("/api/series", asked), plotLibrary()]);
    if (turn !== this.turn || !open.has(this)) return;
    this.end = found.end;
    this.series = found.series;
    this.draw();
  }

  append(parts, end) {
    this.end = end;
    let isFull = false, isNew = false;
    parts.forEach((points, place) => {
      const one = this.series[place];
      for (const [step, time, value] of points) {
        if (!one.x.length && step !== null && one.axis === "time" && settings.axis === "step") one.axis = "step";
        const x = one.axis === "step" ? step : time;
        if (x === null) continue;
        if (one.x.length && x < one.x[one.x.length - 1]) isFull = true; // a restarted loop: the server sorts
        one.x.push(x);
        one.y.push(value);
        one.points += 1;
        isNew = true;
      }
      isFull = isFull || one.x.length > MOST_POINTS;
    });
    if (isFull) this.load();
    else if (isNew) this.draw();
  }

  data() {
    const share = settings.smoothing;
    const tables = this.series.map((one) => [one.x, smoothed(one.y, share)]);
    if (tables.length === 1) return tables[0];
    return tables.length ? uPlot.join(tables) : [[], []];
  }

  draw() {
    const points = this.series.reduce((sum, one) => sum + one.points, 0);
    this.note.textContent = this.series.length === 1
      ? `${number(this.series[0].y[this.series[0].y.length - 1])} · ${plural(points, "point")}`
      : `${plural(this.series.length, "node")} · ${plural(points, "point")}`;
    const axis = this.series.length && this.series[0].axis === "time" ? "time" : settings.axis;
    const look = `${axis} ${settings.log} ${this.hasMany()}`;
    if (this.plot && this.look === look) {
      this.plot.setData(this.data(), this.range === null);
      if (this.range) this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
    } else {
      this.look = look;
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot(this.options(axis), this.data(), this.body);
    }
    this.drawn = performance.now();
    this.element.dataset.points = points;
  }

  // Lines of more than one pixel are stroked as shapes, which takes a hundred times as long as hairlines.
  hasMany() { return this.series.some((one) => one.x.length > 300); }

  options(axis) {
    const ink = color("--faint"), line = color("--line");
    const axes = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
    return {
      width: this.width(),
      height: this.height,
      cursor: { sync: { key: "all" }, drag: { x: true, y: false, setScale: false } },
      legend: { show: this.keys.length > 1 },
      scales: { x: { time: axis === "time" }, y: { distr: settings.log ? 3 : 1 } },
      axes: [{ ...axes, ...named(axis), ...(axis === "time" ? {} : { incrs: WHOLE }) }, { ...axes, size: 58, space: 24, values: (plot, ticks) => ticks.map((one) => one === null ? "" : number(one)) }],
      series: [
        { label: axis, value: (plot, value) => value === null || value === undefined ? "–" : axis === "time" ? clock(value) : String(value) },
        ...this.keys.map((key, place) => ({
          label: this.labels[place], stroke: color(`--ink-${place % INKS}`), width: this.hasMany() ? 1 : 1.4, spanGaps: this.keys.length > 1,
          points: { show: this.series[place] && this.series[place].x.length < 30 },
          value: (plot, value) => number(value),
        })),
      ],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width > 4) {
            this.zoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
          }
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.zoom(null))],
      },
    };
  }

  async zoom(range) {
    this.range = range;
    this.reset.hidden = range === null;
    await this.load();
  }
}

export function redraw(isOtherAxis) {
  for (const chart of open) {
    if (isOtherAxis) {
      chart.range = null;
      chart.reset.hidden = true;
      chart.end = null;
      if (chart.isVisible) chart.load();
    } else if (chart.end !== null) chart.draw();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of open) { chart.look = null; if (chart.end !== null) chart.draw(); }
});
