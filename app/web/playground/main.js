// Puts the page together: controls, runs, and where errors are said.

import { ApiError, getJson, getText, postJson, postStream } from "./api.js";
import { Budget } from "./budget.js";
import { count, create, say } from "./dom.js";
import { createField } from "./fields.js";
import { Panel } from "./panel.js";
import { SAMPLES } from "./samples.js";

const COUNT_AFTER_MS = 250;
const ASK_AGAIN_MS = 2000;
const KEY_NAME = "snapkv-key";

const at = (id) => document.getElementById(id);
const page = {
  server: at("server"),
  notice: at("notice"),
  keyRow: at("key-row"),
  key: at("key"),
  keyError: at("key-error"),
  sample: at("sample"),
  prompt: at("prompt"),
  promptError: at("prompt-error"),
  count: at("count"),
  chat: at("chat"),
  compare: at("compare"),
  run: at("run"),
  stop: at("stop"),
};

let config = null;
let budgets = [];
let panels = [];
let sampling = [];
let running = null;
let counting = null;
let countTimer = null;
let askTimer = null;

async function start() {
  page.key.value = storedKey();
  page.sample.append(
    create("option", { value: "", textContent: "own text" }),
    ...SAMPLES.map(({ title }, index) => create("option", { value: index, textContent: title })),
  );
  page.key.addEventListener("change", () => {
    storeKey(page.key.value);
    askServer();
  });
  page.sample.addEventListener("change", loadSample);
  page.prompt.addEventListener("input", () => {
    page.sample.value = "";
    countSoon();
  });
  page.chat.addEventListener("change", countSoon);
  page.compare.addEventListener("change", showBudgets);
  page.run.addEventListener("click", run);
  page.stop.addEventListener("click", stop);
  document.addEventListener("keydown", onKey);
  await askServer();
}

/** Ask what the server takes, again and again while its model loads. */
async function askServer() {
  clearTimeout(askTimer);
  try {
    const found = await getJson("playground.json", page.key.value);
    say(page.notice, null);
    say(page.keyError, null);
    if (config === null) {
      build(found);
    }
    page.server.textContent = `${found.model} · context of ${count(found.max_model_len)} tokens`;
    countSoon();
  } catch (error) {
    if (error.status === 401) {
      page.server.textContent = "This server asks for a key";
      askForKey(error);
      page.key.focus();
      return;
    }
    page.server.textContent = "Not ready";
    say(page.notice, error.message);
    askTimer = setTimeout(askServer, ASK_AGAIN_MS);
  }
}

function build(found) {
  config = found;
  budgets = [new Budget("a", config), new Budget("b", config)];
  panels = budgets.map(() => new Panel(at("panel"), ""));
  sampling = Object.entries(config.sampling).map(([name, spec]) =>
    createField(name, spec, {
      id: name,
      maxModelLen: spec.maximum,
      onChange: (field) => field.complain(null),
    }),
  );
  at("sampling").append(...sampling.map((field) => field.element));
  const half = { ...budgets[0].values() };
  half.max_capacity_prompt = Math.floor(half.max_capacity_prompt / 2);
  budgets[1].use(half);
  showBudgets();
}

function showBudgets() {
  const isPair = page.compare.checked;
  budgets[0].legend.textContent = isPair ? "Budget A" : "Budget";
  budgets[1].legend.textContent = "Budget B";
  panels[0].title.textContent = isPair ? "Result A" : "Result";
  panels[1].title.textContent = "Result B";
  const number = isPair ? 2 : 1;
  at("budgets").replaceChildren(...budgets.slice(0, number).map((budget) => budget.element));
  at("results").replaceChildren(...panels.slice(0, number).map((panel) => panel.element));
  document.body.classList.toggle("pair", isPair);
}

async function loadSample() {
  const sample = SAMPLES[page.sample.value];
  if (!sample) {
    return;
  }
  try {
    page.prompt.value = (await getText(`playground/samples/${sample.file}`)).trimEnd();
    const longest = sampling.find((field) => field.name === "max_new_tokens");
    if (longest) {
      longest.value = sample.maxNewTokens;
    }
    countSoon();
  } catch (error) {
    say(page.promptError, error.message);
  }
}

function promptBody() {
  const text = page.prompt.value;
  return page.chat.checked ? { messages: [{ role: "user", content: text }] } : { prompt: text };
}

