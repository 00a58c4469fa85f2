// The timeline of a pipeline's steps, from a trace: each worker's actions, the bubbles between, and the predicted order.

import { color, empty, h } from "./dom.js";
import { app, ask, post, run } from "./data.js";
import { WHOLE } from "./chart.js";

const ROW = 22;
const AXIS = 18;
const KINDS = [["forward", "--ink-0"], ["backward", "--ink-1"], ["transfer", "--ink-2"], ["send", "--ink-2"], ["receive", "--ink-2"],
  ["reduce", "--ink-3"], ["wait", "--line"], ["call", "--ink-4"], ["step", "--ink-5"], ["optim", "--ink-5"]];

const inks = new Map();

function inkOf(name) {
  if (!inks.has(name)) {
    const found = KINDS.find(([kind]) => name.toLowerCase().includes(kind));
    inks.set(name, color(found ? found[1] : "--ink-6"));
  }
  return inks.get(name);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => inks.clear());

const isWork = (span) => !/wait|idle|receive|^run$/i.test(span[2]);

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
    bar.hidden = !bar.querySelector("select, button");
    body.replaceChildren();
    if (found.tracks.length) addChoices(bar, found.tracks, body, page);
    if (!found.traces.length || !found.tracks.length) {
      body.append(found.error ? empty(`${found.name} ${found.error}`) :
        empty("No step was traced.", "`lp_pipe trace RUN`, `lp_pipe launch --trace` and the trace button of a live run write traces."));
    }
  }
  await load();
}

// The step that is shown, and whether tracks without any forward or backward are.
function addChoices(bar, tracks, body, page) {
  const steps = stepsOf(tracks.filter((one) => !isPredicted(one)));
  const select = h("select", { "aria-label": "step" }, ...steps.map((one, place) => h("option", { value: place }, `step ${one.step}`)),
    h("option", { value: "all" }, "all that was traced"));
  const most = Math.max(0, ...steps.map((one) => one.count));
  const best = steps.findLastIndex((one) => one.count === most);
  select.value = best < 0 ? "all" : String(best);
  const all = h("input", { type: "checkbox" });
  if (tracks.some((one) => !isPredicted(one))) bar.prepend(select, h("label", {}, all, " all threads"));
  const hasWork = (one) => one.spans.some(isCompute);
  all.checked = !tracks.some(hasWork);
  const draw = () => {
    const step = steps[select.value];
    const isIn = (span) => !step || (span[0] < step.high && span[0] + span[1] > step.low);
    const works = (one) => one.spans.some((span) => isCompute(span) && (isPredicted(one) || isIn(span)));
    const shown = all.checked ? tracks : tracks.filter(works);
    const measured = shown.filter((one) => !isPredicted(one)), predicted = ofStep(shown.filter(isPredicted), step);
    const range = step ? [step.low, step.high] : rangeOf(measured);
    const expected = rangeOf(predicted);
    const size = Math.max(range[1] - range[0], predicted.length ? expected[1] - expected[0] : 0);
    body.replaceChildren();
    body.append(legend(shown));
    if (measured.length) body.append(drawTimeline("measured", measured, range, size, page));
    if (predicted.length) body.append(drawTimeline([...new Set(predicted.map((one) => one.process))].join(", "), predicted, expected, size, page));
  };
  select.addEventListener("change", draw);
  all.addEventListener("change", draw);
  draw();
}

// The colours of what is shown.
function legend(tracks) {
  const names = new Map();
  for (const track of tracks) {
    for (const span of track.spans) {
      if (!isWork(span)) continue;
      const kind = KINDS.find(([kind]) => span[2].toLowerCase().includes(kind));
      names.set(kind ? kind[0] : "other", inkOf(span[2]));
    }
  }
  const items = [...names, ["bubble", color("--bubble")]].map(([name, ink]) => {
    const swatch = h("i", {});
    swatch.style.background = ink;
    return h("span", {}, swatch, name);
  });
  return h("p", { class: "inks faint" }, ...items);
}

// The predicted tracks with the spans of one step. A prediction that was made without a trace is of any step.
function ofStep(tracks, step) {
  if (!step) return tracks;
  const isShown = (span) => span[3].step === undefined || span[3].step === step.step;
  const found = tracks.map((one) => ({ ...one, spans: one.spans.filter(isShown) }));
  return found.some((one) => one.spans.length) ? found : [];
}

const isPredicted = (track) => /predict/i.test(track.process);
const isCompute = (span) => /^(forward|backward)/i.test(span[2]);

