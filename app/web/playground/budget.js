// One set of knobs: a profile and a control for each knob that the server has.

import { create } from "./dom.js";
import { createField } from "./fields.js";

const OWN = "own";
const DEFAULTS = "defaults";

export class Budget {
  /**
   * @param {string} letter Tells the budgets apart.
   * @param {object} config What the server takes.
   */
  constructor(letter, config) {
    this.profiles = { [DEFAULTS]: defaultsOf(config), ...config.profiles };
    this.profile = create("select", { id: `profile-${letter}` });
    for (const [value, label] of [
      [DEFAULTS, "server's defaults"],
      ...Object.keys(config.profiles).map((name) => [name, name]),
      [OWN, "own values"],
    ]) {
      this.profile.append(create("option", { value, textContent: label }));
    }
    this.profile.addEventListener("change", () => this.applyProfile());
    this.fields = Object.entries(config.knobs).map(([name, spec]) =>
      createField(name, spec, {
        id: `${name}-${letter}`,
        maxModelLen: config.max_model_len,
        onChange: (field) => {
          this.profile.value = OWN;
          field.complain(null);
        },
      }),
    );
    this.legend = create("legend", {});
    const label = create("label", { htmlFor: this.profile.id, textContent: "Profile" });
    this.element = create(
      "fieldset",
      { className: "card" },
      this.legend,
      create("div", { className: "field" }, create("div", { className: "field-row" }, label, this.profile)),
      ...this.fields.map((field) => field.element),
    );
  }

  /** The knobs as the server takes them. */
  values() {
    return Object.fromEntries(this.fields.map((field) => [field.name, field.value]));
  }

  /** Take over knobs; they are nobody's profile then. */
  use(values) {
    for (const field of this.fields) {
      field.value = values[field.name];
      field.complain(null);
    }
    this.profile.value = OWN;
  }

  applyProfile() {
    const name = this.profile.value;
    if (name in this.profiles) {
      this.use(this.profiles[name]);
      this.profile.value = name;
    }
  }
}

function defaultsOf(config) {
  return Object.fromEntries(Object.entries(config.knobs).map(([name, spec]) => [name, spec.default]));
}
