/* The table of points: sorted by any column, with the command that measures a point again. dcp.pointsTable(element)
   fills `element` and returns a function that draws the points it is given. */
"use strict";
dcp.pointsTable = (element) => {
  const STEP = 100;
  const { data, fields, view, choices } = dcp.points;
  const el = dcp.element;
  let shown = STEP;
  let current = [];

  const words = [
    ["run", "run", choices("run").length > 1], ["model", "model", true], ["label", "layout", true], ["mode", "live or replay", choices("workload").includes("serve")],
    ["load", "load", choices("load").length > 1], ["context", "context (tokens)", true], ["concurrency", "concurrency", true],
    ["load_request_rate", "request rate (requests/s)", fields.has("load_request_rate")],
  ].filter(([, , wanted]) => wanted).map(([name, label]) => ({ name, label, number: fields.has(name) }));
  const numbers = data.fields.filter((f) => f.table).map((f) => ({ name: f.name, label: f.unit ? `${f.label} (${f.unit})` : f.label, number: true, field: f }));
  const columns = [...words, ...numbers, { name: "marks", label: "marks", number: false }];

  const note = el("p", { class: "note", "aria-live": "polite" });
  const body = el("tbody");
  const heads = columns.map((column) => {
    const button = el("button", { type: "button" }, column.label);
    button.addEventListener("click", () => {
      view.sort = view.sort === column.name ? `-${column.name}` : column.name;
      dcp.points.changed();
    });
    return el("th", { scope: "col", class: column.number ? "n" : null }, button);
  });
  const more = el("button", { type: "button", class: "no-print" });
  more.addEventListener("click", () => { shown += STEP; fill(); });
  const copying = el("th", { scope: "col", class: "no-print" }, "again");
  const table = el("table", {}, el("thead", {}, el("tr", {}, copying, ...heads)), body);
  element.replaceChildren(
    el("h3", {}, "The points"), note,
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The points" }, table), more,
  );

  function cell(point, column) {
    const value = point[column.name] ?? null;
    if (column.name === "marks") return el("td", { class: "w" }, dcp.points.marks(point) || "–");
    if (!column.number) return el("td", { class: "w" }, dcp.points.brief(String(value ?? "–")));
    const ends = column.field ? dcp.points.range(point, column.field) : "";
    return el("td", { class: "n" }, dcp.number(value), ...(ends ? [el("span", { class: "soft" }, ` [${ends.replace("95 %: ", "")}]`)] : []));
  }

  function again(point) {
    if (!point.command) return el("td", { class: "no-print" });
    const button = el("button", { type: "button", class: "copy", title: point.command, "aria-label": `copy the command that measures ${point.label} at concurrency ${point.concurrency} again` }, "copy");
    button.addEventListener("click", () => { dcp.copy(point.command, button); });
    return el("td", { class: "no-print" }, button);
  }

  function ordered(points) {
    const name = view.sort.replace(/^-/, "");
    const column = columns.find((c) => c.name === name);
    if (!column) return points;
    const turn = view.sort.startsWith("-") ? -1 : 1;
    const empty = (v) => v === null || v === undefined;
    return [...points].sort((a, b) => {
      const [one, other] = [a[name], b[name]];
      if (empty(one) || empty(other)) return Number(empty(one)) - Number(empty(other)); // what is not known comes last either way
      return turn * (column.number ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
    });
  }

  function fill() {
    const rows = ordered(current);
    body.replaceChildren(...rows.slice(0, shown).map((point) => el("tr", {}, again(point), ...columns.map((column) => cell(point, column)))));
    columns.forEach((column, i) => {
      const name = view.sort.replace(/^-/, "");
      heads[i].setAttribute("aria-sort", name !== column.name ? "none" : view.sort.startsWith("-") ? "descending" : "ascending");
    });
    const left = rows.length - Math.min(shown, rows.length);
    note.textContent = `${dcp.number(rows.length)} of ${dcp.points.counted(data.count)}${left ? `, the first ${dcp.number(shown)} below` : ""}. A header sorts; “copy” takes the command that measures a point again, alone.`;
    more.hidden = left === 0;
    more.textContent = `Show ${dcp.number(Math.min(STEP, left))} more`;
  }

  return (points) => { current = points; fill(); };
};
