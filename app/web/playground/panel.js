// One result: what the model says, what it cost, and which tokens were kept.

import { bytes, count, create, duration, number, say } from "./dom.js";
import { KeptView } from "./kept.js";

const FIGURES = [
  ["first", "First token"],
  ["rate", "Tokens per second"],
  ["entries", "Entries"],
  ["bytes", "KV cache"],
  ["ratio", "Compression"],
  ["mass", "Kept attention"],
  ["tokens", "Prompt and answer"],
  ["snapshot", "Snapshot"],
];

export class Panel {
  /** @param {HTMLTemplateElement} template The panel's elements. */
  constructor(template, title) {
    this.element = template.content.cloneNode(true).firstElementChild;
    this.state = this.element.querySelector(".panel-state");
    this.error = this.element.querySelector(".panel-error");
    this.answer = this.element.querySelector(".answer");
    this.title = this.element.querySelector(".panel-title");
    this.title.textContent = title;
    this.kept = new KeptView(this.element.querySelector(".kept"));
    this.figures = Object.fromEntries(FIGURES.map(([name]) => [name, create("dd", {})]));
    this.element.querySelector(".figures").append(
      ...FIGURES.map(([name, label]) =>
        create("div", {}, create("dt", { textContent: label }), this.figures[name]),
      ),
    );
    this.reset("Nothing was run yet");
  }

  /** Empty the panel and say what it waits for. */
  reset(state) {
    clearInterval(this.ticking);
    this.state.textContent = state;
    this.answer.textContent = "";
    this.element.classList.remove("busy");
    say(this.error, null);
    for (const figure of Object.values(this.figures)) {
      figure.textContent = "–";
    }
    this.kept.clear();
  }

  /** A request was sent. */
  begin() {
    this.reset("Reading the prompt …");
    this.element.classList.add("busy");
    this.sentAt = performance.now();
    this.firstAt = null;
    this.numPieces = 0;
    this.ticking = setInterval(() => this.tick(), 100);
  }

  /** A piece of the answer came. */
  add(text) {
    if (this.firstAt === null) {
      this.firstAt = performance.now();
      this.state.textContent = "Generating …";
    }
    this.numPieces += 1;
    this.answer.append(text);
    this.answer.scrollTop = this.answer.scrollHeight;
    this.tick();
  }

  /** Show what is known while it goes on; the server's own figures follow at the end. */
  tick() {
    const now = performance.now();
    this.figures.first.textContent = duration((this.firstAt ?? now) - this.sentAt);
    if (this.numPieces > 1) {
      const rate = (this.numPieces - 1) / ((now - this.firstAt) / 1000);
      this.figures.rate.textContent = number(rate);
    }
  }

  /** The last event came. */
  finish(outcome, tokenized) {
    clearInterval(this.ticking);
    this.element.classList.remove("busy");
    const why = outcome.finish_reason === "stop" ? "the model ended it" : "the longest answer was reached";
    this.state.textContent = `Finished: ${why}`;
    this.showFigures(outcome);
    if (outcome.explain && tokenized) {
      this.kept.show(tokenized, outcome.explain);
    }
  }

  showFigures({ usage, kv_cache: cache, snapshot, timings }) {
    const { figures } = this;
    figures.first.textContent = duration(timings.time_to_first_token_ms);
    const numAfterFirst = usage.completion_tokens - 1;
    figures.rate.textContent =
      numAfterFirst > 0 && timings.decode_ms > 0
        ? number(numAfterFirst / (timings.decode_ms / 1000))
        : "–";
    figures.tokens.textContent = `${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)}`;
    figures.snapshot.textContent = snapshot;
    if (!cache) {
      return;
    }
    figures.entries.replaceChildren(
      `${count(cache.original_entries)} → ${count(cache.compressed_entries)}`,
      meter(cache.compressed_entries, cache.original_entries, "entries kept"),
    );
    figures.bytes.textContent = `${bytes(cache.original_bytes)} → ${bytes(cache.compressed_bytes)}`;
    figures.ratio.textContent = `${number(cache.compression_ratio)} ×`;
    figures.mass.replaceChildren(
      `${number(100 * cache.kept_attention_mass)} %`,
      meter(cache.kept_attention_mass, 1, "attention kept"),
    );
    const reasons = { prompt_fits_capacity: "the prompt fits", method_full: "full method" };
    if (cache.skipped) {
      figures.ratio.textContent = `none: ${reasons[cache.skipped] ?? cache.skipped}`;
    }
  }

  /** It ended before its answer was complete. */
  stop(state) {
    clearInterval(this.ticking);
    this.element.classList.remove("busy");
    this.state.textContent = state;
  }

  /** It failed, for a reason that concerns the run as a whole. */
  fail(message) {
    this.stop("Failed");
    say(this.error, message);
  }
}

function meter(value, whole, label) {
  const bar = create("span", { className: "bar" });
  bar.style.setProperty("--share", String(value / whole));
  return create("span", { className: "meter", role: "img", "aria-label": `${number((100 * value) / whole)} % ${label}` }, bar);
}
