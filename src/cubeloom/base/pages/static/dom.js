"use strict";
// What all views share: elements, numbers with units, the theme, the note under the pointer, tables and cards.
const cubeloom = { views: {} };
{
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, properties, children) {
    for (const [name, value] of Object.entries(properties || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }
  cubeloom.h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
  cubeloom.svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
  const h = cubeloom.h;

  // Numbers for people: three digits and a unit.
  const digits = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 100) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  };
  const scaled = (value, units) => {
    if (!Number.isFinite(value)) return "not a number";
    const [size, unit] = units.find(([least]) => Math.abs(value) >= least * 0.9995) || units[units.length - 1];
    return `${digits(value / size)}${unit}`;
  };
  const SECONDS = [[1, " s"], [1e-3, " ms"], [1e-6, " µs"], [1e-9, " ns"]];
  const BYTES = [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"], [1, " B"]];
  const BINARY = [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]];
  const COUNT = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]];
  cubeloom.number = {
    plain: (value) => (Number.isFinite(value) ? (Math.abs(value) >= 1e-3 || !value ? digits(value) : Number(value.toPrecision(3)).toExponential()) : "not a number"),
    seconds: (value) => (value ? scaled(value, SECONDS) : "0 s"),
    bytes: (value) => (value ? scaled(value, BYTES) : "0 B"),
    binary: (value) => (value ? scaled(value, BINARY) : "0 B"),
    count: (value) => (Math.abs(value) < 1 ? cubeloom.number.plain(value) : scaled(value, COUNT)),
    share: (value) => (Number.isFinite(value) ? `${Math.abs(value) < 0.001 && value ? digits(value * 100) : (value * 100).toFixed(1)} %` : "not a number"),
    // A time of a timeline, in its unit.
    time: (value, unit) => (unit === "s" ? cubeloom.number.seconds(value) : unit === "ms" ? cubeloom.number.seconds(value / 1e3) : digits(value)),
  };

  // Round values for an axis: about `count` of them from 0 (or `low`) to `high`.
  cubeloom.ticks = (low, high, count) => {
    if (!(high > low)) return [low];
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(Number((n * step).toPrecision(12)));
    return found;
  };

  // The theme: the system's, or one that was chosen.
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("cubeloom-theme"); } catch { return null; } };
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = THEMES.includes(stored()) ? stored() : "system";
  function themed() {
    root.dataset.theme = theme === "system" ? (system.matches ? "dark" : "light") : theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = `Theme: ${theme}`;
      button.setAttribute("aria-label", `Theme: ${theme}. Change it`);
    }
    document.dispatchEvent(new Event("cubeloom-theme"));
  }
  cubeloom.themeButton = () => {
    document.getElementById("theme").addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try { localStorage.setItem("cubeloom-theme", theme); } catch { /* it holds for this page */ }
      themed();
    });
    system.addEventListener("change", themed);
    themed();
  };
  cubeloom.colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // A note beside the pointer or the element that has the focus; read out by screen readers.
  let note = null;
  cubeloom.tip = (lines, x, y) => {
    if (!note) {
      note = h("div", { id: "tip", role: "status", "aria-live": "polite" });
      document.body.append(note);
    }
    if (!lines) { note.hidden = true; return; }
    note.replaceChildren(...lines.map((line, place) => h("div", { class: place ? (line.class || "") : "head" }, line.text || line)));
    note.hidden = false;
    const box = note.getBoundingClientRect(), room = 12;
    note.style.left = `${Math.max(4, Math.min(x + room, window.innerWidth - box.width - 4))}px`;
    note.style.top = `${Math.max(4, y + room + box.height > window.innerHeight ? y - room - box.height : y + room)}px`;
  };

  cubeloom.card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, title), ...content);
  cubeloom.legend = (entries) => h("ul", { class: "legend" }, entries.map(([name, kind]) =>
    h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name)));
  // What is wider than its place scrolls inside it, with the keyboard, too.
  cubeloom.scroller = (label, ...content) => h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": label }, ...content);

  // Rows of text or elements. On a narrow page each row stands on its own, with the names of the columns.
  cubeloom.table = (caption, heads, rows, properties) => h("table", properties,
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", row.properties, (row.cells || row).map((cell, place) =>
      h(place ? "td" : "th", { "data-head": heads[place], scope: place ? undefined : "row" }, cell))))));
  cubeloom.details = (summary, ...content) => h("details", {}, h("summary", {}, summary), ...content);

  cubeloom.copyButton = (label, text) => {
    const button = h("button", { type: "button", onclick: async () => {
      try { await navigator.clipboard.writeText(text()); button.textContent = "Copied"; }
      catch { button.textContent = "Copying is not allowed here"; }
      setTimeout(() => { button.textContent = label; }, 1500);
    } }, label);
    return button;
  };

  // Draws now and whenever the element's width changes; `draw` gets the width in pixels.
  cubeloom.fitted = (element, draw) => {
    let last = 0;
    new ResizeObserver(() => {
      const width = Math.floor(element.clientWidth);
      if (width > 0 && width !== last) { last = width; draw(width); }
    }).observe(element);
    return element;
  };

  // One bar a row, in parts on one scale from zero. `limit`: a line such as the memory of a device.
  cubeloom.bars = ({ label, rows, kinds, show, limit, unit }) => {
    const most = Math.max(...rows.map((row) => Math.max(row.total, row.high || 0)), limit ? limit.value : 0) * 1.04 || 1;
    const share = (value) => `${(Math.max(0, value) / most) * 100}%`;
    const used = kinds.filter((kind) => rows.some((row) => row.parts[kind.name] > 0));
    const ticks = cubeloom.ticks(0, most, 6);
    const drawn = rows.map((row) => h("div", { class: "bar", role: "listitem", tabindex: "0", "aria-label":
      `${row.name || row.value}: ${show(row.total)}; ${used.map((kind) => `${kind.name} ${show(row.parts[kind.name] || 0)}`).join(", ")}`,
      onpointermove: (event) => told(row, event.clientX, event.clientY), onpointerleave: () => cubeloom.tip(null),
      onfocus: (event) => { const box = event.target.getBoundingClientRect(); told(row, box.left + 40, box.bottom - 12); },
      onblur: () => cubeloom.tip(null) },
    h("div", { class: "bar-name" }, h("span", {}, row.name), h("span", { class: "bar-value" }, row.value || show(row.total))),
    h("div", { class: "bar-track" },
      used.map((kind) => h("span", { class: `part ${kind.class}`, style: { width: share(row.parts[kind.name] || 0) } })),
      row.high ? h("span", { class: "interval", style: { left: share(row.low), width: share(row.high - row.low) } }) : null,
      limit ? h("span", { class: "limit", style: { left: share(limit.value) } }) : null)));
    function told(row, x, y) {
      const lines = used.filter((kind) => row.parts[kind.name] > 0).map((kind) => `${kind.name}: ${show(row.parts[kind.name])}`);
      if (row.high) lines.push(`likely from ${show(row.low)} to ${show(row.high)}`);
      cubeloom.tip([row.name ? `${row.name}: ${show(row.total)}` : row.value, ...lines], x, y);
    }
    const marks = [...used.map((kind) => [kind.name, kind.class])];
    if (rows.some((row) => row.high)) marks.push(["likely interval", "interval-mark"]);
    if (limit) marks.push([`${limit.name}: ${show(limit.value)}`, "limit-mark"]);
    return h("div", { class: "bars" }, cubeloom.legend(marks), h("div", { role: "list", "aria-label": label }, drawn),
      h("div", { class: "bar-axis", "aria-hidden": "true" },
        ticks.map((tick) => h("span", { style: { left: share(tick) } }, tick ? show(tick) : "0"))),
      unit ? h("p", { class: "axis-name" }, unit) : null);
  };

  // A page that stands alone: its data lies in it.
  cubeloom.alone = (view) => {
    cubeloom.themeButton();
    cubeloom.views[view](document.getElementById("view"), JSON.parse(document.getElementById("data").textContent));
  };
}
