// Small helpers for building the page; text is only ever set as text.

/** Create an element with properties and children. */
export function create(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) {
      element[name] = value;
    } else {
      element.setAttribute(name, value);
    }
  }
  element.append(...children);
  return element;
}

/** Show a message in an element that is hidden without one. */
export function say(element, message) {
  element.textContent = message ?? "";
  element.hidden = !message;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** Write a whole number. */
export function count(value) {
  return whole.format(value);
}

/** Write a number with one digit behind the point. */
export function number(value) {
  return tenth.format(value);
}

/** Write a number of bytes. */
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${(unit ? tenth : whole).format(value)} ${units[unit]}`;
}

/** Write milliseconds, as seconds from one second on. */
export function duration(ms) {
  return ms < 1000 ? `${whole.format(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}
