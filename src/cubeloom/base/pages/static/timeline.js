"use strict";
// Timelines of schedules, one above the other on one scale; below each the activations that its workers hold.
{
  const { h, svg, number } = cubeloom;
  const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", R: "start of a reduction", U: "update" };
  const ROW = 22, GAP = 3, HEAD = 8, AXIS = 34, MEMORY = 84, RIGHT = 14;
  const COMPUTE = ["F", "B", "I", "W"];

  cubeloom.timelines = (timelines, options = {}) => {
    const longest = Math.max(...timelines.map((each) => each.makespan)) || 1;
    const body = h("div", {});
    let zoom = 1, redraw = () => {};
    const slider = h("input", { type: "range", min: "1", max: "12", step: "0.5", value: "1", oninput: (event) => {
      zoom = Number(event.target.value);
      redraw();
    } });
    const panels = timelines.map((timeline, index) => panel(timeline, longest, index, options));
    body.append(...panels.map((each) => each.element));
    const holder = h("div", { class: "timelines" }, legend(timelines),
      h("label", { class: "zoom" }, "Zoom ", slider), body,
      h("p", { class: "quiet" }, "Point at an action, or move to one with the arrow keys, to see what it waited for",
        h("span", { class: "swatch outline-before", "aria-hidden": "true" }), " and what needs it",
        h("span", { class: "swatch outline-after", "aria-hidden": "true" }), "."));
    return cubeloom.fitted(holder, (width) => {
      redraw = () => panels.forEach((each) => each.draw(Math.max(300, width) * zoom));
      redraw();
    });
  };

  function legend(timelines) {
    const seen = (kind, up) => timelines.some((each) => each.actions.some((act) => act.kind === kind && (act.replica % 2 === 1) === up));
    const entries = [];
    for (const kind of COMPUTE) {
      if (seen(kind, false)) entries.push([WORDS[kind], `act-${kind} down`]);
      if (seen(kind, true)) entries.push([`${WORDS[kind]}, other direction`, `act-${kind} up`]);
    }
    entries.push(["bubble: idle", "act-idle"]);
    if (timelines.some((each) => each.reductions.length)) entries.push(["gradient reduction", "act-reduce"]);
    return cubeloom.legend(entries);
  }

  function panel(timeline, longest, index, options) {
    const workers = timeline.idle.length;
    const time = (value) => number.time(value, timeline.unit);
    const facts = `${time(timeline.makespan)}${timeline.unit ? "" : " units of time"}, ${number.share(timeline.bubble)} of it bubble; ` +
      `without bubbles ${time(timeline.ideal)}; ${workers} workers, ${timeline.microbatches} micro-batches`;
    const scroller = cubeloom.scroller(`Timeline of ${timeline.name}. Arrow keys move from action to action`);
    const element = h("figure", { class: "timeline" },
      h("figcaption", {}, h("strong", {}, timeline.name), " ", facts, timeline.note ? ` (${timeline.note})` : ""),
      scroller, h("p", { class: "quiet" }, "Activations in flight, in micro-batches of a worker's share:"), memoryLegend(timeline), options.table === false ? null : cubeloom.details("Table of this timeline", numbers(timeline, time)));
    const users = timeline.actions.map(() => []);
    timeline.actions.forEach((act, place) => act.needs.forEach((need) => users[need.at].push(place)));
    let boxes = [], at = -1;

    function choose(place, x, y) {
      const picture = scroller.firstElementChild;
      boxes.forEach((box) => box && box.classList.remove("self", "before", "after"));
      picture.classList.toggle("chosen", place >= 0);
      at = place;
      if (place < 0) { cubeloom.tip(null); return; }
      boxes[place].classList.add("self");
      timeline.actions[place].needs.forEach((need) => boxes[need.at].classList.add("before"));
      users[place].forEach((user) => boxes[user].classList.add("after"));
      cubeloom.tip(said(timeline, place, time), x, y);
    }
    const place = (event) => {
      const found = event.target.closest && event.target.closest("[data-place]");
      return found ? Number(found.dataset.place) : -1;
    };
    scroller.addEventListener("pointerover", (event) => choose(place(event), event.clientX, event.clientY));
    scroller.addEventListener("pointerleave", () => choose(-1));
    scroller.addEventListener("blur", () => choose(-1));
    scroller.addEventListener("keydown", (event) => {
      const next = moved(timeline, at, event.key);
      if (event.key === "Escape") choose(-1);
      if (next === null) return;
      event.preventDefault();
      boxes[next].scrollIntoView({ block: "nearest", inline: "nearest" });
      const box = boxes[next].getBoundingClientRect();
      choose(next, box.right, box.bottom);
    });
    return { element, draw: (width) => {
      const made = drawn(timeline, longest, index, Math.floor(width));
      boxes = made.boxes;
      scroller.replaceChildren(made.picture);
    } };
  }

  // The action that an arrow key leads to: the next of the worker, or one of a neighbouring worker at about that time.
  function moved(timeline, at, key) {
    const all = timeline.actions;
    if (!["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp"].includes(key)) return null;
    if (at < 0) return 0;
    if (key === "ArrowRight") return Math.min(at + 1, all.length - 1);
    if (key === "ArrowLeft") return Math.max(at - 1, 0);
    const wanted = all[at].worker + (key === "ArrowDown" ? 1 : -1);
    let best = at, gap = Infinity;
    all.forEach((act, place) => {
      const away = Math.abs(act.start - all[at].start);
      if (act.worker === wanted && away < gap) { best = place; gap = away; }
    });
    return best;
  }

  function said(timeline, place, time) {
    const all = timeline.actions, act = all[place];
    const last = Math.max(-1, ...act.needs.map((need) => need.arrives));
    const before = place > 0 && all[place - 1].worker === act.worker ? all[place - 1].end : 0;
    const lines = [`${act.name}: ${WORDS[act.kind]}`,
      `stage ${act.stage}, micro-batch ${act.microbatch}, worker ${act.worker}${timeline.replicas > 1 ? `, replica ${act.replica}` : ""}`,
      `from ${time(act.start)} to ${time(act.end)}`];
    for (const need of act.needs) {
      const other = all[need.at], waited = last > before && need.arrives === last;
      lines.push({ text: `${waited ? "waited for" : "after"} ${other.name} on worker ${other.worker}, there at ${time(need.arrives)}`, class: waited ? "was" : "" });
    }
    if (last <= before && before > 0 && before === act.start) lines.push("began when its worker was free");
    return lines;
  }

  function drawn(timeline, longest, index, width) {
    const workers = timeline.idle.length, left = 34, idle = 62;
    const span = Math.max(60, width - left - idle - RIGHT), scale = span / longest;
    const rows = HEAD + workers * (ROW + GAP), base = rows + 20 + MEMORY, height = base + AXIS;
    const x = (value) => left + value * scale;
    const boxes = [];
    const parts = [svg("defs", {}, svg("pattern", { id: `idle-${index}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { width: 6, height: 6, class: "idle-ground" }), svg("rect", { width: 1.6, height: 6, class: "idle-line" })))];
    for (let worker = 0; worker < workers; worker += 1) {
      const y = HEAD + worker * (ROW + GAP);
      parts.push(svg("text", { x: left - 6, y: y + 15, class: "end" }, `P${worker}`),
        svg("rect", { x: left, y, width: timeline.makespan * scale, height: ROW, fill: `url(#idle-${index})` }),
        svg("text", { x: x(timeline.makespan) + 5, y: y + 15, class: "quiet" }, `${Math.round(timeline.idle[worker] * 100)} % idle`));
    }
    timeline.actions.forEach((act, place) => boxes.push(action(act, place, x, scale)));
    parts.push(svg("g", { class: "acts" }, boxes));
    for (const each of timeline.reductions) {
      for (const worker of each.workers) {
        parts.push(svg("rect", { x: x(each.start), y: HEAD + worker * (ROW + GAP) + ROW - 3, width: (each.end - each.start) * scale, height: 4, class: "act-reduce" }));
      }
    }
    parts.push(svg("path", { d: `M${x(timeline.ideal)} ${HEAD - 4}V${rows}`, class: "ideal" }),
      svg("text", { x: x(timeline.ideal), y: rows + 11, class: "middle quiet" }, "without bubbles"),
      ...memory(timeline, x, base), ...axis(timeline, longest, x, base, left, span));
    const picture = svg("svg", { width, height, class: "schedule", role: "img",
      "aria-label": `${timeline.name}: ${workers} workers, ${number.share(timeline.bubble)} bubble` }, parts);
    return { picture, boxes };
  }

  function action(act, place, x, scale) {
    const y = HEAD + act.worker * (ROW + GAP), width = (act.end - act.start) * scale;
    if (!COMPUTE.includes(act.kind)) {
      return svg("g", { "data-place": place, class: "act" }, svg("path", { d: `M${x(act.start)} ${y}v${ROW}`, class: "launch" }));
    }
    const label = `${act.microbatch}${act.part === null ? "" : "ab"[act.part]}`;
    return svg("g", { "data-place": place, class: "act" },
      svg("rect", { x: x(act.start), y, width: Math.max(0.5, width), height: ROW, class: `act-${act.kind} ${act.replica % 2 ? "up" : "down"}` }),
      width >= 6.5 * label.length + 2 ? svg("text", { x: x(act.start) + width / 2, y: y + 15, class: `middle ink-${act.kind}` }, label) : null);
  }

  const hue = (worker, workers) => `w${Math.round((worker * 7) / Math.max(1, workers - 1))}`;

  function memory(timeline, x, base) {
    const most = Math.max(...timeline.peaks) || 1, unit = (MEMORY - 10) / most;
    const parts = [svg("text", { x: x(0), y: base - MEMORY + 2, class: "quiet" }, "activations in flight")];
    for (const level of cubeloom.ticks(0, most, 3)) {
      parts.push(svg("path", { d: `M${x(0)} ${base - level * unit}H${x(timeline.makespan)}`, class: "rule" }),
        svg("text", { x: x(0) - 6, y: base - level * unit + 4, class: "end quiet" }, String(level)));
    }
    timeline.memory.forEach((curve, worker) => {
      let path = `M${x(0)} ${base}`;
      for (const [time, level] of curve) path += `H${x(time).toFixed(1)}V${(base - level * unit).toFixed(1)}`;
      parts.push(svg("path", { d: path, class: `level ${hue(worker, timeline.memory.length)}` }));
    });
    return parts;
  }

  function memoryLegend(timeline) {
    const workers = timeline.peaks.length;
    const shown = workers <= 8 ? [...timeline.peaks.keys()] : [...new Set([0, 1, 2, 3, 4, 5, 6, 7].map((n) => Math.round((n * (workers - 1)) / 7)))];
    return cubeloom.legend(shown.map((worker) => [`P${worker}: peak ${number.plain(timeline.peaks[worker])}`, `line ${hue(worker, workers)}`]));
  }

  function axis(timeline, longest, x, base, left, span) {
    const parts = [svg("path", { d: `M${left} ${base}h${span}`, class: "rule strong" })];
    for (const value of cubeloom.ticks(0, longest, Math.max(3, Math.min(10, span / 110)))) {
      parts.push(svg("path", { d: `M${x(value)} ${base}v4`, class: "rule strong" }),
        svg("text", { x: x(value), y: base + 16, class: "middle quiet" }, number.time(value, timeline.unit)));
    }
    parts.push(svg("text", { x: left + span / 2, y: base + 30, class: "middle quiet" },
      timeline.unit ? "time since the step began" : "time, in units of the costs"));
    return parts;
  }

  function numbers(timeline, time) {
    const of = (worker) => timeline.actions.filter((act) => act.worker === worker);
    return cubeloom.scroller("Actions of each worker", cubeloom.table(`Actions of ${timeline.name}`, ["worker", "idle", "peak activations", "actions in order, with their start"],
      timeline.idle.map((idle, worker) => [`P${worker}`, number.share(idle), number.plain(timeline.peaks[worker]),
        of(worker).slice(0, 200).map((act) => `${act.name} ${time(act.start)}`).join(", ")])));
  }

  cubeloom.summary = (timelines) => cubeloom.table("Schedules compared", ["schedule", "time of a step", "without bubbles", "bubble", "peak activations", "copies of weights"],
    timelines.map((each) => {
      const low = Math.min(...each.peaks), high = Math.max(...each.peaks);
      return [each.name, number.time(each.makespan, each.unit), number.time(each.ideal, each.unit), number.share(each.bubble),
        low === high ? number.plain(high) : `${number.plain(low)} to ${number.plain(high)}`, number.plain(each.weight_copies)];
    }), { class: "stack" });
}
