// The pages that are lists: hangs, runs and checkpoints.

import { bytes, clock, dateTime, duration, empty, h, number, short, table } from "./dom.js";
import { ask, on, run } from "./data.js";

export async function hangsPage(main, page) {
  const now = h("div", {});
  const past = h("div", {});
  const stacks = h("pre", { class: "log", hidden: true });
  const button = h("button", { onclick: async () => {
    stacks.hidden = false;
    stacks.textContent = "asking every node …";
    try { stacks.textContent = (await ask("/api/stacks", { run: run.key })).text; } catch (error) { stacks.textContent = error.message; }
  } }, "stacks now");
  main.append(h("div", { class: "bar" }, h("h2", {}, "Waits now"), run.info.state === "running" ? button : ""), now, stacks, h("h2", {}, "Reported"), past);
  const showNow = () => {
    const waits = run.waits.map((one) => one.text);
    const rows = waits.length ? waits : Object.entries(run.states).filter(([, row]) => row.waiting).map(([node, row]) => `${node} has waited ${row.waiting}`);
    now.replaceChildren(...(rows.length ? rows.map((text) => h("p", { class: "wait-line" }, text)) : [run.info.state === "running" ? empty("No node waits for long.") : empty("The run is not live, so no node waits.")]));
  };
  const showPast = async () => {
    const found = await ask("/api/hangs", { run: run.key });
    if (!page.isCurrent()) return;
    const rows = found.hangs.slice().reverse().map((one) => h("section", { class: one.is_deadlock ? "hang deadlock" : "hang" },
      h("strong", {}, `${clock(one.time)} · ${(one.nodes || [one.node]).join(", ")}`), h("pre", {}, one.text || "")));
    past.replaceChildren(...(rows.length ? rows : [empty("No hang was reported.", "Nodes that wait for each other for longer than `--hang-after` are listed here, with their stacks.")]),
      found.text ? h("details", {}, h("summary", {}, "hangs.log: reports and the stacks at that moment"), h("pre", { class: "log" }, found.text)) : "");
  };
  showNow();
  await showPast();
  page.onLeave(on("states", showNow));
  page.onLeave(on("live", showNow));
  page.onLeave(on("events", (events) => { if (events.some((one) => one.event === "hang")) showPast(); }));
}

export async function runsPage(main, page) {
  const found = await ask("/api/runs");
  if (!found.runs.length) {
    main.append(empty("There is no run here.", "`lp_pipe launch TARGET` starts one."));
    return;
  }
  main.append(table(["run", "state", "program", "mode", "started", "took", "exit", "commit", "command"], found.runs.map((one) => h("tr", {
    class: one.key === run.key ? "chosen" : null, "data-run": one.key,
  },
  h("td", {}, h("a", { href: "#graph", onclick: (event) => { event.preventDefault(); page.open(one.key, "graph"); } }, one.name)),
  h("td", {}, h("span", { class: "badge", "data-state": one.state }, one.state), one.failure ? h("div", { class: "error" }, short(one.failure, 80)) : ""),
  h("td", {}, one.program), h("td", {}, one.mode), h("td", {}, dateTime(one.started)),
  h("td", {}, one.ended ? duration(one.ended - one.started) : one.state === "running" ? duration(Date.now() / 1000 - one.started) : ""),
  h("td", {}, one.exit_status === null ? "" : String(one.exit_status)),
  h("td", {}, one.git && one.git.commit ? `${one.git.commit.slice(0, 8)}${one.git.dirty ? " +" : ""}` : ""),
  h("td", { class: "faint", title: one.argv.join(" ") }, short(one.argv.join(" "), 80))))));
}

export async function checkpointsPage(main, page) {
  const load = async () => {
    const found = await ask("/api/checkpoints", { run: run.key });
    if (!page.isCurrent()) return;
    if (!found.length) {
      main.replaceChildren(empty("There is no checkpoint in the run's folder.", "A program that saves with `lp_pipe.checkpoint` has its checkpoints here; `lp_pipe launch --resume RUN` continues from the newest."));
      return;
    }
    main.replaceChildren(table(["checkpoint", "step", "saved", "size", "files", "parts", "metrics"], found.map((one) => h("tr", { "data-checkpoint": one.name },
      h("td", {}, one.name), one.error ? h("td", { colspan: 6, class: "error" }, one.error) : [
        h("td", {}, String(one.step)), h("td", {}, dateTime(one.saved)), h("td", {}, bytes(one.bytes)), h("td", {}, String(one.files)),
        h("td", {}, one.parts.join(", ")), h("td", {}, Object.entries(one.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ")),
      ]))));
  };
  await load();
  page.onLeave(on("events", (events) => { if (events.some((one) => one.event === "checkpoint")) load(); }));
}
