// What a reader does: points, drags, sorts, chooses.

// ---- pointing ----

function placeOf(canvas, event) {
  const rect = canvas.getBoundingClientRect();
  const top = canvas === mapCanvas ? 6 : lineTopOf(bandRows()),
    bottom = 24;
  const x = event.clientX - rect.left,
    y = event.clientY - rect.top;
  const shareX = (x - GUTTER) / Math.max(1, rect.width - GUTTER - RIGHT),
    shareY = 1 - (y - top) / Math.max(1, rect.height - top - bottom);
  const inside = shareX >= 0 && shareX < 1 && shareY >= 0 && shareY < 1;
  return {
    x,
    y,
    shareX,
    shareY,
    inside,
    event: Math.floor(state.x0 + shareX * (state.x1 - state.x0)),
    bytes: state.y0 + shareY * (state.y1 - state.y0),
  };
}
function blockAt(map, event, bytes) {
  const reach = (state.y1 - state.y0) / Math.max(1, mapCanvas.clientHeight);
  let near = -1,
    distance = reach;
  for (let i = 0; i < map.n; i++) {
    if (map.from[i] > event || map.to[i] <= event) continue;
    const below = map.pos[i] - bytes,
      above = bytes - map.pos[i] - map.size[i];
    if (below <= 0 && above < 0) return i;
    const away = Math.max(below, above);
    if (away < distance) {
      distance = away;
      near = i;
    }
  }
  return near;
}
function row(list, label, text) {
  const dt = document.createElement("dt"),
    dd = document.createElement("dd");
  dt.textContent = label;
  dd.textContent = text;
  list.append(dt, dd);
}
function tellBlock(map, i) {
  tip.textContent = "";
  const head = document.createElement("b"),
    list = document.createElement("dl");
  const name = map.name[i] ? `${data.names[map.name[i] - 1]}, ` : "";
  head.textContent = `${name}block ${grouped(map.id[i])}`;
  row(list, "size", exact(map.size[i]) + (map.parts ? " here" : ""));
  if (map.site[i]) {
    const frames = siteText(map.site[i]);
    frames.slice(0, 5).forEach((frame, at) => row(list, at ? "" : "site", frame));
    if (frames.length > 5) row(list, "", `… ${frames.length - 5} more`);
  }
  const phase = phaseAt(map.from[i]);
  if (phase) row(list, "phase", phase);
  if (map.role[i]) row(list, "role", data.roles[map.role[i]]);
  if (data.streams.length > 1) row(list, "stream", String(data.streams[map.stream[i]]));
  const life = map.to[i] - map.from[i];
  const ends = map.to[i] >= events() ? "to the end" : `to ${grouped(map.to[i])}`;
  row(
    list,
    "life",
    `event ${grouped(map.from[i])} ${ends}: ${grouped(life)} (${percent(life / events())})`,
  );
  if (map.wait[i])
    row(list, "", `of which ${grouped(map.wait[i])} after its free, for another stream`);
  row(list, "lies at", size(map.pos[i]));
  tip.append(head, list);
}
function tellFree(map, event, bytes) {
  const { held } = map;
  let within = -1;
  for (let i = 0; i < held.n && within < 0; i++) {
    if (
      held.from[i] <= event &&
      event < held.to[i] &&
      held.pos[i] <= bytes &&
      bytes < held.pos[i] + held.size[i]
    )
      within = i;
  }
  if (within < 0) return false;
  let low = held.pos[within],
    high = low + held.size[within];
  for (let i = 0; i < map.n; i++) {
    if (map.from[i] > event || map.to[i] <= event) continue;
    const end = map.pos[i] + map.size[i];
    if (end <= bytes && end > low) low = end;
    if (map.pos[i] > bytes && map.pos[i] < high) high = map.pos[i];
  }
  tip.textContent = "";
  const head = document.createElement("b"),
    list = document.createElement("dl");
  head.textContent = `free, but held: ${size(high - low)}`;
  row(list, "segment", `${size(held.size[within])}, since event ${grouped(held.from[within])}`);
  row(list, "event", grouped(event) + (phaseAt(event) ? `, ${phaseAt(event)}` : ""));
  if (map.shades[1]) row(list, "", "blocks too small to be drawn one by one are not counted");
  tip.append(head, list);
  return true;
}
function showTip(event) {
  tip.hidden = false;
  const width = tip.offsetWidth,
    height = tip.offsetHeight;
  const right = event.clientX + 16 + width > window.innerWidth;
  tip.style.left = `${Math.max(8, right ? event.clientX - width - 14 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, window.innerHeight - height - 8))}px`;
}
function point(canvas, event) {
  const place = placeOf(canvas, event);
  state.cursor = place.inside ? Math.min(Math.max(0, place.event), events()) : null;
  const map = mapHere();
  let told = false;
  if (canvas === mapCanvas && map && place.inside && !state.box) {
    const block = blockAt(map, place.event, place.bytes);
    told = block >= 0;
    if (told) tellBlock(map, block);
    else told = tellFree(map, place.event, place.bytes);
  }
  if (told) showTip(event);
  else tip.hidden = true;
  lineLegend();
  refresh();
}

