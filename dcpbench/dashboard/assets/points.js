/* The points: columns from the index, filters, sorting, one page of rows. Extends `dash`:

   dash.take(index)      use a new index: columns, words, measures; keep selection and filters
   dash.state            filters, sorting and selection; dash.save() writes them into the address
   dash.show()           filter, sort and draw the table
   dash.load(file)       load a data file by a script element; return a promise of its data
   dash.percent(ratio)   format 1.031 as "+3.1 %" */
"use strict";
globalThis.dash = (() => {
  const ROWS = 50;
  const MAX_PICKED = 8;
  const USUAL = 0.75; // minimum share of a workload's rows for a setting to be shown once, above the table
  const MIN_USUAL = 4; // minimum rows of a workload for this; with fewer, each row shows its settings
  const FILTERS = ["model", "workload", "layout", "exchange", "context", "concurrency", "hardware"];
  const LABELS = { model: "Model", workload: "Workload", layout: "Layout", exchange: "Exchange", context: "Context", concurrency: "Concurrency", hardware: "Hardware" };
  const SEARCHED = ["model", "workload", "layout", "exchange", "how", "load", "hardware", "driver", "conditions"];
  const { element: el, find } = dcp;
  const unfiltered = () => Object.fromEntries(FILTERS.map((name) => [name, ""]));
  const state = { q: "", metric: "", cpu: false, changed: false, sort: "", down: false, page: 0, x: "date", all: false, picked: [], ...unfiltered() };
  const arrived = new Map();
  const loading = new Map();
  const self = { state, measure: null, index: null, columns: {}, onPick: () => {} };
  let fill = null;

  globalThis.dcpbenchData = (name, data) => { arrived.set(document.currentScript?.getAttribute("src") ?? name, data); arrived.set(name, data); };

  self.load = (file) => {
    if (!loading.has(file)) {
      loading.set(file, new Promise((done, failed) => {
        if (arrived.has(file)) { done(arrived.get(file)); return; }
        document.head.append(el("script", {
          src: file,
          load: () => (arrived.has(file) ? done(arrived.get(file)) : failed(new Error(`${file} holds no data`))),
          error: () => { loading.delete(file); failed(new Error(`${file} no longer exists, as the site was built again; reload the page.`)); },
        }));
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
  self.percent = (ratio) => {
    const change = (ratio - 1) * 100;
    return `${change < 0 ? "−" : "+"}${Math.abs(change).toLocaleString("en-US", { maximumFractionDigits: Math.abs(change) < 10 ? 1 : 0 })} %`;
  };
  self.when = (date) => (date ? date.slice(0, 16).replace("T", " ") : "–");
  /** Format a count; 0 means unknown, as in some imports. */
  const given = (count) => dcp.number(count || null);

  self.take = (index) => {
    self.index = index;
    self.columns = index.lines;
    self.numberOf = new Map(index.lines.id.map((id, line) => [id, line]));
    self.haystack = null;
    if (!index.measures.some((m) => m.id === state.metric)) state.metric = index.first;
    state.picked = state.picked.filter((id) => self.numberOf.has(id)).slice(0, MAX_PICKED);
    for (const name of FILTERS) if (state[name] && !choices(name).some((choice) => String(choice) === state[name])) state[name] = "";
  };

  /** Return whether a run's page can be opened; a live server writes it on request. */
  self.hasPage = (run) => Boolean(self.index.runs.page[run]) || document.documentElement.dataset.live === "yes";

  const choices = (name) => (name in self.index.words ? [...self.index.words[name]] : [...new Set(self.columns[name])])
    .sort((a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })));

  /** Store the values of the shown metric, one per line. */
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

  self.name = (line) => {
    const exchange = self.word("exchange", line);
    return [self.word("model", line), self.word("workload", line), self.word("layout", line), exchange === "none" ? "" : exchange, sizes(line)].filter(Boolean).join(" · ");
  };

  const sizes = (line) => {
    const [many, long] = [self.columns.concurrency[line], self.columns.context[line]];
    return self.word("load", line) || (many && long ? `${dcp.number(many)} × ${dcp.number(long)}` : many ? `${dcp.number(many)} in flight` : long ? `context ${dcp.number(long)}` : "");
  };

  const SHARED = ["model", "workload", "exchange", "hardware"];
  const settings = (line) => [...self.word("how", line).split(" · "), ...self.under(line).filter(Boolean).flatMap((words) => words.split(", "))];

  /** Return what the rows share, to be shown once: `columns` with one value in all rows, and `parts` of their settings;
      `usual` has, by workload, the parts of most of its rows, from which other rows state their deviations. `everywhere` has the
      parts that are usual in every workload. */
  function sharedBy(found) {
    if (found.length < 2) return nothingShared();
    const one = (name) => { const column = self.columns[name]; return found.every((line) => column[line] === column[found[0]]); };
    const { words } = self.index;
    const { workload, how, driver, conditions } = self.columns;
    const groups = new Map();
    for (const line of found) {
      const key = ((workload[line] * words.how.length + how[line]) * words.driver.length + driver[line]) * words.conditions.length + conditions[line];
      const rows = groups.get(key);
      if (rows) rows.count += 1;
      else groups.set(key, { line, count: 1 });
    }
    const all = new Map();
    const counts = new Map();
    for (const { line, count } of groups.values()) {
      const mine = counts.get(workload[line]) ?? { rows: 0, having: new Map() };
      counts.set(workload[line], mine);
      mine.rows += count;
      for (const part of new Set(settings(line))) for (const having of [all, mine.having]) having.set(part, (having.get(part) ?? 0) + count);
    }
    const within = (having, least) => new Set([...having].filter(([part, count]) => part && count >= least).map(([part]) => part));
    const parts = within(all, found.length);
    const usual = new Map([...counts].filter(([, { rows }]) => rows >= MIN_USUAL)
      .map(([name, { rows, having }]) => [name, new Set([...within(having, USUAL * rows)].filter((part) => !parts.has(part)))]));
    const [first, ...others] = usual.size === counts.size ? [...usual.values()] : [];
    const everywhere = others.length ? others.reduce((same, own) => same.intersection(own), first) : new Set();
    return { columns: SHARED.filter(one), parts, usual, everywhere };
  }

  const nothingShared = () => ({ columns: [], parts: new Set(), usual: new Map(), everywhere: new Set() });
  let common = nothingShared();
  function showShared(found) {
    common = sharedBy(found);
    const words = common.columns.map((name) => (name === "exchange" ? `exchange ${self.word(name, found[0])}` : self.word(name, found[0])));
    const all = [...words, ...common.parts, ...self.index.shared].filter(Boolean);
    const usual = [
      ["Unless a row differs: ", [...common.everywhere]],
      ...[...common.usual].map(([name, parts]) => [`Unless a ${self.index.words.workload[name]} row differs: `, [...parts.difference(common.everywhere)]]),
    ];
    const lists = [["All rows: ", all], ...usual].filter(([, parts]) => parts.length);
    find("shared").hidden = found.length < 2 || !lists.length;
    find("shared").replaceChildren(...lists.flatMap(([rows, parts], i) => [i ? el("br") : "", el("strong", {}, rows), parts.join(" · ")]));
    for (const name of SHARED) find("points-table").classList.toggle(`shared-${name}`, common.columns.includes(name));
  }

  /** Equal for `chunk 8,192` and `chunk 4,096`: a row that has one need not state that it lacks the other. The same holds
      for attention kernels, precisions, and the limits of an objective. */
  const kindOf = (part) => (self.index.backends.includes(part) ? "backend" : part.replace(/=.*/, "=").replace(/^(bf|fp)\d.*/, "precision").replace(/ ≤.*/, " ≤").replace(/[\d.,]+/g, "#"));
  const isObjective = (part) => part.includes(" ≤ ");

  /** Return the settings of a row that are not shown above the table. */
  function ownSettings(line) {
    const mine = settings(line).filter(Boolean);
    const usual = common.usual.get(self.columns.workload[line]) ?? new Set();
    const own = mine.filter((part) => !common.parts.has(part) && !usual.has(part));
    const lacking = [...usual].filter((part) => !mine.includes(part) && !own.some((other) => kindOf(other) === kindOf(part)));
    const without = mine.some(isObjective) ? [] : lacking.filter(isObjective);
    return [...own, ...(without.length ? ["no SLO"] : []), ...lacking.filter((part) => !without.includes(part)).map((part) => `not ${part}`)];
  }

  /** Return a line's name without the parts that are shown above the table. */
  const shortName = (line) => {
    const kept = ["model", "workload", "layout", "exchange"].filter((name) => !common.columns.includes(name));
    return [...kept.map((name) => self.word(name, line)).filter((word) => word !== "none"), sizes(line)].filter(Boolean).join(" · ");
  };

  /** Return the conditions of a line in addition to its hardware. */
  self.under = (line) => [self.word("driver", line) && `driver ${self.word("driver", line)}`, self.word("conditions", line)];

  /** Return the text of a change, the class of its colour, and `, worse` or `, better`. */
  self.changed = (better, [, , ratio, , , old, fresh]) => {
    const up = ratio === null ? fresh > old : ratio >= 1;
    const kind = better === "" ? "" : (better === "higher") === up ? "good" : "bad";
    return { kind, text: ratio === null ? `${dcp.number(old)} → ${dcp.number(fresh)}` : self.percent(ratio), judgement: { good: ", better", bad: ", worse" }[kind] ?? "" };
  };

  function shownValue(line) {
    const m = self.measure;
    if (!m || Number.isNaN(m.value[line])) return "–";
    const ends = dcp.range(m.low[line], m.high[line]);
    return [dcp.number(m.value[line]), el("span", { class: "note" }, ends && ` [${ends}]`)];
  }

  function latestChange(line) {
    const found = self.measure?.change.get(line);
    if (!found) return "";
    const { kind, text } = self.changed(self.measure.better, found);
    const since = self.index.runs.date[found[1]];
    return [el("span", { class: kind }, text), el("span", { class: "note" }, ` since ${since ? since.slice(0, 10) : self.index.runs.name[found[1]]}`)];
  }

  function newestRun(line) {
    const outcome = self.word("outcome", line);
    return [self.when(self.index.runs.date[self.columns.last[line]]), outcome === "ok" ? "" : el("span", { class: "bad" }, ` ${outcome}`)];
  }

  function box(line) {
    const id = self.columns.id[line];
    return el("input", { type: "checkbox", "aria-label": `History of ${self.name(line)}`, "data-id": id, checked: isPicked(line), change: (event) => self.pick(id, event.target.checked) });
  }

  const isPicked = (line) => state.picked.includes(self.columns.id[line]);
  self.functional = (cpu) => (cpu ? el("span", { class: "pill" }, "functional") : "");

  /** Return the columns of the table; those of words and numbers sort by their content. */
  function columnsOfTable() {
    const word = (name, label, kind, more = () => "") => ({ name, label, class: kind, key: (line) => self.word(name, line), cell: (line) => [self.word(name, line), more(line)] });
    const number = (name, label, kind, more = {}) => ({ name, label, class: kind, key: (line) => self.columns[name][line], cell: (line) => given(self.columns[name][line]), ...more });
    const functional = (line) => self.functional(self.columns.cpu[line]);
    const how = (line) => [self.word("load", line), ...ownSettings(line)].filter(Boolean).join(" · ");
    const size = (line) => { const found = self.measure?.change.get(line); return found ? Math.abs(Math.log(found[2] ?? 2)) : NaN; };
    return [
      { label: el("span", { class: "unseen" }, "Show history"), cell: box },
      { ...word("model", "Point", "narrow"), cell: (line) => [shortName(line), functional(line), el("div", { class: "note" }, ownSettings(line).join(" · "))] },
      word("model", "Model", "roomy of-model"), word("workload", "Workload", "w roomy of-workload"), word("layout", "Layout", "w roomy", functional), word("exchange", "Exchange", "roomy of-exchange"),
      number("context", "Context", "n roomy"), number("concurrency", "Conc.", "n roomy"),
      { name: "value", label: () => (self.measure ? dcp.measured(self.measure) : "Value"), class: "n", down: true, key: (line) => self.measure?.value[line], cell: shownValue },
      { name: "change", label: "Last change", class: "n", down: true, key: size, cell: latestChange },
      number("runs", "Runs", "n", { down: true }), number("last", "Newest run", "of-run", { down: true, cell: newestRun }), word("hardware", "Hardware", "of-hardware"),
      { ...word("how", "How", "wide"), cell: how },
    ];
  }

  self.pick = (id, on) => {
    if (on && state.picked.length >= MAX_PICKED) self.trouble(new Error(`${MAX_PICKED} points are shown at once; untick one first.`));
    else {
      self.trouble(null);
      state.picked = on ? [...state.picked, id] : state.picked.filter((other) => other !== id);
    }
    for (const ticked of document.querySelectorAll("#table input[data-id]")) {
      ticked.checked = state.picked.includes(ticked.dataset.id);
      ticked.closest("tr").className = ticked.checked ? "on" : "";
    }
    self.save();
    self.onPick();
  };

  self.show = () => {
    const lines = matching();
    const pages = Math.max(1, Math.ceil(lines.length / ROWS));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    fill ??= dcp.table(find("points-table"), "Points", columnsOfTable(), {
      id: "table", look: (line) => (isPicked(line) ? "on" : null), sorted: () => ({ name: state.sort, down: state.down }),
      sort: (name, down) => { Object.assign(state, { sort: name, down, page: 0 }); self.show(); },
    });
    showShared(lines);
    fill(lines, state.page * ROWS, (state.page + 1) * ROWS);
    const hidden = state.cpu ? 0 : self.columns.cpu.reduce((sum, one) => sum + one, 0);
    find("count").textContent = `${dcp.number(lines.length)} of ${dcp.number(self.columns.id.length)} ${self.columns.id.length === 1 ? "point" : "points"}`
      + (hidden ? `; ${dcp.number(hidden)} functional points of CPU runs are hidden` : "");
    dcp.pager(find("pager"), pages, state.page, (page) => { state.page = page; self.show(); });
    self.save();
  };

  self.filters = () => {
    const choose = (chosen) => { Object.assign(state, { ...chosen, page: 0 }); self.show(); };
    const again = (name) => ({ target }) => choose({ [name]: target.type === "checkbox" ? target.checked : target.value });
    const search = el("input", { type: "search", name: "q", placeholder: "model, layout, driver …", value: state.q, input: again("q") });
    const select = (name, label, options, change) => el("label", { class: name === "metric" ? "whole" : null }, label, dcp.select(options, state[name], change, { name }));
    const metric = select("metric", "Metric", self.index.measures.map((m) => [m.id, m.changes ? `${m.label} (${m.changes} changed)` : m.label]), (id) => self.onMetric(id));
    const text = (choice) => (typeof choice === "number" ? (choice ? dcp.number(choice) : "unknown") : choice);
    const selects = FILTERS.map((name) => select(name, LABELS[name], [["", "all"], ...choices(name).map((choice) => [choice, text(choice)])], (value) => choose({ [name]: value })));
    const tick = (name, label) => el("label", { class: "tick" }, el("input", { type: "checkbox", name, checked: state[name], change: again(name) }), label);
    const clear = () => { choose({ q: "", changed: false, ...unfiltered() }); self.filters(); find("filters").querySelector("input").focus(); };
    find("filters").replaceChildren(el("label", { class: "whole" }, "Search", search), metric, ...selects, tick("changed", "only changed"), tick("cpu", "functional CPU runs"), el("button", { type: "button", click: clear }, "Clear"));
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
