"use strict";
// Charts as SVG: lines, maps, bars, histograms, parallel coordinates. A chart is a <figure class="chart"> whose <svg> is
// drawn again when its width changes. All text enters as text nodes, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function make(space, tag, attributes, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, part);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

function number(value) {
  if (value === null || value === undefined) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let k = 0;
  for (; value >= 1000 && k < units.length - 1; k++) value /= 1000;
  return `${Number(value.toPrecision(3))} ${units[k]}`;
}
const seconds = (value) => (value >= 120 ? `${Number((value / 60).toPrecision(3))} min` : `${number(value)} s`);
const superscript = (k) => `2${String(k).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)])}`;
const plural = (n, one, many) => `${n} ${n === 1 ? one : many}`;
const percent = (value) => (value === null || value === undefined ? "–" : `${Number((100 * value).toPrecision(3))} %`);
const range = ([a, b]) => (a === b ? String(a) : `${a}–${b}`);

// A name with its middle left out: names of tensors differ at both ends
const shortened = (name, most) => (name.length <= most ? name : `${name.slice(0, Math.ceil(most / 2))}…${name.slice(1 - Math.floor(most / 2))}`);

// Scales

function scale(values, log, from, to, whole = false) {
  const finite = values.filter((v) => v !== null && Number.isFinite(v) && (!log || v > 0));
  let low = Math.min(...finite), high = Math.max(...finite);
  if (!finite.length) [low, high] = log ? [0.1, 1] : [0, 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const place = log ? Math.log10 : (v) => v;
  const a = place(low), b = place(high);
  const at = (v) => from + ((place(v) - a) / (b - a)) * (to - from);
  return { at, low, high, log, shown: (v) => v !== null && Number.isFinite(v) && (!log || v > 0), ticks: (log ? logTicks(low, high) : linearTicks(low, high)).filter((v) => !whole || Number.isInteger(v)) };
}
function linearTicks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const ticks = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Number(v.toPrecision(10)));
  return ticks;
}
function logTicks(low, high) {
  const decades = Math.log10(high / low), ticks = [];
  const factors = decades < 0.7 ? null : decades < 3 ? [1, 2, 5] : [1];
  if (!factors) return linearTicks(low, high).filter((v) => v > 0);
  const every = Math.max(1, Math.ceil(decades / 6));
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += every)
    for (const m of factors) if (m * 10 ** k >= low * 0.999 && m * 10 ** k <= high * 1.001) ticks.push(Number((m * 10 ** k).toPrecision(4)));
  return ticks;
}

// What all charts share: a title, an SVG that follows the width, a cross-hair for the mouse and the arrow keys