function listen(canvas) {
  let panning = null;
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOf(canvas, event);
    if (panning) {
      pan((panning.x - place.x) / canvas.clientWidth, (place.y - panning.y) / canvas.clientHeight);
      panning = place;
      return;
    }
    if (state.box) Object.assign(state.box, { toX: place.x, toY: place.y });
    point(canvas, event);
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button > 1) return;
    const place = placeOf(canvas, event);
    if (event.pointerId !== undefined && event.isTrusted) canvas.setPointerCapture(event.pointerId);
    if (event.shiftKey || event.button === 1) panning = place;
    else
      state.box = {
        canvas,
        fromX: place.x,
        fromY: place.y,
        toX: place.x,
        toY: place.y,
        from: place,
      };
  });
  canvas.addEventListener("pointerup", (event) => {
    panning = null;
    const box = state.box;
    state.box = null;
    if (!box) return;
    const place = placeOf(canvas, event),
      a = box.from;
    if (Math.abs(place.x - a.x) < 5 && (canvas === lineCanvas || Math.abs(place.y - a.y) < 5))
      return refresh();
    const width = state.x1 - state.x0,
      height = state.y1 - state.y0,
      x0 = state.x0,
      y0 = state.y0;
    state.x0 = x0 + Math.min(a.shareX, place.shareX) * width;
    state.x1 = x0 + Math.max(a.shareX, place.shareX) * width;
    if (canvas === mapCanvas) {
      state.y0 = y0 + Math.min(a.shareY, place.shareY) * height;
      state.y1 = y0 + Math.max(a.shareY, place.shareY) * height;
    }
    clampView();
    refresh();
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    state.cursor = null;
    lineLegend();
    refresh();
  });
  canvas.addEventListener("dblclick", () => {
    resetView();
    refresh();
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      // The page scrolls under the pointer until the figure was clicked.
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const place = placeOf(canvas, event),
        factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
      const both = canvas === mapCanvas && !event.shiftKey;
      zoom(
        Math.min(1, Math.max(0, place.shareX)),
        Math.min(1, Math.max(0, place.shareY)),
        event.altKey ? 1 : factor,
        both ? factor : 1,
      );
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const y = canvas === mapCanvas ? 1 : 0;
    const act = {
      ArrowLeft: () => pan(-0.15, 0),
      ArrowRight: () => pan(0.15, 0),
      ArrowUp: () => pan(0, 0.15),
      ArrowDown: () => pan(0, -0.15),
      "+": () => zoom(0.5, 0.5, 0.7, y ? 0.7 : 1),
      "=": () => zoom(0.5, 0.5, 0.7, y ? 0.7 : 1),
      "-": () => zoom(0.5, 0.5, 1 / 0.7, y ? 1 / 0.7 : 1),
      0: () => (resetView(), refresh()),
      Escape: () => (resetView(), refresh()),
      Home: () => (resetView(), refresh()),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  });
}

// ---- tables ----

function sortable(table) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const value = (line) => line.cells[at].dataset.v ?? line.cells[at].textContent.trim();
      const empty = (text) => text === "" || text === "-";
      const body = table.tBodies[0];
      const lines = [...body.rows].map((line, place) => ({ line, place, v: value(line) }));
      const numbers = lines.every(({ v }) => empty(v) || !Number.isNaN(Number(v)));
      lines.sort((a, b) => {
        // What does not apply stands last either way.
        if (empty(a.v) || empty(b.v)) return empty(a.v) - empty(b.v) || a.place - b.place;
        const order = numbers ? Number(a.v) - Number(b.v) : a.v < b.v ? -1 : a.v > b.v ? 1 : 0;
        return (rising ? order : -order) || a.place - b.place;
      });
      body.append(...lines.map(({ line }) => line));
    });
  });
}

// ---- begin ----

for (const table of document.querySelectorAll("table.sortable")) sortable(table);
for (const line of document.querySelectorAll("tr[data-cell]")) {
  line.addEventListener("click", () => select(Number(line.dataset.cell)));
}
for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
for (const part of document.querySelectorAll(".without-script")) part.hidden = true;
readColours();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  refresh();
});
for (const canvas of [mapCanvas, lineCanvas]) if (canvas) listen(canvas);
const on = (id, kind, act) => $(id) && $(id).addEventListener(kind, act);
on("cell", "change", (event) => select(Number(event.target.value)));
on("mode", "change", (event) => {
  state.mode = event.target.value;
  state.lit = null;
  regroup();
  refresh();
});
on("find", "input", (event) => {
  state.find = event.target.value;
  search();
  refresh();
});
on("nearer", "click", () => zoom(0.5, 0.5, 0.6, 0.6));
on("farther", "click", () => zoom(0.5, 0.5, 1 / 0.6, 1 / 0.6));
on("whole", "click", () => {
  resetView();
  refresh();
});
new ResizeObserver(refresh).observe(document.body);
select(data.shown);
