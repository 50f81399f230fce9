/* Plotly charts that follow the page's theme. Extends `dcp`:

   dcp.plotly()                       load Plotly once: from the page, which has it compressed in <script id="plotly">, or
                                      from the file that <html data-plotly> names
   dcp.draw(element, traces, layout)  draw or redraw; colours may be "var(--name)" or "light-dark(…)" anywhere in both, and are
                                      resolved again when the theme changes, and for printing. Size: that of the element; printed
                                      `data-paper` pixels wide. A message replaces a chart that cannot be drawn.
   dcp.undrawn(element, error)        put that message into a place for charts
   dcp.series(i), symbol(i), dash(i)  colour, marker and line of the i-th series, as in show/figure_style.py
   dcp.spread(middle, low, high, look)  error bars from lists of numbers, of which ends may be null
   dcp.text(string)                   any string as text for Plotly, which takes <b> and <a href> for markup
   trace.tip = (i) => [title, [[name, value]]]  of a trace given to dcp.draw: all values of its i-th marker, shown when the
                                      pointer is over it; Plotly's own labels would have to be shorter than the chart
   dcp.watermark(text)                a shape of a layout: text with line breaks across the whole chart, behind the data
   dcp.sample({colour, symbol, dash}) the line and the marker of a series, as a small picture
   dcp.switches(element, items, change)  buttons that show and hide series: items {name, colour, symbol, dash, on};
                                      change(i, on) is called when a button is pressed, by mouse or keyboard */
