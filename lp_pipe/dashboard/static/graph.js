// The program's graph with the states of its nodes, traffic and waits; and a panel for one node or one folded group.

import { bytes, duration, empty, h, number, s, short } from "./dom.js";
import { ask, on, run } from "./data.js";
import { Chart } from "./chart.js";

const WORST = ["dead", "failed", "restarting", "starting", "waiting", "stopped", "running", "finished"];
const LOG_EVERY_MS = 500;
const MAX_LINES = 2000;
const LEAST_SCALE = 0.72; // a graph that would be smaller is scrolled

function worst(names) {
  const found = names.map((name) => (run.states[name] || {}).state || "unknown");
  return WORST.find((one) => found.includes(one)) || "unknown";
}

function counts(names) {
  const found = new Map();
  for (const name of names) {
    const state = (run.states[name] || {}).state || "unknown";
    found.set(state, (found.get(state) || 0) + 1);
  }
  return [...found].map(([state, count]) => `${count} ${state}`).join(" · ");
}

export async function graphPage(main, page) {
  const scene = run.info.scene;
  const panel = h("aside", { id: "panel", hidden: true });
  const stage = h("div", { class: "stage scroll" });
  main.append(h("div", { class: "graph" }, stage, panel));
  if (!scene) {
    stage.append(empty("The folder of this run has no graph.json.", "Its metrics, hangs and checkpoints are on the other pages."));
    return;
  }
  const drawing = draw(scene, (card, label) => openPanel(panel, card, label, page));
  stage.append(drawing.svg);
  stage.scrollLeft = (stage.scrollWidth - stage.clientWidth) / 2;
  drawing.states();
  drawing.live();
  page.onLeave(on("states", drawing.states));
  page.onLeave(on("live", drawing.live));
  page.onLeave(() => panel.leave && panel.leave());
  const wanted = decodeURIComponent(location.hash.split("/").slice(1).join("/"));
  const box = scene.boxes.find((one) => one.nodes.includes(wanted));
  if (box) await openPanel(panel, { nodes: [wanted] }, box.label, page);
}

function draw(scene, choose) {
  const margin = 24;
  const svg = s("svg", {
    class: "program", width: scene.width + 2 * margin, height: scene.height + 2 * margin,
    viewBox: `${-margin} ${-margin} ${scene.width + 2 * margin} ${scene.height + 2 * margin}`, role: "img",
  });
  svg.style.minWidth = `${LEAST_SCALE * (scene.width + 2 * margin)}px`;
  const marker = (id) => s("marker", {
    id, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 9, markerHeight: 9,
    markerUnits: "userSpaceOnUse", orient: "auto-start-reverse",
  }, s("path", { d: "M 0 0.8 L 10 5 L 0 9.2 L 2.4 5 z" }));
  svg.append(s("defs", {}, marker("arrow"), marker("arrow-wait")));
  for (const box of scene.boxes) {
    const [x, y, width, height] = box.rect;
    svg.append(s("rect", { class: "box", x, y, width, height, rx: 12 }));
  }
  const labels = [];
  for (const curve of scene.curves) {
    const path = s("path", {
      class: "edge", d: curve.path, "marker-end": "url(#arrow)", "marker-start": curve.is_mutual && "url(#arrow)",
    });
    const names = curve.edges.slice(0, 20).map(([user, server]) => `${user} → ${server}`).join("\n");
    const title = s("title", {}, names);
    path.append(title);
    svg.append(path);
    labels.push({ curve, path, title, names, text: null });
  }
  const cards = [];
  const centre = new Map();
  for (const box of scene.boxes) {
    const [x, y] = box.rect;
    const size = box.nodes.length > 1 ? ` × ${box.nodes.length}` : "";
    svg.append(s("text", { class: "label", x: x + 14, y: y + 21 }, short(box.label, 40) + size));
    for (const card of box.cards) cards.push(drawCard(svg, box, card, centre, choose));
  }
  const boxes = scene.boxes.map(({ rect: [x, y, width, height] }) => ({ x, y, width, height }));
  const above = s("g", { class: "waits" });
  svg.append(above);
  return {
    svg,
    states: () => { for (const one of cards) one.update(); },
    live: () => { traffic(labels, svg, boxes); waits(above, centre); },
  };
}

