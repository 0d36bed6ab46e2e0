// The prompt, shaded by how many layer-heads kept each token.
//
// The text is made once, as text nodes of some tokens each. Shades are ranges over them (CSS custom
// highlights), with neighbours of one shade merged, so that another layer costs no new elements.

import { count, create, say } from "./dom.js";

/** Shades from none to all; `playground.css` has a colour for each. */
const NUM_SHADES = 8;
/** Pieces in a text node: a browser looks through all marks of a node to paint one of them. */
const CHUNK_UNITS = 48;
const STRIP_BAR_PX = 3;
const canShade = typeof Highlight === "function" && "highlights" in CSS;

/** Shades of all views on the page, since the browser knows them by name. */
const highlights = new Map();

function highlight(name, priority = 0) {
  if (!highlights.has(name)) {
    const made = new Highlight();
    made.priority = priority;
    CSS.highlights.set(name, made);
    highlights.set(name, made);
  }
  return highlights.get(name);
}

export class KeptView {
  /** @param {HTMLElement} root The element that holds the view's parts. */
  constructor(root) {
    this.root = root;
    this.text = root.querySelector(".kept-text");
    this.layer = root.querySelector(".layer");
    this.layerName = root.querySelector(".layer-name");
    this.strip = root.querySelector(".strip");
    this.readout = root.querySelector(".readout");
    this.notice = root.querySelector(".kept-notice");
    this.ranges = new Map();
    this.cursor = null;
    this.layer.addEventListener("input", () => this.shade());
    root.querySelector(".all-layers").addEventListener("click", () => this.showLayer(0));
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.text.addEventListener("pointermove", (event) => this.onPoint(event));
    this.text.addEventListener("pointerdown", (event) => this.onPoint(event));
    this.strip.addEventListener("click", (event) => this.onStrip(event));
    new ResizeObserver(() => this.drawStrip()).observe(this.strip);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawStrip());
    this.drawLegend();
  }

  /** Forget what is shown. */
  clear() {
    this.unshade();
    this.root.hidden = true;
    this.tokens = null;
    this.units = null;
    this.text.replaceChildren();
  }

  /**
   * Show a prompt.
   *
   * @param {{text: string, offsets: number[][]}} tokenized What `POST /tokenize` answered.
   * @param {object} explain What `POST /generate` said of the same prompt.
   */
  show(tokenized, explain) {
    this.clear();
    this.root.hidden = false;
    this.tokens = tokenized;
    if (!canShade) {
      say(this.notice, "This browser is too old to show shades.");
      return;
    }
    if (tokenized.offsets.length !== explain.kept_counts.length) {
      say(this.notice, "The prompt was tokenised in another way, so that nothing can be shown.");
      return;
    }
    say(this.notice, null);
    this.units = unitsOf(tokenized);
    this.layers = explain.layer_kept_counts.map(fromBase64);
    this.totals = explain.kept_counts;
    this.numHeads = explain.num_kv_heads;
    this.chunks = chunksOf(tokenized.text, this.units);
    this.text.replaceChildren(...this.chunks.map((chunk) => chunk.node));
    this.text.scrollTop = 0;
    this.layer.max = this.layers.length;
    this.showLayer(0);
  }

  /** Show one layer, from 1 on, or all of them for 0. */
  showLayer(layer) {
    this.layer.value = layer;
    this.shade();
  }

  shade() {
    const layer = Number(this.layer.value);
    this.counts = layer === 0 ? this.totals : this.layers[layer - 1];
    this.most = layer === 0 ? this.layers.length * this.numHeads : this.numHeads;
    const name = layer === 0 ? "All layers" : `Layer ${layer} of ${this.layers.length}`;
    this.layerName.textContent = name;
    this.layer.setAttribute("aria-valuetext", name);
    const shades = this.units.map((unit) => this.shadeOf(this.mostKept(unit)));
    this.unshade();
    for (let first = 0; first < shades.length; ) {
      let next = first + 1;
      while (next < shades.length && next % CHUNK_UNITS && shades[next] === shades[first]) {
        next += 1;
      }
      this.mark(`kept-${shades[first]}`, first, next - 1);
      first = next;
    }
    this.drawStrip();
    this.labelLegend();
    this.moveTo(this.cursor);
  }

  shadeOf(kept) {
    return Math.ceil((kept / this.most) * NUM_SHADES);
  }

  /** The most that a token of a unit was kept; several tokens may make up one character. */
  mostKept(unit) {
    let most = 0;
    for (let token = unit.first; token <= unit.last; token += 1) {
      most = Math.max(most, this.counts[token]);
    }
    return most;
  }

  /** Lay a shade on units, which are neighbours in one text node. */
  mark(name, first, last, priority = 0) {
    const { node, start } = this.chunks[Math.floor(first / CHUNK_UNITS)];
    const range = new StaticRange({
      startContainer: node,
      startOffset: this.units[first].start - start,
      endContainer: node,
      endOffset: this.units[last].end - start,
    });
    highlight(name, priority).add(range);
    this.ranges.set(range, name);
    return range;
  }

  unshade() {
    for (const [range, name] of this.ranges) {
      highlights.get(name).delete(range);
    }
    this.ranges.clear();
    this.cursorRange = null;
  }

  /** Put the cursor on a unit and say what is known of it. */
  moveTo(unit) {
    if (this.cursorRange) {
      highlight("kept-cursor").delete(this.cursorRange);
      this.ranges.delete(this.cursorRange);
      this.cursorRange = null;
    }
    this.cursor = unit;
    if (unit === null || unit >= this.units.length) {
      this.cursor = null;
      this.readout.textContent = "Point at a token, or move with the arrow keys.";
      return;
    }
    const { start, end, first, last } = this.units[unit];
    this.cursorRange = this.mark("kept-cursor", unit, unit, 1);
    const numbers = [];
    for (let token = first; token <= last; token += 1) {
      numbers.push(count(this.counts[token]));
    }
    const which = first === last ? `Token ${count(first + 1)}` : `Tokens ${count(first + 1)} to ${count(last + 1)}`;
    const heads = Number(this.layer.value) === 0 ? "layer-heads" : "heads of this layer";
    const piece = JSON.stringify(this.tokens.text.slice(start, end));
    this.readout.textContent =
      `${which} of ${count(this.counts.length)}, ${piece}: kept by ${numbers.join(", ")} of ${this.most} ${heads}`;
  }

  onKey(event) {
    if (!this.units?.length || event.ctrlKey || event.altKey || event.metaKey) {
      return;
    }
    const last = this.units.length - 1;
    const at = this.cursor ?? -1;
    const targets = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, PageDown: at + 100, PageUp: at - 100 };
    if (event.key in targets) {
      event.preventDefault();
      this.moveTo(Math.min(last, Math.max(0, targets[event.key])));
      this.reveal();
    }
  }

  onPoint(event) {
    if (!this.units?.length) {
      return;
    }
    const at = document.caretPositionFromPoint
      ? document.caretPositionFromPoint(event.clientX, event.clientY)
      : document.caretRangeFromPoint(event.clientX, event.clientY);
    const node = at?.offsetNode ?? at?.startContainer;
    const chunk = this.chunks.find((one) => one.node === node);
    const unit = chunk ? this.unitAt(chunk.start + (at.offset ?? at.startOffset)) : null;
    if (unit !== null && unit !== this.cursor) {
      this.moveTo(unit);
    }
  }

  onStrip(event) {
    const share = event.offsetX / this.strip.clientWidth;
    this.moveTo(Math.min(this.units.length - 1, Math.floor(share * this.units.length)));
    this.reveal();
  }

  /** Find the unit that a place of the text lies in. */
  unitAt(place) {
    let low = 0;
    let high = this.units.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (place < this.units[middle].start) {
        high = middle - 1;
      } else if (place >= this.units[middle].end) {
        low = middle + 1;
      } else {
        return middle;
      }
    }
    return null;
  }

  /** Scroll the text, and nothing else, to the cursor. */
  reveal() {
    const { startContainer, startOffset, endContainer, endOffset } = this.cursorRange;
    const range = document.createRange();
    range.setStart(startContainer, startOffset);
    range.setEnd(endContainer, endOffset);
    const token = range.getBoundingClientRect();
    const box = this.text.getBoundingClientRect();
    if (token.top < box.top || token.bottom > box.bottom) {
      this.text.scrollTop += token.top - box.top - box.height / 2;
    }
  }

  /** Draw where in the prompt kept tokens lie. */
  drawStrip() {
    const width = this.strip.clientWidth;
    if (!this.units?.length || width === 0 || this.root.hidden) {
      return;
    }
    const scale = devicePixelRatio;
    const height = this.strip.clientHeight;
    this.strip.width = width * scale;
    this.strip.height = height * scale;
    const pen = this.strip.getContext("2d");
    pen.scale(scale, scale);
    pen.fillStyle = getComputedStyle(this.strip).color;
    const numBars = Math.min(Math.floor(width / STRIP_BAR_PX), this.counts.length);
    for (let bar = 0; bar < numBars; bar += 1) {
      const from = Math.floor((bar * this.counts.length) / numBars);
      const to = Math.floor(((bar + 1) * this.counts.length) / numBars);
      let sum = 0;
      for (let token = from; token < to; token += 1) {
        sum += this.counts[token];
      }
      const tall = (height * sum) / (this.most * (to - from));
      pen.fillRect((bar * width) / numBars, height - tall, width / numBars - 0.5, tall);
    }
  }

  drawLegend() {
    this.least = create("span", { textContent: "none" });
    this.all = create("span", {});
    const swatches = Array.from({ length: NUM_SHADES + 1 }, (_, shade) =>
      create("span", { className: `swatch shade-${shade}` }),
    );
    this.root.querySelector(".legend").replaceChildren(this.least, ...swatches, this.all);
  }

  labelLegend() {
    this.all.textContent = `all ${this.most}`;
  }
}