"use strict";
(() => {
  const el = dcp.element;
  const COLOURS = 7;
  const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "8px,3px,2px,3px,2px,3px", "longdashdot", "3px,6px"];
  const STROKES = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2", longdash: "10 3", longdashdot: "10 3 2 3" };
  const PAPER_WIDTH = 660; // A4 or Letter between usual margins, in CSS pixels
  const drawn = new Map();
  const root = document.documentElement;
  const coarse = matchMedia("(pointer: coarse)");
  const probe = el("span", { hidden: true });

  /** Run the compressed script; its digest is in the page's content security policy, so no other script can run. */
  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(el("script", {}, await new Response(stream).text()));
    if (!globalThis.Plotly) throw new Error("plotly.js did not start");
  }

  const fetched = (src) => new Promise((done, failed) => {
    const missing = () => failed(new Error("the site's assets/plotly-basic.min.js is missing; open this page in its site, or build the site again"));
    document.head.append(el("script", { src, load: done, error: missing }));
  });

  let loading = null;
  function plotly() {
    const packed = dcp.find("plotly");
    return (loading ??= packed ? unpack(packed) : fetched(root.dataset.plotly));
  }

  function colour(name) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = name;
    return getComputedStyle(probe).color;
  }

  /** Return a copy with the current colour in place of every "var(--name)" and "light-dark(…)". */
  function resolved(value, seen = new Map()) {
    if (typeof value === "string" && /^(var\(--|light-dark\()/.test(value)) {
      if (!seen.has(value)) seen.set(value, colour(value));
      return seen.get(value);
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, seen));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, seen)]));
  }

  function merged(base, more) {
    const result = { ...base };
    for (const [key, value] of Object.entries(more)) {
      const both = [result[key], value].every((x) => x !== null && typeof x === "object" && !Array.isArray(x));
      result[key] = both ? merged(result[key], value) : value;
    }
    return result;
  }

  function themed(layout) {
    const axis = {
      automargin: true, gridcolor: "var(--grid)", linecolor: "var(--edge)", tickcolor: "var(--edge)", showline: true,
      zeroline: false, ticks: "outside", ticklen: 4, title: { standoff: 8, font: { size: 13 } }, fixedrange: coarse.matches,
    };
    const axes = ["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis\d+$/.test(key))];
    const base = {
      autosize: true, showlegend: false, hovermode: "closest", dragmode: coarse.matches ? false : "zoom",
      paper_bgcolor: "var(--paper)", plot_bgcolor: "var(--paper)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "var(--ink)" },
      margin: { l: 12, r: 16, t: 12, b: 12 }, colorway: Array.from({ length: COLOURS }, (_, i) => series(i)),
      hoverlabel: { align: "left", bgcolor: "var(--panel)", bordercolor: "var(--edge)", font: { color: "var(--ink)", size: 12.5 }, namelength: -1 },
      ...Object.fromEntries(axes.map((name) => [name, axis])),
    };
    return merged(base, layout);
  }

  /** Draw one chart; an error replaces the chart, and goes to the console. */
  async function draw(element, traces, layout) {
    try {
      await plot(element, traces, layout);
    } catch (error) {
      drawn.delete(element);
      widths.unobserve(element);
      undrawn(element, error);
    }
  }

  function undrawn(element, error) {
    console.warn(error);
    const message = `This chart could not be drawn (${error.message}); the others are not affected.`;
    element.replaceChildren(el("p", { class: "note" }, message));
  }

  async function plot(element, traces, layout = {}) {
    const before = drawn.has(element);
    if (!before) widths.observe(element);
    drawn.set(element, { traces, layout });
    const seen = new Map();
    const full = resolved(themed(layout), seen);
    if ("print" in root.dataset) {
      Object.assign(full, { autosize: false, width: Number(element.dataset.paper ?? PAPER_WIDTH), height: element.clientHeight || undefined });
    }
    const plain = traces.map(({ tip, own, ...trace }) => (tip ? { ...trace, hoverinfo: "none", hovertemplate: "" } : trace));
    await Plotly.react(element, resolved(plain, seen), full, { displayModeBar: false, scrollZoom: false, doubleClick: "reset" });
    if (!before) {
      element.on("plotly_hover", ({ points: [point], event }) => {
        const describe = drawn.get(element).traces[point.curveNumber]?.tip;
        if (describe) showTip(describe(point.pointNumber), event, element.getBoundingClientRect());
      });
      element.on("plotly_unhover", hideTip);
    }
  }

  const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" }); // tables have the same values
  const hideTip = () => { tip.hidden = true; };

  const ASIDE = 16; // pixels between the pointer and its text
  const MIN_TIP = 240;
  const between = (low, value, high) => Math.max(low, Math.min(value, high));

  /** Show the text next to the marker and inside its chart, so that it covers no other chart; in a narrow chart above or below the marker. */
  function showTip([title, rows], event, chart) {
    tip.replaceChildren(el("strong", {}, title), ...rows.flat().map((words) => el("span", {}, words)));
    if (!tip.isConnected) document.body.append(tip);
    tip.hidden = false;
    tip.style.left = tip.style.top = "0"; // so that the previous position does not limit its width
    tip.style.maxWidth = `${Math.min(Math.max(chart.width / 2 - 2 * ASIDE, MIN_TIP), innerWidth - 8)}px`;
    const { width, height } = tip.getBoundingClientRect();
    const [x, y] = [event.clientX ?? 0, event.clientY ?? 0];
    const [left, right] = [Math.max(4, chart.left), Math.min(innerWidth - 4, chart.right)];
    const side = [x + ASIDE, x - ASIDE - width].find((at) => at >= left && at + width <= right);
    const above = y - ASIDE - height;
    const top = side === undefined ? (above >= 4 ? above : y + ASIDE) : between(chart.top, y - height / 3, chart.bottom - height);
    tip.style.left = `${side ?? between(left, x - width / 2, right - width)}px`;
    tip.style.top = `${between(4, top, innerHeight - height - 4)}px`;
  }

  function redraw() {
    for (const [element, { traces, layout }] of drawn) {
      if (element.isConnected) draw(element, traces, layout);
      else drawn.delete(element);
    }
  }

  const widths = new ResizeObserver((entries) => requestAnimationFrame(() => {
    for (const { target } of entries) {
      const fits = Math.abs((target._fullLayout?.width ?? 0) - target.clientWidth) < 1;
      if (target.clientWidth && !fits && !("print" in root.dataset)) Plotly.Plots.resize(target);
    }
  }));

  const series = (i) => `var(--series-${(i % COLOURS) + 1})`;
  const symbol = (i) => SYMBOLS[i % SYMBOLS.length];
  const dash = (i) => DASHES[i % DASHES.length];
  const text = (string) => String(string).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);

  const spread = (middle, low, high, look) => ({
    type: "data", symmetric: false, ...look,
    array: middle.map((value, i) => (high[i] ?? value) - value), arrayminus: middle.map((value, i) => value - (low[i] ?? value)),
  });

  const watermark = (words) => ({
    type: "rect", xref: "paper", yref: "paper", x0: 0, x1: 1, y0: 0, y1: 1, line: { width: 0 }, layer: "below",
    label: { text: text(words).replaceAll("\n", "<br>"), textposition: "middle center", textangle: -12, font: { size: 17, color: "var(--watermark)" } },
  });

  /** Return a small picture of the line and the marker of a series. */
  function sample(item) {
    const space = "http://www.w3.org/2000/svg";
    const make = (name, attributes) => {
      const node = document.createElementNS(space, name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return node;
    };
    const svg = make("svg", { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    svg.style.color = item.colour;
    if (item.dash) {
      const stroke = STROKES[item.dash] ?? item.dash.replaceAll("px", "").replaceAll(",", " ");
      svg.append(make("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": stroke }));
    }
    const shapes = {
      square: "M9 2h8v8h-8z", "triangle-up": "M13 1l5 9h-10z", diamond: "M13 1l5 5l-5 5l-5-5z", "triangle-down": "M13 11l5-9h-10z",
      cross: "M11.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z", x: "M9 3.5l1.5-1.5l2.5 2.5l2.5-2.5l1.5 1.5l-2.5 2.5l2.5 2.5l-1.5 1.5l-2.5-2.5l-2.5 2.5l-1.5-1.5l2.5-2.5z",
    };
    const shape = (item.symbol ?? "").replace("-open", "");
    const paint = item.symbol?.endsWith("-open") ? { fill: "var(--paper)", stroke: "currentColor", "stroke-width": 1.5 } : { fill: "currentColor" };
    if (shape === "circle") svg.append(make("circle", { cx: 13, cy: 6, r: 4, ...paint }));
    else if (shapes[shape]) svg.append(make("path", { d: shapes[shape], ...paint }));
    else if (!item.dash) svg.append(make("rect", { x: 6, y: 0, width: 14, height: 12, ...paint }));
    return svg;
  }

  function switches(element, items, change) {
    element.classList.add("switches");
    element.setAttribute("role", "group");
    element.replaceChildren(...items.map((item, i) => {
      const press = () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        change(i, on);
      };
      const button = el("button", { type: "button", class: "switch", "aria-pressed": String(item.on !== false), click: press }, sample(item), el("span", {}, item.name));
      return button;
    }));
  }

  addEventListener("scroll", hideTip, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new MutationObserver(redraw).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  addEventListener("beforeprint", () => { root.dataset.print = ""; redraw(); });
  addEventListener("afterprint", () => { delete root.dataset.print; redraw(); });

  Object.assign(dcp, { plotly, draw, undrawn, series, symbol, dash, spread, text, watermark, sample, switches });
})();
