// Canvases, axes, and the time line.

let asked = false;
function refresh() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    drawLine();
    drawMap();
  });
}
/** A canvas made as large as it is shown, cleared, with its plotting area. */
function begin(canvas, top, bottom) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth,
    height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return {
    pen,
    ratio,
    left: GUTTER,
    top,
    width: Math.max(1, width - GUTTER - RIGHT),
    height: Math.max(1, height - top - bottom),
  };
}
/** The round number, 1, 2 or 5 times a power of ten, that is at least so much. */
function roundStep(rough, least) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return Math.max(
    [1, 2, 5, 10].map((by) => by * power).find((by) => by >= rough),
    least,
  );
}
function ticks(from, to, count, least) {
  const step = roundStep((to - from) / count, least);
  const out = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) out.push(at);
  return { step, out };
}
function axisX(area) {
  const { pen, left, top, width, height } = area;
  const { out } = ticks(state.x0, state.x1, Math.max(2, width / 110), 1);
  pen.fillStyle = ink.soft;
  pen.textBaseline = "top";
  for (const at of out) {
    const x = left + ((at - state.x0) / (state.x1 - state.x0)) * width;
    if (x > left + width - 70) continue;
    pen.textAlign = x < left + 20 ? "left" : "center";
    pen.fillText(grouped(at), x, top + height + 6);
  }
  pen.textAlign = "right";
  pen.fillText("event", left + width, top + height + 6);
}
function axisY(area, from, to, lines) {
  const { pen, left, top, width, height } = area;
  const [name, scale] = UNITS.find(([, unit]) => to >= 2 * unit) || ["B", 1];
  const { out, step } = ticks(from / scale, to / scale, Math.max(2, height / 36), 0);
  const decimals = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const at of out) {
    const y = top + height - ((at * scale - from) / (to - from)) * height;
    if (lines) {
      pen.fillStyle = ink.grid;
      pen.fillRect(left, Math.round(y), width, 1);
    }
    pen.fillStyle = ink.soft;
    const text = at.toFixed(decimals);
    const last = at === out[out.length - 1];
    pen.fillText(
      last ? `${text} ${name}` : text,
      left - 8,
      Math.min(Math.max(y, top + 6), top + height - 5),
    );
  }
}
const isStep = (name) => /^step\d+$/.test(name);
/** Stretches of the trace with one name, and how many steps stand before each. */
function stretches(nameOf) {
  const out = [];
  for (let i = 0; i < marks.n; i++) {
    const name = nameOf(data.phases[marks.phase[i]]);
    const from = marks.event[i];
    const last = out[out.length - 1];
    if (last && last.name === name) continue;
    if (last) last.to = from;
    const count = last ? last.count + (isStep(last.name) ? 1 : 0) : 0;
    out.push({ name, from, to: data.events, count });
  }
  return out;
}
const ofSteps = stretches(stepOf);
const ofPhases = stretches((name) => name);
const inView = (parts) => parts.filter((part) => part.to > state.x0 && part.from < state.x1);
/** What stands above the time line: steps, and their phases where there is room for them. */
function bandRows() {
  if (!marked()) return [];
  const steps = inView(ofSteps);
  const phases = inView(ofPhases);
  const room = lineCanvas.clientWidth / 26;
  return phases.length > steps.length && phases.length < room ? [steps, phases] : [steps];
}
const lineTopOf = (rows) => (rows.length ? 17 * rows.length + 6 : 8);
function bands(area, rows) {
  const { pen, left, width } = area;
  const x = (event) =>
    left +
    ((Math.min(Math.max(event, state.x0), state.x1) - state.x0) / (state.x1 - state.x0)) * width;
  rows.forEach((parts, row) => {
    const y = row * 17;
    parts.forEach((part, at) => {
      const from = x(part.from),
        to = x(part.to);
      pen.fillStyle = ink.band;
      pen.fillRect(from, y, Math.max(0.5, to - from - 1), 15);
      if (row === 0 && at > 0 && to - from > 4) {
        pen.fillStyle = ink.grid;
        pen.fillRect(Math.round(from) - 1, area.top, 1, area.height);
      }
    });
    const boxes = parts
      .filter((part) => part.name)
      .map((part) => ({
        count: part.count,
        from: x(part.from),
        to: x(part.to),
        text: row ? part.name.replace(/^step\d+\./, "") : part.name,
      }));
    pen.fillStyle = ink.soft;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (const { text, middle } of row ? fitting(pen, boxes) : everyNth(pen, boxes, area))
      pen.fillText(text, middle, y + 8);
  });
}
/** Labels that fit into what they name. */
function fitting(pen, boxes) {
  return boxes
    .filter(({ text, from, to }) => pen.measureText(text).width < to - from - 8)
    .map(({ text, from, to }) => ({ text, middle: (from + to) / 2 }));
}
/** Labels of steps: where there is no room for each of them, of every second, fifth, tenth. */
function everyNth(pen, boxes, { left, width }) {
  const measured = boxes.map((box) => ({ ...box, wide: pen.measureText(box.text).width }));
  const steps = measured.filter(({ text }) => isStep(text));
  const rooms = steps.map(({ from, to }) => to - from).sort((a, b) => a - b);
  const widest = steps.reduce((most, { wide }) => Math.max(most, wide), 0) + 8;
  const nth = steps.length ? roundStep(widest / Math.max(0.01, rooms[rooms.length >> 1]), 1) : 1;
  const out = [];
  let free = left;
  for (const { count, from, to, text, wide } of measured) {
    // What is no step has nothing to be counted by: it is named where it fits.
    if (isStep(text) ? count % nth : wide + 8 > to - from) continue;
    const half = wide / 2;
    const middle = Math.min(Math.max((from + to) / 2, left + half), left + width - half);
    if (middle - half < free) continue;
    out.push({ text, middle });
    free = middle + half + 8;
  }
  return out;
}
const SERIES = [
  ["reserved", "reserved", 1.8],
  ["active", "active", 1],
  ["allocated", "allocated", 1],
  ["requested", "requested", 1.2],
];
function lineTop() {
  let top = 1;
  cells.forEach((cell, at) => {
    if (!cell.line || (at !== state.cell && cell.events !== here().events)) return;
    for (let i = 0; i < cell.line.n; i++)
      top = Math.max(top, cell.line.reserved[i], cell.line.requested[i]);
  });
  return top * 1.12;
}
function trail(area, line, values, top, close) {
  const { pen, left, width, height } = area;
  const scale = width / (state.x1 - state.x0);
  const y = (value) => area.top + height - (value / top) * height;
  let first = 0;
  while (first + 1 < line.n && line.event[first + 1] <= state.x0) first++;
  pen.beginPath();
  let px = left + (Math.max(line.event[first], state.x0) - state.x0) * scale,
    py = y(values[first]);
  if (close) pen.moveTo(px, y(0));
  close ? pen.lineTo(px, py) : pen.moveTo(px, py);
  for (let i = first + 1; i < line.n && line.event[i] <= state.x1; i++) {
    px = left + (line.event[i] - state.x0) * scale;
    pen.lineTo(px, py);
    py = y(values[i]);
    pen.lineTo(px, py);
  }
  px = left + width * Math.min(1, (events() - state.x0) / (state.x1 - state.x0));
  pen.lineTo(px, py);
  if (close) {
    pen.lineTo(px, y(0));
    pen.closePath();
  }
}
function drawLine() {
  if (!lineCanvas || lineCanvas.hidden) return;
  const rows = bandRows(),
    area = begin(lineCanvas, lineTopOf(rows), 24),
    { pen } = area;
  const top = lineTop(),
    line = here().line;
  bands(area, rows);
  axisY(area, 0, top, true);
  axisX(area);
  if (!line || !line.n) return;
  pen.save();
  pen.beginPath();
  pen.rect(area.left, area.top - 2, area.width, area.height + 3);
  pen.clip();
  pen.lineJoin = "round";
  pen.fillStyle = ink.waste;
  trail(area, line, line.reserved, top, true);
  pen.fill();
  pen.fillStyle = ink.requested;
  pen.globalAlpha = 0.85;
  trail(area, line, line.requested, top, true);
  pen.fill();
  pen.globalAlpha = 1;
  if (data.overlay) {
    cells.forEach((cell, at) => {
      if (at === state.cell || !cell.line || cell.events !== here().events) return;
      pen.strokeStyle = KINDS[(at + 2) % KINDS.length];
      pen.lineWidth = 1.2;
      trail(area, cell.line, cell.line.reserved, top, false);
      pen.stroke();
    });
  }
  for (const [key, colour, width] of SERIES) {
    if (key === "active" && !here().timeline.has_deferred) continue;
    pen.strokeStyle = ink[colour];
    pen.lineWidth = width;
    trail(area, line, line[key], top, false);
    pen.stroke();
  }
  pen.restore();
  tellPeaks(area, line, top);
  tellRefusal(area);
  cursor(area);
  if (state.box && state.box.canvas === lineCanvas) drawBox(area);
}
/** Where a level is at its highest for the first time, and what stands there, if that is in view. */
function peakOf(area, line, key, top) {
  const { pen, left, width, height } = area;
  let at = 0;
  for (let i = 1; i < line.n; i++) if (line[key][i] > line[key][at]) at = i;
  if (line.event[at] < state.x0 || line.event[at] > state.x1) return null;
  const x = left + ((line.event[at] - state.x0) / (state.x1 - state.x0)) * width,
    y = area.top + height - (line[key][at] / top) * height,
    text = size(line[key][at]);
  const wide = pen.measureText(text).width;
  const from = Math.min(Math.max(x - wide / 2, left + 2), left + width - wide - 2);
  return { x, y, foot: y, text, wide, from, colour: ink[key] };
}
/** A dot on each peak, and its size above it. */
function tellPeaks(area, line, top) {
  const reserved = peakOf(area, line, "reserved", top),
    requested = peakOf(area, line, "requested", top);
  const shown = [reserved, requested].filter((peak) => peak);
  if (reserved && requested) {
    if (reserved.text === requested.text) shown.pop();
    else if (
      Math.abs(reserved.y - requested.y) < 18 &&
      Math.abs(reserved.from - requested.from) < Math.max(reserved.wide, requested.wide) + 6
    )
      setApart(area, reserved, requested);
  }
  for (const peak of shown) {
    area.pen.beginPath();
    area.pen.arc(peak.x, peak.y, 3, 0, 2 * Math.PI);
    area.pen.fillStyle = peak.colour;
    area.pen.fill();
    area.pen.lineWidth = 1.5;
    area.pen.strokeStyle = ink.card;
    area.pen.stroke();
    plate(area.pen, peak.text, peak.from, peak.foot - 20, peak.wide, ink.ink);
  }
}
/** Two labels that would meet stand side by side on one line, in the order of their peaks. */
function setApart({ left, width }, reserved, requested) {
  const [first, second] =
    requested.x <= reserved.x ? [requested, reserved] : [reserved, requested];
  const room = first.wide + second.wide + 10;
  const from = (first.x + second.x - room) / 2;
  first.from = Math.min(Math.max(from, left + 2), left + width - room - 2);
  second.from = first.from + first.wide + 10;
  first.foot = second.foot = Math.min(first.y, second.y);
}
/** Text on a plate of its own, legible over whatever is drawn below it. */
function plate(pen, text, from, top, wide, colour) {
  pen.globalAlpha = 0.86;
  pen.fillStyle = ink.card;
  pen.fillRect(from - 3, top, wide + 6, 15);
  pen.globalAlpha = 1;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillStyle = colour;
  pen.fillText(text, from, top + 8);
}
function tellRefusal(area) {
  const { pen, left, top, width, height } = area,
    at = here().oom;
  if (at === null || at < state.x0 || at > state.x1) return;
  const x = Math.round(left + ((at - state.x0) / (state.x1 - state.x0)) * width);
  pen.fillStyle = ink.bad;
  pen.fillRect(x - 1, top, 2, height);
  const text = "out of memory",
    wide = pen.measureText(text).width;
  const from = x > left + width / 2 ? x - wide - 7 : x + 7;
  plate(pen, text, from, top + height - 20, wide, ink.bad);
}
function lineLegend() {
  const box = $("line-legend");
  if (!box) return;
  box.textContent = "";
  const of = data.overlay ? `${here().name} ` : "";
  const add = (colour, label) => {
    const key = document.createElement("span");
    key.className = "key";
    const swatch = document.createElement("i");
    swatch.style.background = colour;
    const text = document.createElement("span");
    text.textContent = label;
    key.append(swatch, text);
    box.append(key);
    return text;
  };
  const level = (key) =>
    state.cursor === null || !here().line
      ? ""
      : ` ${size(levelAt(here().line, key, state.cursor))}`;
  for (const key of ["reserved", "active", "allocated", "requested"]) {
    if (key === "active" && !(here().timeline && here().timeline.has_deferred)) continue;
    add(`var(--${key})`, (key === "reserved" ? of : "") + key + level(key));
  }
  if (data.overlay) {
    cells.forEach((cell, at) => {
      if (at === state.cell || !cell.line || cell.events !== here().events) return;
      const now =
        state.cursor === null ? "" : ` ${size(levelAt(cell.line, "reserved", state.cursor))}`;
      add(KINDS[(at + 2) % KINDS.length], `${cell.name} reserved${now}`);
    });
  }
  if (state.cursor !== null) {
    const phase = phaseAt(state.cursor);
    add("transparent", `event ${grouped(state.cursor)}${phase ? `, ${phase}` : ""}`);
  }
}
function levelAt(line, key, event) {
  let low = 0,
    high = line.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.event[middle] <= event) low = middle + 1;
    else high = middle;
  }
  return line[key][Math.max(0, low - 1)];
}
function cursor(area) {
  if (state.cursor === null || state.cursor < state.x0 || state.cursor > state.x1) return;
  const x = area.left + ((state.cursor - state.x0) / (state.x1 - state.x0)) * area.width;
  area.pen.fillStyle = ink.ink;
  area.pen.globalAlpha = 0.45;
  area.pen.fillRect(Math.round(x), area.top, 1, area.height);
  area.pen.globalAlpha = 1;
}
function drawBox(area) {
  const { fromX, fromY, toX, toY, canvas } = state.box,
    { pen } = area;
  const y0 = canvas === lineCanvas ? area.top : Math.min(fromY, toY),
    y1 = canvas === lineCanvas ? area.top + area.height : Math.max(fromY, toY);
  pen.fillStyle = ink.accent;
  pen.globalAlpha = 0.18;
  pen.fillRect(Math.min(fromX, toX), y0, Math.abs(toX - fromX), y1 - y0);
  pen.globalAlpha = 1;
  pen.strokeStyle = ink.accent;
  pen.strokeRect(Math.min(fromX, toX), y0, Math.abs(toX - fromX), y1 - y0);
}
