// What a reader does with a report, as events, and what came of it. The test adds it to a page.
const told = {},
  view = () => document.getElementById("map").dataset.view.split(" ").map(Number);
const later = (act) =>
  new Promise((done) =>
    setTimeout(() => {
      act && act();
      done();
    }, 150),
  );
const at = (canvas, kind, x, y, more) => {
  const place = canvas.getBoundingClientRect();
  const options = {
    clientX: place.left + x,
    clientY: place.top + y,
    bubbles: true,
    cancelable: true,
    ...more,
  };
  canvas.dispatchEvent(
    kind === "wheel" ? new WheelEvent(kind, options) : new PointerEvent(kind, options),
  );
};
const key = (canvas, key) =>
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
(async () => {
  const map = document.getElementById("map"),
    line = document.getElementById("timeline");
  await later();
  told.whole = view();
  map.focus();
  at(map, "wheel", 300, 200, { deltaY: -300 });
  await later();
  told.wheel = view();
  key(map, "ArrowRight");
  await later();
  told.moved = view();
  key(map, "0");
  await later();
  told.again = view();
  at(map, "pointerdown", 200, 100, { button: 0 });
  at(map, "pointermove", 400, 300, {});
  at(map, "pointerup", 400, 300, {});
  await later();
  told.box = view();
  document.getElementById("whole").click();
  at(line, "pointerdown", 200, 60, { button: 0 });
  at(line, "pointerup", 500, 60, {});
  await later();
  told.line = view();
  document.getElementById("whole").click();
  await later();
  told.tips = [];
  for (let x = 80; x < map.clientWidth - 20; x += 60) {
    for (let y = 20; y < map.clientHeight - 40; y += 12) {
      at(map, "pointermove", x, y, {});
      const tip = document.getElementById("tip");
      if (!tip.hidden) told.tips.push(tip.innerText);
    }
  }
  told.tips = [...new Set(told.tips)].slice(0, 400);
  told.modes = [...document.getElementById("mode").options].map((option) => option.value);
  for (const mode of told.modes) {
    document.getElementById("mode").value = mode;
    document.getElementById("mode").dispatchEvent(new Event("change"));
    await later();
    told.keys = document.querySelectorAll("#map-legend button").length;
    document.querySelector("#map-legend button").click();
  }
  const find = document.getElementById("find");
  find.value = "forward";
  find.dispatchEvent(new Event("input"));
  await later();
  const table = [...document.querySelectorAll("table.sortable")].pop();
  const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.v));
  table.tHead.querySelectorAll("button")[1].click();
  told.rising = column();
  table.tHead.querySelectorAll("button")[1].click();
  told.falling = column();
  told.sort = table.tHead.rows[0].cells[1].getAttribute("aria-sort");
  const rows = document.querySelectorAll("tr[data-cell]");
  if (rows.length) {
    rows[rows.length - 1].click();
    await later();
    told.selected = [document.getElementById("cell").value, view().join(" ")];
  }
  told.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const result = document.createElement("pre");
  result.id = "told";
  result.textContent = JSON.stringify(told);
  document.body.append(result);
})();
