/* The charts of a report: `dcp.charts[kind](figure, points)` returns the content of a figure. A figure has a
   `slug`, `off` (names of hidden series) and `wide` (one panel per row). The content is {panels, items, note}:
   panels [{key, title, traces, layout, rows?}], items for dcp.switches with a `key`. `dcp.charts.NEEDS[kind]` names
   the values that a point needs to be drawn. */
"use strict";
dcp.charts = (() => {
  const DOUBLINGS = 4;
  const MAX_PANELS = 12;
  const MAX_LOADS = 3;
  const FLOOR = "floor";
  const ROW_PIXELS = 24;
  const AHEAD = "Above 1, DCP has more output than the same layout without DCP. The answer at the top of the page compares it with the best other layout instead, within the SLO.";
  const LONG_LABEL = 20; // maximum characters next to a bar on a phone
  const LABEL_PIXELS = 16; // line height of small text
  const LABEL_SHARE = 0.09; // share of a panel's height that such a line takes, so that it covers no marker
  const MIN_GAP = 0.1; // between two labels of points, as a share of the axis
  const AXIS_LETTERS = 26; // that fit next to each other below an axis
  const ASIDE = 0.03; // between series of one layout that have a point at the same load, as a share of the axis
  const MARGIN = { l: 68, r: 18, t: 18, b: 53 }; // pixels of numeric axes: Plotly draws the chart twice if an axis needs more
  const { data, series, fields } = dcp.points;
  const plain = (value) => new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 }).format(value);
  const known = (value) => value !== null && value !== undefined;

  const grouped = (points, key) => Map.groupBy(points, key);
  const title = (name) => dcp.measured(fields.get(name));
  const tipOf = (point) => [dcp.points.brief(series[point.series].name), dcp.points.words(point)];
  const shape = (look, mode) => dcp.symbol(look.symbol) + (mode === "replay" ? "-open" : "");
  const onCpu = (points) => points.some((p) => p.warnings.includes("cpu") || p.device === "CPU");
  const watermark = (points) => (onCpu(points) ? [dcp.watermark(data.watermark)] : []);
  /** Return the title of an axis below bars, with the text of the watermark, which bars would cover. */
  const below = (points, words) => ({ text: [words, onCpu(points) ? data.watermark.replaceAll("\n", " ") : ""].filter(Boolean).join("<br>") });
  const lineBelow = (points) => (onCpu(points) ? LABEL_PIXELS : 0); // additional height

  const scaled = (words) => (words.endsWith(")") ? `${words.slice(0, -1)}, log scale)` : `${words} (log scale)`);

  /** Return an axis from 0, or a logarithmic axis if values differ by a large factor. */
  function values(numbers, words) {
    const positive = numbers.filter((v) => known(v) && v > 0);
    const [least, most] = [Math.min(...positive), Math.max(...positive)];
    if (positive.length && most / least > data.log_range) {
      return { type: "log", range: [Math.log10(least / 1.2), Math.log10(most * 1.5)], dtick: most / least > 1000 ? 1 : "D2", tickformat: ",~r", title: { text: scaled(words) } };
    }
    return { type: "linear", range: [0, positive.length ? most * 1.1 : 1], nticks: 6, tickformat: ",~r", title: { text: words } };
  }

  /** Return an axis with ticks at the measured loads. */
  function loads(numbers, words) {
    const ticks = [...new Set(numbers)].sort((a, b) => a - b);
    const [least, most] = [ticks[0], ticks.at(-1)];
    const log = least > 0 && most / least >= DOUBLINGS;
    const place = log ? Math.log10 : (v) => v;
    const span = place(most) - place(least) || 1;
    const apart = [most];
    const gap = (a, b) => ((plain(a).length + plain(b).length) / 2 / AXIS_LETTERS) * span;
    for (const tick of ticks.slice(0, -1).reverse()) if (place(apart[0]) - place(tick) >= gap(apart[0], tick)) apart.unshift(tick);
    const margin = ticks.length === 1 ? Math.abs(place(least)) * 0.5 || 1 : span * 0.06;
    return {
      type: log ? "log" : "linear", range: [place(least) - margin, place(most) + margin], tickvals: apart,
      ticktext: apart.map(plain), tickangle: 0, title: { text: log ? scaled(words) : words },
    };
  }

  function limited(panels) {
    const left = panels.length - MAX_PANELS;
    return [panels.slice(0, MAX_PANELS), left > 0 ? `${MAX_PANELS} of ${panels.length} panels are drawn; use filters to see the others.` : ""];
  }

  /** Put the unit on a separate line if the title of the y axis is longer than the panel is high. */
  function titled({ layout, low }) {
    const { text } = layout.yaxis.title;
    return text.length <= (low ? 16 : 26) ? layout : { ...layout, yaxis: { ...layout.yaxis, title: { text: text.replace(" (", "<br>(") } } };
  }

  /** Reduce the ticks of a low panel. */
  function lowered(panel) {
    const { yaxis } = panel.layout;
    const ticks = yaxis.type === "log" && yaxis.range[1] - yaxis.range[0] > 1 ? { dtick: 1 } : {};
    return panel.low ? { ...panel, layout: { ...panel.layout, yaxis: { ...yaxis, ...ticks } } } : panel;
  }

  /** Arrange panels in one row per model, lines before single points; the panels of single points are low if they are more. Shared parts of titles are removed. */
  function arranged(panels) {
    const model = (panel) => panel.title.slice(0, panel.title.indexOf(", ") + 2);
    const models = [...grouped(panels, model).values()];
    const one = models.length === 1 && panels.length > 1;
    const aRow = models.length > 1 && models.some((own) => own.length > 1);
    return models.flatMap((own) => {
      const [lines, single] = [true, false].map((wanted) => own.filter((panel) => panel.traces.some((trace) => trace.mode.startsWith("lines+") && trace.x.length > 1) === wanted));
      const low = lines.length > 0 && single.length > lines.length;
      return [...lines, ...single.map((panel) => lowered({ ...panel, low }))].map((panel, i) => ({ ...panel, begins: aRow && i === 0 }));
    }).map((panel) => ({ ...panel, layout: panels.length > 1 ? titled(panel) : panel.layout, title: (one ? panel.title.slice(model(panel).length) : panel.title).replace(/, (live|replay)$/, "") }));
  }

  /** Return the series of the points, each with a switch. */
  function itemsOf(points) {
    const replayed = points.every((p) => p.mode === "replay") ? "replay" : "";
    const layouts = new Map(points.map((p) => [p.series, p]));
    const lighter = (a, b) => a.tp - b.tp || a.dp - b.dp || a.dcp - b.dcp || a.series - b.series;
    return [...layouts.values()].sort(lighter).map((p) => p.series).map((i) => ({
      key: series[i].name, name: dcp.points.brief(series[i].name), colour: series[i].colour, symbol: shape(series[i], replayed), dash: dcp.dash(series[i].dash),
    }));
  }

  /** Return the positions of a series' points along an axis: series of one layout that share a load are drawn side by side, as one
      would hide the other, within half the distance to the next load and inside the frame. */
  function placeSideBySide(points, axis) {
    const place = axis.type === "log" ? [Math.log10, (v) => 10 ** v] : [(v) => v, (v) => v];
    const at = [...new Set(points.map(along))].map(place[0]).sort((a, b) => a - b);
    const gap = Math.min(...at.slice(1).map((v, i) => v - at[i]), 3 * (at[0] - axis.range[0]));
    const shifts = new Map();
    for (const [, own] of grouped(points, (p) => series[p.series].colour)) {
      const shared = [...grouped(own, along).values()].some((here) => new Set(here.map((p) => p.series)).size > 1);
      const lines = shared ? [...new Set(own.map((p) => p.series))] : [];
      const step = Math.min(ASIDE * (axis.range[1] - axis.range[0]), gap / 2 / Math.max(lines.length - 1, 1));
      lines.forEach((of, i) => shifts.set(of, (i - (lines.length - 1) / 2) * step));
    }
    return (point) => (shifts.has(point.series) ? place[1](place[0](along(point)) + shifts.get(point.series)) : along(point));
  }

  function line(points, x, y) {
    const look = series[points[0].series];
    const [low, high] = [`${y}_low`, `${y}_high`];
    const spread = points.some((p) => known(p[low]) && p[low] !== p[high]);
    const { colour } = look;
    return {
      x: points.map(x), y: points.map((p) => p[y]), own: points, mode: "lines+markers", tip: (i) => tipOf(points[i]),
      line: { color: colour, dash: dcp.dash(look.dash), width: 2 }, marker: { color: colour, symbol: shape(look, points[0].mode), size: 8, line: { color: colour, width: 1.5 } },
      error_y: spread ? dcp.spread(...[y, low, high].map((name) => points.map((p) => p[name])), { thickness: 1.3, width: 4, color: colour }) : { visible: false },
    };
  }

  /** Draw a percentile next to a line. */
  function dashes(points, x, y) {
    const color = series[points[0].series].colour;
    const marker = { symbol: "line-ew-open", size: 13, color, line: { width: 2.5, color } };
    return { ...line(points, x, y), line: { color, dash: "dot", width: 1 }, marker, error_y: { visible: false } };
  }

  const along = (point) => (point.arrival === "gamma" ? point.load_request_rate : point.concurrency);
  const byLoad = (points) => [...points].sort((a, b) => along(a) - along(b));
  const switchedOn = (figure, points) => points.filter((p) => !figure.off.has(series[p.series].name));
  const AGAINST = { gamma: "request rate (requests/s)", closed: "concurrency (closed loop)" }; // by arrival of served requests
  const against = (point) => AGAINST[point.arrival] ?? "concurrency (requests in flight)";

  /** Draw lines over load; `stats` are [column, name] pairs: the first is a line, the others are dashes. */
  function overLoad(figure, points, stats) {
    const loaded = points.filter((p) => p.arrival !== "trace" && stats.some(([column]) => known(p[column])));
    const items = itemsOf(loaded);
    const present = stats.filter(([column]) => loaded.some((p) => known(p[column])));
    if (present.length > 1) {
      items.push(...present.map(([, name], i) => ({ key: name, name, colour: "var(--soft)", symbol: i ? "" : "circle", dash: i ? "dot" : "solid" })));
    }
    const on = switchedOn(figure, loaded);
    const drawn = present.filter(([, name]) => !figure.off.has(name));
    const heights = grouped(on, (p) => p.model);
    const panels = [...grouped(on, (p) => p.panel)].map(([name, inside]) => {
      const xaxis = loads(inside.map(along), against(inside[0]));
      const x = placeSideBySide(inside, xaxis);
      const traces = [...grouped(inside, (p) => p.series).values()].flatMap((own) => drawn.map(([column]) => {
        const ordered = byLoad(own.filter((p) => known(p[column])));
        return ordered.length === 0 ? null : column === present[0][0] ? line(ordered, x, column) : dashes(ordered, x, column);
      })).filter(Boolean);
      const all = heights.get(inside[0].model).flatMap((p) => drawn.flatMap(([column]) => [p[column], p[`${column}_high`]]));
      return {
        key: name, title: name, traces,
        layout: { margin: MARGIN, xaxis, yaxis: values(all, figure.axis), shapes: watermark(inside) },
      };
    });
    const traced = points.some((p) => p.arrival === "trace") ? "Requests from a file have a single load: see the table of points and Explore. " : "";
    const missing = stats.length > 1 && present.length < stats.length ? "No point has a p99: it needs 662 samples, or a result file that states it." : "";
    const [few, left] = limited(arranged(panels));
    return { panels: few, items, note: [traced, missing, left].join(" ").trim() };
  }

  /** Each run, or engine, has its own panels, as ratios compare points of the same run. */
  const several = (points) => new Set(points.map((p) => p.run)).size > 1;
  const panelIn = (of, apart) => (apart && of.run !== of.model ? `${of.panel}, ${data.filters.run === "run" ? "run " : ""}${of.run}` : of.panel);
  const byRun = (points) => (several(points) ? points.map((p) => ({ ...p, panel: panelIn(p, true) })) : points);

  /** Draw ratios of output with DCP to output of the same layout without it. */
  function breakEven(figure, points) {
    const compared = byRun(points.filter((p) => known(p.dcp_ratio) && p.arrival === "closed"));
    const { panels, items, note } = overLoad({ ...figure, axis: "with DCP / without" }, compared, [["dcp_ratio", "ratio"]]);
    const on = switchedOn(figure, compared).flatMap((p) => [p.dcp_ratio, p.dcp_ratio_low ?? p.dcp_ratio, p.dcp_ratio_high ?? p.dcp_ratio, 1]);
    const [least, most] = [Math.min(...on), Math.max(...on)];
    const margin = (most - least) * 0.08 || 0.05;
    const level = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: "var(--ink)", width: 1.5 } };
    const yaxis = { type: "linear", range: [least - margin, most + margin], nticks: 6, ticksuffix: "×", title: { text: figure.axis ?? "with DCP / without" } };
    return { items, note: `${AHEAD} ${note}`.trim(), panels: panels.map((panel) => ({ ...panel, layout: { ...panel.layout, yaxis, shapes: [level] } })) };
  }

  /** Draw each layout over the best other one, the smallest load from which on DCP is ahead, and layouts that do not fit. */
  function overview(figure, points) {
    const axis = "relative to the best other";
    const kept = points.filter((p) => known(p.other_ratio));
    const compared = byRun(kept);
    const { panels, items: names, note } = overLoad({ ...figure, axis }, compared, [["other_ratio", "ratio"]]);
    const items = names.map((item) => ({ ...item, symbol: item.symbol.replace("-open", "") })); // hollow has another meaning here
    const on = switchedOn(figure, compared);
    const ratios = [...on.map((p) => p.other_ratio), 1];
    const margin = (Math.max(...ratios) - Math.min(...ratios)) * 0.08 || 0.05;
    const lostIn = (panel) => [...grouped(data.lacks_memory.filter((lost) => panelIn(lost, several(kept)) === panel.key), (lost) => lost.layout)];
    const below = Math.max(0, ...panels.map((panel) => lostIn(panel).length)) * LABEL_SHARE * (Math.max(...ratios) - Math.min(...ratios) + 2 * margin);
    const above = on.some((p) => p.pays) ? LABEL_SHARE * (Math.max(...ratios) - Math.min(...ratios) + 2 * margin) : 0;
    const yaxis = { type: "linear", range: [Math.min(...ratios) - margin - below, Math.max(...ratios) + margin + above], nticks: 6, ticksuffix: "×", title: { text: axis } };
    const label = (words, more) => ({ text: dcp.text(words), xref: "paper", yref: "paper", showarrow: false, font: { size: 12, color: "var(--soft)" }, ...more });
    const drawn = panels.map((panel) => {
      const inside = on.filter((p) => p.panel === panel.key);
      const loads_ = [...grouped(inside, along)].sort(([a], [b]) => a - b);
      const wins = loads_.map(([, own]) => own.some((p) => p.pays));
      const from = loads_[wins.lastIndexOf(false) + 1]?.[0];
      const shapes = [
        { type: "rect", layer: "below", xref: "paper", x0: 0, x1: 1, y0: 1 - data.level, y1: 1 + data.level, fillcolor: "var(--panel)", line: { width: 0 } },
        { type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: "var(--ink)", width: 1.5 } },
        ...(from === undefined ? [] : [{ type: "line", yref: "paper", x0: from, x1: from, y0: 0, y1: 1, line: { color: "var(--soft)", width: 1.5, dash: "dot" } }]),
      ];
      const labels = lostIn(panel).map(([layout, lost], i) => label(`${layout}: does not fit from ${plain(Math.min(...lost.map((l) => l.concurrency)))}`, { x: 1, y: 0.01, yshift: LABEL_PIXELS * i, xanchor: "right", yanchor: "bottom" }));
      if (from !== undefined) {
        const { type, range } = panel.layout.xaxis;
        const x = type === "log" ? Math.log10(from) : from;
        const onLeft = x < (range[0] + range[1]) / 2;
        labels.push(label(`DCP ahead from ${plain(from)}`, { xref: "x", x, xshift: onLeft ? 4 : -4, y: 1, xanchor: onLeft ? "left" : "right", yanchor: "top" }));
      }
      const traces = panel.traces.map((trace) => ({ ...trace, marker: { ...trace.marker, symbol: trace.own.map((p) => shape(series[p.series], p.misses ? "replay" : "")) } }));
      return { ...panel, traces, layout: { ...panel.layout, yaxis, shapes, annotations: labels } };
    });
    const hollow = on.some((p) => p.misses) ? "Hollow markers miss the SLO. " : "";
    return { items, panels: drawn, note: `${data.single ? "Above 1, a layout is faster than the fastest other one. Each layout ran in one launch, and another launch may differ." : `Above 1, a layout is ahead of the best other one; in the band (± ${plain(100 * data.level)} %) they are level.`} ${hollow}${note}`.trim() };
  }

  /** Return the points that no other point exceeds in both values, fastest user first. */
  function best(points) {
    let top = -Infinity;
    return [...points].sort((a, b) => b.tok_s_per_user - a.tok_s_per_user || b.output_tok_s_per_gpu - a.output_tok_s_per_gpu)
      .filter((p) => p.output_tok_s_per_gpu > top && ((top = p.output_tok_s_per_gpu), true));
  }

  /** Return the points whose labels do not overlap on axes that hold `all`, from the last one, which is the most loaded. */
  function apart(points, all) {
    const [across, up] = ["tok_s_per_user", "output_tok_s_per_gpu"].map((name) => {
      const numbers = all.map((p) => p[name]).filter((v) => v > 0);
      const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
      return most / least > data.log_range ? (p) => Math.log(p[name] / least) / Math.log((most * 1.8) / least) : (p) => p[name] / (most * 1.1);
    });
    const kept = [];
    for (const p of [...points].reverse()) {
      if (kept.every((other) => Math.abs(across(p) - across(other)) > MIN_GAP || Math.abs(up(p) - up(other)) > MIN_GAP)) kept.unshift(p);
    }
    return kept;
  }

  function frontier(figure, points) {
    const placed = points.filter((p) => known(p.tok_s_per_user) && known(p.output_tok_s_per_gpu));
    const items = itemsOf(placed);
    const on = switchedOn(figure, placed);
    const panels = [...grouped(on, (p) => p.panel)].map(([name, inside]) => {
      const edge = best(inside);
      const same = on.filter((p) => p.model === inside[0].model);
      const last = apart([...new Map(edge.map((p) => [along(p), p])).values()], same);
      const traces = [
        { x: edge.map((p) => p.tok_s_per_user), y: edge.map((p) => p.output_tok_s_per_gpu), mode: "lines", line: { color: "var(--line)", width: 8 }, hoverinfo: "skip" },
        ...[...grouped(inside, (p) => p.series).values()].map((own) => line(byLoad(own), (p) => p.tok_s_per_user, "output_tok_s_per_gpu")),
        { x: last.map((p) => p.tok_s_per_user), y: last.map((p) => p.output_tok_s_per_gpu), mode: "text", text: last.map((p) => plain(along(p))), textposition: "top right", textfont: { size: 11, color: "var(--soft)" }, hoverinfo: "skip", cliponaxis: false },
      ];
      return {
        key: name, title: name, traces,
        layout: {
          margin: MARGIN, xaxis: values(same.map((p) => p.tok_s_per_user), title("tok_s_per_user")), yaxis: values(same.map((p) => p.output_tok_s_per_gpu), title("output_tok_s_per_gpu")),
          shapes: watermark(inside),
        },
      };
    });
    const [few, left] = limited(arranged(panels));
    return { panels: few, items, note: `Up and right is better. The wide line joins the points that no other point exceeds in both; the numbers next to these points are their loads. ${left}`.trim() };
  }

  function kv(figure, points) {
    const holding = points.filter((p) => known(p.kv_tokens_per_gib));
    const models = grouped(holding, (p) => panelIn({ ...p, panel: p.model }, several(points)));
    const measures = [["kv_tokens_per_gib", "tokens per GiB of KV memory on each GPU"], ["kv_capacity_tokens", "tokens held in all"]];
    const panels = [...models].flatMap(([model, inside]) => measures.map(([column, words]) => {
      const real = column === "kv_capacity_tokens" ? inside.filter((p) => p.kv_bounded_by !== "sweep") : inside;
      const tops = [...grouped(real, (p) => p.layout).values()].map((own) => own.reduce((a, b) => (b[column] > a[column] ? b : a)));
      if (tops.length === 0) return null;
      tops.sort((a, b) => a.tp - b.tp || a.dp - b.dp || a.dcp - b.dcp);
      const first = tops[0][column];
      return {
        key: `${model} ${column}`, title: `${model}, ${words}`, rows: tops.length, below: lineBelow(inside),
        traces: [{
          type: "bar", orientation: "h", x: tops.map((p) => p[column]), y: tops.map((p) => dcp.text(p.layout)), marker: { color: tops.map((p) => series[p.series].colour) },
          text: tops.map((p) => `${dcp.number(p[column])} (${Number((p[column] / first).toPrecision(3))}×)`), textposition: "outside", cliponaxis: false, textfont: { color: "var(--ink)" },
          tip: (i) => tipOf(tops[i]),
        }],
        layout: {
          xaxis: { range: [0, Math.max(...tops.map((p) => p[column])) * 1.8], showticklabels: false, ticks: "", showgrid: false, showline: false, title: below(inside, "") },
          yaxis: { type: "category", autorange: "reversed", showline: false, showgrid: false, ticks: "" }, bargap: 0.35,
        },
      };
    })).filter(Boolean);
    const [few, left] = limited(panels);
    const drawn = new Set(holding.map((p) => p.run));
    const others = new Set(points.filter((p) => known(p.kv_capacity_tokens) && !drawn.has(p.run)).map((p) => p.run));
    const without = holding.length > 0 && others.size > 0 ? `Not drawn, as the memory of the KV cache is unknown: ${[...others].join(", ")}.` : "";
    return { panels: few, items: [], note: `${without} ${left}`.trim() };
  }

  function phases(figure, points) {
    const profiled = points.filter((p) => known(p["phase:idle"]));
    const names = [...data.phases, "idle"].filter((name) => profiled.some((p) => p[`phase:${name}`] > 0));
    const cpu = profiled.every((p) => p.device === "CPU");
    const called = (name) => (name === "idle" && cpu ? "outside ranges" : name.replaceAll("_", " "));
    const floored = profiled.some((p) => names.some((name) => p[`floor:${name}`] > 0));
    const items = names.map((name) => ({ key: name, name: called(name), colour: `var(--phase-${name})` }));
    if (floored) items.push({ key: FLOOR, name: FLOOR, colour: "var(--ink)" });
    const on = names.filter((name) => !figure.off.has(name));
    const all = [...new Set(profiled.map((p) => p.concurrency))].sort((a, b) => a - b);
    const some = all.length > MAX_LOADS ? [all[0], all[all.length >> 1], all.at(-1)] : all;
    const apart = several(profiled);
    const total = (point) => on.reduce((sum, phase) => sum + (point[`phase:${phase}`] ?? 0), 0);
    const whole = (point) => names.reduce((sum, phase) => sum + (point[`phase:${phase}`] ?? 0), 0);
    const limit = (point, phase) => {
      const [floor, time] = [point[`floor:${phase}`], point[`phase:${phase}`]];
      return known(floor) && time > 0 ? [["floor", `${dcp.number(floor)} ms, ${(floor / time).toFixed(2)} of its time`]] : [];
    };
    const shareOf = (point, phase) => [called(phase), [
      ["time", `${dcp.number(point[`phase:${phase}`])} ms`], ...limit(point, phase), ["share of the profiled step", `${dcp.number((100 * point[`phase:${phase}`]) / whole(point))} %`],
      ["layout", point.label], ["concurrency", dcp.number(point.concurrency)], ["load", dcp.points.brief(point.panel)],
    ]];
    /** Draw thin bars inside the others, each from the beginning of its phase and as long as its floor. */
    const floorsOf = (bars) => {
      const least = bars.flatMap(({ point, y }) => on.map((phase, i) => ({
        point, y, phase, ms: point[`floor:${phase}`] ?? 0, from: on.slice(0, i).reduce((sum, other) => sum + (point[`phase:${other}`] ?? 0), 0),
      }))).filter((part) => part.ms > 0);
      return {
        type: "bar", orientation: "h", y: least.map((part) => part.y), x: least.map((part) => part.ms), base: least.map((part) => part.from), width: 0.24,
        marker: { color: "var(--paper)", line: { color: "var(--ink)", width: 1 } }, tip: (i) => shareOf(least[i].point, least[i].phase),
      };
    };
    const longest = (model) => Math.max(0, ...profiled.filter((p) => p.model === model).map(total));
    const panels = [...grouped(profiled.filter((p) => some.includes(p.concurrency)), (p) => panelIn(p, apart))].map(([name, inside]) => {
      const rows = some.flatMap((c) => {
        const own = inside.filter((p) => p.concurrency === c);
        return own.length ? [{ heading: `concurrency ${c}` }, ...own.map((point) => ({ point }))] : [];
      });
      const wordy = inside.some((point) => point.label.length > LONG_LABEL);
      const labelled = (point) => { const text = dcp.text(dcp.points.brief(point.label)); return wordy ? text.replace(" (", "<br>(") : text; };
      const bars = rows.map((row, y) => ({ ...row, y })).filter((row) => row.point);
      return {
        key: name, title: name, rows: rows.length * (wordy ? 1.4 : 1), below: lineBelow(inside),
        traces: [...on.map((phase) => ({
          type: "bar", orientation: "h", y: bars.map((bar) => bar.y), x: bars.map((bar) => bar.point[`phase:${phase}`]), marker: { color: `var(--phase-${phase})`, line: { color: "var(--paper)", width: 0.5 } },
          tip: (i) => shareOf(bars[i].point, phase),
        })), ...(floored && !figure.off.has(FLOOR) ? [floorsOf(bars)] : [])],
        layout: {
          barmode: "stack", bargap: 0.2,
          xaxis: { title: below(inside, "profiled step (ms)"), range: [0, longest(inside[0].model) * 1.04], nticks: 5 },
          yaxis: {
            tickvals: rows.map((_, y) => y), ticktext: rows.map((row) => (row.heading ? `<b>${row.heading}</b>` : labelled(row.point))),
            range: [rows.length - 0.4, -0.6], showgrid: false, showline: false, ticks: "", tickfont: { size: 12 },
          },
        },
      };
    });
    const [few, left] = limited(panels);
    const fewer = some.length < all.length ? `Concurrencies ${some.map(dcp.number).join(", ")} of ${all.length}; filters bring others.` : "";
    const floors = floored ? "A white bar inside a part is its floor, the least time that this machine needs for it." : "";
    return { panels: few, items, note: [floors, fewer, left].filter(Boolean).join(" ") };
  }

  /** Any number against any other; a thin line joins points that differ in their load alone. */
  function explore(figure, points) {
    const { x, y, colour } = figure;
    const placed = points.filter((p) => known(p[x]) && known(p[y]));
    const mixed = new Set(placed.map((p) => p.mode)).size > 1;
    const group = (p) => `${p[colour] ?? "–"}${mixed && colour !== "mode" ? `, ${p.mode}` : ""}`;
    const every = [...new Set(dcp.points.all.map((p) => String(p[colour] ?? "–")))];
    const look = (p) => {
      const i = every.indexOf(String(p[colour] ?? "–"));
      return colour === "layout" ? series[p.series] : { colour: dcp.series(i), symbol: i + Math.floor(i / 7) };
    };
    const groups = [...grouped(placed, group)].sort((a, b) => every.indexOf(String(a[1][0][colour])) - every.indexOf(String(b[1][0][colour])));
    const items = groups.map(([name, own]) => ({ key: name, name: dcp.points.brief(name), colour: look(own[0]).colour, symbol: shape(look(own[0]), own[0].mode) }));
    const joined = ["concurrency", "load_request_rate"].includes(x);
    const traces = groups.filter(([name]) => !figure.off.has(name)).map(([, own]) => {
      const parts = joined ? [...grouped(own, (p) => `${p.series} ${p.panel}`).values()] : [own];
      const ordered = parts.flatMap((part) => [...[...part].sort((a, b) => a[x] - b[x]), null]).slice(0, -1);
      const [color, symbol] = [look(own[0]).colour, shape(look(own[0]), own[0].mode)];
      return {
        x: ordered.map((p) => p?.[x] ?? null), y: ordered.map((p) => p?.[y] ?? null), tip: (i) => tipOf(ordered[i]),
        mode: joined ? "lines+markers" : "markers", line: { color, width: 1 }, marker: { color, symbol, size: 8, line: { color, width: 1.5 } }, connectgaps: false,
      };
    });
    const on = placed.filter((p) => !figure.off.has(group(p)));
    const axis = (name) => (joined && name === x ? loads(on.map((p) => p[name]), title(name)) : values(on.map((p) => p[name]), title(name)));
    const panels = on.length === 0 ? [] : [{ key: "explore", title: "", traces, layout: { margin: MARGIN, xaxis: axis(x), yaxis: axis(y), shapes: watermark(on) } }];
    const without = points.length - placed.length;
    return { panels, items, note: without > 0 ? `Not drawn: ${without} of ${dcp.counted(points.length, "point")} without ${fields.get(x).label} or without ${fields.get(y).label}.` : "", wide: true };
  }

  const NEEDS = {
    throughput: "an output rate", ttft: "a TTFT", itl: "an ITL", frontier: "both a speed for one user and an output per GPU",
    overview: "another layout to be compared with", "break-even": "a baseline without DCP", kv: "a KV capacity", phases: "a profiled step", explore: "both numbers",
  };

  return {
    ROW_PIXELS, NEEDS,
    throughput: (figure, points) => overLoad({ ...figure, axis: "output (tok/s)" }, points, [["output_tok_s", "output"]]),
    ttft: (figure, points) => overLoad({ ...figure, axis: "time to first token (ms)" }, points, [["ttft_p50_ms", "p50"], ["ttft_p99_ms", "p99"]]),
    itl: (figure, points) => overLoad({ ...figure, axis: "inter-token latency (ms)" }, points, [[points.some((p) => known(p.step_ms)) ? "step_ms" : "itl_p50_ms", "p50"], ["itl_p99_ms", "p99"]]),
    overview, "break-even": breakEven, frontier, kv, phases, explore,
  };
})();
