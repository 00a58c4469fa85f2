// The timeline of a pipeline's steps, from a trace: each worker's actions, the bubbles between, and the predicted order.

import { color, h } from "/dom.js";
import { app, ask, post, run } from "/data.js";

const ROW = 22;
const LEFT = 150;
const KINDS = [["forward", "--ink-0"], ["backward", "--ink-1"], ["transfer", "--ink-2"], ["send", "--ink-2"], ["receive", "--ink-2"],
  ["reduce", "--ink-3"], ["wait", "--line"], ["call", "--ink-4"], ["step", "--ink-5"], ["optim", "--ink-5"]];

function inkOf(name) {
  const found = KINDS.find(([kind]) => name.toLowerCase().includes(kind));
  return color(found ? found[1] : "--ink-6");
}

const isWork = (span) => !/wait|idle|receive/i.test(span[2]);

export async function timelinePage(main, page) {
  const bar = h("div", { class: "bar" });
  const body = h("div", {});
  main.append(bar, body);
  let chosen = null;
  async function load() {
    const found = await ask("/api/timeline", { run: run.key, ...(chosen ? { trace: chosen } : {}) });
    bar.replaceChildren();
    if (found.traces.length) {
      const select = h("select", { "aria-label": "trace" }, ...found.traces.map((one) => h("option", { value: one }, one)));
      select.value = found.name;
      select.addEventListener("change", () => { chosen = select.value; load(); });
      bar.append(select);
    }
    if (!app.readOnly && run.info.state === "running") {
      const button = h("button", { onclick: async () => {
        button.disabled = true;
        said.textContent = "tracing the next step …";
        try { await post("/api/trace", { run: run.key }); chosen = null; await load(); } catch (error) { said.textContent = error.message; }
        button.disabled = false;
      } }, "trace");
      bar.append(button);
    }
    const said = h("span", { class: "faint" });
    bar.append(said);
    body.replaceChildren();
    if (!found.tracks.length) {
      body.append(h("p", { class: "empty" }, found.error ? `${found.name} ${found.error}` :
        "No step was traced. `lp_pipe trace RUN`, `lp_pipe launch --trace` and the trace button write traces."));
      return;
    }
    for (const [title, tracks] of Object.entries(grouped(found.tracks))) body.append(drawTimeline(title, tracks, page));
  }
  await load();
}

function grouped(tracks) {
  const isPredicted = (one) => /predict/i.test(one.process);
  const found = { measured: tracks.filter((one) => !isPredicted(one)) };
  const predicted = tracks.filter(isPredicted);
  if (predicted.length) found.predicted = predicted;
  return found;
}

function drawTimeline(title, tracks, page) {
  const low = Math.min(...tracks.map((one) => one.spans.length ? one.spans[0][0] : Infinity));
  const high = Math.max(...tracks.map((one) => one.spans.reduce((most, span) => Math.max(most, span[0] + span[1]), 0)));
  let view = [low, high];
  const canvas = h("canvas", { class: "timeline", tabindex: 0 });
  const tip = h("div", { class: "tip", hidden: true });
  const names = h("div", { class: "tracks" }, ...tracks.map((one) => {
    const busy = busyTime(one.spans);
    const share = high > low ? 1 - busy / (high - low) : 0;
    return h("div", {}, h("span", { title: `${one.process} ${one.track}` }, one.process.length > 3 ? `${one.process} ${one.track}` : one.track),
      h("span", { class: "faint" }, `${Math.round(100 * share)} % idle`));
  }));
  const box = h("section", { class: "timelines" }, h("h3", {}, `${title} · ${((high - low) / 1000).toFixed(2)} ms`),
    h("div", { class: "timeline-box" }, names, canvas), tip);
  const draw = () => {
    const width = Math.max(200, canvas.parentElement.clientWidth - LEFT), height = tracks.length * ROW;
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    paint.font = "10px system-ui";
    const at = (time) => (time - view[0]) / (view[1] - view[0]) * width;
    tracks.forEach((one, row) => {
      paint.fillStyle = color("--bubble");
      paint.fillRect(0, row * ROW + 1, width, ROW - 3);
      for (const span of one.spans) {
        const left = at(span[0]), size = Math.max(0.6, at(span[0] + span[1]) - left);
        if (left > width || left + size < 0) continue;
        paint.fillStyle = inkOf(span[2]);
        paint.fillRect(left, row * ROW + 1, size, ROW - 3);
        if (size > 16) {
          paint.fillStyle = color("--on-ink");
          const mark = span[3].microbatch ?? span[3].micro_batch;
          paint.fillText(mark === undefined ? span[2].slice(0, Math.floor(size / 6)) : String(mark), left + 3, row * ROW + 14);
        }
      }
    });
  };
  const spanAt = (event) => {
    const rect = canvas.getBoundingClientRect();
    const time = view[0] + (event.clientX - rect.left) / rect.width * (view[1] - view[0]);
    const track = tracks[Math.floor((event.clientY - rect.top) / ROW)];
    return track && track.spans.findLast((span) => span[0] <= time && time <= span[0] + span[1]);
  };
  canvas.addEventListener("mousemove", (event) => {
    const span = spanAt(event);
    tip.hidden = !span;
    if (!span) return;
    const facts = Object.entries(span[3]).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
    tip.textContent = `${span[2]} · ${(span[1] / 1000).toFixed(3)} ms${facts ? ` · ${facts}` : ""}`;
    tip.style.left = `${event.clientX + 12}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const rect = canvas.getBoundingClientRect();
    const share = (event.clientX - rect.left) / rect.width;
    const centre = view[0] + share * (view[1] - view[0]);
    const size = Math.min(high - low, (view[1] - view[0]) * (event.deltaY > 0 ? 1.25 : 0.8));
    const start = Math.max(low, Math.min(high - size, centre - share * size));
    view = [start, start + size];
    draw();
  }, { passive: false });
  canvas.addEventListener("dblclick", () => { view = [low, high]; draw(); });
  const resized = new ResizeObserver(draw);
  requestAnimationFrame(() => { draw(); resized.observe(box); });
  page.onLeave(() => resized.disconnect());
  return box;
}

function busyTime(spans) {
  let busy = 0, until = -Infinity;
  for (const span of spans) {
    if (!isWork(span)) continue;
    const end = span[0] + span[1];
    if (end > until) busy += end - Math.max(span[0], until);
    until = Math.max(until, end);
  }
  return busy;
}
