"use strict";
// A paper's experiments: published figures beside ours, and where the simulated time goes.
{
  const { h, number } = cubeloom;
  const FIGURES = [["published", "m5"], ["ours", "m0"], ["ours, calibrated with this figure", "m1"]];
  const PARTS = [["computed", "c-compute"], ["exposed", "c-exposed"], ["communicated", "c-exposed"], ["waited", "c-bubble"], ["summed", "m2"], ["updated", "m3"]];
  const kinds = (pairs) => pairs.map(([name, kind]) => ({ name, class: kind }));

  cubeloom.views.reproduced = (into, data) => {
    const spent = [...new Set(Object.values(data.seconds).flatMap((parts) => Object.keys(parts)))];
    const known = PARTS.filter(([name]) => spent.includes(name)), others = spent.filter((name) => !PARTS.some(([each]) => each === name));
    const terms = [...known, ...others.map((name, place) => [name, `m${4 + (place % 3)}`])];
    into.replaceChildren(
      cubeloom.card("What to know", h("ul", { class: "plain" }, data.words.map((text) => h("li", {}, text)))),
      ...data.plots.map((plot) => cubeloom.card(plot.title, cubeloom.bars({ label: plot.title, kinds: kinds(FIGURES), show: number.plain, unit: plot.unit,
        limit: plot.one ? { name: "as fast as the other", value: 1 } : null, rows: plot.rows.flatMap(pair) }))),
      cubeloom.card("Where the simulated time goes", cubeloom.bars({ label: "Seconds of our runs", kinds: kinds(terms), show: number.seconds, unit: "time of a step",
        rows: Object.entries(data.seconds).map(([name, parts]) => ({ name, parts, total: Object.values(parts).reduce((a, b) => a + b, 0) })) })),
      cubeloom.card("All figures", cubeloom.table("All figures", ["figure", "published", "ours", "difference", "source"],
        data.rows.map((row) => [row.name, number.plain(row.published), number.plain(row.ours), difference(row), row.source]), { class: "stack" })));
  };

  function pair(row) {
    const ours = row.calibrated ? "ours, calibrated with this figure" : "ours";
    return [{ name: row.name, value: `${number.plain(row.published)} published`, parts: { published: row.published }, total: row.published },
      { name: "", value: `${number.plain(row.ours)} ours`, parts: { [ours]: row.ours }, total: row.ours }];
  }

  function difference(row) {
    if (row.calibrated) return "calibrated";
    if (!row.published) return row.ours ? "differs" : "as published";
    const away = row.ours / row.published - 1;
    return `${away < 0 ? "-" : "+"}${(Math.abs(away) * 100).toFixed(1)} %`;
  }
}
