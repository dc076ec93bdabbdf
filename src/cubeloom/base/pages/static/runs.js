"use strict";
// Runs: the state of each, their curves (several together), a measured step above the simulated one, events, settings.
{
  const { h } = cubeloom;

  cubeloom.views.runs = (into, data) => {
    const { runs } = data, names = [];
    for (const run of runs) for (const chart of run.charts) if (!names.includes(chart.name)) names.push(chart.name);
    const curves = names.map((name) => cubeloom.curves(runs.flatMap((run) => run.charts.filter((chart) => chart.name === name).map((chart) => ({ name: run.name, chart })))));
    into.replaceChildren(
      cubeloom.card(runs.length > 1 ? "Compared" : "The run", facts(runs)),
      curves.length ? h("div", { class: "charts" }, curves) : cubeloom.card("Curves", h("p", {}, "The run has not come to the end of a step.")),
      ...runs.map((run) => step(run, runs.length > 1)),
      ...runs.map((run) => cubeloom.card(named("Events", run, runs), events(run))),
      ...runs.map((run) => cubeloom.card(named("Settings", run, runs), cubeloom.details("All of them, as they were resolved", h("pre", { tabindex: "0" }, run.settings)))));
  };

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
