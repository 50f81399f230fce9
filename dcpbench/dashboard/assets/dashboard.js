/* Starts the page, shows the runs, and follows a server that updates the site while runs are in progress. */
"use strict";
(() => {
  const { state } = dash;
  const { element: el, find, counted } = dcp;
  const root = document.documentElement;
  const RUNS = 20;
  const POLL_MS = 2000;
  let runPage = 0;
  let fill = null;
  let version = null;

  function summary() {
    const { runs, lines } = dash.index;
    const dates = runs.date.filter(Boolean).sort();
    const span = dates.length ? `, ${[...new Set([dates[0].slice(0, 10), dates.at(-1).slice(0, 10)])].join(" to ")}` : "";
    const entries = lines.runs.reduce((sum, one) => sum + one, 0);
    find("summary").textContent = `${counted(runs.name.length, "run")}${span} · ${counted(lines.id.length, "point")} with ${counted(entries, "outcome")}`;
  }

  /** Show the latest changes, newest first: the points, the size, the confidence, and the two runs. */
  function latest() {
    const { steps, more } = dash.index.latest;
    const left = more ? [el("p", { class: "note" }, `${counted(more, "earlier pair")} of runs with changes: tick “only changed” below.`)] : [];
    find("latest").replaceChildren(...(steps.length ? [...steps.flatMap(step), ...left] : [nothing()]));
  }

  function nothing() {
    const { lines, least } = dash.index;
    const long = lines.runs.filter((runs, line) => runs >= least && !lines.cpu[line]).length;
    const looked = long ? `${dcp.number(long)} ${long === 1 ? "history" : "histories"} of ${least} runs or more ${long === 1 ? "was" : "were"} searched` : `a change can be distinguished from chance after ${least} runs of a point on the same hardware, driver and conditions; the longest history here has ${Math.max(0, ...lines.runs)}`;
    return el("p", {}, el("strong", {}, "No change is marked: "), `${looked}. The measurements of single runs follow below; dcpbench compare says how two of them differ.`);
  }

  function step({ before, after, same_code, points, worse, better, groups, omitted }) {
    const { date, commit, driver } = dash.index.runs;
    const about = (i) => [date[i] ? date[i].slice(0, 10) : "", commit[i] && `commit ${commit[i]}`].filter(Boolean).join(", ");
    const run = (i) => [link(i, "report.html", dash.index.runs.name[i]), about(i) ? ` (${about(i)})` : ""];
    const drivers = driver[before] && driver[after] && driver[before] !== driver[after] ? ` The driver changed from ${driver[before]} to ${driver[after]}.` : "";
    const code = same_code ? " Both runs have the same commit, so the code is not the cause." : "";
    const verdicts = [[worse, "bad", "worse"], [better, "good", "better"]].filter(([count]) => count)
      .flatMap(([count, kind, word], i) => [i ? ", " : ": ", el("strong", { class: kind }, `${dcp.number(count)} ${word}`)]);
    return [
      el("p", { class: "step" }, "Between ", ...run(before), " and ", ...run(after), ` ${counted(points, "point")} changed`, ...verdicts, `.${code}${drivers}`),
      el("ul", { class: "changed" }, ...groups.map(group), omitted ? el("li", { class: "note" }, `${counted(omitted, "point")} that changed less`) : ""),
    ];
  }

  /** Return the item for one point, or for several of a layout with the same change. Metrics with equal changes are joined. */
  function group({ line, points, model, verdict, changes }) {
    const of = [model ? dash.word("model", line) : "", dash.word("layout", line)].filter(Boolean).join(" · ");
    const name = points === 1 ? dash.name(line) : `${counted(points, "point")} of ${of}`;
    const joined = new Map();
    changes.forEach((change, i) => {
      const text = metricOf(change, points, verdict, i === 0);
      joined.set(text.key, { ...text, measures: [...(joined.get(text.key)?.measures ?? []), dash.index.measures[change[0]]] });
    });
    return el("li", {}, el("strong", {}, name), ...(verdict ? [" ", el("strong", { class: KINDS[verdict] }, verdict)] : []), ": ",
      ...[...joined.values()].flatMap(({ measures, shown }, i) => [i ? " · " : "", ...measures.flatMap((measure, k) => [k ? ", " : "", history(measure, line)]), ...shown]));
  }

  const KINDS = { worse: "bad", better: "good" };
  const history = (measure, line) => el("button", {
    type: "button", "aria-label": `History of ${measure.label}, ${dash.name(line)}`, click: () => dash.showHistory(measure.id, line),
  }, measure.label);

  /** Return by how much a metric changed, and its verdict if that differs from its line's; equal texts have the same `key`. */
  function metricOf([number, count, least, most, ...levels], points, verdict, first) {
    const measure = dash.index.measures[number];
    const [ratio, low, high, old, fresh] = levels;
    const { kind, text, judgement } = dash.changed(measure.better, [0, 0, ...levels]);
    const both = least !== null && (least - 1) * (most - 1) < 0;
    const ends = count === 1 || least === null ? [] : [...new Set((most <= 1 ? [most, least] : [least, most]).map(dash.percent))];
    const by = ends.length ? ends.join(" … ") : text;
    const word = both ? ", both ways" : kind === (KINDS[verdict] ?? "") ? "" : judgement;
    const some = count < points ? ` (${dcp.number(count)} of them)` : "";
    const sure = ratio === null ? "" : `95 %: ${dash.percent(low)} to ${dash.percent(high)}, `;
    const detail = points === 1 && first ? ` (${sure}${dcp.number(old)} → ${dcp.number(fresh)} ${measure.unit})` : "";
    return { key: [by, word, some, detail].join(), shown: [" ", el("strong", { class: both ? "" : kind }, `${by}${word}`), some, detail] };
  }

  const file = (i, name, text) => el("a", { href: `runs/${dash.index.runs.slug[i]}/${name}` }, text);
  const link = (i, name, text) => (dash.hasPage(i) ? file(i, name, text) : text);
  const word = (label, name, kind) => ({ label, class: kind, cell: (i) => dash.index.runs[name][i] });

  const columns = [
    { label: "Run", class: "name", cell: (i) => [link(i, "report.html", dash.index.runs.name[i]), dash.functional(dash.index.runs.cpu[i])] },
    { label: "Date", class: "of-run", cell: (i) => dash.when(dash.index.runs.date[i]) },
    word("Commit", "commit"), word("Hardware", "hardware", "of-hardware"), word("Driver", "driver"), word("Workloads", "workloads"), word("Models", "models"), word("ok", "ok", "n"),
    { label: "failed", class: "n", cell: (i) => { const lost = dash.index.runs.failed[i] + dash.index.runs.hung[i]; return el("span", { class: lost ? "bad" : "" }, lost); } },
    word("rejected", "rejected", "n"), word("Headline", "headline", "wide"),
    { label: "Files", class: "of-run", cell: (i) => (dash.hasPage(i) ? [link(i, "records.jsonl", "records"), " ", link(i, "points.csv", "CSV")] : dash.index.runs.records[i] ? file(i, "records.jsonl", "records") : "") },
  ];

  function runs() {
    const newest = dash.index.runs.name.map((_, i) => i).reverse();
    fill ??= dcp.table(find("runs-table"), "Runs", columns, { id: "run-table" });
    fill(newest, runPage * RUNS, (runPage + 1) * RUNS);
    dcp.pager(find("run-pager"), Math.ceil(newest.length / RUNS), runPage, (page) => { runPage = page; runs(); });
    const skipped = dash.index.skipped;
    find("skipped").replaceChildren(...(skipped.length ? [el("details", {}, el("summary", {}, `${skipped.length} left out`), el("ul", {}, ...skipped.map((text) => el("li", {}, text))))] : []));
  }

  async function metric(id) {
    const wanted = dash.index.measures.find((m) => m.id === id);
    state.metric = id;
    try {
      if (wanted) dash.takeMeasure(await dash.load(wanted.file));
      else dash.measure = null;
      dash.trouble(null);
    } catch (error) {
      dash.trouble(error);
    }
  }

  dash.onMetric = async (id) => {
    await metric(id);
    dash.show();
    dash.draw();
  };

  dash.showHistory = async (id, line) => {
    await metric(id);
    if (!state.picked.includes(dash.columns.id[line])) dash.pick(dash.columns.id[line], true);
    dash.filters();
    dash.show();
    await dash.draw();
    find("history").scrollIntoView();
  };

  /** Load an index and update the page; input, selection and focus are kept. */
  async function take(file) {
    const index = await dash.load(file);
    dash.take(index);
    await metric(state.metric);
    const at = document.activeElement?.closest("#filters")?.contains(document.activeElement) ? document.activeElement.name : "";
    const caret = at === "q" ? document.activeElement.selectionStart : null;
    dash.filters();
    if (at) {
      const field = find("filters").elements.namedItem(at);
      field?.focus({ preventScroll: true });
      if (caret !== null) field.setSelectionRange(caret, caret);
    }
    dash.show();
    summary();
    latest();
    runs();
    return dash.draw();
  }

  function job(one) {
    return el("div", {}, el("p", { class: "title" }, one.title), el("progress", { max: one.total || 1, value: one.done, "aria-label": one.title }), el("p", { class: "note" }, one.note));
  }

  async function follow() {
    if (document.visibilityState === "visible") {
      try {
        const news = await (await fetch("live.json", { cache: "no-store" })).json();
        find("live").hidden = !news.jobs.length && !news.note;
        find("jobs").replaceChildren(...news.jobs.map(job), ...(news.note ? [el("p", { class: "note" }, news.note)] : []));
        if (version === null) version = root.dataset.index;
        if (news.index && news.index !== version) {
          version = news.index;
          await take(news.index);
        }
        if (find("trouble").dataset.lost) { dash.trouble(null); delete find("trouble").dataset.lost; }
      } catch {
        dash.trouble(new Error("The server does not answer; this page is no longer updated."));
        find("trouble").dataset.lost = "yes";
      }
    }
    setTimeout(follow, POLL_MS);
  }

  async function start() {
    dcp.themeButton(find("theme"));
    dash.restore();
    try {
      await take(root.dataset.index);
    } catch (error) {
      dash.trouble(error);
    }
    performance.mark("dcpbench-usable");
    root.dataset.usable = String(Math.round(performance.now()));
    addEventListener("hashchange", async () => {
      if (!location.hash.includes("=")) { dash.save(); return; }
      dash.restore();
      await take(version ?? root.dataset.index);
    });
    if (root.dataset.live === "yes") follow();
  }
  document.addEventListener("DOMContentLoaded", start);
})();
