"use strict";
// Curves over the steps of one run or several, drawn by uPlot.
{
  const { h, number } = cubeloom;
  const SHOW = { "": number.plain, seconds: number.seconds, bytes: number.binary, share: number.share, count: number.count };
  const STACKED = { computing: "--compute", "exposed communication": "--exposed", bubble: "--bubble" };
  const HEIGHT = 220;

  // `runs`: [{name, chart}], all of one kind of curve. One colour a run; of a single run one colour a series.
  // The element's `renew` takes the same runs with more steps: what is zoomed, open or has the focus stays.
  cubeloom.curves = (runs) => {
    const { chart } = runs[0], now = { lines: lines(runs), marks: chart.marks }, show = SHOW[chart.unit] || number.plain;
    const holder = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${chart.title} over steps. Arrow keys move along the curve` });
    const marked = h("div", {}), listed = h("div", {});
    let plot = null, width = 0;
    const make = () => {
      if (plot) plot.destroy();
      plot = new uPlot(settings(now, show, width), joined(now.lines), holder);
    };
    const beside = () => {
      keepOpen(marked, badges(now.lines, runs));
      keepOpen(listed, cubeloom.details("Table", table(chart, now.lines, show)));
    };
    document.addEventListener("cubeloom-theme", () => { if (width && holder.isConnected) make(); });
    holder.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!way || !plot) return;
      event.preventDefault();
      const steps = plot.data[0], at = plot.cursor.idx ?? (way > 0 ? -1 : steps.length);
      const next = Math.max(0, Math.min(steps.length - 1, at + way));
      plot.setCursor({ left: plot.valToPos(steps[next], "x"), top: 20 });
    });
    cubeloom.fitted(holder, (wide) => { width = wide; if (plot) plot.setSize({ width, height: HEIGHT }); else make(); });
    beside();
    const figure = h("figure", { class: "card chart", "data-chart": chart.name }, h("figcaption", {}, h("h3", {}, chart.title)), holder, marked, listed);
    figure.renew = (newer) => {
      const whole = plot && plot.scales.x.min === plot.data[0][0] && plot.scales.x.max === plot.data[0][plot.data[0].length - 1];
      const alike = newer.flatMap((run) => run.chart.series.map((each) => each.name)).join() === runs.flatMap((run) => run.chart.series.map((each) => each.name)).join();
      runs = newer;
      Object.assign(now, { lines: lines(newer), marks: newer[0].chart.marks });
      if (plot && alike) plot.setData(joined(now.lines), whole); else if (plot) make();
      beside();
    };
    return figure;
  };

  function lines(runs) {
    const alone = runs.length === 1;
    return runs.flatMap((run, place) => run.chart.series.filter((each) => alone || each.shape !== "area")
      .map((each, number_) => ({ ...each, colour: alone ? number_ : place, label: alone ? each.name : `${run.name}: ${each.name}` })));
  }

  function keepOpen(into, details) {
    const before = into.querySelector("details");
    if (details && before) details.open = before.open;
    into.replaceChildren(...(details ? [details] : []));
  }

  // All series on the steps of any; what a series does not have is not drawn, and a number that is not finite is a gap.
  function joined(lines) {
    const at = lines.map((line) => new Map(line.steps.map((step, place) => [step, line.values[place]])));
    const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const stack = new Array(steps.length).fill(0);
    const columns = lines.map((line, place) => steps.map((step, n) => {
      if (!at[place].has(step)) return undefined;
      const value = at[place].get(step);
      if (line.shape !== "area" || value === null) return value;
      stack[n] += value;
      return stack[n];
    }));
    return [steps, ...columns];
  }

  const colour = (line) => cubeloom.colour(line.shape === "area" ? STACKED[line.name] || "--l0" : line.name === "whole step" ? "--muted" : `--l${line.colour % 6}`);

  function settings(now, show, width) {
    const { lines } = now, text = cubeloom.colour("--quiet"), rule = cubeloom.colour("--rule");
    const series = lines.map((line, place) => {
      const stroke = colour(line);
      return { label: line.label, stroke, width: line.shape === "dots" ? 0 : 1.6, spanGaps: false,
        paths: line.shape === "dots" ? () => null : undefined,
        points: line.shape === "dots" ? { show: true, size: 8, fill: stroke } : { show: line.steps.length === 1, size: 7, fill: stroke },
        fill: line.shape === "area" && !place ? stroke : undefined,
        value: (u, _, __, index) => said(now.lines[place], u, index, show) };
    });
    const bands = [];
    lines.forEach((line, place) => { if (line.shape === "area" && place && lines[place - 1].shape === "area") bands.push({ series: [place + 1, place], fill: colour(line) }); });
    const axis = { stroke: text, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "11px system-ui, sans-serif" };
    return { width, height: HEIGHT, legend: { live: true }, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (u, low, high) => bounds(now.lines, low, high) } }, bands,
      axes: [{ ...axis, label: "step", labelSize: 18, labelFont: "11px system-ui, sans-serif", size: 34, values: (_, all) => all.map((value) => (Number.isInteger(value) ? value.toLocaleString("en") : "")) },
        { ...axis, size: 72, values: (_, all) => all.map((value) => (value === null ? "" : show(value))) }],
      series: [{ label: "step", value: (_, value) => (value === null || value === undefined ? "-" : value.toLocaleString("en")) }, ...series],
      hooks: { draw: [(u) => marks(u, now.marks), (u) => gaps(u, now.lines)] } };
  }

  function said(line, u, index, show) {
    if (index === null || index === undefined) return "-";
    const place = line.steps.indexOf(u.data[0][index]);
    if (place < 0) return "-";
    return line.values[place] === null ? "not a number" : show(line.values[place]);
  }

  function bounds(lines, low, high) {
    if (low === null || high === null) return [0, 1];
    const floor = lines.some((line) => line.shape === "area") ? 0 : low;
    const room = (high - floor) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [floor === 0 || (floor > 0 && floor - room < 0) ? 0 : floor - room, high + room];
  }

  // Vertical lines at skipped updates and restarts.
  function marks(u, marked) {
    const { ctx } = u, { top, height } = u.bbox;
    ctx.save();
    ctx.strokeStyle = cubeloom.colour("--alert");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4, 4]);
    for (const mark of marked) {
      const x = u.valToPos(mark.step, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // A triangle at the top where a value is not a number.
  function gaps(u, lines) {
    const { ctx } = u, size = 5 * devicePixelRatio;
    ctx.save();
    ctx.fillStyle = cubeloom.colour("--alert");
    for (const line of lines) {
      line.values.forEach((value, place) => {
        if (value !== null) return;
        const x = u.valToPos(line.steps[place], "x", true), y = u.bbox.top;
        ctx.beginPath();
        ctx.moveTo(x - size, y);
        ctx.lineTo(x + size, y);
        ctx.lineTo(x, y + size * 1.6);
        ctx.fill();
      });
    }
    ctx.restore();
  }

  function badges(lines, runs) {
    const found = runs.flatMap((run) => run.chart.marks.map((mark) => `${runs.length > 1 ? `${run.name}, ` : ""}step ${mark.step}: ${mark.text}`));
    for (const line of lines) line.values.forEach((value, place) => { if (value === null) found.push(`step ${line.steps[place]}: ${line.label} is not a number`); });
    return found.length ? cubeloom.details(`${found.length} marked on the curve`, h("ul", { class: "plain" }, found.slice(0, 60).map((text) => h("li", {}, text)))) : null;
  }

  function table(chart, lines, show) {
    const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const some = steps.length <= 25 ? steps : [...new Set([...Array(25).keys()].map((n) => steps[Math.round((n * (steps.length - 1)) / 24)]))];
    const of = (line, step) => { const place = line.steps.indexOf(step); return place < 0 ? "-" : line.values[place] === null ? "not a number" : show(line.values[place]); };
    return cubeloom.scroller(`${chart.title}, as a table`, cubeloom.table(`${chart.title}, ${some.length} of ${steps.length} steps`, ["step", ...lines.map((line) => line.label)],
      some.map((step) => [step.toLocaleString("en"), ...lines.map((line) => of(line, step))])));
  }
}
