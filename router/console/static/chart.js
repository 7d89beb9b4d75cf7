// Lines over the last ten minutes, drawn as SVG. The scale moves in round steps, so that the picture stands still.

import { attribute } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const SPAN_S = 600;
const HEIGHT = 150;
const MARGIN = { left: 46, right: 10, top: 10, bottom: 20 };

function node(tag, attributes, parent) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}

function roundUp(value) {
  if (value <= 0) return 10;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * size).find((step) => step >= value * 1.02) ?? 20 * size;
}

export class Chart {
  // series: [{name, told, area}]; format: of the scale and the readout; top: the scale's end, or null to follow the values.
  constructor(place, readout, { series, format, top = null, label }) {
    this.readout = readout;
    this.series = series;
    this.format = format;
    this.top = top;
    this.label = label;
    this.points = [];
    this.svg = node("svg", { height: HEIGHT, role: "img" });
    place.append(this.svg);
    this.grid = node("g", { class: "grid" }, this.svg);
    this.shapes = series.map(({ name, area }) => ({
      area: area ? node("path", { class: `area ${name}` }, this.svg) : null,
      line: node("path", { class: `line ${name}` }, this.svg),
    }));
    this.cursor = node("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, this.svg);
    this.pointed = null;
    new ResizeObserver(() => this.draw()).observe(place);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.place = place;
  }

  // points: [{at, values: [number or null, ...]}], the oldest first; now: where the right end is.
  show(points, now) {
    this.points = points;
    this.now = now;
    this.draw();
  }

  point(event) {
    this.pointed = event === null ? null : event.clientX - this.svg.getBoundingClientRect().left;
    this.tell();
  }

  draw() {
    const width = this.place.clientWidth;
    if (!width) return;
    attribute(this.svg, "width", String(width));
    attribute(this.svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
    this.inner = width - MARGIN.left - MARGIN.right;
    const highest = Math.max(0, ...this.points.flatMap(({ values }) => values.map((value) => value ?? 0)));
    this.end = this.top ?? roundUp(highest);
    this.drawGrid(width);
    this.shapes.forEach(({ line, area }, index) => {
      const runs = this.runs(index);
      line.setAttribute("d", runs.map((run) => `M${run.join("L")}`).join(""));
      const ground = HEIGHT - MARGIN.bottom;
      area?.setAttribute(
        "d",
        runs.map((run) => `M${run[0].split(",")[0]},${ground}L${run.join("L")}L${run.at(-1).split(",")[0]},${ground}Z`).join(""),
      );
    });
    this.tell();
  }

  x(at) {
    return MARGIN.left + this.inner * (1 - (this.now - at) / SPAN_S);
  }

  y(value) {
    return MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - Math.min(1, value / this.end));
  }

  runs(index) {
    const runs = [[]];
    for (const { at, values } of this.points) {
      if (values[index] === null) runs.push([]);
      else if (this.now - at <= SPAN_S) runs.at(-1).push(`${this.x(at).toFixed(1)},${this.y(values[index]).toFixed(1)}`);
    }
    return runs.filter((run) => run.length > 0);
  }

  drawGrid(width) {
    const key = `${width}/${this.end}`;
    if (this.gridKey === key) return;
    this.gridKey = key;
    this.grid.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const y = this.y(share * this.end);
      node("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }, this.grid);
      node("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.grid).textContent = this.format(share * this.end);
    }
    for (const minutes of [10, 5, 0]) {
      const x = MARGIN.left + this.inner * (1 - minutes / 10);
      const anchor = { 10: "start", 5: "middle", 0: "end" }[minutes];
      node("text", { x, y: HEIGHT - 4, "text-anchor": anchor }, this.grid).textContent = minutes ? `−${minutes} min` : "now";
    }
  }

  // What the values are, at the pointer or now: beside the title, and for those who do not see the lines.
  tell() {
    if (!this.points.length || !this.inner) return;
    const last = this.points.at(-1);
    let shown = last;
    if (this.pointed !== null) {
      const at = this.now - SPAN_S * (1 - (this.pointed - MARGIN.left) / this.inner);
      shown = this.points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best), last);
    }
    const x = this.pointed === null ? -9 : this.x(shown.at);
    attribute(this.cursor, "x1", String(x));
    attribute(this.cursor, "x2", String(x));
    const told = shown.values.map((value, index) => `${value === null ? "–" : this.format(value)} ${this.series[index].told}`).join(", ");
    const when = this.pointed === null ? "" : `${Math.round(this.now - shown.at)} s ago: `;
    if (this.readout.textContent !== when + told) this.readout.textContent = when + told;
    attribute(this.svg, "aria-label", `${this.label} over the last ten minutes; now ${told}`);
  }
}

// A few values as a small line, without a scale.
export function spark(svg, values) {
  const [width, height] = [64, 18];
  const top = Math.max(1e-9, ...values);
  const step = width / Math.max(1, values.length - 1);
  const path = values.map((value, index) => `${(index * step).toFixed(1)},${(height - 1 - (height - 2) * (value / top)).toFixed(1)}`);
  attribute(svg, "viewBox", `0 0 ${width} ${height}`);
  if (!svg.firstChild) node("path", { class: "line out" }, svg);
  attribute(svg.firstChild, "d", path.length > 1 ? `M${path.join("L")}` : "");
}
