/* The points of a report, which of them are shown, and the fragment of the address that remembers it. Adds to `dcp`:

   dcp.points.all, fields, series, data   every point as an object by column name; what points.py wrote
   dcp.points.shown()                     those that pass the filters
   dcp.points.view                        what else the fragment holds: x, y, colour, sort, and switched-off series
   dcp.points.words(point)                [name, value] pairs with units and intervals, for those who point at a mark
   dcp.points.changed()                   something was chosen: remember it, and tell all who asked by watch(callback) */
"use strict";
dcp.points = (() => {
  const data = JSON.parse(dcp.find("data").textContent);
  const columns = Object.entries(data.columns);
  const all = Array.from({ length: data.count }, (_, i) => Object.fromEntries(columns.map(([name, values]) => [name, values[i]])));
  const fields = new Map(data.fields.map((field) => [field.name, field]));
  const hidden = Object.fromEntries(Object.keys(data.filters).map((name) => [name, new Set()]));
  const view = { x: "", y: "", colour: "", sort: "", off: {} };
  const watchers = [];
  const LONGEST = 90;

  const valuesOf = (point, name) => (name === "warnings" ? point.warnings : [String(point[name] ?? "")]);
  const passes = (point) => Object.entries(hidden).every(([name, values]) => values.size === 0 || !valuesOf(point, name).some((v) => values.has(v)));
  const shown = () => all.filter(passes);
  const choices = (name) => [...new Set(all.flatMap((point) => valuesOf(point, name)))];
  const brief = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

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

  /** What a fragment says; one without `=` is the place of a section. */
  function read() {
    const text = location.hash.slice(1);
    if (!text.includes("=")) return false;
    const said = new URLSearchParams(text);
    for (const [name, values] of Object.entries(hidden)) {
      values.clear();
      for (const value of said.getAll(`hide.${name}`)) values.add(value);
    }
    view.off = {};
    for (const key of said.keys()) if (key.startsWith("off.")) view.off[key.slice(4)] = new Set(said.getAll(key));
    for (const name of ["x", "y", "colour", "sort"]) view[name] = said.get(name) ?? "";
    return true;
  }

  const tell = () => { for (const watcher of watchers) watcher(); };
  function changed() {
    const said = fragment();
    if (said || location.hash.includes("=")) history.replaceState(null, "", said ? `#${said}` : location.pathname + location.search);
    tell();
  }
  addEventListener("hashchange", () => { if (read()) tell(); });
  read();

  return {
    data, all, fields, series: data.series, hidden, view, shown, choices, words, warnings, range, brief, changed,
    off: (chart) => (view.off[chart] ??= new Set()), watch: (watcher) => { watchers.push(watcher); },
  };
})();
