"use strict";
// Layouts: the layers of a model on a grid, which rank holds which block, and what each layer moves.
{
  const { h, svg, number } = cubeloom;
  const AXES = ["data", "z", "y", "x"];

  cubeloom.views.layouts = (into, data, state = {}, changed = null) => {
    let rank = Math.min(Number(state.rank || 0), data.ranks.length - 1);
    const detail = h("div", { class: "detail" });
    const ranks = h("div", { class: "ranks", role: "group", "aria-label": "Ranks of the grid" });
    const select = (place) => {
      rank = place;
      ranks.querySelectorAll("button").forEach((button, number_) => button.setAttribute("aria-pressed", String(number_ === rank)));
      const open = new Set([...detail.querySelectorAll("details[open]")].map((each) => each.dataset.key));
      detail.replaceChildren(...data.pieces.map((piece, place_) => shown(data, piece, place_, rank)));
      detail.querySelectorAll("details").forEach((each) => { if (open.has(each.dataset.key)) each.open = true; });
      if (changed) changed({ rank: rank ? String(rank) : "" });
    };
    ranks.append(...groups(data, select));
    into.replaceChildren(
      cubeloom.card("Ranks", h("p", { class: "quiet" }, "Select a rank: its blocks are marked below. ", data.grid.x * data.grid.y > 1 ? "In a plane, x goes to the right and y down. " : "",
        `A micro-batch has ${data.samples.toLocaleString("en")} ${data.tokens ? `sequences of ${data.sequence.toLocaleString("en")} tokens` : "images"} over the whole grid.`), ranks),
      cubeloom.card("What each layer moves", h("p", { class: "quiet" }, "Bytes that the first rank receives in a forward and a backward, with the reduction of gradients."), moved(data)),
      detail);
    select(rank);
  };

  // Data and z as groups, y as rows, x as columns.
  function groups(data, select) {
    const found = new Map();
    data.ranks.forEach((place, rank) => {
      const key = AXES.slice(0, 2).filter((axis) => data.grid[axis] > 1).map((axis) => `${axis} ${place[axis]}`).join(", ");
      if (!found.has(key)) found.set(key, []);
      found.get(key).push([rank, place]);
    });
    return [...found].map(([key, members]) => {
      const rows = [...Array(data.grid.y).keys()].map((y) => members.filter(([, place]) => place.y === y));
      return h("fieldset", {}, h("legend", {}, key || "one plane"), h("div", { class: "plane" },
        rows.map((row) => h("div", { class: "plane-row" }, row.map(([rank, place]) => h("button", { type: "button", onclick: () => select(rank),
          "aria-label": `rank ${rank}: ${AXES.map((axis) => `${axis} ${place[axis]}`).join(", ")}` }, String(rank)))))));
    });
  }

  function moved(data) {
    const layers = data.pieces.flatMap((piece) => piece.layers.filter((layer) => Object.keys(layer.moved).length).map((layer) => [piece, layer]));
    const axes = [...new Set(layers.flatMap(([, layer]) => Object.keys(layer.moved)))].sort((a, b) => a.length - b.length || a.localeCompare(b));
    if (!layers.length) return h("p", {}, "Nothing: one rank.");
    return cubeloom.bars({ label: "Bytes by layer", show: number.bytes, unit: "bytes received in a forward and a backward of one layer",
      kinds: axes.map((axis, place) => ({ name: axis, class: `m${place % 7}` })),
      rows: layers.map(([piece, layer]) => ({ name: layer.name + (piece.count > 1 ? ` (${piece.count} alike)` : ""), parts: layer.moved, total: Object.values(layer.moved).reduce((a, b) => a + b, 0) })) });
  }

  function shown(data, piece, place, rank) {
    const title = piece.count > 1 ? `${piece.count} equal pieces, each` : `Piece ${place + 1}`;
    return cubeloom.card(title, h("div", { class: "layers" }, piece.layers.map((layer) => one(data, layer, rank, `${place}-${layer.name}`))));
  }

  function one(data, layer, rank, key) {
    const idle = !layer.parameters.length && !layer.collectives.length;
    const facts = [layer.shares ? ["weight", `shared with ${layer.shares}`] : null, layer.takes.length ? ["input", layer.takes.join("; ")] : null, layer.gives ? ["output", layer.gives] : null, idle ? ["parameters and communication", "none"] : null].filter(Boolean);
    const moves = layer.collectives.length ? cubeloom.details(`${layer.collectives.length} collectives in a forward and a backward`,
      cubeloom.table(`Collectives of ${layer.name}`, ["pass", "collective", "along", "of", "received"],
        layer.collectives.map((each) => [each.phase, each.operation, each.axes, each.of, number.bytes(each.received)]), { class: "stack" })) : null;
    if (moves) moves.dataset.key = key;
    return h("article", { class: "layer" }, h("h3", {}, layer.name, h("span", { class: "quiet" }, ` ${layer.kind}`)),
      h("dl", { class: "facts small" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      h("div", { class: "parameters" }, layer.parameters.map((each) => parameter(data, each, rank))), moves);
  }

  // The tensor as a rectangle of blocks; those that the chosen rank stores are marked, with the ranks that have the same.
  function parameter(data, each, rank) {
    // A vector lies in a row.
    const flat = each.shape.length < 2;
    const [rows, columns] = flat ? [1, each.parts[0] || 1] : [each.parts[0] || 1, each.parts[1] || 1];
    const at = (block) => (flat ? [0, block[0] || 0] : [block[0] || 0, block[1] || 0]);
    const own = each.blocks[rank], [mineRow, mineColumn] = at(own), holders = new Map();
    each.blocks.forEach((block, other) => {
      const key = at(block).join(",");
      if (!holders.has(key)) holders.set(key, []);
      holders.get(key).push(other);
    });
    const wide = 168, high = flat ? 26 : Math.min(192, Math.max(96, rows * 14)), cell = [wide / columns, high / rows];
    const boxes = [];
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const mine = mineRow === row && mineColumn === column, who = holders.get(`${row},${column}`) || [];
        const text = who.length > 3 ? `${who.length} ranks` : who.join(" ");
        boxes.push(svg("rect", { x: 1 + column * cell[0], y: 1 + row * cell[1], width: cell[0], height: cell[1], class: mine ? "block mine" : "block" }));
        if (cell[1] >= 12 && cell[0] >= text.length * 6.5) {
          boxes.push(svg("text", { x: 1 + (column + 0.5) * cell[0], y: 1 + (row + 0.5) * cell[1] + 4, class: mine ? "middle mine" : "middle" }, text));
        }
      }
    }
    const same = holders.get(`${mineRow},${mineColumn}`).filter((other) => other !== rank);
    const cut = each.cuts.map((axes, dim) => (axes ? `${["rows", "columns"][dim]} over ${axes}` : null)).filter(Boolean).join(", ");
    return h("figure", { class: "parameter" },
      svg("svg", { width: wide + 2, height: high + 2, role: "img", "aria-label": `${each.name}: ${rows} by ${columns} blocks; rank ${rank} stores block ${own.map((n) => n + 1).join(", ")}` }, boxes),
      h("figcaption", {}, h("strong", {}, each.name.split(".").slice(-2).join(".")), ` ${each.shape.join(" × ")}`, h("br"),
        cut || "replicated", h("br"), `${number.bytes(each.bytes)} a rank`, h("br"),
        same.length ? `same as rank${same.length > 1 ? "s" : ""} ${listed(same)}` : "no other rank has this block", sections(each, own)));
  }

  const listed = (ranks) => (ranks.length > 6 ? `${ranks.slice(0, 5).join(", ")} and ${ranks.length - 5} more` : ranks.join(", "));

  function sections(each, own) {
    if (!each.rows) return null;
    const runs = each.rows.of[own[each.rows.dim]].map((run) => (run ? `${run[0]} to ${run[1] - 1}` : "padding"));
    return [h("br"), `${each.rows.dim ? "columns" : "rows"} ${runs.slice(0, 4).join(", ")}${runs.length > 4 ? ", …" : ""}`];
  }
}
