// The sections of the page, each a function of the data and the state; null where there is nothing to show.

const COLOURS = 10;
const PHASE_COLOURS = { local: "var(--s0)", mean: "var(--s4)", wait: "var(--s7)", exchange: "var(--s1)", outer: "var(--s2)", evaluate: "var(--s3)", checkpoint: "var(--s5)", other: "var(--line)" };
const groupColour = (group) => `var(--s${group % COLOURS})`;
const groupDash = (group) => DASHES[Math.floor(group / COLOURS) % DASHES.length];

function section(title, controls, note, ...content) {
  const shown = content.flat().filter(Boolean);
  if (!shown.length) return null;
  return el("section", {}, el("div", { class: "head" }, el("h2", {}, title), el("div", { class: "controls" }, controls || [])), note ? el("p", { class: "note" }, note) : null, shown);
}
function table(header, rows, { numeric = [], wrap = [] } = {}) {
  const kind = (k) => (numeric.includes(k) ? "number" : wrap.includes(k) ? "wrap" : null);
  const cell = (value, k) => el("td", { class: kind(k) }, value instanceof Node ? value : String(value ?? "–"));
  return el("div", { class: "tables", tabindex: 0, role: "region", "aria-label": `Table: ${header.filter(Boolean).join(", ")}` }, el("table", {}, el("thead", {}, el("tr", {}, header.map((name, k) => el("th", { scope: "col", class: kind(k) }, name)))), el("tbody", {}, rows.map((row) => (row instanceof Node ? row : el("tr", {}, row.map(cell)))))));
}
function choice(label, options, value, change) {
  return el("label", {}, label, el("select", { onchange: (event) => change(event.target.value) }, options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text))));
}
function toggle(label, value, change) {
  return el("label", {}, el("input", { type: "checkbox", checked: value, onchange: (event) => change(event.target.checked) }), label);
}
const legend = (entries) => el("div", { class: "legend wide" }, entries.map(([name, colour]) => el("span", {}, el("span", { class: "box", style: { background: colour } }), name)));

// Runs: the table that is also the selection

function runTable(data, state, update) {
  if (!data.runs.length) return null;
  const metrics = [...new Set(data.runs.map((run) => run.metric))];
  const chosen = (run, key) => { const curve = run.curves[run.metric]; return curve ? curve[key] : undefined; };
  const lossAlone = metrics.length === 1 && metrics[0] === "loss";
  const withBytes = data.runs.some((r) => r.times && r.times.bytes);
  const header = ["show", "run", "algorithm", "seed", "rounds", "last loss", ...(lossAlone ? [] : [`last ${metrics.length === 1 ? metrics[0] : "main metric"}`]), "best", "in round", "did not count", "time", ...(withBytes ? ["sent by node 0"] : [])];
  const rows = data.runs.map((run, i) => {
    const best = chosen(run, run.lower ? "low" : "high") || [];
    const box = el("input", { type: "checkbox", checked: state.selected.has(i), "data-run": i, "aria-label": `show ${run.name}`, onchange: (event) => { event.target.checked ? state.selected.add(i) : state.selected.delete(i); update(); } });
    const cells = [box, el("span", {}, swatch(run.group), run.name), run.algorithm, run.seed || "–", run.rounds, run.curves.loss ? number(run.curves.loss.last) : "–", ...(lossAlone ? [] : [chosen(run, "last") === undefined ? "–" : number(chosen(run, "last"))]), best.length ? number(best[0]) : "–", best.length ? best[1] : "–", run.nodes ? run.nodes.excluded : 0, run.times ? seconds(run.times.total) : "–", ...(withBytes ? [run.times && run.times.bytes ? bytes(run.times.bytesInAll) : "–"] : [])];
    return el("tr", { class: state.selected.has(i) ? null : "off" }, cells.map((value, k) => el("td", { class: k > 2 ? "number" : null }, value instanceof Node ? value : String(value))));
  });
  const only = (keep) => () => { state.selected = new Set(data.runs.map((_, i) => i).filter(keep)); update(); };
  const buttons = [el("button", { onclick: only(() => true) }, "Show all"), el("button", { onclick: only(() => false) }, "Show none")];
  const note = data.runs.some((run) => !run.lower) ? "The best value is the highest one where higher is better, else the lowest." : null;
  return section("Runs", buttons, note, table(header, rows, { numeric: [3, 4, 5, 6, 7, 8, 9, 10, 11] }));
}
const swatch = (group) => el("span", { class: "swatch", style: { "border-color": groupColour(group), "border-top-style": group >= COLOURS ? "dashed" : "solid" } });

