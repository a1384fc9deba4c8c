// Charts for single questions: stacked bars, histograms, parallel coordinates. See charts.js for what they share.

// Bars: one per row, of parts side by side. rows: {name, parts: [{name, value, colour}]}

function barChart(title, rows, { text = number, caption = "" } = {}) {
  const line = 30, height = rows.length * line + 34;
  return figure(title, `${rows.length} bars. Arrow keys move through their parts.`, (plot, width) => {
    const left = Math.min(200, 14 + 6.6 * Math.max(...rows.map((r) => Math.min(r.name.length, 28))));
    const most = Math.max(...rows.map((r) => r.parts.reduce((sum, p) => sum + p.value, 0)), 1e-12);
    const x = scale([0, most], false, left, width - 14);
    const ticks = text === seconds && most >= 120 ? linearTicks(0, most / 60).map((v) => v * 60) : x.ticks;
    for (const v of ticks) plot.append(svg("line", { class: "grid-line", x1: x.at(v), x2: x.at(v), y1: 0, y2: rows.length * line }), svg("text", { x: x.at(v), y: rows.length * line + 16, "text-anchor": "middle" }, text(v)));
    const cells = [];
    rows.forEach((row, r) => {
      plot.append(svg("text", { x: left - 7, y: r * line + 19, "text-anchor": "end" }, shortened(row.name, 28)));
      let from = 0;
      for (const part of row.parts) {
        const rect = svg("rect", { class: "mark", x: x.at(from), y: r * line + 4, width: Math.max(0, x.at(from + part.value) - x.at(from)), height: line - 10, style: { fill: part.colour } });
        plot.append(rect);
        cells.push({ row, part, rect, from: x.at(from), to: x.at(from + part.value), r });
        from += part.value;
      }
    });
    return {
      count: cells.length,
      x: (i) => cells[i].from,
      nearest: (px, py) => cells.findIndex((c) => c.r === Math.floor(py / line) && px >= c.from && px <= c.to),
      hide: () => cells.forEach((c) => { c.rect.style.stroke = ""; }),
      show: (i) => {
        cells.forEach((c, k) => { c.rect.style.stroke = k === i ? "var(--ink)" : ""; });
        if (!cells[i]) return null;
        const whole = cells[i].row.parts.reduce((sum, p) => sum + p.value, 0);
        return { title: cells[i].row.name, rows: cells[i].row.parts.map((p) => ({ name: p === cells[i].part ? `▸ ${p.name}` : p.name, colour: p.colour, value: `${text(p.value)}, ${percent(whole ? p.value / whole : 0)}` })) };
      },
    };
  }, { height, caption, wide: true });
}

// Magnitudes in octaves, before and after clipping, as steps over powers of two

function histogramChart(title, { before, after }, [low, high]) {
  return figure(title, "Numbers of coordinates by magnitude, in powers of two, before and after clipping.", (plot, width, height) => {
    const frame = { left: 52, right: width - 10, top: 8, bottom: height - 34 };
    const x = scale([low, high], false, frame.left, frame.right);
    const y = scale([0.8, ...before, ...after].map((p) => (Array.isArray(p) ? p[1] : p)), true, frame.bottom, frame.top);
    axes(plot, { ...x, ticks: linearTicks(low, high).filter(Number.isInteger) }, y, frame, { xLabel: "magnitude", xText: superscript });
    const steps = (pairs) => {
      const counts = new Map(pairs);
      let path = `M${x.at(low)} ${frame.bottom}`;
      for (let k = low; k < high; k++) {
        const at = counts.get(k) > 0 ? y.at(counts.get(k)) : frame.bottom;
        path += `L${x.at(k)} ${at}L${x.at(k + 1)} ${at}`;
      }
      return `${path}L${x.at(high)} ${frame.bottom}`;
    };
    plot.append(svg("path", { class: "mark", d: steps(before), style: { fill: "var(--s0)", opacity: "0.3", stroke: "var(--s0)" } }));
    plot.append(svg("path", { class: "mark line", d: steps(after), style: { stroke: "var(--s1)" } }));
    const count = high - low, was = new Map(before), is = new Map(after);
    const mark = svg("rect", { class: "hit", visibility: "hidden", y: frame.top, height: frame.bottom - frame.top, width: x.at(low + 1) - x.at(low), style: { stroke: "var(--soft)" } });
    plot.append(mark);
    return {
      count,
      x: (i) => x.at(low + i),
      nearest: (px) => (px < frame.left || px > frame.right ? -1 : Math.min(count - 1, Math.floor((px - frame.left) / (x.at(low + 1) - x.at(low))))),
      hide: () => mark.setAttribute("visibility", "hidden"),
      show: (i) => {
        if (i < 0) return null;
        mark.setAttribute("x", x.at(low + i)); mark.setAttribute("visibility", "visible");
        return { title: `${number(2 ** (low + i))} to ${number(2 ** (low + i + 1))}`, rows: [{ name: "before", colour: "var(--s0)", value: String(was.get(low + i) || 0) }, { name: "after", colour: "var(--s1)", value: String(is.get(low + i) || 0) }] };
      },
    };
  }, { height: 200 });
}

