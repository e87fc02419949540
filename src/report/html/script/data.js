"use strict";
// The interactive part of a report, in five files that are one script: data, view, draw, map, act.
// Everything here adds to a page that says all without it. The data stand in the page as JSON with
// columns of numbers packed as base64 (see pack.rs).
// What the page's data say, in numbers and words, and which colours blocks have.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const GUTTER = 62,
  RIGHT = 14,
  LABELS_MAX = 400;

// ---- unpacking ----

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}
/** `count` numbers of 7 bits a byte, the lowest first; no text at all stands for zeros. */
function column(text, count) {
  const out = new Float64Array(count);
  if (!text) return out;
  const bytes = bytesOf(text);
  for (let i = 0, at = 0; i < count; i++) {
    let value = 0,
      scale = 1,
      byte;
    do {
      byte = bytes[at++];
      value += (byte & 127) * scale;
      scale *= 128;
    } while (byte > 127);
    out[i] = value;
  }
  return out;
}
/** Numbers told as differences from the one before. */
function rising(text, count) {
  const out = column(text, count);
  for (let i = 1; i < count; i++) out[i] += out[i - 1];
  return out;
}
function signed(text, count) {
  const out = column(text, count);
  let sum = 0;
  for (let i = 0; i < count; i++) {
    const half = Math.floor(out[i] / 2);
    sum += out[i] % 2 ? -half - 1 : half;
    out[i] = sum;
  }
  return out;
}
function scaled(values, factor) {
  for (let i = 0; i < values.length; i++) values[i] *= factor;
  return values;
}

const marks = {
  n: data.marks.n,
  event: rising(data.marks.event, data.marks.n),
  phase: column(data.marks.phase, data.marks.n),
};

function unpackTimeline(t) {
  const line = { n: t.n, event: rising(t.event, t.n) };
  for (const level of ["requested", "allocated", "active", "reserved"])
    line[level] = signed(t[level], t.n);
  return line;
}
function unpackMap(m) {
  const n = m.n,
    map = { n, height: m.height, lanes: m.lanes, parts: m.parts };
  map.from = rising(m.from, n);
  map.to = column(m.life, n);
  map.wait = column(m.wait, n);
  for (let i = 0; i < n; i++) map.to[i] += map.from[i];
  map.pos = scaled(column(m.pos, n), 2 ** m.shift);
  const sizes = column(m.sizes, m.sizes_n);
  map.size = column(m.size, n);
  for (let i = 0; i < n; i++) map.size[i] = sizes[map.size[i]];
  map.id = signed(m.id, n);
  for (const key of ["site", "name", "role", "stream"]) map[key] = column(m[key], n);
  map.held = {
    n: m.held_n,
    from: rising(m.held_from, m.held_n),
    to: column(m.held_life, m.held_n),
    pos: scaled(column(m.held_pos, m.held_n), 2 ** m.shift),
    size: scaled(column(m.held_size, m.held_n), 2 ** m.shift),
  };
  for (let i = 0; i < m.held_n; i++) map.held.to[i] += map.held.from[i];
  map.shades = [m.held_shade, m.shade].map(unpackShade);
  return map;
}
/** A raster told as runs: how often, what. */
function unpackShade(s) {
  if (!s) return null;
  const runs = column(s.runs, 2 * s.n),
    cover = new Uint8Array(s.rows * s.columns);
  for (let i = 0, at = 0; i < s.n; i++) {
    cover.fill(runs[2 * i + 1], at, at + runs[2 * i]);
    at += runs[2 * i];
  }
  return { rows: s.rows, columns: s.columns, cover };
}

// ---- words ----

const UNITS = [
  ["TiB", 2 ** 40],
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
];
function size(bytes) {
  const unit = UNITS.find(([, scale]) => bytes >= scale);
  if (!unit) return `${bytes} B`;
  const value = bytes / unit[1];
  return `${Number.isInteger(value) ? value : value.toFixed(2)} ${unit[0]}`;
}
const grouped = (count) =>
  Math.round(count)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, ",");
const exact = (bytes) => (bytes < 1024 ? size(bytes) : `${size(bytes)} (${grouped(bytes)} bytes)`);
const percent = (part) => `${(100 * part).toFixed(part < 0.0995 ? 2 : 1)} %`;
// What the manager of chunks asks for are events of its own: the trace's marks are not among them.
const events = () => Math.max(1, here().events);
const marked = () => marks.n > 0 && here().events === data.events;
function phaseAt(event) {
  if (!marked()) return null;
  let low = 0,
    high = marks.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (marks.event[middle] <= event) low = middle + 1;
    else high = middle;
  }
  return low ? data.phases[marks.phase[low - 1]] : null;
}
/** What stays of a phase's name when steps are not told apart. */
const kindOfPhase = (name) =>
  name === null ? "before the first phase" : name.replace(/^step\d+\.?/, "") || "step";