function stepsOf(tracks) {
  const found = new Map();
  for (const track of tracks) {
    for (const span of track.spans) {
      const step = span[3].step;
      if (step === undefined || !isCompute(span)) continue;
      const one = found.get(step) || { step, low: Infinity, high: -Infinity, count: 0 };
      one.low = Math.min(one.low, span[0]);
      one.high = Math.max(one.high, span[0] + span[1]);
      one.count += 1;
      found.set(step, one);
    }
  }
  return [...found.values()].sort((a, b) => a.step - b.step);
}

function rangeOf(tracks) {
  return [Math.min(...tracks.map((one) => one.spans.length ? one.spans[0][0] : Infinity)),
    Math.max(...tracks.map((one) => one.spans.reduce((most, span) => Math.max(most, span[0] + span[1]), 0)))];
}

// range: what is measured for the idle shares. size: the time that is as wide as the picture, at first.
function drawTimeline(title, tracks, range, size, page) {
  const [low, high] = [range[0], range[0] + size];
  let view = [low, high];
  const canvas = h("canvas", { class: "timeline", tabindex: 0 });
  const tip = h("div", { class: "tip", hidden: true });
  const names = h("div", { class: "tracks" }, ...tracks.map((one) => {
    const busy = busyTime(one.spans, range);
    const share = range[1] > range[0] ? 1 - busy / (range[1] - range[0]) : 0;
    return h("div", {}, h("span", { title: `${one.process} ${one.track}` }, nameOf(one, tracks)),
      h("span", { class: "faint" }, `${Math.round(100 * share)} % idle`));
  }));
  const longest = Math.max(...tracks.map((one) => nameOf(one, tracks).length));
  const left = window.innerWidth > 900 ? Math.min(260, Math.max(150, 70 + 7 * longest)) : 150;
  names.style.flexBasis = `${left}px`;
  const box = h("section", { class: "timelines" }, h("h3", {}, `${title} · ${((range[1] - range[0]) / 1000).toFixed(1)} ms`),
    h("div", { class: "timeline-box" }, names, canvas), tip);
  const draw = () => {
    const width = Math.max(200, canvas.parentElement.clientWidth - left), height = tracks.length * ROW + AXIS;
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    paint.font = "10px system-ui";
    const bubble = color("--bubble"), onInk = color("--on-ink");
    const at = (time) => (time - view[0]) / (view[1] - view[0]) * width;
    tracks.forEach((one, row) => {
      paint.fillStyle = bubble;
      paint.fillRect(0, row * ROW + 1, width, ROW - 3);
      for (const span of one.spans) {
        const left = at(span[0]), size = Math.max(0.6, at(span[0] + span[1]) - left);
        if (left > width || left + size < 0) continue;
        const isBusy = isWork(span);  // a wait is a bubble, also inside of a call
        paint.fillStyle = isBusy ? inkOf(span[2]) : bubble;
        paint.fillRect(left, row * ROW + 1, size, ROW - 3);
        if (isBusy && size > 16) {
          paint.fillStyle = onInk;
          const mark = span[3].microbatch === undefined ? span[2] : String(span[3].microbatch);
          if (paint.measureText(mark).width < size - 5) paint.fillText(mark, left + 3, row * ROW + 14);
        }
      }
    });
    paint.fillStyle = color("--faint");
    const most = Math.max(3, Math.floor(width / 90)), each = (view[1] - view[0]) / most;
    const step = WHOLE.map((one) => one / 1000).find((one) => one >= each) || each;
    for (let tick = Math.ceil((view[0] - low) / step) * step; tick <= view[1] - low; tick += step) {
      const text = `${Number((tick / 1000).toPrecision(6))} ms`, left = at(low + tick);
      paint.fillRect(left, height - AXIS, 1, 4);
      if (left + 3 + paint.measureText(text).width < width) paint.fillText(text, left + 3, height - 5);
    }
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

function nameOf(track, tracks) {
  if (isPredicted(track)) return track.track;
  return tracks.filter((one) => one.process === track.process).length > 1 ? `${track.process} ${track.track}` : track.process;
}

// The time within the range in which the innermost span of the track is work; a wait inside of a call is idle.
function busyTime(spans, range) {
  const hasCompute = spans.some(isCompute);
  let busy = 0, until = range[0];
  for (const span of spans) {
    if (!isWork(span) || (hasCompute && !isCompute(span) && !/send|reduce|optim|apply/i.test(span[2]))) continue;
    const end = Math.min(range[1], span[0] + span[1]);
    if (end <= Math.max(span[0], until)) continue;
    busy += end - Math.max(span[0], until);
    until = end;
  }
  return busy;
}