// Parallel coordinates: an axis per setting and one for the value. rows: [{number, values: [...], value, ended}], best first

function parallelChart(title, names, rows, metric, lower) {
  return figure(title, `${rows.length} points over ${names.length} settings, best first. Arrow keys move from point to point.`, (plot, width, height) => {
    const frame = { left: 30, right: width - 60, top: 34, bottom: height - 24 };
    const columns = [...names.map((name, k) => ({ name, values: rows.map((row) => row.values[k]) })), { name: metric, values: rows.map((row) => row.value) }];
    const at = (k) => frame.left + (columns.length > 1 ? (k / (columns.length - 1)) * (frame.right - frame.left) : 0);
    columns.forEach((column, k) => {
      const numeric = column.values.every((v) => v === null || typeof v === "number");
      if (numeric) {
        const finite = column.values.filter((v) => v !== null), log = finite.length > 0 && Math.min(...finite) > 0 && Math.max(...finite) / Math.min(...finite) > 8;
        const s = scale(column.values, log, frame.bottom, frame.top);
        column.at = (v) => (s.shown(v) ? s.at(v) : k === columns.length - 1 ? (lower ? frame.top - 10 : frame.bottom + 10) : null);
        column.ticks = s.ticks.map((v) => [v, number(v)]);
      } else {
        const kinds = [...new Set(column.values.map(String))].sort();
        column.at = (v) => (kinds.length > 1 ? frame.bottom - (kinds.indexOf(String(v)) / (kinds.length - 1)) * (frame.bottom - frame.top) : (frame.top + frame.bottom) / 2);
        column.ticks = kinds.map((v) => [v, v.slice(0, 14)]);
      }
    });
    const lines = rows.map((row, place) => {
      const points = columns.map((c, k) => [at(k), c.at(k < names.length ? row.values[k] : row.value)]).filter(([, y]) => y !== null);
      const best = place === 0, share = rows.length > 1 ? place / (rows.length - 1) : 0;
      return svg("path", { class: "mark line", d: `M${points.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`, "stroke-dasharray": row.ended ? "3 3" : null, style: { stroke: best ? "var(--s1)" : "var(--s0)", opacity: best ? "1" : String(0.65 - 0.5 * share), "stroke-width": best ? "2.6" : "1.2" } });
    });
    plot.append(...[...lines].reverse());
    columns.forEach((column, k) => {
      plot.append(svg("line", { class: "axis-line", x1: at(k), x2: at(k), y1: frame.top, y2: frame.bottom }), svg("text", { class: "label", x: at(k), y: 16, "text-anchor": k === 0 ? "start" : "middle" }, column.name.slice(0, 20)));
      for (const [v, text] of column.ticks) plot.append(svg("text", { x: at(k) + 5, y: column.at(v) + 3.5, style: { "paint-order": "stroke", stroke: "var(--card)", "stroke-width": "3px" } }, text));
    });
    const over = svg("path", { class: "line", visibility: "hidden", style: { stroke: "var(--ink)", "stroke-width": "3" } });
    plot.append(over);
    return {
      count: rows.length,
      nearest: (px, py) => {
        if (columns.length < 2) return -1;
        const k = Math.max(0, Math.min(columns.length - 2, Math.floor(((px - frame.left) / (frame.right - frame.left)) * (columns.length - 1))));
        const along = (px - at(k)) / (at(k + 1) - at(k));
        const height = (row) => {
          const a = columns[k].at(row.values[k]), b = columns[k + 1].at(k + 1 < names.length ? row.values[k + 1] : row.value);
          return a === null || b === null ? 1e9 : a + along * (b - a);
        };
        const found = closest(rows, (row) => Math.abs(height(row) - py));
        return found >= 0 && Math.abs(height(rows[found]) - py) < 24 ? found : -1;
      },
      hide: () => over.setAttribute("visibility", "hidden"),
      show: (i) => {
        if (i < 0) return null;
        over.setAttribute("d", lines[i].getAttribute("d")); over.setAttribute("visibility", "visible");
        const row = rows[i];
        return { title: `point ${row.number}, place ${i + 1}`, rows: [{ name: metric, value: number(row.value) }, ...names.map((name, k) => ({ name, value: typeof row.values[k] === "number" ? number(row.values[k]) : String(row.values[k]) })), ...(row.ended ? [{ name: "ended", value: row.ended }] : [])] };
      },
    };
  }, { height: 300, wide: true });
}
