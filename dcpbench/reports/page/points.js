/* The points of a report, the filters, and the address fragment that stores them. Extends `dcp`:

   dcp.points.all, fields, series, data   every point as an object by column name; the data of points.py
   dcp.points.shown()                     the points that pass the filters
   dcp.points.view                        further state in the fragment: x, y, colour, sort, and hidden series
   dcp.points.words(point)                [name, value] pairs with units and intervals, for the text at the pointer
   dcp.points.changed()                   store a changed choice in the fragment, and call all callbacks given to watch(callback) */
"use strict";
dcp.points = (() => {
  const data = JSON.parse(dcp.find("data").textContent);
  const columns = Object.entries(data.columns);
  const all = Array.from({ length: data.count }, (_, i) => Object.fromEntries(columns.map(([name, values]) => [name, values[i]])));
  const fields = new Map(data.fields.map((field) => [field.name, field]));
  const hidden = Object.fromEntries(Object.keys(data.filters).map((name) => [name, new Set()]));
  const view = { x: "", y: "", colour: "", sort: "", off: {} };
  const watchers = [];
  const MAX_CHARS = 90;

  const valuesOf = (point, name) => (name === "warnings" ? point.warnings : [String(point[name] ?? "")]);
  const passes = (point) => Object.entries(hidden).every(([name, values]) => values.size === 0 || !valuesOf(point, name).some((v) => values.has(v)));
  const shown = () => all.filter(passes);
  const choices = (name) => [...new Set(all.flatMap((point) => valuesOf(point, name)))];
  const brief = (text) => (text.length > MAX_CHARS ? `${text.slice(0, MAX_CHARS - 1)}…` : text);

  function range(point, field) {
    const [low, high] = [point[`${field.name}_low`], point[`${field.name}_high`]];
    const ends = dcp.range(low, high);
    if (!field.range || !ends || low === high) return "";
    if (field.name === "dcp_ratio") return `at widest ${ends}`;
    return point.workload === "serve" ? `${ends} over ${point.repeats} repeats` : `95 %: ${ends}`;
  }

  /** Return the warnings that distinguish a point from the others of its run. Shared warnings are in the text. */
  const warnings = (point) => point.telling ?? "";

  function words(point) {
    const rows = [["load", brief(point.panel)], ["backend", point.backend], ["exchange", point.exchange]];
    for (const field of fields.values()) {
      const value = point[field.name] ?? null;
      if (value === null || ["tp", "dp", "dcp", "context"].includes(field.name)) continue;
      const ends = range(point, field);
      rows.push([field.label, [dcp.number(value), field.unit, ends && `[${ends}]`].filter(Boolean).join(" ")]);
      if (field.name === "dcp_ratio") rows.push(["compared with", `${point.baseline}: ${point.verdict}`]);
    }
    return [...rows, ["warnings", warnings(point)], [data.filters.run, brief(point.run)], ["measured by", point.origin]].filter(([, value]) => value);
  }

  function fragment() {
    const found = new URLSearchParams();
    for (const [name, values] of Object.entries(hidden)) for (const value of values) found.append(`hide.${name}`, value);
    for (const [chart, names] of Object.entries(view.off)) for (const name of names) found.append(`off.${chart}`, name);
    for (const name of ["x", "y", "colour", "sort"]) if (view[name]) found.set(name, view[name]);
    return found.toString();
  }

  /** Read the state from the fragment; a fragment without `=` is the anchor of a section. */
  function read() {
    const text = location.hash.slice(1);
    if (!text.includes("=")) return false;
    const stored = new URLSearchParams(text);
    for (const [name, values] of Object.entries(hidden)) {
      values.clear();
      for (const value of stored.getAll(`hide.${name}`)) values.add(value);
    }
    view.off = {};
    for (const key of stored.keys()) if (key.startsWith("off.")) view.off[key.slice(4)] = new Set(stored.getAll(key));
    for (const name of ["x", "y", "colour", "sort"]) view[name] = stored.get(name) ?? "";
    return true;
  }

  const notify = () => { for (const watcher of watchers) watcher(); };
  function changed() {
    const state = fragment();
    if (state || location.hash.includes("=")) history.replaceState(null, "", state ? `#${state}` : location.pathname + location.search);
    notify();
  }
  addEventListener("hashchange", () => { if (read()) notify(); });
  read();

  return {
    data, all, fields, series: data.series, hidden, view, shown, choices, words, warnings, range, brief, changed,
    off: (chart) => (view.off[chart] ??= new Set()), watch: (watcher) => { watchers.push(watcher); },
  };
})();
