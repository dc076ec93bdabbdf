"use strict";
// The controls of a view: labelled inputs from a list, whose values are the page's state.
{
  const { h, number } = cubeloom;
  let made = 0;

  // `fields`: {name, label, type, value, ...}. `changed` gets all values as text after each change.
  cubeloom.controls = (fields, values, changed) => {
    const inputs = {};
    const read = () => Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.type === "checkbox" ? (input.checked ? "1" : "") : input.value]));
    const element = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      fields.map((field) => {
        const id = `control-${(made += 1)}`, value = values[field.name] ?? field.value ?? "";
        const hint = field.hint ? h("p", { class: "quiet", id: `${id}-hint` }, field.hint) : null;
        const common = { id, name: field.name, "aria-describedby": hint ? `${id}-hint` : undefined };
        const tell = () => changed(read());
        const [input, around] = KINDS[field.type](field, common, String(value), tell);
        inputs[field.name] = input;
        if (field.type === "check") return h("div", { class: "field check" }, around, h("label", { for: id }, field.label), hint);
        return h("div", { class: "field" }, h("label", { for: id }, field.label), around, hint);
      }));
    return { element, read, set: (name, value) => { inputs[name].value = value; inputs[name].dispatchEvent(new Event("cubeloom-set")); } };
  };

  const KINDS = {
    select: (field, common, value, tell) => {
      const input = h("select", { ...common, onchange: tell }, field.options.map((option) => h("option", { value: option[0], selected: option[0] === value }, option[1])));
      return [input, input];
    },
    // A name from a list, or one of the user's own.
    name: (field, common, value, tell) => {
      const list = `${common.id}-list`;
      const input = h("input", { ...common, type: "text", list, value, autocomplete: "off", spellcheck: "false", onchange: tell });
      return [input, h("div", {}, input, h("datalist", { id: list }, field.options.map((option) => h("option", { value: option[0] }, option[1]))))];
    },
    check: (field, common, value, tell) => {
      const input = h("input", { ...common, type: "checkbox", checked: value === "1", onchange: tell });
      return [input, input];
    },
    // A number, with a slider beside it: over the listed values, or from `min` to `max`.
    range: (field, common, value, tell) => {
      const steps = field.steps || null;
      const place = (text) => (steps ? nearest(steps, Number(text)) : Number(text));
      const input = h("input", { ...common, type: "number", value, min: field.min ?? 0, max: field.limit, step: field.step || (steps ? 1 : "any"), oninput: () => { slider.value = place(input.value); tell(); } });
      const slider = h("input", { type: "range", min: steps ? 0 : field.min ?? 0, max: steps ? steps.length - 1 : field.max, step: steps ? 1 : field.step || 1,
        "aria-label": `${field.label}, slider`, oninput: () => { input.value = steps ? steps[Number(slider.value)] : slider.value; tell(); } });
      slider.value = place(value);
      if (steps) slider.addEventListener("input", () => slider.setAttribute("aria-valuetext", number.plain(steps[Number(slider.value)])));
      input.addEventListener("cubeloom-set", () => { slider.value = place(input.value); });
      return [input, h("div", { class: "range" }, slider, input)];
    },
  };

  const nearest = (steps, wanted) => steps.reduce((best, value, place) => (Math.abs(value - wanted) < Math.abs(steps[best] - wanted) ? place : best), 0);

  // 1, 2, 3, 4, 6, 8, 12, ... up to the most.
  cubeloom.counts = (most) => {
    const found = [];
    for (let power = 1; power <= most; power *= 2) { found.push(power); if (power * 1.5 <= most && power > 1) found.push(power * 1.5); }
    if (most > 0 && found[found.length - 1] !== most) found.push(most);
    return found;
  };
}