// Groups of runs that differ in their seed alone: mean and spread

function groupTable(data, state) {
  if (!data.groups.some((group) => group.runs.length > 1)) return null;
  const names = [...new Set(data.runs.map((run) => run.metric)), "loss"].filter((name, k, all) => all.indexOf(name) === k);
  const rows = data.groups.map((group, g) => {
    const runs = group.runs.filter((i) => state.selected.has(i)).map((i) => data.runs[i]);
    const cells = names.map((name) => meanAndSpread(runs.map((run) => (run.curves[name] ? run.curves[name].last : undefined)).filter((v) => v !== undefined)));
    return [el("span", {}, swatch(g), group.name), runs.length, ...cells];
  });
  return section("Over seeds", [], "Last values: mean ± standard deviation over the selected runs that differ in their seed alone.", table(["settings", "runs", ...names], rows, { numeric: [1, 2, 3] }));
}
function meanAndSpread(values) {
  if (!values.length) return "–";
  if (values.includes(null)) return `not finite in ${values.filter((v) => v === null).length} of ${values.length}`;
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const deviation = Math.sqrt(values.reduce((sum, v) => sum + (v - mean) ** 2, 0) / Math.max(values.length - 1, 1));
  return values.length > 1 ? `${number(mean)} ± ${Number(deviation.toPrecision(2))}` : number(mean);
}

// Curves

function curveSection(data, state, update) {
  const runs = selectedRuns(data, state);
  const main = [...new Set(data.runs.map((run) => run.metric))];
  const names = [...new Set([...main, "loss", ...data.runs.flatMap((run) => Object.keys(run.curves))])].filter((name) => data.runs.some((run) => run.curves[name]));
  if (!names.length) return null;
  const options = { yLog: { linear: false, logarithmic: true }[state.yLog] ?? "automatic", xLog: state.xLog };
  const charts = names.map((name, k) => {
    const series = seriesOf(data, state, (run) => (run.curves[name] ? run.curves[name].series : null));
    return series.length ? lineChart(name, series, { ...options, height: k < 2 ? 280 : 200, wide: names.length === 1 }) : null;
  });
  const broken = runs.filter((run) => run.notFinite).map((run) => `${run.name}: ${run.notFinite} rounds without a finite loss`);
  const controls = [
    choice("values", [["automatic", "automatic"], ["linear", "linear"], ["logarithmic", "logarithmic"]], state.yLog, (v) => { state.yLog = v; update(); }),
    toggle("logarithmic rounds", state.xLog, (v) => { state.xLog = v; update(); }),
    data.groups.some((g) => g.runs.length > 1) ? toggle("mean over seeds, with the range", state.spread, (v) => { state.spread = v; update(); }) : null,
  ];
  const many = charts.length > 8;
  return section("Curves", controls.filter(Boolean), broken.join("; ") || null, el("div", { class: "grid" }, charts.slice(0, 8).filter(Boolean)), many ? el("details", {}, el("summary", {}, `${charts.length - 8} more metrics`), el("div", { class: "grid" }, charts.slice(8).filter(Boolean))) : null);
}
const selectedRuns = (data, state) => data.runs.filter((_, i) => state.selected.has(i));

