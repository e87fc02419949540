// What is shown, and which part of it.

// ---- what is shown ----

const cells = data.cells.map((cell) => ({
  ...cell,
  line: cell.timeline && unpackTimeline(cell.timeline),
  drawn: null,
}));
const state = {
  cell: data.shown,
  x0: 0,
  x1: 1,
  y0: 0,
  y1: 1,
  mode: "age",
  lit: null,
  find: "",
  cursor: null,
  box: null,
};
const mapCanvas = $("map"),
  lineCanvas = $("timeline"),
  tip = $("tip");
const here = () => cells[state.cell];
function mapHere() {
  const cell = here();
  if (!cell.drawn && cell.map) cell.drawn = unpackMap(cell.map);
  return cell.drawn;
}
let classes = null,
  found = null;

function regroup() {
  const map = mapHere();
  if (!map) return;
  classes = classesOf(map, state.mode);
  const box = $("map-legend");
  box.textContent = "";
  classes.labels.forEach((label, at) => {
    if (!classes.seen.has(at)) return;
    const key = document.createElement("button");
    key.type = "button";
    key.className = "key";
    key.setAttribute("aria-pressed", String(state.lit === at));
    key.title = `Show only: ${label}`;
    const swatch = document.createElement("i");
    swatch.style.background = classes.colours[at];
    const text = document.createElement("span");
    text.textContent = short(label);
    key.append(swatch, text);
    key.addEventListener("click", () => {
      state.lit = state.lit === at ? null : at;
      regroup();
      refresh();
    });
    box.append(key);
  });
  const held = document.createElement("span");
  held.className = "key";
  const swatch = document.createElement("i");
  swatch.style.background = "var(--held)";
  swatch.style.outline = "1px solid var(--line)";
  const text = document.createElement("span");
  text.textContent = "held, but free";
  held.append(swatch, text);
  box.append(held);
}
function search() {
  const map = mapHere(),
    words = state.find.trim().toLowerCase();
  found = null;
  if (!map || !words) return;
  const bySite = new Map();
  found = new Uint8Array(map.n);
  for (let i = 0; i < map.n; i++) {
    const key = `${map.site[i]} ${map.name[i]}`;
    if (!bySite.has(key)) {
      const parts = [
        ...(map.site[i] ? siteText(map.site[i]) : []),
        map.name[i] ? data.names[map.name[i] - 1] : "",
      ];
      bySite.set(key, parts.join("\n").toLowerCase().includes(words));
    }
    found[i] =
      bySite.get(key) ||
      (phaseAt(map.from[i]) || "").toLowerCase().includes(words) ||
      String(map.id[i]) === words
        ? 1
        : 0;
  }
}
function select(index) {
  if (!cells[index]) return;
  state.cell = index;
  state.lit = null;
  resetView();
  for (const row of document.querySelectorAll("tr[data-cell]"))
    row.setAttribute("aria-selected", String(Number(row.dataset.cell) === index));
  for (const part of document.querySelectorAll("[data-of-cell]"))
    part.hidden = Number(part.dataset.ofCell) !== index;
  const chooser = $("cell");
  if (chooser) chooser.value = String(index);
  $("map-section").hidden = !here().map;
  offerModes();
  regroup();
  search();
  lineLegend();
  refresh();
}
function offerModes() {
  const map = mapHere(),
    chooser = $("mode");
  if (!map || !chooser) return;
  const several = (values) => values.some((value) => value !== values[0]);
  const offers = [
    ["age", "how long it lives", true],
    ["size", "size", true],
    ["phase", "phase", marked()],
    ["site", "site", several(map.site)],
    ["name", "name", several(map.name)],
    ["role", "role", several(map.role)],
    ["stream", "stream", several(map.stream)],
  ];
  chooser.textContent = "";
  for (const [value, label, offered] of offers) {
    if (offered) chooser.append(new Option(label, value));
  }
  if (!offers.some(([value, , offered]) => offered && value === state.mode)) state.mode = "age";
  chooser.value = state.mode;
}

// ---- the view ----

const yMax = () => (mapHere() ? Math.max(1, mapHere().height) : 1);
function resetView() {
  Object.assign(state, { x0: 0, x1: events(), y0: 0, y1: yMax() });
}
function clampView() {
  const clamp = (from, to, end, least) => {
    const width = Math.min(end, Math.max(least, to - from));
    const start = Math.min(Math.max(0, from + (to - from - width) / 2), end - width);
    return [start, start + width];
  };
  [state.x0, state.x1] = clamp(state.x0, state.x1, events(), Math.min(4, events()));
  [state.y0, state.y1] = clamp(state.y0, state.y1, yMax(), Math.min(4096, yMax()));
}
/** Zooms about a place, told as shares of the view; factors under one go nearer. */
function zoom(shareX, shareY, factorX, factorY) {
  const width = state.x1 - state.x0,
    height = state.y1 - state.y0;
  const x = state.x0 + shareX * width,
    y = state.y0 + shareY * height;
  state.x0 = x - shareX * width * factorX;
  state.x1 = state.x0 + width * factorX;
  state.y0 = y - shareY * height * factorY;
  state.y1 = state.y0 + height * factorY;
  clampView();
  refresh();
}
function pan(shareX, shareY) {
  const x = shareX * (state.x1 - state.x0),
    y = shareY * (state.y1 - state.y0);
  const moved = (from, to, by, end) => Math.min(Math.max(by, -from), end - to);
  const dx = moved(state.x0, state.x1, x, events()),
    dy = moved(state.y0, state.y1, y, yMax());
  state.x0 += dx;
  state.x1 += dx;
  state.y0 += dy;
  state.y1 += dy;
  refresh();
}