function figure(title, description, draw, { height = 240, caption = "", wide = false, key = null } = {}) {
  const plot = svg("svg", { height, tabindex: 0, role: "img", "aria-label": `${title}. ${description}` });
  const node = el("figure", { class: wide ? "chart wide" : "chart" }, el("h3", {}, title), key, plot, caption ? el("figcaption", {}, caption) : null);
  let width = 0;
  const redraw = () => {
    plot.replaceChildren();
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.interaction = draw(plot, width, height);
  };
  new ResizeObserver(() => {
    const now = Math.floor(plot.clientWidth);
    if (now > 0 && now !== width) { width = now; redraw(); }
  }).observe(plot);
  let at = -1;
  const show = (index, x, y) => {
    const found = plot.interaction && plot.interaction.show(index);
    if (!found) return hide();
    at = index;
    tip(found, x, y);
  };
  const hide = () => { at = -1; if (plot.interaction) plot.interaction.hide(); document.getElementById("tip").hidden = true; };
  plot.addEventListener("mousemove", (event) => {
    if (!plot.interaction) return;
    const box = plot.getBoundingClientRect();
    show(plot.interaction.nearest(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  });
  plot.addEventListener("mouseleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const size = plot.interaction ? plot.interaction.count : 0;
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 };
    if (event.key === "Escape") return hide();
    if (!size || !(event.key in moves || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const next = event.key === "Home" ? 0 : event.key === "End" ? size - 1 : at < 0 ? 0 : at + moves[event.key];
    const box = plot.getBoundingClientRect(), index = Math.max(0, Math.min(size - 1, next));
    show(index, box.left + (plot.interaction.x ? plot.interaction.x(index) : 40), box.top + 24);
    document.getElementById("said").textContent = document.getElementById("tip").textContent;
  });
  return node;
}
function tip({ title, rows }, x, y) {
  const box = document.getElementById("tip");
  const cells = rows.slice(0, 14).map((row) => el("tr", {}, el("td", {}, row.colour ? el("span", { class: "swatch", style: { "border-color": row.colour, width: "14px" } }) : null, row.name), el("td", {}, row.value)));
  box.replaceChildren(el("strong", {}, title, " "), el("table", {}, el("tbody", {}, cells)), rows.length > 14 ? `and ${rows.length - 14} more` : "");
  box.hidden = false;
  const size = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, x + 16 + size.width > innerWidth ? x - size.width - 16 : x + 16)}px`;
  box.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - size.height - 8))}px`;
}
function axes(plot, x, y, frame, { xLabel = "", yLabel = "", yText = number, xText = number } = {}) {
  const { left, right, top, bottom } = frame;
  for (const v of y.ticks) plot.append(svg("line", { class: "grid-line", x1: left, x2: right, y1: y.at(v), y2: y.at(v) }), svg("text", { x: left - 7, y: y.at(v) + 3.5, "text-anchor": "end" }, yText(v)));
  let last = -1e9;
  for (const v of x.ticks) {
    if (x.at(v) - last < 34) continue;
    last = x.at(v);
    plot.append(svg("line", { class: "axis-line", x1: last, x2: last, y1: bottom, y2: bottom + 4 }), svg("text", { x: last, y: bottom + 16, "text-anchor": "middle" }, xText(v)));
  }
  plot.append(svg("line", { class: "axis-line", x1: left, x2: right, y1: bottom, y2: bottom }));
  if (xLabel) plot.append(svg("text", { x: (left + right) / 2, y: bottom + 30, "text-anchor": "middle" }, xLabel));
  if (yLabel) plot.append(svg("text", { x: 0, y: top - 8 }, yLabel));
}

// Lines. A series: {name, colour, dash, x, y, low?, high?, faint?}; low and high are the edges of a band.

