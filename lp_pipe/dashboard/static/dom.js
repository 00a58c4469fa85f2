// Elements without HTML: names, labels and log lines of programs are texts, and never become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== false) element.append(child);
  }
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function dateTime(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString([], { hour12: false }) : "";
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") return `${count >= 100 || unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(5)).toString();
}

// count: a number. one: the word for one of it, which takes an s.
export function plural(count, one) {
  return `${count.toLocaleString()} ${one}${count === 1 ? "" : "s"}`;
}

export function short(text, letters) {
  return text.length <= letters ? text : text.slice(0, letters - 1) + "…";
}

export function table(head, rows) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ...head.map((one) => h("th", {}, one)))),
    h("tbody", {}, ...rows)));
}

// What a page says where there is nothing yet: the first sentence, and how there will be something. `…` is code.
export function empty(what, how = "") {
  const parts = how.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
  return h("div", { class: "empty" }, h("p", {}, what), how && h("p", { class: "faint" }, ...parts));
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
