/* What every page has beside its charts, added to `dcp` (chart.js):

   dcp.element(name, attributes, ...children)  an element; strings become text, never markup
   dcp.themeButton(button)                     lets a button switch between light and dark, and remembers it
   dcp.copy(text, button)                      to the clipboard, also where a page from file:// has none; says so on the button */
"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "dcpbench-theme";
  const SAID_MS = 1500;

  dcp.element = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : String(value));
    }
    node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return node;
  };

  function remembered() {
    try { return localStorage.getItem(KEY); } catch { return null; } // storage may be forbidden for files
  }

  dcp.themeButton = (button) => {
    const theme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
    const say = () => { button.textContent = theme() === "dark" ? "Light theme" : "Dark theme"; };
    if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
    button.addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* then only this page knows */ }
      say();
    });
    dark.addEventListener("change", say);
    say();
  };

  /** By a selected textarea, which works without the clipboard's permission. */
  function copySelected(text) {
    const area = dcp.element("textarea", { readonly: true, "aria-hidden": "true", style: "position:fixed;top:0;opacity:0" });
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus({ preventScroll: true });
    return done;
  }

  dcp.copy = async (text, button) => {
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      done = copySelected(text);
    }
    const name = button.dataset.name ?? (button.dataset.name = button.textContent);
    button.textContent = done ? "copied" : "not copied";
    setTimeout(() => { button.textContent = name; }, SAID_MS);
  };
})();