function countSoon() {
  clearTimeout(countTimer);
  countTimer = setTimeout(countTokens, COUNT_AFTER_MS);
}

async function countTokens() {
  if (config === null) {
    return;
  }
  counting?.abort();
  counting = new AbortController();
  say(page.promptError, null);
  try {
    const found = await postJson("tokenize", promptBody(), page.key.value, counting.signal);
    const isTooLong = found.count >= found.max_model_len;
    page.count.textContent = isTooLong
      ? `${count(found.count)} tokens, of which the model takes ${count(found.max_model_len)}`
      : `${count(found.count)} tokens`;
    page.count.classList.toggle("over", isTooLong);
  } catch (error) {
    if (error.name !== "AbortError") {
      page.count.textContent = "not counted";
      explain(error, null);
    }
  }
}

async function run() {
  if (config === null || running) {
    return;
  }
  running = new AbortController();
  page.run.setAttribute("aria-disabled", "true");
  page.stop.setAttribute("aria-disabled", "false");
  complainAboutNothing();
  const plans = budgets.map((budget, index) => ({ budget, panel: panels[index] }));
  const wanted = page.compare.checked ? plans : plans.slice(0, 1);
  for (const { panel } of wanted) {
    panel.reset("Waiting for its turn");
  }
  let current = null;
  try {
    const prompt = promptBody();
    // One after the other: two at once would share the machine, and no time be its own.
    for (current of wanted) {
      await runOne(current, prompt, running.signal);
    }
  } catch (error) {
    if (error.name === "AbortError") {
      current.panel.stop("Stopped");
    } else {
      explain(error, current);
    }
    for (const { panel } of wanted.slice(wanted.indexOf(current) + 1)) {
      panel.stop("Not run");
    }
  } finally {
    running = null;
    page.run.setAttribute("aria-disabled", "false");
    page.stop.setAttribute("aria-disabled", "true");
  }
}

async function runOne({ budget, panel }, prompt, signal) {
  const key = page.key.value;
  panel.begin();
  const tokenizing = postJson("tokenize", { ...prompt, return_offsets: true }, key, signal);
  tokenizing.catch(() => {}); // looked at below, unless the run itself fails before that
  const body = {
    ...prompt,
    ...budget.values(),
    ...Object.fromEntries(sampling.map((field) => [field.name, field.value])),
    explain: true,
  };
  let outcome = null;
  for await (const event of postStream("generate", body, key, signal)) {
    if (event.usage) {
      outcome = event;
    } else {
      panel.add(event.text);
    }
  }
  panel.finish(outcome, await tokenizing);
}

function stop() {
  running?.abort();
}

/** Say what went wrong beside what it concerns, and put the focus there if somebody asked to run. */
function explain(error, current) {
  if (!(error instanceof ApiError)) {
    throw error;
  }
  if (error.status === 401) {
    askForKey(error);
    if (current) {
      current.panel.stop("Not run");
      page.key.focus();
    }
    return;
  }
  const fields = [...sampling, ...(current?.budget.fields ?? [])];
  let isPlaced = false;
  for (const { param, message } of error.problems) {
    const name = (param ?? "").split(".")[0];
    const field = fields.find((one) => one.name === name);
    if (field) {
      field.complain(message);
      if (!isPlaced) {
        field.input.focus();
      }
      isPlaced = true;
    } else if (name === "prompt" || name === "messages") {
      say(page.promptError, message);
      isPlaced = true;
    }
  }
  if (current) {
    current.panel.stop("Refused");
  }
  if (!isPlaced) {
    if (current) {
      current.panel.fail(error.message);
    } else {
      say(page.promptError, error.message);
    }
  }
}

function askForKey(error) {
  page.keyRow.hidden = false;
  say(page.keyError, page.key.value ? `Refused: ${error.message}` : error.message);
}

function complainAboutNothing() {
  say(page.promptError, null);
  say(page.keyError, null);
  for (const field of [...sampling, ...budgets.flatMap((budget) => budget.fields)]) {
    field.complain(null);
  }
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape") {
    stop();
  }
}

/** The key lives as long as the tab; where storing is forbidden, as long as the page. */
function storedKey() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return "";
  }
}

function storeKey(key) {
  try {
    sessionStorage.setItem(KEY_NAME, key);
  } catch {
    // It is in the field.
  }
}

start();
