// The frame of the page: the chosen run, the links to pages, and whether the server and the launcher are there.

import { clock, dateTime, empty, h } from "./dom.js";
import { app, ask, choose, on, run } from "./data.js";
import { plotLibrary } from "./chart.js";
import { graphPage } from "./graph.js";
import { metricsPage } from "./metrics.js";
import { timelinePage } from "./timeline.js";
import { experimentsPage } from "./experiments.js";
import { checkpointsPage, hangsPage, runsPage } from "./tables.js";

const PAGES = {
  graph: graphPage, metrics: metricsPage, pipeline: timelinePage, hangs: hangsPage,
  experiments: experimentsPage, runs: runsPage, checkpoints: checkpointsPage,
};
const WITHOUT_RUN = ["runs", "experiments"];

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const link = document.getElementById("link");
let leave = [];
let shown = 0;

async function show() {
  let name = location.hash.slice(1).split("/")[0];
  if (!PAGES[name]) name = run.key === null || (!app.single && !location.hash) ? "runs" : "graph";
  const turn = ++shown;
  delete document.body.dataset.ready;
  for (const one of leave) one();
  leave = [];
  for (const one of document.querySelectorAll("nav a")) {
    one.classList.toggle("chosen", one.dataset.page === name);
    if (one.dataset.page === name) one.scrollIntoView({ block: "nearest", inline: "center" });
  }
  main.replaceChildren();
  main.dataset.shown = name;
  if (run.key === null && !WITHOUT_RUN.includes(name)) {
    main.append(empty("There is no run here yet.", "`lp_pipe launch TARGET` starts one."));
    document.body.dataset.ready = name;
    return;
  }
  const isCurrent = () => turn === shown;
  try {
    await PAGES[name](main, { onLeave: (one) => leave.push(one), isCurrent, open });
  } catch (error) {
    if (isCurrent()) main.append(h("p", { class: "error" }, error.message));
  }
  if (isCurrent()) requestAnimationFrame(() => { if (isCurrent()) document.body.dataset.ready = name; });
}

async function open(key, page) {
  await choose(key);
  head();
  if (page && location.hash !== `#${page}`) location.hash = page;
  else await show();
}

function head() {
  const info = run.info;
  if (!info) return;
  document.title = `${info.program} · lp_pipe`;
  document.getElementById("program").textContent = info.program;
  const state = document.getElementById("state");
  state.textContent = info.state;
  state.dataset.state = info.state;
  document.getElementById("mode").textContent = `${info.mode} mode · since ${dateTime(info.started)}`;
  const select = document.getElementById("run");
  if (select.value !== run.key) select.value = run.key;
  const texts = {
    dead: "dead: the launcher was killed. This is the last state that its files tell.",
    failed: `failed: ${info.failure || ""}`,
    unknown: `This run is on host ${info.host}; what its files tell is shown.`,
  };
  if (!banner.dataset.locked) {
    banner.replaceChildren(texts[info.state] || "", info.state === "failed" ? traceback() : "");
    banner.hidden = !banner.textContent;
    banner.dataset.state = info.state;
  }
}

function traceback() {
  const text = h("pre", { class: "log" });
  const details = h("details", { ontoggle: async () => {
    if (!details.open || text.textContent) return;
    try { text.textContent = (await ask("/api/failure", { run: run.key })).text || "No traceback was written."; } catch (error) { text.textContent = error.message; }
  } }, h("summary", {}, "whole traceback"), text);
  return details;
}

function sayLink(lostSince) {
  document.body.classList.toggle("lost", lostSince !== null);
  link.textContent = lostSince === null ? (document.hidden ? "" : "● live") : `disconnected since ${clock(lostSince)}`;
  if (lostSince === null && run.info && run.info.state !== "running") link.textContent = "";
}

on("link", sayLink);
on("run", () => { head(); sayLink(null); });
on("locked", () => {
  banner.dataset.locked = "yes";
  banner.hidden = false;
  banner.textContent = "This page's key is no longer valid: open the new URL that lp_pipe ui has printed.";
});

async function begin() {
  if (location.search) history.replaceState(null, "", `/${location.hash}`); // the token leaves the address bar
  const found = await ask("/api/begin");
  app.readOnly = found.read_only;
  app.single = found.single || found.runs.length === 1;
  const select = document.getElementById("run");
  for (const one of found.runs) {
    select.append(h("option", { value: one.key }, `${one.key}${one.state === "running" ? " ●" : ""}`));
  }
  select.hidden = found.runs.length < 2;
  select.addEventListener("change", () => open(select.value));
  if (found.first !== null) await choose(found.first, found.run);
  head();
  window.addEventListener("hashchange", show);
  await show();
  setTimeout(() => plotLibrary().catch(() => null), 50);
}

begin().catch((error) => {
  main.append(h("p", { class: "error" }, error.message));
  document.body.dataset.ready = "error";
});
