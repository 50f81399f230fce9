/* Puts a report together: unpacks plotly.js, fills figures with panels, and lets filters, switches and axes act on all. */
"use strict";
(() => {
  const { points: store, element: el } = dcp;
  const { data, view } = store;
  const byId = (id) => document.getElementById(id);
  const pending = new Map();
  const near = new Set();
  let ready = false;

  /** The script as it was packed; its digest is in the page's policy, so nothing else could run here. */
  async function unpack() {
    const bytes = Uint8Array.from(atob(byId("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(Object.assign(document.createElement("script"), { textContent: await new Response(stream).text() }));
    if (!globalThis.Plotly) throw new Error("plotly.js did not start");
  }

  function drawPending(element) {
    const panel = pending.get(element);
    if (!ready || !panel) return;
    pending.delete(element);
    dcp.draw(element, panel.traces, panel.layout);
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting) drawPending(target);
    }
  }, { rootMargin: "500px" });

  /** One figure: its switches, and a place for each panel, which is drawn when it comes near. */
  function figureOf(chart) {
    const root = byId(`chart-${chart.slug}`);
    const [legend, grid, note] = [".legend", ".panels", ".note"].map((name) => root.querySelector(name));
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
      const { panels, items, note: said, wide } = dcp.charts[chart.kind]({ ...chart, off, ...axes() }, own);
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
        chartBox.setAttribute("aria-label", `${root.querySelector("figcaption").textContent}${panel.title ? `: ${panel.title}` : ""}. ${panel.traces.length} series; numbers in the table of points.`);
        chartBox.classList.toggle("low", Boolean(panel.low));
        chartBox.dataset.paper = wide || panels.length === 1 ? 660 : 325;
        chartBox.style.height = panel.rows ? `${panel.rows * dcp.charts.ROW_PIXELS + 80}px` : "";
        pending.set(chartBox, panel);
        if (near.has(chartBox)) drawPending(chartBox);
      }
      grid.replaceChildren(...(panels.length ? panels.map((panel) => places.get(panel.key).box) : [el("p", { class: "note" }, `No point that the filters leave has ${dcp.charts.NEEDS[chart.kind] ?? "this"}.`)]));
      note.textContent = said;
      note.hidden = !said;
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
      const select = el("select", { id: `pick-${name}` }, ...options.map(([value, text]) => el("option", { value }, text)));
      select.addEventListener("change", () => { view[name] = select.value; store.changed(); });
      root.append(el("label", { for: select.id }, label, select));
      return () => { select.value = axes()[name]; };
    };
    const numbers = data.fields.map((f) => [f.name, f.unit ? `${f.label} (${f.unit})` : f.label]);
    const colours = data.colours.filter((name) => store.choices(name).length > 1 || name === "layout").map((name) => [name, data.filters[name] ?? name]);
    return [make("x", "x axis", numbers), make("y", "y axis", numbers), make("colour", "colour by", colours)];
  }

  function filters(root) {
    const groups = Object.entries(data.filters).map(([name, label]) => [name, label, store.choices(name)]).filter(([, , values]) => values.length > 1);
    const count = el("span", { "aria-live": "polite" });
    const boxes = [];
    const fieldsets = groups.map(([name, label, values]) => el("fieldset", {}, el("legend", {}, label), ...values.map((value) => {
      const box = el("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        store.hidden[name][box.checked ? "delete" : "add"](value);
        store.changed();
      });
      boxes.push(() => { box.checked = !store.hidden[name].has(value); });
      const number = Number(value);
      return el("label", {}, box, el("span", {}, value && Number.isFinite(number) ? dcp.number(number) : store.brief(value) || "–"));
    })));
    const reset = el("button", { type: "button" }, "Show all");
    reset.addEventListener("click", () => {
      for (const values of Object.values(store.hidden)) values.clear();
      store.changed();
    });
    root.append(el("details", {}, el("summary", {}, "Filters: ", count), el("div", { class: "groups" }, ...fieldsets), reset));
    return (shown) => {
      count.textContent = `${dcp.number(shown.length)} of ${store.counted(data.count)} in charts and table`;
      for (const box of boxes) box();
    };
  }

  function start() {
    for (const node of document.querySelectorAll(".scripted")) node.hidden = false;
    byId("theme").hidden = false;
    dcp.themeButton(byId("theme"));
    if (data.count === 0) return;
    byId("filters").hidden = false;
    const said = filters(byId("filters"));
    const picked = pickers(document.querySelector("#chart-explore .controls"));
    const figures = [...data.charts, { slug: "explore", kind: "explore", workload: "", mode: "" }].map(figureOf);
    const table = dcp.pointsTable(byId("every-point"));
    const all = () => {
      const shown = store.shown();
      said(shown);
      for (const pick of picked) pick();
      for (const show of figures) show(shown);
      table(shown);
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
    unpack().then(() => {
      ready = true;
      for (const element of near) drawPending(element);
      document.documentElement.dataset.ready = "";
    }).catch((error) => {
      byId("broken").hidden = false;
      byId("broken").textContent = `This browser cannot draw the charts (${error.message}); figures/ beside this page has them as pictures.`;
    });
  }
  start();
})();