function lineChart(title, series, options = {}) {
  const { xLog = false, xLabel = "round", yText = number, labels = true } = options;
  const yLog = options.yLog === "automatic" ? spansDecades(series) : options.yLog === true;
  const described = `${series.filter((s) => !s.faint).length} lines. Arrow keys move along the ${xLabel}.`;
  return figure(title, described, (plot, width, height) => {
    const named = labels && width > 420 ? series.filter((s) => !s.faint) : [];
    const labelled = named.length > 1 && named.length <= MOST_LABELS;
    const room = labelled ? Math.min(150, 14 + 6.4 * Math.max(...named.map((s) => Math.min(s.name.length, 22)))) : 12;
    const frame = { left: 52, right: width - room, top: 12, bottom: height - 36 };
    const x = scale(series.flatMap((s) => s.x), xLog, frame.left, frame.right, true);
    const y = scale(series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]), yLog, frame.bottom, frame.top);
    axes(plot, x, y, frame, { xLabel, yText });
    for (const s of series) if (s.low) plot.append(svg("path", { class: "band mark", d: bandPath(s, x, y), style: { fill: s.colour } }));
    for (const s of series) {
      plot.append(svg("path", { class: s.faint ? "line faint mark" : "line mark", d: linePath(s.x, s.y, x, y), "stroke-dasharray": s.dash || null, style: { stroke: s.colour } }));
      const shown = s.y.filter(y.shown).length;
      if (shown === 1 || (shown > 0 && shown < s.y.length / 3 && shown < 20)) s.x.forEach((v, i) => { if (y.shown(s.y[i]) && x.shown(v)) plot.append(svg("circle", { class: "mark", cx: x.at(v), cy: y.at(s.y[i]), r: 3, style: { fill: s.colour } })); });
    }
    if (labelled) endLabels(plot, named, x, y, frame);
    const cross = svg("line", { class: "cross", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
    const dots = svg("g");
    plot.append(cross, dots);
    const places = [...new Set(series.filter((s) => !s.faint).flatMap((s) => s.x))].filter(x.shown).sort((a, b) => a - b);
    return {
      count: places.length,
      x: (i) => x.at(places[i]),
      nearest: (px) => closest(places, (v) => Math.abs(x.at(v) - px)),
      hide: () => { cross.setAttribute("visibility", "hidden"); dots.replaceChildren(); },
      show: (i) => {
        const place = places[i];
        if (place === undefined) return null;
        for (const key of ["x1", "x2"]) cross.setAttribute(key, x.at(place));
        cross.setAttribute("visibility", "visible");
        const rows = [];
        dots.replaceChildren();
        for (const s of series) {
          if (s.faint) continue;
          const value = interpolated(s.x, s.y, place);
          if (value === undefined) continue;
          if (y.shown(value)) dots.append(svg("circle", { cx: x.at(place), cy: y.at(value), r: 3.5, style: { fill: s.colour } }));
          const low = s.low && interpolated(s.x, s.low, place), high = s.high && interpolated(s.x, s.high, place);
          rows.push({ name: s.name, colour: s.colour, sort: value, value: yText(value) + (y.shown(low ?? null) && y.shown(high ?? null) ? ` (${yText(low)} to ${yText(high)})` : "") });
        }
        rows.sort((a, b) => (b.sort ?? -Infinity) - (a.sort ?? -Infinity));
        return { title: `${xLabel} ${number(place)}`, rows };
      },
    };
  }, { ...options, key: options.key && series.length > MOST_LABELS ? lineKey(series) : null });
}
const MOST_LABELS = 7;
// Where lines are too many to be labelled at their ends, and no table above names their colours
const lineKey = (series) => el("div", { class: "legend" }, series.map((s) => el("span", {}, el("span", { class: "swatch", style: { "border-color": s.colour, "border-top-style": s.dash ? "dashed" : "solid" } }), s.name)));
function spansDecades(series) {
  const values = series.flatMap((s) => s.y).filter((v) => v !== null);
  return values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
}
function linePath(xs, ys, x, y) {
  let path = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (!x.shown(xs[i]) || !y.shown(ys[i])) { pen = "M"; continue; }
    path += `${pen}${x.at(xs[i]).toFixed(1)} ${y.at(ys[i]).toFixed(1)}`;
    pen = "L";
  }
  return path;
}
function bandPath(s, x, y) {
  const kept = s.x.map((_, i) => i).filter((i) => x.shown(s.x[i]) && y.shown(s.low[i]) && y.shown(s.high[i]));
  const edge = (list, values) => list.map((i) => `${x.at(s.x[i]).toFixed(1)} ${y.at(values[i]).toFixed(1)}`).join("L");
  return kept.length ? `M${edge(kept, s.high)}L${edge([...kept].reverse(), s.low)}Z` : "";
}
function endLabels(plot, series, x, y, frame) {
  const ends = series.map((s) => ({ s, i: s.y.findLastIndex(y.shown) })).filter((e) => e.i >= 0).map((e) => ({ ...e, at: y.at(e.s.y[e.i]) })).sort((a, b) => a.at - b.at);
  const apart = Math.min(13, (frame.bottom - frame.top) / Math.max(ends.length - 1, 1));
  for (let pass = 0; pass < 40; pass++) {
    for (let k = 1; k < ends.length; k++) {
      const overlap = apart - (ends[k].at - ends[k - 1].at);
      if (overlap > 0) { ends[k].at += overlap / 2; ends[k - 1].at -= overlap / 2; }
    }
    for (const end of ends) end.at = Math.min(Math.max(end.at, frame.top), frame.bottom);
  }
  for (const { s, at } of ends) plot.append(svg("text", { class: "label", x: frame.right + 7, y: at + 4, style: { fill: s.colour } }, s.name.length > 22 ? `${s.name.slice(0, 21)}…` : s.name));
}
function closest(values, distance) {
  let best = -1;
  values.forEach((v, i) => { if (best < 0 || distance(v) < distance(values[best])) best = i; });
  return best;
}
function interpolated(xs, ys, at) {
  if (!xs.length || at < xs[0] || at > xs[xs.length - 1]) return undefined;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= at) low = middle; else high = middle; }
  if (xs[high] === at) return ys[high];
  if (xs[low] === at || low === high) return ys[low];
  if (ys[low] === null || ys[high] === null) return null;
  return ys[low] + ((at - xs[low]) / (xs[high] - xs[low])) * (ys[high] - ys[low]);
}

