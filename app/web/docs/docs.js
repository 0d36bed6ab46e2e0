// Renders openapi.json as a page. Texts become text nodes, never markup.

const MAX_DEPTH = 4;
const METHODS = ["get", "post", "put", "patch", "delete"];

/** Build an element; children are elements or texts. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Give text with `code` between backquotes as nodes. */
function prose(text) {
  return (text ?? "")
    .split("`")
    .map((part, index) => (index % 2 ? make("code", {}, part) : part));
}

function table(heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, ...cell))));
  // Wide tables scroll by themselves, also from the keyboard.
  return make(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": heads.join(", ") },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)),
  );
}

class Description {
  constructor(openapi) {
    this.openapi = openapi;
  }

  /** Follow a reference to what it stands for. */
  resolve(schema) {
    const path = schema?.$ref?.split("/").slice(1);
    return path ? path.reduce((found, name) => found[name], this.openapi) : (schema ?? {});
  }

  /** List the alternatives that a schema allows. */
  alternatives(schema) {
    return schema.anyOf ?? schema.oneOf ?? [schema];
  }

  typeOf(schema) {
    if (schema.$ref) {
      return schema.$ref.split("/").at(-1);
    }
    if (schema.enum) {
      return schema.enum.map((value) => JSON.stringify(value)).join(", ");
    }
    if (schema.anyOf || schema.oneOf) {
      return this.alternatives(schema).map((each) => this.typeOf(each)).join(" or ");
    }
    if ("const" in schema) {
      return JSON.stringify(schema.const);
    }
    if (schema.type === "array") {
      return `list of ${this.typeOf(schema.items ?? {})}`;
    }
    return schema.type ?? "anything";
  }

  /** Give rows for the fields of an object and of the objects inside it. */
  fields(schema, prefix = "", depth = 0) {
    const object = this.resolve(schema);
    const required = new Set(object.required ?? []);
    return Object.entries(object.properties ?? {}).flatMap(([name, field]) => {
      const fallback = "default" in field ? JSON.stringify(field.default) : "";
      const row = [
        [make("code", {}, prefix + name)],
        [this.typeOf(field)],
        [required.has(name) ? "required" : fallback],
        prose(field.description),
      ];
      const inner = this.alternatives(field).flatMap((each) => {
        const [item, path] = each.type === "array" ? [each.items, `${name}[].`] : [each, `${name}.`];
        return item?.$ref && depth < MAX_DEPTH ? this.fields(item, prefix + path, depth + 1) : [];
      });
      return [row, ...inner];
    });
  }

  fieldTable(schema) {
    const rows = this.alternatives(this.resolve(schema)).flatMap((each) => this.fields(each));
    return rows.length ? table(["field", "type", "default", "meaning"], rows) : null;
  }

  parameters(operation) {
    const rows = (operation.parameters ?? []).map((parameter) => [
      [make("code", {}, parameter.name), ` (${parameter.in})`],
      [this.typeOf(parameter.schema ?? {})],
      [parameter.required ? "required" : ""],
      prose(parameter.description),
    ]);
    return rows.length
      ? [make("h3", {}, "Parameters"), table(["parameter", "type", "default", "meaning"], rows)]
      : [];
  }

  body(operation) {
    const schema = operation.requestBody?.content?.["application/json"]?.schema;
    if (!schema) {
      return [];
    }
    const example = this.resolve(schema).example;
    return [
      make("h3", {}, "Body"),
      this.fieldTable(schema),
      ...(example ? [make("h3", {}, "Example"), make("pre", { tabindex: "0" }, JSON.stringify(example, null, 2))] : []),
    ];
  }

  responses(operation) {
    const rows = Object.entries(operation.responses ?? {}).map(([status, response]) => {
      const schema = response.content?.["application/json"]?.schema;
      const shape = schema && Object.keys(schema).length ? this.typeOf(schema) : "";
      return [[status], [shape], prose(response.description)];
    });
    const whole = operation.responses?.["200"]?.content?.["application/json"]?.schema;
    const fields = whole ? this.fieldTable(whole) : null;
    return [
      make("h3", {}, "Answers"),
      table(["status", "body", "when"], rows),
      ...(fields ? [make("h3", {}, "Fields of the answer"), fields] : []),
    ];
  }

  operation(path, method, operation) {
    const id = [method, ...path.match(/[a-z0-9]+/gi)].join("-");
    const title = make(
      "summary",
      {},
      make("span", { class: "method" }, method.toUpperCase()),
      " ",
      make("code", {}, path),
      " ",
      make("span", { class: "muted" }, operation.summary ?? ""),
    );
    const content = [
      make("p", {}, ...prose(operation.description)),
      ...this.parameters(operation),
      ...this.body(operation),
      ...this.responses(operation),
    ];
    const section = make("details", { class: "operation", id }, title, make("div", {}, ...content));
    const link = make("li", {}, make("a", { href: `#${id}` }, `${method.toUpperCase()} ${path}`));
    return { section, link, text: `${method} ${path} ${operation.summary}`.toLowerCase() };
  }

  operations() {
    return Object.entries(this.openapi.paths).flatMap(([path, item]) =>
      METHODS.filter((method) => item[method]).map((method) => this.operation(path, method, item[method])),
    );
  }
}

/** Open what the address names, as a link to it would. */
function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named instanceof HTMLDetailsElement) {
    named.open = true;
    named.scrollIntoView();
    named.querySelector("summary").focus({ preventScroll: true });
  }
}

function listen(operations) {
  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const { section, link, text } of operations) {
      section.hidden = link.hidden = !text.includes(wanted);
    }
  });
  const toggle = document.getElementById("toggle");
  toggle.addEventListener("click", () => {
    const isOpening = operations.some(({ section }) => !section.open);
    for (const { section } of operations) {
      section.open = isOpening;
    }
    toggle.textContent = isOpening ? "Close all" : "Open all";
  });
  window.addEventListener("hashchange", openNamed);
}

async function main() {
  const status = document.getElementById("status");
  try {
    const response = await fetch("openapi.json");
    if (!response.ok) {
      throw new Error(`the server answered ${response.status}`);
    }
    const openapi = await response.json();
    const operations = new Description(openapi).operations();
    document.title = openapi.info.title;
    document.getElementById("title").textContent = openapi.info.title;
    document.getElementById("summary").textContent = openapi.info.summary ?? "";
    document.getElementById("contents").append(...operations.map(({ link }) => link));
    document.getElementById("operations").append(...operations.map(({ section }) => section));
    listen(operations);
    status.remove();
    openNamed();
  } catch (error) {
    status.textContent = `The description could not be read: ${error.message}`;
  }
}

await main();
