// The memory map on its canvas.

/** Fills rectangles of the map; whatever is smaller than a pixel tints it by its share. */
function fill(area, list, from, to, pos, sizes) {
  const { pen, left, top, width, height, ratio } = area;
  const scaleX = width / (state.x1 - state.x0),
    scaleY = height / (state.y1 - state.y0);
  const snap = (value) => Math.round(value * ratio) / ratio;
  const count = list ? list.length : from.length;
  for (let k = 0; k < count; k++) {
    const i = list ? list[k] : k;
    if (
      to[i] <= state.x0 ||
      from[i] >= state.x1 ||
      pos[i] >= state.y1 ||
      pos[i] + sizes[i] <= state.y0
    )
      continue;
    const ax = left + (Math.max(from[i], state.x0) - state.x0) * scaleX,
      bx = left + (Math.min(to[i], state.x1) - state.x0) * scaleX;
    const ay = top + height - (Math.min(pos[i] + sizes[i], state.y1) - state.y0) * scaleY,
      by = top + height - (Math.max(pos[i], state.y0) - state.y0) * scaleY;
    const x0 = snap(ax),
      x1 = snap(bx),
      y0 = snap(ay),
      y1 = snap(by);
    const wide = x1 > x0,
      high = y1 > y0;
    pen.fillRect(
      wide ? x0 : ax,
      high ? y0 : ay,
      wide ? x1 - x0 : bx - ax,
      high ? y1 - y0 : by - ay,
    );
  }
}
function shade(area, raster, colour, map) {
  if (!raster) return;
  const { pen, left, top, width, height, ratio } = area;
  const snap = (value) => Math.round(value * ratio) / ratio;
  const fieldX = events() / raster.columns,
    fieldY = map.height / raster.rows;
  const scaleX = width / (state.x1 - state.x0),
    scaleY = height / (state.y1 - state.y0);
  pen.fillStyle = colour;
  for (
    let row = Math.max(0, Math.floor(state.y0 / fieldY));
    row < raster.rows && row * fieldY < state.y1;
    row++
  ) {
    for (
      let at = Math.max(0, Math.floor(state.x0 / fieldX));
      at < raster.columns && at * fieldX < state.x1;
      at++
    ) {
      const cover = raster.cover[row * raster.columns + at];
      if (!cover) continue;
      pen.globalAlpha = 0.12 + 0.8 * (cover / 255);
      const x = left + (Math.max(at * fieldX, state.x0) - state.x0) * scaleX,
        x1 = left + (Math.min((at + 1) * fieldX, state.x1) - state.x0) * scaleX;
      const y = top + height - (Math.min((row + 1) * fieldY, state.y1) - state.y0) * scaleY,
        y1 = top + height - (Math.max(row * fieldY, state.y0) - state.y0) * scaleY;
      pen.fillRect(snap(x), snap(y), snap(x1) - snap(x), snap(y1) - snap(y));
    }
  }
  pen.globalAlpha = 1;
}
// The map without what follows the pointer, and what it was drawn for.
const layer = document.createElement("canvas");
let layerIs = "";
function drawMap() {
  const map = mapHere();
  if (!map || !mapCanvas || mapCanvas.hidden) return;
  const area = begin(mapCanvas, 6, 24),
    { pen } = area;
  const view = [state.x0, state.x1, state.y0, state.y1];
  const wanted = JSON.stringify([
    ...view,
    state.cell,
    state.mode,
    state.lit,
    state.find,
    mapCanvas.width,
    mapCanvas.height,
    ink,
  ]);
  if (wanted !== layerIs) {
    layer.width = mapCanvas.width;
    layer.height = mapCanvas.height;
    const onLayer = { ...area, pen: layer.getContext("2d") };
    onLayer.pen.setTransform(area.ratio, 0, 0, area.ratio, 0, 0);
    onLayer.pen.font = pen.font;
    drawBlocks(onLayer, map);
    layerIs = wanted;
  }
  pen.drawImage(layer, 0, 0, mapCanvas.width / area.ratio, mapCanvas.height / area.ratio);
  cursor(area);
  if (state.box && state.box.canvas === mapCanvas) drawBox(area);
  mapCanvas.dataset.view = view.map(Math.round).join(" ");
}
function drawBlocks(area, map) {
  const { pen } = area;
  pen.strokeStyle = ink.line;
  pen.lineWidth = 1;
  pen.strokeRect(area.left - 0.5, area.top - 0.5, area.width + 1, area.height + 1);
  axisY(area, state.y0, state.y1, false);
  axisX(area);
  shade(area, map.shades[0], ink.held, map);
  pen.fillStyle = ink.held;
  fill(area, null, map.held.from, map.held.to, map.held.pos, map.held.size);
  shade(area, map.shades[1], ink.shade, map);
  classes.lists.forEach((list, at) => {
    pen.fillStyle = classes.colours[at];
    const dim = state.lit !== null && state.lit !== at;
    if (!found) {
      pen.globalAlpha = dim ? 0.1 : 1;
      fill(area, list, map.from, map.to, map.pos, map.size);
      return;
    }
    pen.globalAlpha = 0.1;
    fill(
      area,
      list.filter((i) => !found[i]),
      map.from,
      map.to,
      map.pos,
      map.size,
    );
    pen.globalAlpha = dim ? 0.1 : 1;
    fill(
      area,
      list.filter((i) => found[i]),
      map.from,
      map.to,
      map.pos,
      map.size,
    );
  });
  pen.globalAlpha = 1;
  borders(area, map);
  labels(area, map);
}
/** Borders of segments, and of blocks where they are large enough to be told apart. */
function borders(area, map) {
  const { pen, left, top, width, height } = area;
  const scaleX = width / (state.x1 - state.x0),
    scaleY = height / (state.y1 - state.y0);
  pen.strokeStyle = ink.card;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.55;
  for (let i = 0; i < map.n; i++) {
    if ((map.to[i] - map.from[i]) * scaleX < 5 || map.size[i] * scaleY < 5) continue;
    if (
      map.to[i] <= state.x0 ||
      map.from[i] >= state.x1 ||
      map.pos[i] >= state.y1 ||
      map.pos[i] + map.size[i] <= state.y0
    )
      continue;
    const x0 = Math.max(left - 2, left + (map.from[i] - state.x0) * scaleX),
      x1 = Math.min(left + width + 2, left + (map.to[i] - state.x0) * scaleX);
    const y0 = Math.max(top - 2, top + height - (map.pos[i] + map.size[i] - state.y0) * scaleY),
      y1 = Math.min(top + height + 2, top + height - (map.pos[i] - state.y0) * scaleY);
    pen.strokeRect(x0 + 0.5, y0 + 0.5, x1 - x0 - 1, y1 - y0 - 1);
  }
  pen.globalAlpha = 1;
  pen.strokeStyle = ink.soft;
  pen.setLineDash([4, 4]);
  pen.beginPath();
  for (const end of map.lanes.slice(0, -1)) {
    if (end <= state.y0 || end >= state.y1) continue;
    const y = Math.round(top + height - (end - state.y0) * scaleY) + 0.5;
    pen.moveTo(left, y);
    pen.lineTo(left + width, y);
  }
  pen.stroke();
  pen.setLineDash([]);
}

