"use strict";
// A plan: strategies side by side, where time and memory go, the pipeline and the settings file of the chosen one.
{
  const { h, number } = cubeloom;
  const TIME = [["computation", "c-compute"], ["bubble", "c-bubble"], ["exposed communication", "c-exposed"]];
  const MEMORY = [["parameters", "m0"], ["gradients", "m1"], ["optimizer", "m2"], ["activations", "m3"], ["gathered", "m4"], ["buffers", "m5"], ["update", "m6"]];
  const kinds = (pairs) => pairs.map(([name, kind]) => ({ name, class: kind }));
  const GRID = "grid: pipe × data × z × y × x";

  cubeloom.views.plan = (into, data, chosen = 0, choose = null) => {
    const all = [...data.plans, ...(data.usual || []).filter((each) => each.step_s)];
    if (!data.plans.length) { into.replaceChildren(none(data)); return; }
    let at = Math.min(chosen, all.length - 1);
    const detail = h("div", { class: "detail", "aria-live": "polite" });
    const strategies = h("div", {});
    const select = (place) => {
      at = place;
      strategies.querySelectorAll("tr[data-place]").forEach((row) => row.classList.toggle("chosen", Number(row.dataset.place) === at));
      strategies.querySelectorAll("tr[data-place] button").forEach((button, number_) => button.setAttribute("aria-pressed", String(number_ === at)));
      detail.replaceChildren(...one(data, all[at]));
    };
    strategies.append(side(data, all, (place) => { select(place); if (choose) choose(place); }));
    select(at);
    into.replaceChildren(...[
      h("p", { class: "lead" }, data.sentence),
      h("p", { class: "quiet" }, `${data.considered.toLocaleString("en")} decompositions of a batch of ${data.samples.toLocaleString("en")} ` +
        `${data.unit === "tokens" ? `sequences of ${data.sequence.toLocaleString("en")} tokens` : "images"} in ${data.dtype} were compared in ${number.seconds(data.seconds)}.`),
      cubeloom.card("Strategies", strategies, without(data)),
      cubeloom.card("Where the time of a step goes", cubeloom.bars({ label: "Time of a step by strategy", kinds: kinds(TIME), show: number.seconds, unit: "time of a step",
        rows: all.map((plan) => ({ name: title(plan), parts: plan.time, total: plan.step_s, low: plan.step_s - plan.error_s, high: plan.step_s + plan.error_s,
          value: `${number.seconds(plan.step_s)} ± ${number.seconds(plan.error_s)}` })) })),
      cubeloom.card("Where the memory of a device goes", cubeloom.bars({ label: "Memory of a device by strategy", kinds: kinds(MEMORY), show: number.bytes, unit: "bytes of the rank that needs most",
        limit: { name: `capacity of ${data.device}`, value: data.capacity },
        rows: all.map((plan) => ({ name: title(plan), parts: plan.memory, total: plan.memory_gb * 1e9 })) })),
      detail,
      data.scaling ? cubeloom.card("Other numbers of devices", scaling(data)) : null,
      cubeloom.card("What was refused", refused(data))].filter(Boolean));
  };

  const why = (plan) => Object.entries(plan.saves).map(([term, seconds]) => `${number.seconds(Math.abs(seconds))} ${seconds > 0 ? "more" : "less"} ${term}`).join(", ") || "-";
  const title = (plan) => (plan.label ? `${plan.label}: ` : "") + `${plan.name}, ${plan.schedule}`;

  function side(data, all, select) {
    const heads = ["strategy", "step", "against the best", `${data.unit}/s`, "MFU", "memory", "micro-batches", "why it is slower"];
    const rows = all.map((plan, place) => ({
      properties: { "data-place": place },
      cells: [
        h("button", { type: "button", class: "choose", onclick: () => select(place) }, h("strong", {}, plan.label || plan.name), h("span", {}, plan.label ? `${plan.name}, ${plan.schedule}` : plan.schedule)),
        h("span", {}, number.seconds(plan.step_s), h("span", { class: "quiet" }, ` ± ${number.seconds(plan.error_s)}`)),
        plan.slower < 0.0005 ? "best" : `+${(plan.slower * 100).toFixed(1)} %`,
        number.count(plan.per_second), number.share(plan.mfu), number.bytes(plan.memory_gb * 1e9),
        `${plan.microbatches} of ${plan.microbatch}`, why(plan)],
    }));
    return h("div", {}, cubeloom.scroller("Strategies", cubeloom.table("Strategies, the fastest first", heads, rows, { class: "stack strategies" })),
      h("p", { class: "quiet" }, `${GRID}; axes of one rank are left out. ± is one standard deviation of a prediction.`));
  }

  function without(data) {
    if (data.usual === undefined) return h("p", { class: "quiet" }, `On the same devices, being computed: ${data.compared.join("; ")}.`);
    const missing = data.usual.filter((each) => !each.step_s);
    return missing.length ? h("p", { class: "quiet" }, missing.map((each) => `${each.label} cannot run: ${each.why}. `)) : null;
  }

  function one(data, plan) {
    const bytes = Object.entries(plan.bytes).filter(([, size]) => size > 0);
    const what = plan.label ? `${plan.label} (${plan.name})` : plan.name;
    return [
      cubeloom.card(`Selected: ${what}, ${plan.schedule}`,
        h("p", {}, plan.details, "."),
        h("h3", {}, "Received by rank 0 in a step"),
        bytes.length ? cubeloom.bars({ label: "Bytes by axis", kinds: [{ name: "bytes", class: "c-exposed" }], show: number.bytes, rows: bytes.map(([axis, size]) => ({ name: `along ${axis}`, parts: { bytes: size }, total: size })) })
          : h("p", {}, "Nothing: one device."),
        h("h3", {}, "Settings file"),
        h("p", { class: "quiet" }, "cubeloom train FILE runs it; add the data and the learning rate."),
        h("pre", { tabindex: "0", "aria-label": "Settings file" }, plan.settings), cubeloom.copyButton("Copy the settings file", () => plan.settings)),
      plan.timeline ? cubeloom.card("Its pipeline", cubeloom.timelines([plan.timeline])) : null,
    ].filter(Boolean);
  }

  const scaling = (data) => cubeloom.table("Other numbers of devices", ["devices", "best grid", "schedule", "step", `${data.unit}/s`, "MFU"],
    data.scaling.map((each) => (each.name ? [each.devices.toLocaleString("en"), each.name, each.schedule, number.seconds(each.step_s), number.count(each.per_second), number.share(each.mfu)]
      : [each.devices.toLocaleString("en"), "none can run", "-", "-", "-", "-"])), { class: "stack" });

  const refused = (data) => cubeloom.table("Refused decompositions", ["why", "decompositions"],
    Object.entries(data.refused).map(([why, count]) => [why, count.toLocaleString("en")]), { class: "pairs" });

  function none(data) {
    const near = (data.nearest || []).map((count) => count.toLocaleString("en")).join(" and ");
    return cubeloom.card("No decomposition can run", h("p", {}, `${data.title}: nothing runs. `,
      near ? `The nearest numbers of devices that work are ${near}.` : "More devices, a smaller batch or a smaller model may."), refused(data));
  }
}