function seriesOf(data, state, of) {
  const found = [];
  data.groups.forEach((group, g) => {
    const runs = group.runs.filter((i) => state.selected.has(i)).map((i) => data.runs[i]).filter(of);
    const look = { colour: groupColour(g), dash: groupDash(g) };
    if (state.spread && runs.length > 1) {
      for (const run of runs) found.push({ ...look, name: run.name, x: of(run)[0], y: of(run)[1], faint: true });
      found.push({ ...look, name: group.name, ...meanSeries(runs.map(of)) });
    } else for (const run of runs) {
      const [x, y, low, high] = of(run); // low and high: of stretches of rounds, where there are many
      found.push({ ...look, name: runs.length > 1 && run.seed ? `${group.name}, seed ${run.seed}` : group.name, x, y, low, high });
    }
  });
  return found;
}
function meanSeries(list) {
  const from = Math.max(...list.map(([x]) => x[0])), to = Math.min(...list.map(([x]) => x[x.length - 1]));
  const places = [...new Set(list.flatMap(([x]) => x))].filter((v) => v >= from && v <= to).sort((a, b) => a - b);
  const values = places.map((place) => list.map(([x, y]) => interpolated(x, y, place)));
  const whole = (f) => values.map((v) => (v.includes(null) || v.includes(undefined) ? null : f(v)));
  return { x: places, y: whole((v) => v.reduce((a, b) => a + b, 0) / v.length), low: whole((v) => Math.min(...v)), high: whole((v) => Math.max(...v)) };
}

// Settings

function settingsSection(data) {
  if (!data.runs.length) return null;
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
  const short = (name) => name.replace(/^(algorithm|run)\.(?!name$)/, "");
  const differing = names.filter((name) => new Set(data.runs.map((run) => run.settings[name] ?? "")).size > 1);
  const runName = (run) => el("span", {}, swatch(run.group), run.name);
  const rows = data.runs.map((run) => [runName(run), ...differing.map((name) => run.settings[name] ?? "–")]);
  const all = table(["setting", ...data.runs.map((run) => run.name)], names.map((name) => [short(name), ...data.runs.map((run) => run.settings[name] ?? "–")]), { wrap: data.runs.map((_, k) => k + 1) });
  const facts = [...new Set(data.runs.flatMap((run) => Object.keys(run.environment)))];
  const where = table(["environment", ...data.runs.map((run) => run.name)], facts.map((name) => [name, ...data.runs.map((run) => run.environment[name] ?? "–")]), { wrap: data.runs.map((_, k) => k + 1) });
  const content = differing.length ? [el("h3", {}, "What differs"), table(["run", ...differing.map(short)], rows)] : [el("p", {}, data.runs.length > 1 ? "All runs have the same settings." : "")];
  return section("Settings", [], null, content, el("details", { open: data.runs.length === 1 }, el("summary", {}, "All settings, and where the runs were made"), all, el("br"), where));
}

// Clipping

function clippingSection(data, state, update) {
  const runs = data.runs.filter((run) => run.clipping);
  if (!runs.length) return null;
  const kinds = [["above", "cut to u"], ["below", "raised to d"], ["zero", "exactly 0"]];
  const lines = kinds.map(([key, text]) => {
    const series = seriesOf(data, { ...state, spread: state.spread }, (run) => (run.clipping ? run.clipping.shares[key] : null));
    return series.length ? lineChart(`Share of coordinates ${text}`, series, { height: 190, yText: percent, xLog: state.xLog }) : null;
  });
  const largest = seriesOf(data, state, (run) => (run.clipping ? run.clipping.largest : null));
  lines.push(largest.length ? lineChart("Largest magnitude of a gradient", largest, { height: 190, yLog: true, xLog: state.xLog }) : null);
  const [run, chooser] = oneRun(data, state, update, "clipping");
  const c = run.clipping;
  const map = (key, title, colour) => mapChart(`${title}, by layer: ${run.name}`, {
    rows: c.tensors, columns: c.rounds, rowText: (name) => name,
    colour: (r, k) => (c.maps[key][r][k] === null ? "var(--empty)" : `color-mix(in oklab, ${colour} ${shade(c.maps[key][r][k])}%, var(--empty))`),
    text: (r, k) => [{ name: title.toLowerCase(), value: c.maps[key][r][k] === null ? "no gradient" : percent(c.maps[key][r][k] / 1000) }],
    caption: `Pale: none; full colour: all coordinates.${c.leftOut ? ` The ${c.tensors.length} largest tensors; ${c.leftOut} more are not shown.` : ""}`,
  });
  const histograms = run.histograms ? [el("h3", { class: "wide" }, `Magnitudes of the gradients of ${run.name}`), legend([["before clipping", "color-mix(in srgb, var(--s0) 35%, transparent)"], ["after clipping", "var(--s1)"]]), ...run.histograms.map((h) => histogramChart(`Round ${h.round}`, h, octaves(run.histograms)))] : [];
  const note = `Counted over all local steps of a round.${data.runs.length > runs.length ? ` ${plural(data.runs.length - runs.length, "run has", "runs have")} no counts: record them with statistics = true.` : ""}`;
  return section("Clipping", chooser, note, el("div", { class: "grid" }, lines.filter(Boolean), map("above", "Cut to u", "var(--s1)"), map("below", "Raised to d", "var(--s0)"), histograms));
}
function octaves(histograms) {
  const found = histograms.flatMap((h) => [...h.before, ...h.after]).map(([k]) => k).filter((k) => k > -127 && k < 128);
  return found.length ? [Math.min(...found), Math.max(...found) + 1] : [-1, 1];
}
const shade = (permille) => Math.round(8 * Math.sqrt(permille / 1000) * 100) / 8;