const stepOf = (name) => (/^step\d+(?=\.|$)/.exec(name) || [name])[0];
const siteText = (site) => data.sites[site - 1].map((frame) => data.frames[frame]);
const short = (text) => (text.length > 60 ? `…${text.slice(-59)}` : text);

// ---- colours ----

let ink = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = [
    "ink",
    "soft",
    "line",
    "grid",
    "band",
    "held",
    "shade",
    "card",
    "accent",
    "requested",
    "allocated",
    "active",
    "reserved",
    "waste",
    "bad",
  ];
  ink = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
const LIVES = ["#fdcc5c", "#f59142", "#db5461", "#8c478f", "#4a5296", "#29768e"];
const SIZES = ["#fdcc5c", "#f59142", "#db5461", "#8c478f", "#4a5296", "#29768e"];
const KINDS = [
  "#0072b2",
  "#e69f00",
  "#009e73",
  "#d55e00",
  "#56b4e9",
  "#cc79a7",
  "#b8a900",
  "#7f6ad6",
];
const OTHERS = "#8d949e";

/** Where lives are told apart: by powers of ten, the last one more finely (as in figures.rs). */
function lifeSteps() {
  const top = 10 ** Math.max(3, Math.floor(Math.log10(Math.max(1, events() / 2)) + 1e-9));
  return [top / 1000, top / 100, top / 10, (3 * top) / 10, top];
}
/** Classes of blocks: how to colour, and what to call them. */
function classesOf(map, mode) {
  const of = new Uint8Array(map.n);
  if (mode === "age" || mode === "size") {
    const values = mode === "age" ? (i) => map.to[i] - map.from[i] : (i) => map.size[i];
    const steps =
      mode === "age" ? lifeSteps() : [2 ** 12, 2 ** 20, 16 * 2 ** 20, 128 * 2 ** 20, 2 ** 30];
    const seen = new Set();
    for (let i = 0; i < map.n; i++) {
      const value = values(i);
      let at = 0;
      while (at < steps.length && value >= steps[at]) at++;
      of[i] = at;
      seen.add(at);
    }
    const told = (value) => (mode === "age" ? grouped(value) : size(value));
    const unit = mode === "age" ? " events" : "";
    const labels = [...steps, null].map((step, at) =>
      at === 0
        ? `under ${told(steps[0])}${unit}`
        : step === null
          ? `${told(steps[at - 1])}${unit} or more`
          : `${told(steps[at - 1])} to ${told(step)}`,
    );
    return pick(of, mode === "age" ? LIVES : SIZES, labels, seen);
  }
  const phases = mode === "phase" ? new Map() : null;
  const label = {
    phase: (i) => kindOfPhase(phaseAt(map.from[i])),
    site: (i) => (map.site[i] ? data.frames[data.sites[map.site[i] - 1][0]] : "no site"),
    name: (i) => (map.name[i] ? data.names[map.name[i] - 1] : "no name"),
    role: (i) => data.roles[map.role[i]],
    stream: (i) => `stream ${data.streams[map.stream[i]]}`,
  }[mode];
  const areas = new Map(),
    names = new Array(map.n);
  for (let i = 0; i < map.n; i++) {
    const name = label(i);
    names[i] = name;
    areas.set(name, (areas.get(name) || 0) + map.size[i] * (map.to[i] - map.from[i]));
  }
  const order = [...areas.entries()]
    .sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1))
    .map((entry) => entry[0]);
  const top = new Map(order.slice(0, KINDS.length).map((name, at) => [name, at]));
  const seen = new Set();
  for (let i = 0; i < map.n; i++) {
    const at = top.get(names[i]);
    of[i] = at === undefined ? KINDS.length : at;
    seen.add(of[i]);
  }
  const labels = order.slice(0, KINDS.length);
  while (labels.length < KINDS.length) labels.push("");
  return pick(of, [...KINDS, OTHERS], [...labels, `${order.length - KINDS.length} others`], seen);
}
function pick(of, colours, labels, seen) {
  const lists = colours.map(() => []);
  for (let i = 0; i < of.length; i++) lists[of[i]].push(i);
  return { of, colours, labels, lists, seen };
}
