"use strict";
// The explorer: which view, its state in the address, its controls, and what the server answers.
{
  const { h } = cubeloom;
  const content = document.getElementById("view"), sidebar = document.getElementById("controls"), state = document.getElementById("state");
  let choices = null, timer = null, polling = null, view = "", newest = 0, last = Promise.resolve();

  const address = () => {
    const [name, query] = location.hash.slice(1).split("?");
    return { name: PAGES[name] ? name : "plan", values: Object.fromEntries(new URLSearchParams(query || "")) };
  };
  // Only what differs from the defaults stands in the address.
  function remember(name, values, fields) {
    const shown = Object.entries(values).filter(([key, value]) => value !== "" && value !== String((fields.find((field) => field.name === key) || {}).value ?? ""));
    history.replaceState(null, "", `#${name}${shown.length ? `?${new URLSearchParams(shown)}` : ""}`);
  }

  async function ask(path, values) {
    const given = Object.entries(values).filter(([, value]) => value !== "");
    const answer = await fetch(`api/${path}?${new URLSearchParams(given)}`);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
    return found;
  }

  function tell(text, wrong) {
    state.textContent = text;
    state.classList.toggle("wrong", Boolean(wrong));
  }

  // One question at a time, so that the server never computes two: of those that wait, the newest is asked.
  function answer(work) {
    const mine = (newest += 1), before = last, stale = () => mine !== newest;
    last = (async () => {
      await before;
      if (stale()) return;
      content.setAttribute("aria-busy", "true");
      tell("Computing");
      try {
        await work(stale);
        if (!stale()) tell("Up to date");
      } catch (error) {
        if (!stale()) tell(error.message, true);
      } finally {
        content.removeAttribute("aria-busy");
      }
    })();
  }

  function show() {
    const { name, values } = address();
    clearInterval(polling);
    view = name;
    document.querySelectorAll("nav a").forEach((link) => {
      if (link.hash === `#${name}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    });
    document.title = `${PAGES[name].title} - Cubeloom`;
    content.replaceChildren();
    content.parts = null;
    PAGES[name].open(values);
  }

  const later = (work, wait = 250) => { clearTimeout(timer); timer = setTimeout(work, wait); };
  const place = (title, form) => sidebar.replaceChildren(h("details", { open: window.innerWidth > 900, class: "asked" }, h("summary", {}, title), form.element));

  // A view whose answer depends on its controls alone.
  function simple(name, fields, draw) {
    return (values) => {
      let kept = values;
      const listed = fields(kept);
      const go = (now) => {
        kept = { ...Object.fromEntries(Object.entries(kept).filter(([key]) => !(key in now))), ...now };
        remember(name, kept, listed);
        later(() => answer((stale) => draw(kept, stale, (more) => { kept = { ...kept, ...more }; remember(name, kept, listed); })));
      };
      const form = cubeloom.controls(listed, values, go);
      place("Controls", form);
      go(form.read());
      clearTimeout(timer);
      answer((stale) => draw(kept, stale, (more) => { kept = { ...kept, ...more }; remember(name, kept, listed); }));
    };
  }

  const planFields = (values) => {
    const machines = choices.plan.clusters, machine = machines.find((each) => each.name === (values.cluster || "dgx-h100")) || machines[0];
    return [
      { name: "model", label: "Model", type: "name", value: "gpt-5b", options: choices.plan.models.map((each) => [each.name, each.name]), hint: "A preset, or the path of a Hugging Face folder" },
      { name: "cluster", label: "Cluster", type: "select", value: "dgx-h100", options: machines.map((each) => [each.name, `${each.name}: ${each.devices.toLocaleString("en")} × ${each.device}`]) },
      { name: "devices", label: "Devices", type: "range", value: "64", min: 1, steps: cubeloom.counts(Math.min(4096, machine.devices)) },
      { name: "batch", label: "Batch, in samples of a step", type: "range", value: "256", min: 1, steps: cubeloom.counts(8192) },
      { name: "sequence", label: "Tokens of a sample", type: "range", value: "", min: 0, steps: [0, ...cubeloom.counts(8192).filter((n) => n >= 128)], hint: "0 or empty: the longest that the model takes" },
      { name: "dtype", label: "Numbers", type: "select", value: "bfloat16", options: choices.plan.dtypes.map((each) => [each, each]) },
      { name: "reserve", label: "Memory left free, in %", type: "range", value: "8", min: 0, max: 40, step: 1 },
      { name: "record", label: "Stages as CUDA graphs where possible", type: "check", value: "" },
    ];
  };
  const asked = (values) => ({ ...values, sequence: values.sequence === "0" ? "" : values.sequence });

  async function plan(values, stale, keep) {
    const data = await ask("plan", asked(values));
    if (stale()) return;
    const draw = (chosen) => cubeloom.views.plan(content, data, chosen, (next) => keep({ strategy: next ? String(next) : "" }));
    draw(0);
    content.removeAttribute("aria-busy");
    const found = [];
    for (const name of data.compared) {
      tell(`The best are there; computing ${name}`);
      found.push(await ask("usual", { ...asked(values), name }));
      if (stale()) return;
    }
    data.usual = found;
    draw(Number(values.strategy || 0));
  }

  const scheduleFields = () => {
    const families = choices.schedules.families.map((each) => [each.name, `${each.name}: ${each.about}`]);
    const cost = (name, label, value) => ({ name, label, type: "range", value, min: 0, max: 4, step: 0.05 });
    return [
      { name: "name", label: "Schedule", type: "select", value: "1f1b", options: families },
      { name: "compare", label: "Compared with", type: "select", value: "chimera", options: [["none", "none"], ...families] },
      { name: "stages", label: "Stages (workers)", type: "range", value: "8", min: 1, max: 32, step: 1 },
      { name: "microbatches", label: "Micro-batches", type: "range", value: "8", min: 1, max: 64, step: 1 },
      { name: "chunks", label: "Chunks a worker", type: "range", value: "", min: 0, max: 8, step: 1, hint: "For interleaved, zb-h1 and hanayo; 0 or empty: its own default" },
      { name: "pairs", label: "Pairs of pipelines", type: "range", value: "", min: 0, max: 8, step: 1, hint: "For chimera, chimera-zb and auto" },
      cost("F", "Time of a forward", "1"), cost("I", "Time of an input gradient", "1"), cost("W", "Time of a weight gradient", "1"),
      { name: "p2p", label: "Time of a message", type: "range", value: "0", min: 0, max: 2, step: 0.05 },
      { name: "reduce", label: "Time to reduce the gradients of a worker", type: "range", value: "0", min: 0, max: 8, step: 0.1 },
      { name: "sync", label: "Reductions start", type: "select", value: "none", options: [["none", "after the step"], ["end", "at its end, launched by the rows"], ["eager", "eagerly"], ["eager-opt", "eagerly where a bubble follows"]] },
      { name: "recompute", label: "Recompute forwards in the backward", type: "check", value: "" },
    ];
  };
  const nonzero = (values, ...names) => ({ ...values, ...Object.fromEntries(names.filter((name) => values[name] === "0").map((name) => [name, ""])) });

  async function schedules(values, stale) {
    const data = await ask("schedules", nonzero(values, "chunks", "pairs"));
    if (!stale()) cubeloom.views.schedules(content, data);
  }

  const layoutFields = () => {
    const axis = (name, label, value) => ({ name, label, type: "range", value, min: 1, max: 16, step: 1 });
    const list = (name) => choices.layouts[name].map((each) => [each, each]);
    return [
      { name: "model", label: "Model", type: "name", value: "gpt-tiny", options: choices.plan.models.map((each) => [each.name, each.name]), hint: "A preset, or the path of a Hugging Face folder" },
      axis("data", "data: copies of the model", "1"), axis("z", "z: cuts rows, and weights at rest", "2"),
      axis("y", "y: cuts outputs, then inputs", "2"), axis("x", "x: cuts inputs, then outputs", "2"),
      { name: "activations", label: "Activations at rest", type: "select", value: choices.layouts.activations[0], options: list("activations") },
      { name: "weights", label: "Weights at rest, along z", type: "select", value: choices.layouts.weights[0], options: list("weights") },
      { name: "inputs", label: "Inputs for the weight gradient", type: "select", value: choices.layouts.inputs[0], options: list("inputs") },
      { name: "samples", label: "Samples of a micro-batch, over the grid", type: "range", value: "", min: 0, steps: [0, ...cubeloom.counts(256)], hint: "0 or empty: as many as ranks" },
      { name: "dtype", label: "Numbers", type: "select", value: "bfloat16", options: choices.plan.dtypes.map((each) => [each, each]) },
    ];
  };

  async function layouts(values, stale, keep) {
    const data = await ask("layouts", nonzero(values, "samples"));
    if (!stale()) cubeloom.views.layouts(content, data, values, keep);
  }

  async function runs(values) {
    const found = await ask("runs", {});
    let names = (values.names || "").split(",").filter((name) => found.runs.some((run) => run.name === name)), seen = "";
    if (!names.length && found.runs.length) names = [found.runs[0].name];
    const boxes = found.runs.map((run) => h("li", {}, h("label", {}, h("input", { type: "checkbox", checked: names.includes(run.name), value: run.name, onchange: (event) => {
      names = event.target.checked ? [...names, run.name] : names.filter((name) => name !== run.name);
      history.replaceState(null, "", names.length ? `#runs?${new URLSearchParams({ names: names.join(",") })}` : "#runs");
      seen = "";
      safely();
    } }), ` ${run.name}`, h("span", { class: "quiet" }, ` ${new Date(run.changed).toLocaleString()}`))));
    sidebar.replaceChildren(h("details", { open: window.innerWidth > 900, class: "asked" }, h("summary", {}, `Runs in ${found.folder}`),
      found.runs.length ? h("ul", { class: "plain" }, boxes) : h("p", {}, "None yet: cubeloom train FILE writes one.")));
    async function draw() {
      if (!names.length) { content.parts = null; content.replaceChildren(cubeloom.card("Runs", h("p", {}, found.runs.length ? "Choose a run, or several to compare." : `There is no run in ${found.folder}.`))); tell("Up to date"); return; }
      const fetched = await ask("run", { names: names.join(","), seen });
      if (fetched.runs === null || view !== "runs") return;
      seen = fetched.seen;
      cubeloom.views.runs(content, fetched);
      tell("Up to date; new steps appear by themselves");
    }
    const safely = () => draw().catch((error) => tell(error.message, true));
    await safely();
    polling = setInterval(safely, 2000);
  }

  const PAGES = {
    plan: { title: "Plan", open: simple("plan", planFields, plan) },
    schedules: { title: "Schedules", open: simple("schedules", scheduleFields, schedules) },
    layouts: { title: "Layouts", open: simple("layouts", layoutFields, layouts) },
    runs: { title: "Runs", open: (values) => { newest += 1; runs(values).catch((error) => tell(error.message, true)); } },
  };

  cubeloom.themeButton();
  document.getElementById("link").replaceWith(Object.assign(cubeloom.copyButton("Copy link", () => location.href), { id: "link" }));
  window.addEventListener("hashchange", show);
  ask("choices", {}).then((found) => { choices = found; show(); }).catch((error) => tell(error.message, true));
}