function oneRun(data, state, update, key) {
  const able = data.runs.map((run, i) => [run, i]).filter(([run]) => run[key]);
  const preferred = able.find(([, i]) => i === state.one[key]) || able.find(([, i]) => state.selected.has(i)) || able[0];
  return [preferred[0], able.length > 1 ? [choice("maps of", able.map(([run, i]) => [i, run.name]), preferred[1], (v) => { state.one[key] = Number(v); update(); })] : []];
}

// Nodes

function nodeSection(data, state, update) {
  if (!data.runs.some((run) => run.nodes)) return null;
  const [run, chooser] = oneRun(data, state, update, "nodes");
  const n = run.nodes, width = n.rounds.length;
  const share = (r, k) => Math.min(1, n.tookPart[r][k] / n.cells[r * width + k]);
  const map = mapChart(`Who took part in ${run.name}`, {
    rows: n.lines, columns: n.rounds, rowText: (line) => `node ${range(line)}`,
    colour: (r, k) => (n.leftOut[r][k] ? `color-mix(in oklab, var(--bad) ${Math.round(45 + 55 * Math.min(1, n.leftOut[r][k] / Math.max(n.tookPart[r][k], 1)))}%, var(--s2))` : `color-mix(in oklab, var(--s2) ${Math.round(90 * share(r, k) / 5) * 5}%, var(--empty))`),
    text: (r, k) => [{ name: "took part", value: `${n.tookPart[r][k]} of ${n.cells[r * width + k]}` }, { name: "did not count", value: String(n.leftOut[r][k]) }],
  });
  const keys = legend([["took part and counted", "var(--s2)"], ["did not count", "var(--bad)"], ["was not drawn", "var(--empty)"]]);
  const rows = n.exclusions.map(([round, node, reason, tensor, value, bound]) => [round, node, reason, tensor, value, bound || "–"]);
  const list = rows.length ? el("details", { open: rows.length <= 12 }, el("summary", {}, `${n.excluded} contributions did not count${n.excluded > rows.length ? `; the first ${rows.length}` : ""}`), table(["round", "node", "reason", "in", "value", "at most possible"], rows, { numeric: [0, 1, 4, 5], wrap: [2, 3] })) : el("p", { class: "note" }, "Every contribution counted.");
  return section("Nodes", chooser, `${n.count} nodes.`, keys, map, list);
}

// Time and traffic