/**
 * Cut a text into pieces that each belong to one token, or to the tokens of one character.
 *
 * Offsets count code points and the browser counts UTF-16 units. What lies between two pieces, as
 * blanks that a tokenizer trims, goes to the second one.
 */
function unitsOf({ text, offsets }) {
  const toUtf16 = utf16Offsets(text);
  const units = [];
  let covered = 0;
  offsets.forEach(([start, end], token) => {
    if (end <= start) {
      return; // an added token, which stands for no text
    }
    const last = units.at(-1);
    if (last && start < covered) {
      last.last = token;
      last.end = Math.max(last.end, toUtf16(end));
    } else {
      units.push({ start: toUtf16(covered), end: toUtf16(end), first: token, last: token });
    }
    covered = Math.max(covered, end);
  });
  if (units.length) {
    units.at(-1).end = text.length;
  }
  return units;
}

/** Make the text nodes, each with the place of its first character. */
function chunksOf(text, units) {
  const chunks = [];
  for (let first = 0; first < units.length; first += CHUNK_UNITS) {
    const { start } = units[first];
    const end = units[Math.min(first + CHUNK_UNITS, units.length) - 1].end;
    chunks.push({ node: document.createTextNode(text.slice(start, end)), start });
  }
  return chunks;
}

function utf16Offsets(text) {
  const starts = [];
  let at = 0;
  for (const character of text) {
    starts.push(at);
    at += character.length;
  }
  starts.push(at);
  return starts.length === text.length + 1 ? (place) => place : (place) => starts[place];
}

function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}
