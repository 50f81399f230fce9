/* Tables that are filled by script. Extends `dcp`:

   dcp.table(place, label, columns, {id, look, sorted, sort})  put an empty table into a place, and return a function
                              that fills it: (rows, from, to) sorts the rows and shows those from `from` to `to`
   dcp.pager(place, pages, page, go)  show buttons to change the page; none for a single page

   A column has a `label` (text, a node, or a function that returns the current text), a `class` of all its cells, and
   `cell(row)`: text, a node or a list of them; a <td> is taken as it is. A column with a `name` sorts by `key(row)` when its
   header is pressed, ascending first, or descending with `down`: `sorted()` returns {name, down}, and `sort(name, down)` is
   called. `look(row)` is the class of a row. */
"use strict";
(() => {
  const el = dcp.element;
  const { compare } = new Intl.Collator("en", { numeric: true });
  const unknown = (key) => key === null || key === undefined || Number.isNaN(key);

  /** Sort the rows; unknown values come last in both directions. */
  function ordered(rows, column, down) {
    const sign = down ? -1 : 1;
    const order = ([a], [b]) => {
      if (unknown(a) || unknown(b)) return Number(unknown(a)) - Number(unknown(b));
      return sign * (typeof a === "number" ? a - b : compare(a, b));
    };
    return rows.map((row) => [column.key(row), row]).sort(order).map(([, row]) => row);
  }

  function cell(column, row) {
    const inside = [column.cell(row)].flat();
    return inside[0]?.tagName === "TD" ? inside[0] : el("td", { class: column.class }, ...inside);
  }

  dcp.table = (place, label, columns, { id, look = () => null, sorted = () => ({}), sort } = {}) => {
    const heads = columns.map((column) => {
      const text = typeof column.label === "function" ? "" : column.label;
      if (!column.name) return el("th", { scope: "col", class: column.class }, text);
      const press = () => { const now = sorted(); sort(column.name, now.name === column.name ? !now.down : Boolean(column.down)); };
      return el("th", { scope: "col", class: column.class }, el("button", { type: "button", "data-sort": column.name, click: press }, text));
    });
    const body = el("tbody");
    const table = el("table", { id }, el("thead", {}, el("tr", {}, ...heads)), body);
    place.replaceChildren(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table));
    return (rows, from = 0, to = rows.length) => {
      const { name, down } = sorted();
      columns.forEach((column, i) => {
        if (typeof column.label === "function") (heads[i].firstElementChild ?? heads[i]).textContent = column.label();
        if (column.name) heads[i].setAttribute("aria-sort", column.name !== name ? "none" : down ? "descending" : "ascending");
      });
      const by = columns.find((column) => column.name && column.name === name);
      const shown = (by ? ordered(rows, by, down) : rows).slice(from, to);
      body.replaceChildren(...shown.map((row) => el("tr", { class: look(row) }, ...columns.map((column) => cell(column, row)))));
    };
  };

  dcp.pager = (place, pages, page, go) => {
    const button = (name, to, off) => el("button", {
      type: "button", disabled: off,
      click: () => { go(to); [...place.querySelectorAll("button")].find((b) => b.textContent === name && !b.disabled)?.focus(); },
    }, name);
    place.replaceChildren(...(pages < 2 ? [] : [
      button("First", 0, page === 0), button("Previous", page - 1, page === 0),
      el("span", { class: "note" }, `page ${page + 1} of ${dcp.number(pages)}`),
      button("Next", page + 1, page === pages - 1), button("Last", pages - 1, page === pages - 1),
    ]));
  };
})();