function drawCard(svg, box, card, centre, choose) {
  const [x, y, width, height] = card.rect;
  for (const name of card.nodes) centre.set(name, [x + width / 2, y + height / 2, width, height]);
  const isOne = card.nodes.length === 1;
  const index = card.nodes[0].slice(card.nodes[0].lastIndexOf("/") + 1);
  const state = s("text", { class: "state", x: x + 26, y: y + 37 });
  const group = s("g", {
    class: "node", "data-node": card.nodes.join(" "), tabindex: 0, role: "button",
    onclick: () => choose(card, box.label),
    onkeydown: (event) => { if (event.key === "Enter") choose(card, box.label); },
  },
  box.is_stack && s("rect", { x: x + 6, y: y - 6, width, height, rx: 8, class: "card behind" }),
  s("rect", { x, y, width, height, rx: 8, class: "card" }),
  s("circle", { cx: x + 15, cy: y + 33, r: 5, class: "light" }),
  s("text", { class: "runs", x: x + 12, y: y + 19 }, short(card.runs, 17)),
  isOne && box.nodes.length > 1 && s("text", { class: "index", x: x + width - 10, y: y + 19 }, index),
  state,
  ...card.notes.map((note, place) => s("text", { class: "note", x: x + 12, y: y + 54 + 14 * place }, short(note, 26))),
  s("title", {}, `${isOne ? card.nodes[0] : `${box.label}: ${card.nodes.length} nodes`}: ${card.kind}(${card.runs})`));
  svg.append(group);
  return {
    update() {
      const found = worst(card.nodes);
      if (group.dataset.state !== found) group.dataset.state = found;
      const row = run.states[card.nodes[0]] || {};
      const restarts = isOne && row.restarts ? ` · ↻ ${row.restarts}` : "";
      const text = isOne ? `${found}${restarts}` : counts(card.nodes);
      if (state.textContent !== text) state.textContent = short(text, 24);
    },
  };
}

// Labels of edges are tried beside these parts of their length. The one that is crossed by the fewest lines is taken.
const PLACES = [0.5, 0.35, 0.65, 0.22, 0.78];
const LABEL_HEIGHT = 12;
const POINT_EVERY = 8;

function spots({ path, length }, width) {
  return PLACES.flatMap((share) => {
    const at = path.getPointAtLength(share * length), next = path.getPointAtLength(share * length + 1);
    const isSteep = Math.abs(next.y - at.y) > Math.abs(next.x - at.x);
    const sides = !isSteep && length < 90 ? [[-width / 2, 24]] // there is no room between neighbouring cards, but below them
      : [-6 - width, -width / 2, 6].flatMap((x) => [[x, -15], [x, -6], [x, 3]]);
    return sides.map(([x, y]) => ({ x: at.x + x, y: at.y + y, width, height: LABEL_HEIGHT }));
  });
}

function pointsOf(path) {
  const length = path.getTotalLength();
  return [...Array(Math.ceil(length / POINT_EVERY)).keys()].map((place) => {
    const { x, y } = path.getPointAtLength(place * POINT_EVERY);
    return { x: x - 1, y: y - 1, width: 2, height: 2 };
  });
}

