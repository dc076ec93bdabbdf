"use strict";
// Runs: the state of each, their curves (several together), a measured step above the simulated one, events, settings.
{
  const { h } = cubeloom;

  cubeloom.views.runs = (into, data) => {
    const { runs } = data, names = [], several = runs.length > 1;
    for (const run of runs) for (const chart of run.charts) if (!names.includes(chart.name)) names.push(chart.name);
    const of = (name) => runs.flatMap((run) => run.charts.filter((chart) => chart.name === name).map((chart) => ({ name: run.name, chart })));
    // A part of the page is made again only where what it shows has changed; curves take new steps as they are.
    const old = into.parts || new Map(), parts = new Map();
    const part = (key, shown, make) => {
      const text = JSON.stringify(shown), before = old.get(key);
      parts.set(key, before && before.text === text ? before : { text, element: make() });
      return parts.get(key).element;
    };
    const curves = names.map((name) => {
      const key = `${runs.map((run) => run.name)} ${name}`, before = old.get(key);
      if (before) before.element.renew(of(name));
      parts.set(key, before || { element: cubeloom.curves(of(name)) });
      return parts.get(key).element;
    });
    const charts = (old.get("charts") || { element: h("div", { class: "charts" }) }).element;
    parts.set("charts", { element: charts });
    placed(charts, curves);
    into.parts = parts;
    placed(into, [
      part("facts", runs.map((run) => [run.name, run.facts]), () => cubeloom.card(several ? "Compared" : "The run", facts(runs))),
      curves.length ? charts : part("none", [], () => cubeloom.card("Curves", h("p", {}, "The run has not come to the end of a step."))),
      ...runs.map((run) => part(`step of ${run.name}`, [several, run.step], () => step(run, several))),
      ...runs.map((run) => part(`events of ${run.name}`, [several, run.events], () => cubeloom.card(named("Events", run, runs), events(run)))),
      ...runs.map((run) => part(`settings of ${run.name}`, [several, run.settings], () => cubeloom.card(named("Settings", run, runs),
        cubeloom.details("All of them, as they were resolved", h("pre", { tabindex: "0" }, run.settings))))),
    ]);
  };

  // These children in this order; those that are there already are not taken out, so that the focus stays.
  function placed(into, children) {
    [...into.childNodes].filter((child) => !children.includes(child)).forEach((child) => child.remove());
    children.forEach((child, place) => { if (into.childNodes[place] !== child) into.insertBefore(child, into.childNodes[place] || null); });
  }

  const named = (title, run, runs) => (runs.length > 1 ? `${title} of ${run.name}` : title);

  function facts(runs) {
    if (runs.length === 1) return h("dl", { class: "facts" }, runs[0].facts.map((fact) => h("div", {}, h("dt", {}, fact.name), h("dd", {}, fact.value))));
    const names = [...new Set(runs.flatMap((run) => run.facts.map((fact) => fact.name)))];
    const of = (run, name) => (run.facts.find((fact) => fact.name === name) || { value: "-" }).value;
    return cubeloom.scroller("Facts of the runs", cubeloom.table("Facts of the runs", ["", ...runs.map((run) => run.name)], names.map((name) => [name, ...runs.map((run) => of(run, name))])));
  }

  function step(run, several) {
    const title = several ? `A step of ${run.name}` : "A step";
    if (!run.step.timelines) return cubeloom.card(title, h("p", {}, run.step.why));
    return cubeloom.card(title, h("p", {}, run.step.words), cubeloom.timelines(run.step.timelines));
  }

  function events(run) {
    if (!run.events.length) return h("p", {}, "None were recorded.");
    return h("div", {}, run.earlier ? h("p", {}, `The last ${run.events.length}; ${run.earlier.toLocaleString("en")} earlier ones are in metrics.jsonl.`) : null,
      cubeloom.table("Events", ["time (UTC)", "event", "what"], run.events.map((event) => [event.time, event.name, event.fields || "-"]), { class: "stack" }));
  }
}
