// Controls made from what the server says it takes: a number with a slider, or a choice of words.

import { create, say } from "./dom.js";

/** How fields look; names, ranges and defaults come from the server. */
const LOOKS = {
  method: { label: "Method" },
  max_capacity_prompt: { label: "Capacity", hint: "tokens kept per layer and head", grows: true },
  window_size: { label: "Window", hint: "last tokens, which score the rest", sliderMax: 256 },
  kernel_size: { label: "Kernel", hint: "width of the pooling, odd", sliderMax: 63, step: 2 },
  pooling: { label: "Pooling" },
  max_new_tokens: { label: "Answer", hint: "most tokens", grows: true },
  temperature: { label: "Temperature", hint: "0 is greedy", sliderMax: 2, step: 0.05 },
};

/** Positions of a slider whose values grow by a factor. */
const POSITIONS = 1000;

/** Build the control of one field. */
export function createField(name, spec, { id, maxModelLen, onChange }) {
  const looks = LOOKS[name] ?? { label: name };
  return spec.choices
    ? new ChoiceField(name, spec, looks, id, onChange)
    : new NumberField(name, spec, looks, id, maxModelLen, onChange);
}

class Field {
  constructor(name, looks, id, input, extra) {
    this.name = name;
    this.input = input;
    input.id = id;
    this.error = create("p", { id: `${id}-error`, className: "error", role: "alert", hidden: true });
    input.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
    const label = create("label", { htmlFor: id, textContent: looks.label });
    const hint = create("span", { id: `${id}-hint`, className: "hint", textContent: looks.hint ?? "" });
    const row = create("div", { className: "field-row" }, label, ...extra, input);
    this.element = create("div", { className: "field" }, row, hint, this.error);
    hint.hidden = !looks.hint;
  }

  /** Say what is wrong with the value, or nothing. */
  complain(message) {
    say(this.error, message);
    if (message) {
      this.input.setAttribute("aria-invalid", "true");
    } else {
      this.input.removeAttribute("aria-invalid");
    }
  }
}

class ChoiceField extends Field {
  constructor(name, spec, looks, id, onChange) {
    const options = spec.choices.map((word) => create("option", { value: word, textContent: word }));
    super(name, looks, id, create("select", {}, ...options), []);
    this.input.addEventListener("change", () => onChange(this));
    this.value = spec.default;
  }

  get value() {
    return this.input.value;
  }

  set value(word) {
    this.input.value = word;
  }
}

class NumberField extends Field {
  constructor(name, spec, looks, id, maxModelLen, onChange) {
    // Without a form nothing but the server judges a value.
    const input = create("input", { type: "number", min: spec.minimum, max: spec.maximum, step: "any" });
    const slider = create("input", { type: "range", "aria-label": `${looks.label}, slider` });
    super(name, looks, id, input, [slider]);
    this.slider = slider;
    this.least = spec.minimum;
    this.most = Math.min(spec.maximum, looks.sliderMax ?? maxModelLen);
    this.grows = looks.grows ?? false;
    slider.min = this.grows ? 0 : this.least;
    slider.max = this.grows ? POSITIONS : this.most;
    slider.step = this.grows ? 1 : looks.step ?? 1;
    slider.addEventListener("input", () => {
      input.value = this.fromSlider();
      this.describe();
      onChange(this);
    });
    input.addEventListener("input", () => {
      this.toSlider();
      onChange(this);
    });
    this.value = spec.default;
  }

  /** The number in the field; null, the server's own default, when there is none. */
  get value() {
    return this.input.value === "" ? null : Number(this.input.value);
  }

  set value(given) {
    this.input.value = given;
    this.toSlider();
  }

  fromSlider() {
    const position = Number(this.slider.value);
    if (!this.grows) {
      return position;
    }
    const exact = this.least * (this.most / this.least) ** (position / POSITIONS);
    const rounded = exact < 64 ? Math.round(exact) : Math.round(exact / 16) * 16;
    return Math.min(this.most, rounded);
  }

  toSlider() {
    const value = Math.min(this.most, Math.max(this.least, this.value ?? this.least));
    this.slider.value = this.grows
      ? (POSITIONS * Math.log(value / this.least)) / Math.log(this.most / this.least)
      : value;
    this.describe();
  }

  describe() {
    this.slider.setAttribute("aria-valuetext", this.input.value);
  }
}
