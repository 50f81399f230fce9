/* Helpers of every page of dcpbench: one global object, `dcp`, which table.js and chart.js extend:

   dcp.element(name, attributes, ...children)  create an element; strings become text, never markup; an attribute
                                     that is a function listens to the event of its name
   dcp.find(id)                      the element with this id
   dcp.number(value)                 format 1234.5 as "1,235", an unknown value as "–"
   dcp.counted(n, word)              "1 point", "2 points"
   dcp.measured({label, unit})       "ITL p50 (ms)"
   dcp.range(low, high)              "1.2–1.3"; empty if either is unknown
   dcp.select(options, chosen, change, attributes)  create a selection among [value, text] pairs
   dcp.themeButton(button)           make a button switch between the light and the dark theme, which is stored
   dcp.copy(text, button)            copy to the clipboard, also on a page from file://, and show the result on the button */
"use strict";
globalThis.dcp = (() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "dcpbench-theme";
  const MESSAGE_MS = 1500;

  function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(key, value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : String(value));
    }
    node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

  function number(value) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    const digits = size >= 1000 || Number.isInteger(value) ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
    const form = size && size < 1 ? { maximumSignificantDigits: 3 } : { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return new Intl.NumberFormat("en-US", form).format(value);
  }

  function select(options, chosen, change, attributes = {}) {
    const made = options.map(([value, text]) => element("option", { value, selected: String(value) === String(chosen) }, text));
    return element("select", { ...attributes, change: (event) => change(event.target.value) }, ...made);
  }

  function remembered() {
    try { return localStorage.getItem(KEY); } catch { return null; } // storage may be forbidden for files
  }

  function themeButton(button) {
    const theme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
    const update = () => { button.textContent = theme() === "dark" ? "Light theme" : "Dark theme"; };
    if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
    button.addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* then the choice holds for this page only */ }
      update();
    });
    dark.addEventListener("change", update);
    button.hidden = false;
    update();
  }

  /** Copy through a selected textarea, which needs no permission for the clipboard. */
  function copySelected(text) {
    const area = element("textarea", { readonly: true, "aria-hidden": "true", style: "position:fixed;top:0;opacity:0" });
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus({ preventScroll: true });
    return done;
  }

  async function copy(text, button) {
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      done = copySelected(text);
    }
    const name = button.dataset.name ?? (button.dataset.name = button.textContent);
    button.textContent = done ? "copied" : "not copied";
    setTimeout(() => { button.textContent = name; }, MESSAGE_MS);
  }

  return {
    element, number, select, themeButton, copy,
    find: (id) => document.getElementById(id),
    counted: (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`,
    measured: ({ label, unit }) => (unit ? `${label} (${unit})` : label),
    range: (low, high) => (known(low) && known(high) ? `${number(low)}–${number(high)}` : ""),
  };
})();