function timeSection(data, state) {
  const runs = selectedRuns(data, state).filter((run) => run.times);
  if (!data.runs.some((run) => run.times)) return null;
  if (!runs.length) return section("Time", [], null, el("p", {}, "No run is selected."));
  const phases = Object.keys(PHASE_COLOURS).filter((phase) => runs.some((run) => run.times.totals[phase] !== undefined));
  const bars = barChart("Where the time went", runs.map((run) => ({ name: run.name, parts: phases.filter((p) => run.times.totals[p] !== undefined).map((p) => ({ name: p, value: run.times.totals[p] || 0, colour: PHASE_COLOURS[p] || "var(--s7)" })) })), { text: seconds });
  const perRound = lineChart("Seconds per round", seriesOf(data, { ...state, spread: false }, (run) => (run.times ? run.times.rounds : null)), { height: 200, yLog: true, xLog: state.xLog });
  const sent = runs.some((run) => run.times.bytes) ? lineChart("Bytes sent by node 0 per round", seriesOf(data, { ...state, spread: false }, (run) => (run.times && run.times.bytes ? run.times.bytes : null)), { height: 200, yText: bytes, xLog: state.xLog }) : null;
  const note = `local: the local steps (on real nodes those of the slowest node); wait: node 0 waits for that one; mean: guard and mean; exchange: displacements and verdicts; outer: the outer step and the new weights.${sent ? "" : " A simulation sends nothing."}`;
  return section("Time and traffic", [], note, legend(phases.map((p) => [p, PHASE_COLOURS[p] || "var(--s7)"])), el("div", { class: "grid" }, bars, perRound, sent));
}

// Sweeps and studies

function sweepSections(data) {
  if (!data.sweeps.length) return [];
  const comparable = new Set(data.sweeps.map((s) => s.metric)).size === 1;
  const lines = data.sweeps.map((s, k) => ({ name: s.name, colour: groupColour(k), dash: groupDash(k), x: s.budget.map((p) => p[0]), y: s.budget.map((p) => p[1]), low: s.budget.map((p) => p[2]), high: s.budget.map((p) => p[3]) }));
  const budget = (series, title) => lineChart(title, series.length > 4 ? series.map((s) => ({ ...s, low: undefined, high: undefined })) : series, { xLog: true, xLabel: "points tried", height: 260, wide: true, key: true });
  const together = comparable && lines.length > 1 ? section("What fewer points would have found", [], `The best ${data.sweeps[0].metric} of so many points, drawn at random from those that were tried: the median${lines.length > 4 ? "" : " and the quartiles"}.`, budget(lines, `best ${data.sweeps[0].metric}`)) : null;
  const each = data.sweeps.map((s, k) => {
    if (!s.rows.length) return section(`Sweep ${s.name}`, [], null, el("p", {}, "No trial is recorded yet."));
    const rows = s.rows.slice(0, 10).map((row, place) => [place + 1, row.number, ...row.settings.map((v) => (typeof v === "number" ? number(v) : v)), `${number(row.value)}${row.spread === null ? "" : ` ± ${Number(row.spread.toPrecision(2))}`}`, row.ended ? `ended after round ${row.rounds}` : ""]);
    const fresh = s.fresh.length ? `On ${s.fresh.length} fresh seeds the best point has ${meanAndSpread(s.fresh)}.` : "";
    const points = s.rows.map((row) => ({ ...row, values: row.settings }));
    return section(`Sweep ${s.name}`, [], `${s.algorithm}, ${s.points} points by ${s.metric} on the tuning seeds; ${s.lower ? "lower" : "higher"} is better. ${fresh}`, parallelChart("All points; the best one stands out", s.settings, points, s.metric, s.lower), together ? null : budget([lines[k]], `best ${s.metric} of so many points`), el("h3", {}, "Best points"), table(["place", "point", ...s.settings, s.metric, "note"], rows, { numeric: [0, 1] }));
  });
  return [together, ...(each.length > 3 ? [section(`${each.length} sweeps`, [], null, each.map((one) => folded(one)))] : each)];
}
// A section in a line that opens it
function folded(one) {
  const title = one.querySelector("h2").textContent;
  one.querySelector(".head").remove();
  return el("details", {}, el("summary", {}, title), [...one.children]);
}
function studySections(data) {
  return data.studies.map((study) => {
    const blocks = study.blocks.map((block) => (block.table ? table(block.table[0], block.table.slice(1)) : block.heading ? el("h3", {}, block.heading) : el("p", {}, block.text)));
    const curves = study.curves.map((chart) => lineChart(chart.title, chart.series.map((s, k) => ({ ...s, colour: groupColour(k), dash: groupDash(k) })), { xLog: chart.xLog, xLabel: chart.x, height: 260, key: true }));
    return section(`Study ${study.name}`, [], null, curves.length ? el("div", { class: "grid" }, curves) : null, blocks);
  });
}