// Maps: rows by columns of rectangles; equal neighbours in a row are one rectangle

function mapChart(title, { rows, columns, colour, text, rowText, caption, wide = true }) {
  const cell = Math.max(5, Math.min(18, Math.floor(380 / rows.length)));
  const height = rows.length * cell + 44;
  return figure(title, `A map of ${rows.length} rows and ${columns.length} columns of rounds. Arrow keys move through its cells.`, (plot, width) => {
    const left = Math.min(260, 14 + 6.2 * Math.max(...rows.map((r) => Math.min(rowText(r).length, 40))));
    const size = (width - left - 12) / columns.length;
    const every = Math.ceil(12 / cell);
    rows.forEach((row, r) => {
      const label = rowText(row);
      if (r % every === 0) plot.append(svg("text", { x: left - 7, y: r * cell + cell / 2 + 4, "text-anchor": "end" }, shortened(label, 40)));
      for (let c = 0; c < columns.length;) {
        let end = c + 1;
        while (end < columns.length && colour(r, end) === colour(r, c)) end++;
        plot.append(svg("rect", { class: "mark", x: (left + c * size).toFixed(2), y: r * cell, width: ((end - c) * size + 0.3).toFixed(2), height: cell - (cell > 8 ? 1 : 0), style: { fill: colour(r, c) } }));
        c = end;
      }
    });
    const bottom = rows.length * cell;
    let last = -100;
    columns.forEach((column, c) => {
      const x = left + (c + 0.5) * size;
      if (x - last < 70) return;
      last = x;
      plot.append(svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, String(column[0])));
    });
    plot.append(svg("text", { x: left + (width - left) / 2, y: bottom + 32, "text-anchor": "middle" }, "round"));
    const mark = svg("rect", { fill: "none", visibility: "hidden", width: Math.max(size, 3), height: cell, style: { stroke: "var(--ink)", "stroke-width": "1.5" } });
    plot.append(mark);
    return {
      count: rows.length * columns.length,
      x: (i) => left + (i % columns.length) * size,
      nearest: (px, py) => {
        const c = Math.floor((px - left) / size), r = Math.floor(py / cell);
        return c < 0 || c >= columns.length || r < 0 || r >= rows.length ? -1 : r * columns.length + c;
      },
      hide: () => mark.setAttribute("visibility", "hidden"),
      show: (i) => {
        if (i < 0) return null;
        const r = Math.floor(i / columns.length), c = i % columns.length;
        mark.setAttribute("x", left + c * size); mark.setAttribute("y", r * cell); mark.setAttribute("visibility", "visible");
        return { title: `${rowText(rows[r])}, round ${range(columns[c])}`, rows: text(r, c) };
      },
    };
  }, { height, caption, wide });
}
