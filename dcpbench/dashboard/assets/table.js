/* The points: columns as they come from the index, filters, sorting, one page of rows. Adds to `dash`:

   dash.take(index)      a new index: columns, words, measures; selection and filters stay
   dash.state            what is filtered, sorted and ticked; dash.save() writes it into the address
   dash.show()           filters, sorts and draws the table
   dash.load(file)       a data file by a script element; a promise of what it says
   dash.percent(ratio)   1.031 as "+3.1 %" */
"use strict";
globalThis.dash = (() => {
  const ROWS = 50;
  const MOST_PICKED = 8;
  const FILTERS = ["model", "workload", "layout", "exchange", "context", "concurrency", "hardware"];
  const LABELS = { model: "Model", workload: "Workload", layout: "Layout", exchange: "Exchange", context: "Context", concurrency: "Concurrency", hardware: "Hardware" };
  const SEARCHED = ["model", "workload", "layout", "exchange", "how", "load", "hardware", "driver", "conditions"];
  const el = (...parts) => dcp.element(...parts);
  const find = (id) => document.getElementById(id);
  const state = { q: "", metric: "", cpu: false, changed: false, sort: "", down: false, page: 0, x: "date", all: false, picked: [], ...Object.fromEntries(FILTERS.map((name) => [name, ""])) };
  const arrived = new Map();
  const loading = new Map();
  const self = { state, find, el, ROWS, MOST_PICKED, FILTERS, measure: null, index: null, columns: {}, onPick: () => {} };

  globalThis.dcpbenchData = (name, data) => { arrived.set(document.currentScript?.getAttribute("src") ?? name, data); arrived.set(name, data); };
  self.arrived = (name) => arrived.get(name);

  self.load = (file) => {
    if (!loading.has(file)) {
      loading.set(file, new Promise((done, failed) => {
        if (arrived.has(file)) { done(arrived.get(file)); return; }
        const script = el("script", { src: file });
        script.addEventListener("load", () => (arrived.has(file) ? done(arrived.get(file)) : failed(new Error(`${file} holds no data`))));
        script.addEventListener("error", () => { loading.delete(file); failed(new Error(`${file} is gone; the site was built again. Reload the page.`)); });
        document.head.append(script);
      }));
    }
    return loading.get(file);
  };

  self.trouble = (error) => {
    find("trouble").textContent = error ? error.message : "";
    find("trouble").hidden = !error;
  };

  const summed = (gaps) => { let at = 0; return gaps.map((gap) => (at += gap)); };
  self.summed = summed;
  self.word = (name, line) => self.index.words[name][self.columns[name][line]];
  self.value = (name, line) => (name in self.index.words ? self.word(name, line) : self.columns[name][line]);
  self.percent = (ratio) => {
    const change = (ratio - 1) * 100;
    return `${change < 0 ? "−" : "+"}${Math.abs(change).toLocaleString("en-US", { maximumFractionDigits: Math.abs(change) < 10 ? 1 : 0 })} %`;
  };
  self.when = (date) => (date ? date.slice(0, 16).replace("T", " ") : "no date");
  self.worse = (better, ratio) => (better === "" ? "" : (better === "higher") === (ratio < 1) ? "bad" : "good");

  self.take = (index) => {
    self.index = index;
    self.columns = index.lines;
    self.numberOf = new Map(index.lines.id.map((id, line) => [id, line]));
    self.haystack = null;
    if (!index.measures.some((m) => m.id === state.metric)) state.metric = index.first;
    state.picked = state.picked.filter((id) => self.numberOf.has(id)).slice(0, MOST_PICKED);
    for (const name of FILTERS) if (state[name] && !choices(name).some((choice) => String(choice) === state[name])) state[name] = "";
  };

  /** Whether a run's page can be opened; a server makes it when it is asked for. */
  self.hasPage = (run) => Boolean(self.index.runs.page[run]) || document.documentElement.dataset.live === "yes";

  const choices = (name) => (name in self.index.words ? [...self.index.words[name]] : [...new Set(self.columns[name])])
    .sort((a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })));

  /** Values of the metric that is shown, spread over all lines. */
  self.takeMeasure = (data) => {
    const n = self.columns.id.length;
    const make = () => new Float64Array(n).fill(NaN);
    const measure = { ...self.index.measures.find((m) => m.id === data.id), value: make(), low: make(), high: make(), run: new Int32Array(n).fill(-1), change: new Map() };
    summed(data.line).forEach((line, i) => {
      measure.value[line] = data.value[i] ?? NaN;
      measure.low[line] = data.low[i] ?? NaN;
      measure.high[line] = data.high[i] ?? NaN;
      measure.run[line] = data.run[i];
    });
    for (const [line, ...change] of data.changes) measure.change.set(line, change);
    self.measure = measure;
  };

  function matching() {
    const n = self.columns.id.length;
    const wanted = FILTERS.filter((name) => state[name] !== "").map((name) => {
      if (!(name in self.index.words)) return [self.columns[name], Number(state[name])];
      return [self.columns[name], self.index.words[name].indexOf(state[name])];
    });
    const terms = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    if (terms.length && !self.haystack) {
      const lower = Object.fromEntries(SEARCHED.map((name) => [name, self.index.words[name].map((word) => word.toLowerCase())]));
      self.haystack = Array.from({ length: n }, (_, line) => SEARCHED.map((name) => lower[name][self.columns[name][line]]).join(" ") + ` ${self.columns.context[line]} ${self.columns.concurrency[line]}`);
    }
    const found = [];
    for (let line = 0; line < n; line++) {
      if (!state.cpu && self.columns.cpu[line]) continue;
      if (state.changed && !self.measure?.change.has(line)) continue;
      if (!wanted.every(([column, value]) => column[line] === value)) continue;
      if (terms.length && !terms.every((term) => self.haystack[line].includes(term))) continue;
      found.push(line);
    }
    return found;
  }

  function sorted(lines) {
    const name = state.sort;
    if (name !== "value" && name !== "change" && !Object.hasOwn(self.columns, name)) return lines;
    let key;
    if (name === "value") key = (line) => self.measure?.value[line] ?? NaN;
    else if (name === "change") key = (line) => { const found = self.measure?.change.get(line); return found ? Math.abs(Math.log(found[2] ?? 2)) : NaN; };
    else if (name in self.index.words) {
      const rank = new Map(choices(name).map((word, i) => [word, i]));
      const ranks = self.index.words[name].map((word) => rank.get(word));
      key = (line) => ranks[self.columns[name][line]];
    } else key = (line) => self.columns[name][line];
    const keys = new Map(lines.map((line) => [line, key(line)]));
    const sign = state.down ? -1 : 1;
    return lines.sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b; // unknown comes last
      return sign * (x - y) || a - b;
    });
  }

  self.name = (line) => {
    const load = self.word("load", line) || `${self.columns.concurrency[line].toLocaleString("en-US")} × ${self.columns.context[line].toLocaleString("en-US")}`;
    const exchange = self.word("exchange", line);
    return [self.word("model", line), self.word("workload", line), self.word("layout", line), exchange === "none" ? "" : exchange, load].filter(Boolean).join(" · ");
  };

  function head() {
    const m = self.measure;
    const columns = [["", ""], ["model", "Point", "narrow"], ["model", "Model", "roomy"], ["workload", "Workload", "roomy"], ["layout", "Layout", "roomy"], ["exchange", "Exchange", "roomy"], ["context", "Context", "n roomy"], ["concurrency", "Conc.", "n roomy"],
      ["value", m ? `${m.label}${m.unit ? ` (${m.unit})` : ""}` : "Value", "n"], ["change", "Last change", "n"], ["runs", "Runs", "n"], ["last", "Newest run"], ["hardware", "Hardware"], ["how", "How"]];
    find("table").tHead.replaceChildren(el("tr", {}, ...columns.map(([name, label, kind]) => {
      if (!name) return el("th", { scope: "col" }, el("span", { class: "unseen" }, "Show history"));
      const button = el("button", { type: "button", "data-sort": name }, label);
      button.addEventListener("click", () => {
        Object.assign(state, { down: state.sort === name ? !state.down : ["value", "change", "runs", "last"].includes(name), sort: name, page: 0 });
        self.show();
        [...find("table").querySelectorAll(`[data-sort="${name}"]`)].find((one) => one.offsetParent)?.focus();
      });
      return el("th", { scope: "col", class: kind, "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : null }, button);
    })));
  }

  self.shownValue = (line) => {
    const m = self.measure;
    if (!m || Number.isNaN(m.value[line])) return "–";
    const interval = Number.isNaN(m.low[line]) ? "" : ` [${dcp.number(m.low[line])}–${dcp.number(m.high[line])}]`;
    return [dcp.number(m.value[line]), el("span", { class: "note" }, interval)];
  };

  function changeCell(line) {
    const found = self.measure?.change.get(line);
    if (!found) return el("td", { class: "n" }, "");
    const [, after, ratio, , , old, fresh] = found;
    const text = ratio === null ? `${dcp.number(old)} → ${dcp.number(fresh)}` : self.percent(ratio);
    const kind = self.worse(self.measure.better, ratio ?? (fresh > old ? 2 : 0.5));
    const since = self.index.runs.date[after];
    return el("td", { class: "n" }, el("span", { class: kind }, text), el("span", { class: "note" }, ` since ${since ? since.slice(0, 10) : self.index.runs.name[after]}`));
  }

  function row(line) {
    const id = self.columns.id[line];
    const on = state.picked.includes(id);
    const box = el("input", { type: "checkbox", "aria-label": `History of ${self.name(line)}`, "data-id": id });
    box.checked = on;
    box.addEventListener("change", () => self.pick(id, box.checked));
    const functional = () => (self.columns.cpu[line] ? el("span", { class: "pill" }, "functional") : "");
    const outcome = self.word("outcome", line);
    const last = self.columns.last[line];
    const cells = [
      el("td", {}, box), el("td", { class: "narrow" }, self.name(line), functional()), el("td", { class: "roomy" }, self.word("model", line)), el("td", { class: "w roomy" }, self.word("workload", line), functional()),
      el("td", { class: "w roomy" }, self.word("layout", line)), el("td", { class: "roomy" }, self.word("exchange", line)),
      el("td", { class: "n roomy" }, self.columns.context[line].toLocaleString("en-US")), el("td", { class: "n roomy" }, self.columns.concurrency[line].toLocaleString("en-US")),
      el("td", { class: "n" }, ...[self.shownValue(line)].flat()), changeCell(line), el("td", { class: "n" }, self.columns.runs[line]),
      el("td", { class: "w" }, self.when(self.index.runs.date[last]), outcome === "ok" ? "" : el("span", { class: "bad" }, ` ${outcome}`)),
      el("td", { class: "w" }, self.word("hardware", line)),
      el("td", { class: "wide" }, [self.word("load", line), self.word("how", line), self.word("driver", line) && `driver ${self.word("driver", line)}`, self.word("conditions", line)].filter(Boolean).join(" · ")),
    ];
    return el("tr", { class: on ? "on" : null }, ...cells);
  }

  self.pick = (id, on) => {
    if (on && state.picked.length >= MOST_PICKED) self.trouble(new Error(`${MOST_PICKED} points are shown at once; untick one first.`));
    else {
      self.trouble(null);
      state.picked = on ? [...state.picked, id] : state.picked.filter((other) => other !== id);
    }
    for (const box of document.querySelectorAll("#table input[data-id]")) {
      box.checked = state.picked.includes(box.dataset.id);
      box.closest("tr").className = box.checked ? "on" : "";
    }
    self.save();
    self.onPick();
  };

  self.show = () => {
    const lines = sorted(matching());
    const pages = Math.max(1, Math.ceil(lines.length / ROWS));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    head();
    find("table").tBodies[0].replaceChildren(...lines.slice(state.page * ROWS, (state.page + 1) * ROWS).map(row));
    const hidden = state.cpu ? 0 : self.columns.cpu.reduce((sum, one) => sum + one, 0);
    find("count").textContent = `${lines.length.toLocaleString("en-US")} of ${self.columns.id.length.toLocaleString("en-US")} points`
      + (hidden ? `; ${hidden.toLocaleString("en-US")} functional ones of CPU runs are hidden` : "");
    self.pager(find("pager"), pages, state.page, (page) => { state.page = page; self.show(); });
    self.save();
  };

  self.pager = (element, pages, page, go) => {
    if (pages < 2) { element.replaceChildren(); return; }
    const button = (name, to, off) => {
      const made = el("button", { type: "button", disabled: off }, name);
      made.addEventListener("click", () => { go(to); [...element.querySelectorAll("button")].find((b) => b.textContent === name && !b.disabled)?.focus(); });
      return made;
    };
    element.replaceChildren(button("First", 0, page === 0), button("Previous", page - 1, page === 0), el("span", { class: "note" }, `page ${page + 1} of ${pages.toLocaleString("en-US")}`),
      button("Next", page + 1, page === pages - 1), button("Last", pages - 1, page === pages - 1));
  };

  self.filters = () => {
    const again = (name) => (event) => { Object.assign(state, { [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value, page: 0 }); self.show(); };
    const search = el("input", { type: "search", name: "q", placeholder: "model, layout, driver …" });
    search.value = state.q;
    search.addEventListener("input", again("q"));
    const select = (name, label, options, chosen, changed) => {
      const made = el("select", { name }, ...options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
      made.addEventListener("change", changed);
      return el("label", { class: name === "metric" ? "whole" : null }, label, made);
    };
    const metric = select("metric", "Metric", self.index.measures.map((m) => [m.id, m.changes ? `${m.label} (${m.changes} changed)` : m.label]), state.metric, (event) => self.onMetric(event.target.value));
    const text = (name, choice) => (typeof choice === "number" ? choice.toLocaleString("en-US") : choice);
    const selects = FILTERS.map((name) => select(name, LABELS[name], [["", "all"], ...choices(name).map((choice) => [choice, text(name, choice)])], state[name], again(name)));
    const tick = (name, label) => {
      const box = el("input", { type: "checkbox", name });
      box.checked = state[name];
      box.addEventListener("change", again(name));
      return el("label", { class: "tick" }, box, label);
    };
    const clear = el("button", { type: "button" }, "Clear");
    clear.addEventListener("click", () => { Object.assign(state, { q: "", changed: false, page: 0, ...Object.fromEntries(FILTERS.map((name) => [name, ""])) }); self.filters(); self.show(); find("filters").querySelector("input").focus(); });
    find("filters").replaceChildren(el("label", { class: "whole" }, "Search", search), metric, ...selects, tick("changed", "only changed"), tick("cpu", "functional CPU runs"), clear);
  };

  const KEPT = ["q", "metric", "cpu", "changed", "sort", "down", "page", "x", "all", ...FILTERS];
  self.save = () => {
    const kept = new URLSearchParams();
    for (const name of KEPT) if (state[name]) kept.set(name, String(state[name]));
    for (const id of state.picked) kept.append("p", id);
    const address = `#${kept}`;
    if (address !== location.hash) history.replaceState(null, "", address);
  };
  self.restore = () => {
    const kept = new URLSearchParams(location.hash.slice(1));
    for (const name of KEPT) {
      const value = kept.get(name);
      if (value === null) continue;
      if (typeof state[name] === "boolean") state[name] = value === "true";
      else state[name] = typeof state[name] === "number" ? Math.max(0, Number.parseInt(value, 10) || 0) : value;
    }
    state.picked = [...new Set(kept.getAll("p"))];
  };
  return self;
})();
