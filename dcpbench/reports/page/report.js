/* Builds the report: fills the figures and the table of points, and applies filters, switches and axes to all of them. */
"use strict";
(() => {
  const { points: store, element: el, find } = dcp;
  const { data, view, fields } = store;
  const STEP = 100; // rows of the table that are shown at first, and added by each press
  const MAX_IDLE = 1000; // markers of a panel that is drawn before it is visible: more would block the page for a moment
  const MAX_NAME_CHARS = 40; // of a series' name that is shown above its chart on a phone
  const root = document.documentElement;
  const whenIdle = globalThis.requestIdleCallback ?? ((call) => setTimeout(call, 50)); // Safari lacks it
  const pending = new Map();
  const near = new Set();
  let ready = false;
  let waiting = false;

  async function drawPending(element) {
    const panel = pending.get(element);
    if (!ready || !panel) return;
    pending.delete(element);
    delete element.dataset.later;
    await dcp.draw(element, panel.traces, panel.layout);
  }

  const countMarkers = (panel) => panel.traces.reduce((sum, trace) => sum + trace.x.length, 0);

  /** Draw panels that are not visible yet, one at a time, while the browser is idle. */
  function drawRest() {
    if (waiting || !ready) return;
    const next = [...pending].find(([element, panel]) => element.isConnected && countMarkers(panel) <= MAX_IDLE);
    if (!next) {
      root.dataset.drawn = ""; // all panels but those with a message in their place
      return;
    }
    waiting = true;
    whenIdle(async () => {
      await drawPending(next[0]);
      waiting = false;
      drawRest();
    });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting) drawPending(target);
    }
  }, { rootMargin: "500px" });

  /** Fill one figure: its switches, and a place for each panel, which is drawn when it is scrolled near. */
  function figureOf(chart) {
    const figure = find(`chart-${chart.slug}`);
    const [legend, grid, note] = [".legend", ".panels", ".note"].map((name) => figure.querySelector(name));
    const places = new Map();
    let listed = "";

    function place(panel) {
      const chartBox = el("div", { class: "chart", role: "img" });
      const box = el("div", { class: "panel" }, ...(panel.title ? [el("p", { class: "panel-title" }, panel.title)] : []), chartBox);
      seen.observe(chartBox);
      return { box, chartBox };
    }

    function show(points) {
      try {
        fill(points);
      } catch (error) {
        dcp.undrawn(grid, error);
        note.hidden = true;
      }
    }

    function fill(points) {
      const own = points.filter((p) => (!chart.workload || p.workload === chart.workload) && (!chart.mode || p.mode === chart.mode));
      const off = store.off(chart.slug);
      const { panels, items, note: message, wide } = dcp.charts[chart.kind]({ ...chart, off, ...axes() }, own);
      legend.classList.toggle("wordy", items.some((item) => item.name.length > MAX_NAME_CHARS));
      const names = JSON.stringify([items, [...off]]);
      if (names !== listed && !legend.contains(document.activeElement)) {
        dcp.switches(legend, items.map((item) => ({ ...item, on: !off.has(item.key) })), (i, on) => {
          off[on ? "delete" : "add"](items[i].key);
          store.changed();
        });
        listed = names;
      }
      grid.classList.toggle("single", wide || panels.length === 1);
      grid.classList.toggle("pairs", [2, 4].includes(panels.length));
      for (const panel of panels) {
        if (!places.has(panel.key)) places.set(panel.key, place(panel));
        const { box, chartBox } = places.get(panel.key);
        if (panel.title) box.querySelector(".panel-title").textContent = panel.title;
        chartBox.setAttribute("aria-label", `${figure.querySelector("figcaption").textContent}${panel.title ? `: ${panel.title}` : ""}. ${panel.traces.length} series; numbers in the table of points.`);
        box.classList.toggle("begins", Boolean(panel.begins));
        chartBox.classList.toggle("low", Boolean(panel.low));
        chartBox.dataset.paper = wide || panels.length === 1 ? 660 : 325;
        chartBox.style.height = panel.rows ? `${panel.rows * dcp.charts.ROW_PIXELS + 80 + (panel.below ?? 0)}px` : "";
        pending.set(chartBox, panel);
        if (countMarkers(panel) > MAX_IDLE) chartBox.dataset.later = `${dcp.number(countMarkers(panel))} markers, drawn when they are scrolled into view.`;
        if (near.has(chartBox)) drawPending(chartBox);
      }
      grid.replaceChildren(...(panels.length ? panels.map((panel) => places.get(panel.key).box) : [el("p", { class: "note" }, `No point that passes the filters has ${dcp.charts.NEEDS[chart.kind] ?? "this"}.`)]));
      note.textContent = message;
      note.hidden = !message;
    }
    return show;
  }

  function axes() {
    const known = (...names) => names.find((name) => store.fields.has(name)) ?? data.fields[0].name;
    const both = ["tok_s_per_user", "output_tok_s_per_gpu"].every((name) => store.fields.has(name));
    const x = both ? "tok_s_per_user" : "concurrency";
    return { x: known(view.x, x), y: known(view.y, "output_tok_s_per_gpu", "output_tok_s"), colour: data.colours.includes(view.colour) ? view.colour : store.choices("settings").length > 1 ? "settings" : "layout" };
  }

  function pickers(root) {
    const make = (name, label, options) => {
      const select = dcp.select(options, axes()[name], (value) => { view[name] = value; store.changed(); }, { id: `pick-${name}` });
      root.append(el("label", { for: select.id }, label, select));
      return () => { select.value = axes()[name]; };
    };
    const numbers = data.fields.map((f) => [f.name, dcp.measured(f)]);
    const colours = data.colours.filter((name) => store.choices(name).length > 1 || name === "layout").map((name) => [name, data.filters[name] ?? name]);
    return [make("x", "x axis", numbers), make("y", "y axis", numbers), make("colour", "colour by", colours)];
  }

  function filters(root) {
    const groups = Object.entries(data.filters).map(([name, label]) => [name, label, store.choices(name)]).filter(([, , values]) => values.length > 1);
    const count = el("span", { "aria-live": "polite" });
    const boxes = [];
    const fieldsets = groups.map(([name, label, values]) => el("fieldset", {}, el("legend", {}, label), ...values.map((value) => {
      const box = el("input", { type: "checkbox", change: () => { store.hidden[name][box.checked ? "delete" : "add"](value); store.changed(); } });
      boxes.push(() => { box.checked = !store.hidden[name].has(value); });
      const number = Number(value);
      return el("label", {}, box, el("span", {}, value && Number.isFinite(number) ? dcp.number(number) : store.brief(value) || "–"));
    })));
    const all = () => { for (const values of Object.values(store.hidden)) values.clear(); store.changed(); };
    const reset = el("button", { type: "button", click: all }, "Show all");
    root.append(el("details", {}, el("summary", {}, "Filters: ", count), el("div", { class: "groups" }, ...fieldsets), reset));
    return (shown) => {
      count.textContent = `${dcp.number(shown.length)} of ${dcp.counted(data.count, "point")} in charts and table`;
      for (const box of boxes) box();
    };
  }

  /** Return the settings that all points share, shown once above their table. */
  const served = () => store.choices("workload").includes("serve");
  const shared = () => ["model", ...(served() ? ["mode"] : [])].filter((name) => store.choices(name).length === 1).map((name) => store.brief(String(store.choices(name)[0])));

  const repeatable = store.all.some((point) => point.command); // imported points are not

  /** Return the columns of the table of points, with a button that copies the command of each point. */
  function columnsOfTable() {
    const several = (name) => store.choices(name).length > 1;
    const words = [
      ["run", data.filters.run, several("run")], ["model", "model", several("model")], ["label", "layout", true], ["mode", "live or replay", served() && several("mode")],
      ["load", "load", store.choices("load").length > 1], ["context", "context (tokens)", true], ["concurrency", "concurrency", true],
      ["load_request_rate", "request rate (requests/s)", fields.has("load_request_rate")],
    ].filter(([, , wanted]) => wanted).map(([name, label]) => (fields.has(name)
      ? { name, label, class: "n", key: (point) => point[name], cell: (point) => dcp.number(point[name]) }
      : { name, label, class: name === "load" ? "long" : "w", key: (point) => point[name] ?? null, cell: (point) => store.brief(String(point[name] ?? "–")) }));
    const numbers = data.fields.filter((field) => field.table).map((field) => ({
      name: field.name, label: dcp.measured(field), class: "n", key: (point) => point[field.name],
      cell: (point) => {
        const ends = store.range(point, field);
        return [dcp.number(point[field.name]), ...(ends ? [el("span", { class: "soft" }, ` [${ends.replace("95 %: ", "")}]`)] : [])];
      },
    }));
    const again = (point) => (point.command ? el("button", {
      type: "button", class: "copy", title: point.command, "aria-label": `copy the command that measures ${point.label} at concurrency ${point.concurrency} again`,
      click: (event) => { dcp.copy(point.command, event.currentTarget); },
    }, "copy") : "");
    return [...(repeatable ? [{ label: "again", class: "no-print", cell: again }] : []), ...words, ...numbers, { name: "warnings", label: "warnings", class: "w", key: store.warnings, cell: (point) => store.warnings(point) || "–" }];
  }

  function pointsTable(root) {
    let shown = STEP;
    let current = [];
    const [note, place] = [el("p", { class: "note", "aria-live": "polite" }), el("div")];
    const more = el("button", { type: "button", class: "no-print", click: () => { shown += STEP; fill(); } });
    root.replaceChildren(el("h3", {}, "The points"), note, place, more);
    const common = shared().join(" · ");
    const table = dcp.table(place, "The points", columnsOfTable(), {
      sorted: () => ({ name: view.sort.replace(/^-/, ""), down: view.sort.startsWith("-") }),
      sort: (name, down) => { view.sort = `${down ? "-" : ""}${name}`; store.changed(); },
    });

    function fill() {
      table(current, 0, shown);
      const left = Math.max(current.length - shown, 0);
      note.textContent = `${dcp.number(current.length)} of ${dcp.counted(data.count, "point")}${left ? `, the first ${dcp.number(shown)} below` : ""}${common ? `, all ${common}` : ""}. Press a header to sort${repeatable ? "; “copy” copies the command that measures this point again" : ""}.`;
      more.hidden = left === 0;
      more.textContent = `Show ${dcp.number(Math.min(STEP, left))} more`;
    }
    return (points) => { current = points; fill(); };
  }

  function start() {
    for (const node of document.querySelectorAll(".scripted")) node.hidden = false;
    dcp.themeButton(find("theme"));
    if (data.count === 0) return;
    find("filters").hidden = false;
    const updateFilters = filters(find("filters"));
    const picked = pickers(document.querySelector("#chart-explore .controls"));
    const figures = [...data.charts, { slug: "explore", kind: "explore", workload: "", mode: "" }].map(figureOf);
    const table = pointsTable(find("every-point"));
    const all = () => {
      const shown = store.shown();
      updateFilters(shown);
      for (const pick of picked) pick();
      delete root.dataset.drawn;
      for (const show of figures) show(shown);
      table(shown);
      drawRest();
    };
    store.watch(all);
    all();
    addEventListener("beforeprint", () => {
      for (const details of document.querySelectorAll("details:not([open])")) { details.open = true; details.dataset.opened = ""; }
      for (const element of [...pending.keys()]) if (element.isConnected) drawPending(element);
    });
    addEventListener("afterprint", () => {
      for (const details of document.querySelectorAll("details[data-opened]")) { details.open = false; delete details.dataset.opened; }
    });
    dcp.plotly().then(() => {
      ready = true;
      for (const element of near) drawPending(element);
      root.dataset.ready = "";
      drawRest();
    }).catch((error) => {
      find("broken").hidden = false;
      const instead = root.dataset.plotly ? "run dcpbench report on the records next to this page to write a page that needs no other file" : "figures/ next to this page has them as pictures";
      find("broken").textContent = `This browser cannot draw the charts (${error.message}); ${instead}.`;
    });
  }
  start();
})();
