// What the page knows of the chosen run, and the stream that keeps it up to date while the tab is visible.

const SILENCE_MS = 1600;
const RETRY_MS = 400;

export const run = { key: null, info: null, states: {}, events: [], waits: [], edges: [], size: -1 };
export const app = { readOnly: false };

const listeners = new Map();

export function on(kind, listener) {
  if (!listeners.has(kind)) listeners.set(kind, new Set());
  listeners.get(kind).add(listener);
  return () => listeners.get(kind).delete(listener);
}

export function emit(kind, data) {
  for (const listener of [...(listeners.get(kind) || [])]) listener(data);
}

export async function ask(path, asked = {}) {
  const query = new URLSearchParams(asked).toString();
  const answer = await fetch(query ? `${path}?${query}` : path);
  return checked(answer);
}

export async function post(path, said) {
  const answer = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(said),
  });
  return checked(answer);
}

async function checked(answer) {
  if (answer.status === 401) {
    emit("locked");
    throw new Error("open the URL that lp_pipe ui has printed: the server was started anew");
  }
  if (!(answer.headers.get("Content-Type") || "").includes("json")) throw new Error(await answer.text());
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `status ${answer.status}`);
  return found;
}

let source = null;
let last = 0;
let lostSince = null;
let retry = null;
let watchdog = null;

export function follow() {
  stop();
  if (document.hidden || run.key === null) return;
  last = performance.now();
  source = new EventSource(`/api/stream?run=${encodeURIComponent(run.key)}`);
  source.onmessage = (message) => {
    const found = JSON.parse(message.data);
    last = performance.now();
    if (lostSince !== null || found.kind === "hello") {
      const wasLost = lostSince !== null;
      lostSince = null;
      emit("link", null);
      if (wasLost) emit("back");
    }
    take(found);
  };
  source.onerror = () => lost();
  watchdog = setInterval(() => { if (performance.now() - last > SILENCE_MS) lost(); }, 200);
}

export function stop() {
  if (source) source.close();
  source = null;
  clearTimeout(retry);
  clearInterval(watchdog);
}

function lost() {
  stop();
  if (lostSince === null) {
    lostSince = Date.now() / 1000;
    emit("link", lostSince);
  }
  // First a query: unlike a stream it tells that the key is wrong.
  retry = setTimeout(() => ask("/api/runs").catch(() => null).then(follow), RETRY_MS);
}

function take(found) {
  if (found.kind === "states") {
    Object.assign(run.states, found.states);
    emit("states", found.states);
  } else if (found.kind === "events") {
    run.events.push(...found.events);
    if (run.events.length > 1000) run.events.splice(0, run.events.length - 1000);
    emit("events", found.events);
  } else if (found.kind === "run") {
    Object.assign(run.info, { state: found.state, ended: found.ended, failure: found.failure });
    emit("run");
  } else if (found.kind === "metrics") {
    run.size = found.size;
    emit("metrics");
  } else if (found.kind === "live") {
    run.waits = found.waits || [];
    run.edges = found.edges || [];
    emit("live");
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else { follow(); emit("back"); }
});

// info: what the server says of the run, if that is known.
export async function choose(key, info = null) {
  stop();
  run.info = info || await ask("/api/run", { run: key });
  Object.assign(run, { key, states: run.info.states, events: [], waits: [], edges: [], size: -1 });
  lostSince = null;
  follow();
}