/** Names or sizes on blocks with room for them, unless there are too many to read. */
function labels(area, map) {
  const { pen, left, top, width, height } = area;
  const scaleX = width / (state.x1 - state.x0),
    scaleY = height / (state.y1 - state.y0);
  const shown = [];
  for (let i = 0; i < map.n && shown.length <= LABELS_MAX; i++) {
    if (map.size[i] * scaleY < 15 || (map.to[i] - map.from[i]) * scaleX < 44) continue;
    const x0 = Math.max(map.from[i], state.x0),
      x1 = Math.min(map.to[i], state.x1);
    const y0 = Math.max(map.pos[i], state.y0),
      y1 = Math.min(map.pos[i] + map.size[i], state.y1);
    if ((x1 - x0) * scaleX < 44 || (y1 - y0) * scaleY < 15) continue;
    const dim = (state.lit !== null && state.lit !== classes.of[i]) || (found && !found[i]);
    if (!dim) shown.push([i, (x0 + x1) / 2, (y0 + y1) / 2, (x1 - x0) * scaleX]);
  }
  if (shown.length > LABELS_MAX) return;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const [i, x, y, room] of shown) {
    const name = map.name[i] ? data.names[map.name[i] - 1] : "";
    const texts = name ? [`${name}, ${size(map.size[i])}`, name] : [size(map.size[i])];
    const text = texts.find((text) => pen.measureText(text).width < room - 8);
    if (!text) continue;
    pen.fillStyle = dark(classes.colours[classes.of[i]]) ? "#ffffff" : "#1b1f27";
    pen.fillText(
      text,
      left + (x - state.x0) * scaleX,
      top + height - (y - state.y0) * scaleY + 0.5,
    );
  }
}
function dark(colour) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return 0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5) < 140;
}
