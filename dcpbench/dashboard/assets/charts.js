/* The history of the selected points: a chart for each metric, changes as text, all runs in a table.
   dash.draw()  load missing data and draw; called again whenever selection, axis or data change. */
"use strict";
(() => {
  const { state } = dash;
  const { element: el, find } = dcp;
  const FIRST = 4;
  const MAX_OTHERS = 6;
  const TOP = 26;
  const LABEL = { size: 12, height: 17, apart: 8 }; // pixels; Plotly leaves a little around a text
  const AXES = [["date", "date"], ["commit", "commit"], ["run", "run"]];
  let drawing = 0;

  async function historyOf(line) {
    const { starts, shards } = dash.index;
    let shard = starts.length - 1;
    while (starts[shard] > line) shard -= 1;
    const found = (await dash.load(shards[shard]))[line - starts[shard]];
    return { line, ...found, run: dash.summed(found.run) };
  }

  dash.draw = async () => {
    const mine = ++drawing;
    const lines = state.picked.map((id) => dash.numberOf.get(id)).filter((line) => line !== undefined);
    find("nothing").hidden = lines.length > 0;
    if (!lines.length) { find("picked").replaceChildren(); find("charts").replaceChildren(); return; }
    try {
      const histories = await Promise.all([...lines.map(historyOf), dcp.plotly()]);
      if (mine !== drawing) return; // the selection has changed meanwhile
      histories.pop();
      controls(histories);
      charts(histories);
    } catch (error) {
      dash.trouble(error);
    }
  };

  function controls(histories) {
    const axis = dcp.select(AXES, state.x, (value) => { state.x = value; dash.save(); charts(histories); }, { name: "x" });
    const none = () => { for (const id of [...state.picked]) dash.pick(id, false); find("points").querySelector("input").focus(); };
    const look = looks(histories);
    const rows = histories.map(({ line }, i) => el("li", {},
      dcp.sample(look[i]),
      el("span", {}, `${dash.name(line)} · ${dash.word("how", line)}`, el("span", { class: "note" }, ` — ${place(line)}`)),
      el("button", { type: "button", "aria-label": `Untick ${dash.name(line)}`, click: () => dash.pick(dash.columns.id[line], false) }, "Untick")));
    const clear = el("button", { type: "button", click: none }, "Untick all");
    find("picked").replaceChildren(el("ul", {}, ...rows), elsewhere(histories), el("div", { class: "controls" }, el("label", {}, "By", axis), clear));
  }

  /** Return colour, marker and dash of each history: one colour per layout, and a marker and dash for each history of a layout. */
  function looks(histories) {
    const seen = new Map();
    return histories.map(({ line }) => {
      const [colour, marker] = dash.index.looks[dash.columns.layout[line]];
      const nth = seen.get(colour) ?? 0;
      seen.set(colour, nth + 1);
      return { colour, symbol: dcp.symbol(marker + nth), dash: dcp.dash(nth) };
    });
  }

  const place = (line) => [dash.word("hardware", line), ...dash.under(line)].filter(Boolean).join(", ");

  /** Return buttons that select the same points on other hardware, drivers and conditions. */
  function elsewhere(histories) {
    const { point, id, cpu } = dash.columns;
    const shown = new Set(histories.map(({ line }) => line));
    const points = new Set(histories.map(({ line }) => point[line]));
    const others = [];
    for (let line = 0; line < point.length && others.length < MAX_OTHERS; line++) {
      if (points.has(point[line]) && !shown.has(line) && (state.cpu || !cpu[line])) others.push(line);
    }
    if (!others.length) return "";
    const layout = (line) => (points.size > 1 ? `${dash.word("layout", line)}: ` : "");
    return el("p", { class: "note" }, "The same points elsewhere: ", ...others.map((line) => el("button", {
      type: "button", "aria-label": `Show ${dash.name(line)}, ${place(line)}`, click: () => dash.pick(id[line], true),
    }, `${layout(line)}${place(line)}`)));
  }

  function charts(histories) {
    const having = dash.index.measures.filter((m) => histories.some((h) => h.values[m.id]));
    const chosen = having.filter((m) => m.id === state.metric);
    const rest = having.filter((m) => m.id !== state.metric);
    const changed = rest.filter((m) => histories.some((h) => h.changes[m.id]));
    const order = [...chosen, ...changed, ...rest.filter((m) => !changed.includes(m))];
    const shown = state.all ? order : order.slice(0, Math.max(FIRST, chosen.length + changed.length));
    const figures = shown.map((m) => figure(m, histories));
    const parts = figures.map(({ node }) => node);
    if (order.length > shown.length || state.all) {
      const more = () => { state.all = !state.all; dash.save(); charts(histories); };
      parts.push(el("p", {}, el("button", { type: "button", click: more }, state.all ? "Fewer metrics" : `All ${order.length} metrics`)));
    }
    find("charts").replaceChildren(...parts, ...histories.map(runsTable));
    for (const { draw } of figures) draw();
    for (const box of find("charts").querySelectorAll("p, details")) box.style.gridColumn = "1 / -1";
  }

  /** Return the positions of runs on the axis; null for a run without a date. */
  function axisOf(histories) {
    const { date, commit, name } = dash.index.runs;
    if (state.x === "date") return { at: (run) => date[run], between: (a, b) => (date[a] && date[b] ? new Date((Date.parse(date[a]) + Date.parse(date[b])) / 2).toISOString() : null), layout: { type: "date" } };
    const runs = [...new Set(histories.flatMap((h) => h.run))].sort((a, b) => a - b);
    const text = (run) => (state.x === "commit" ? commit[run] || "no commit" : name[run]);
    const labels = [...new Set(runs.map(text))];
    const number = new Map(labels.map((label, i) => [label, i]));
    const at = (run) => number.get(text(run));
    const step = Math.ceil(labels.length / 14);
    const ticks = labels.map((label, i) => [i, label]).filter(([i]) => i % step === 0);
    const short = (label) => (label.length > 14 ? `…${label.slice(-13)}` : label);
    return { at, between: (a, b) => (at(a) + at(b)) / 2, layout: { tickvals: ticks.map(([i]) => i), ticktext: ticks.map(([, label]) => dcp.text(state.x === "commit" ? label.slice(0, 7) : short(label))), tickangle: -40 } };
  }

  function figure(measure, histories) {
    const axis = axisOf(histories);
    const look = looks(histories);
    const traces = [];
    const shapes = [];
    const labels = [];
    const sentences = [];
    let undated = 0;
    histories.forEach((history, i) => {
      const values = history.values[measure.id];
      if (!values) return;
      const known = history.run.map((_, k) => k).filter((k) => values[0][k] !== null);
      const placed = known.filter((k) => axis.at(history.run[k]) !== null);
      undated += known.length - placed.length;
      traces.push(trace(measure, history, placed, axis, look[i]));
      for (const change of history.changes[measure.id] ?? []) {
        const [before, after] = change.map((k) => history.run[k]);
        sentences.push(sentence(measure, history.line, before, after, change, histories.length > 1));
        const x = axis.between(before, after);
        if (x === null) continue;
        shapes.push({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: look[i].colour, width: 1.5, dash: "dash" } });
        labels.push({ x, xref: "x", y: 1, yref: "paper", yanchor: "bottom", yshift: 0, showarrow: false, text: dcp.text(dash.changed("", change).text), font: { size: LABEL.size, color: "var(--ink)" } });
      }
    });
    const watermarks = histories.some(({ line }) => dash.columns.cpu[line]) ? [dcp.watermark("CPU: functional run, not performance")] : [];
    const chart = el("div", { class: "chart", role: "img", "aria-label": `${measure.label} over ${histories.length} histories; the values are in the tables below` });
    const notes = [measure.better ? `${measure.better} is better` : "", undated ? `${undated} values of runs without a date are not shown; choose “by run”` : ""].filter(Boolean);
    const node = el("figure", { "data-measure": measure.id }, el("figcaption", {}, dcp.measured(measure)), el("p", { class: "note" }, notes.join("; ")), chart, ...(sentences.length ? [el("ul", {}, ...sentences)] : []));
    const layout = { xaxis: { ...axis.layout }, yaxis: { tickformat: "~r", separatethousands: true }, shapes: [...shapes, ...watermarks], annotations: labels, margin: { t: TOP } };
    const draw = () => {
      const done = dcp.draw(chart, traces, layout);
      const apart = () => keepApart(chart, layout, labels);
      chart.on("plotly_afterplot", apart); // labels move together on a narrower page and in print
      done.then(apart);
    };
    return { node, draw };
  }

  /** Return the row of each label, counted from the plot upwards: the lowest row in which it overlaps no other label. */
  function rowsOf(chart, labels) {
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = `${LABEL.size}px ${getComputedStyle(document.body).fontFamily}`;
    const spans = labels.map(({ x, text }, i) => {
      const [middle, half] = [chart._fullLayout.xaxis.r2p(x), pen.measureText(text).width / 2];
      return { i, left: middle - half, right: middle + half + LABEL.apart };
    });
    const ends = [];
    const rows = [];
    for (const { i, left, right } of spans.sort((a, b) => a.left - b.left)) {
      const free = ends.findIndex((end) => end <= left);
      rows[i] = free < 0 ? ends.length : free;
      ends[rows[i]] = right;
    }
    return rows;
  }

  /** Move labels up where they would overlap; the chart grows by their rows, and its plot keeps its size. */
  function keepApart(chart, layout, labels) {
    const changed = {};
    const rows = labels.length ? rowsOf(chart, labels) : [];
    rows.forEach((row, i) => {
      if (labels[i].yshift !== row * LABEL.height) changed[`annotations[${i}].yshift`] = labels[i].yshift = row * LABEL.height;
    });
    if (!Object.keys(changed).length) return;
    const more = Math.max(...rows) * LABEL.height;
    changed["margin.t"] = layout.margin.t = TOP + more;
    chart.style.setProperty("--labels", `${more}px`);
    Plotly.relayout(chart, changed); // without a new drawing, which would reset the zoom
  }

  function trace(measure, history, placed, axis, { colour, symbol, dash: dashes }) {
    const [median, low, high] = history.values[measure.id].map((values) => placed.map((k) => values[k]));
    const { name, date, commit } = dash.index.runs;
    return {
      type: "scatter", mode: placed.length > 1 ? "lines+markers" : "markers", name: dcp.text(dash.name(history.line)),
      x: placed.map((k) => axis.at(history.run[k])), y: median,
      line: { color: colour, width: 1.5, dash: dashes }, marker: { color: colour, symbol, size: 7 },
      error_y: low ? dcp.spread(median, low, high, { thickness: 1.2, width: 3, color: colour }) : { visible: false },
      tip: (j) => {
        const run = history.run[placed[j]];
        return [`${dash.name(history.line)}, ${place(history.line)}`, [
          [measure.label, `${dcp.number(median[j])} ${measure.unit}`], ["interval", interval([median, low, high], j)],
          ["run", name[run]], ["date", dash.when(date[run])], ["commit", commit[run] || "–"], ["warnings", history.warnings[placed[j]]],
        ].filter(([, value]) => value)];
      },
    };
  }

  const interval = ([, low, high], k) => (low ? dcp.range(low[k], high[k]).replace("–", " – ") : "");

  function sentence(measure, line, before, after, change, named) {
    const [, , ratio, low, high, old, fresh] = change;
    const { name, date, commit } = dash.index.runs;
    const at = (run) => `${name[run]} (${[dash.when(date[run]), commit[run]].filter(Boolean).join(", ")})`;
    const { kind, text, judgement } = dash.changed(measure.better, change);
    const sure = ratio === null ? "" : ` (95 %: ${dash.percent(low)} to ${dash.percent(high)})`;
    return el("li", {}, el("span", { class: kind }, `${text}${judgement}`),
      `${sure}, ${dcp.number(old)} → ${dcp.number(fresh)} ${measure.unit}, between ${at(before)} and ${at(after)}${named ? `: ${dash.name(line)}` : ""}`);
  }

  function runsTable(history) {
    const { name, slug, date, commit } = dash.index.runs;
    const run = (k) => history.run[k];
    const valueOf = (values) => (k) => { const ends = interval(values, k); return [dcp.number(values[0][k]), el("span", { class: "note" }, ends && ` [${ends}]`)]; };
    const outcome = (k) => {
      const ok = history.outcome[k] === "ok";
      return el("td", { class: ok ? null : "long" }, el("span", { class: ok ? "" : "bad" }, history.outcome[k]), history.reason[k] ? ` ${history.reason[k]}` : "");
    };
    const columns = [
      { label: "Run", cell: (k) => (dash.hasPage(run(k)) ? el("a", { href: `runs/${slug[run(k)]}/report.html` }, name[run(k)]) : name[run(k)]) },
      { label: "Date", class: "w", cell: (k) => dash.when(date[run(k)]) }, { label: "Commit", cell: (k) => commit[run(k)] },
      { label: "Outcome", cell: outcome }, { label: "Repeats", class: "n", cell: (k) => history.repeats[k] },
      ...dash.index.measures.filter((m) => history.values[m.id]).map((m) => ({ label: dcp.measured(m), class: "n", cell: valueOf(history.values[m.id]) })),
      { label: "Warnings", cell: (k) => history.warnings[k] ?? "" },
    ];
    const place = el("div");
    dcp.table(place, `Runs of ${dash.name(history.line)}`, columns)(history.run.map((_, k) => k).reverse());
    return el("details", {}, el("summary", {}, `All ${history.run.length} runs of ${dash.name(history.line)}`), place);
  }

  dash.onPick = dash.draw;
})();