function overlaps(a, b) {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

function placeLabels(labels, boxes) {
  const placed = [];
  for (const one of labels) one.points = one.points || pointsOf(one.path);
  const lines = labels.flatMap((one) => one.points);
  const shown = labels.filter((one) => one.text && one.text.textContent);
  const crossed = (rect, others) => others.filter((one) => overlaps(one, rect)).length;
  for (const label of shown.sort((a, b) => a.length - b.length)) { // short edges have the fewest places
    const width = 6 * label.text.textContent.length;
    const free = spots(label, width).filter((rect) => !crossed(rect, placed));
    const marks = free.map((rect) => 3 * crossed(rect, boxes) + crossed(rect, lines));
    const found = free[marks.indexOf(Math.min(...marks))];
    label.text.classList.toggle("crowded", !found); // it is in the edge's title
    if (!found) continue;
    placed.push(found);
    label.text.setAttribute("x", found.x + width / 2);
    label.text.setAttribute("y", found.y + 10);
  }
}

function traffic(labels, svg, boxes) {
  let isChanged = false;
  const rates = new Map(run.edges.map((one) => [`${one.user}\n${one.server}`, one]));
  for (const label of labels) {
    let calls = 0, size = 0;
    for (const [user, server] of label.curve.edges) {
      const found = rates.get(`${user}\n${server}`);
      if (found) { calls += found.calls_per_s; size += found.bytes_per_s; }
    }
    const parts = [label.curve.channels, calls >= 0.05 && `${number(Number(calls.toPrecision(3)))} calls/s`,
      size >= 1 && `${bytes(size)}/s`];
    const text = parts.filter(Boolean).join(" · ");
    if (!text && !label.text) continue;
    if (!label.text) {
      label.length = label.path.getTotalLength();
      label.text = s("text", { class: "traffic" });
      svg.append(label.text);
    }
    isChanged = isChanged || Math.abs(label.text.textContent.length - text.length) > 1;
    if (label.text.textContent !== text) label.text.textContent = text;
    label.title.textContent = `${label.names}\n${text}`;
    label.path.classList.toggle("busy", calls > 0 || size > 0);
  }
  if (isChanged) placeLabels(labels, boxes);
}

function waits(above, centre) {
  const seen = new Set();
  const found = [];
  for (const wait of run.waits) {
    const from = centre.get(wait.node), to = centre.get(wait.waits_for);
    const key = from && to && `${from} ${to}`;
    if (!from || !to || from === to || seen.has(key)) continue;
    seen.add(key);
    const [x0, y0] = from, [x1, y1, width, height] = to;
    const dx = x1 - x0, dy = y1 - y0;
    const share = Math.min(Math.abs(dx) > 1 ? (width / 2) / Math.abs(dx) : 1, Math.abs(dy) > 1 ? (height / 2) / Math.abs(dy) : 1, 1);
    const line = s("path", {
      class: "wait", d: `M ${x0} ${y0} Q ${x0 + dx / 2 + 14} ${y0 + dy / 2 - 14} ${x1 - dx * share} ${y1 - dy * share}`,
      "marker-end": "url(#arrow-wait)",
    }, s("title", {}, wait.text));
    found.push(line);
  }
  above.replaceChildren(...found);
}

async function openPanel(panel, card, label, page) {
  if (panel.leave) panel.leave();
  panel.hidden = false;
  const close = h("button", { class: "close", "aria-label": "close", onclick: () => { panel.leave(); panel.hidden = true; } }, "×");
  if (card.nodes.length > 1) {
    const list = h("div", { class: "members" });
    const items = card.nodes.map((name) => h("button", {
      class: "member", "data-node": name, onclick: () => openPanel(panel, { nodes: [name] }, label, page),
    }, name.slice(name.lastIndexOf("/") + 1)));
    list.append(...items);
    const update = () => {
      for (const item of items) {
        const row = run.states[item.dataset.node] || {};
        item.dataset.state = row.state || "unknown";
        item.title = `${item.dataset.node}: ${row.state}${row.error ? `: ${row.error}` : ""}`;
      }
    };
    update();
    const leave = on("states", update);
    panel.leave = leave;
    panel.replaceChildren(h("h2", {}, `${label} × ${card.nodes.length}`), close, list);
    return;
  }
  await nodePanel(panel, card.nodes[0], close);
  if (window.innerWidth < 900) panel.scrollIntoView({ behavior: "smooth" });
}

async function nodePanel(panel, node, close) {
  const facts = h("dl", {});
  const log = h("pre", { class: "log tail", tabindex: 0 });
  const charts = h("div", { class: "charts small" });
  const stacks = h("pre", { class: "log", hidden: true });
  const ask_stacks = h("button", {
    onclick: async () => {
      stacks.hidden = false;
      stacks.textContent = "asking …";
      try {
        stacks.textContent = stacksOf((await ask("/api/stacks", { run: run.key })).text, node);
      } catch (error) { stacks.textContent = error.message; }
    },
  }, "stacks");
  panel.replaceChildren(h("h2", {}, node), close, facts, h("div", { class: "bar" }, ask_stacks), stacks,
    h("h3", {}, "Log"), log, h("h3", {}, "Metrics"), charts);
  const update = () => {
    const row = run.states[node] || {};
    const rows = [["state", row.state], ["pid", row.pid], ["restarts", row.restarts],
      ["up", row.since && row.state === "running" ? duration(Date.now() / 1000 - row.since) : null],
      ["calls/s", run.edges.length ? number(calls(node)) : null],
      ["waits", row.waiting], ["error", row.error]];
    facts.replaceChildren(...rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
    ask_stacks.hidden = run.info.state !== "running";
  };
  update();
  const leaves = [on("states", update), on("live", update)];
  panel.leave = () => { for (const one of leaves) one(); panel.leave = null; };
  const follower = followLog(log, node);
  leaves.push(follower.stop);
  await follower.first;
  const names = (await ask("/api/names", { run: run.key })).filter((one) => one.node === node).slice(0, 6);
  if (!names.length) charts.append(h("p", { class: "faint" }, "This node has logged no metrics."));
  for (const one of names) {
    const chart = new Chart(charts, one.name, [[node, one.name]], { height: 130 });
    leaves.push(() => chart.close());
    await chart.load();
  }
}

function calls(node) {
  return Number(run.edges.filter((one) => one.server === node).reduce((sum, one) => sum + one.calls_per_s, 0).toPrecision(3));
}

function stacksOf(text, node) {
  const parts = text.split(/\n(?=node )/);
  const own = parts.filter((part) => part.startsWith(`node ${node}`));
  return (own.length ? own.join("\n") : text) || "no thread";
}

export function followLog(log, node) {
  let end = null, start = 0, isOver = false, timer = null, isBusy = false;
  const lines = [];
  const older = h("button", { class: "older", onclick: earlier }, "earlier lines");
  async function look() {
    if (!document.hidden && !isBusy) {
      isBusy = true;
      try {
        const found = await ask("/api/log", { run: run.key, node, ...(end === null ? {} : { start: end }) });
        if (isOver) return;
        if (end === null || found.start > end || found.size < end) { lines.length = 0; start = found.start; }
        if (found.lines.length || end === null) {
          const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
          lines.push(...found.lines);
          if (lines.length > MAX_LINES) lines.splice(0, lines.length - MAX_LINES);
          render();
          if (isAtEnd || end === null) log.scrollTop = log.scrollHeight;
        }
        end = found.end;
      } catch (error) {
        if (end === null) log.textContent = error.message;
      } finally { isBusy = false; }
    }
    if (!isOver && run.info.state === "running") timer = setTimeout(look, LOG_EVERY_MS);
  }
  async function earlier() {
    const found = await ask("/api/log", { run: run.key, node, end: start });
    lines.unshift(...found.lines);
    if (lines.length > MAX_LINES) lines.length = MAX_LINES;
    start = found.start;
    render();
    log.scrollTop = 0;
  }
  function render() {
    log.textContent = lines.join("\n");
    if (start > 0) log.prepend(older);
    if (!lines.length) log.textContent = run.info.state === "running" ? "This node has printed nothing yet." : "This node has printed nothing.";
  }
  return { first: look(), stop: () => { isOver = true; clearTimeout(timer); } };
}
