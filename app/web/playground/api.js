// Talks to the server this page came from. The key is sent as a header and is never part of an address.

/** What went wrong with a call: an answer of the server, or none. */
export class ApiError extends Error {
  /**
   * @param {string} message One sentence for people.
   * @param {number} status Status of the answer, 0 without one.
   * @param {{param?: string|null, message: string}[]} problems Every field that is named.
   */
  constructor(message, status = 0, problems = []) {
    super(message);
    this.status = status;
    this.problems = problems;
  }
}

/** Get a JSON document. */
export async function getJson(path, key, signal) {
  return (await call(path, { headers: headersOf(key), signal })).json();
}

/** Post JSON and read a JSON answer. */
export async function postJson(path, body, key, signal) {
  return (await post(path, body, key, signal)).json();
}

/** Get one of the page's own files. */
export async function getText(path) {
  return (await call(path, {})).text();
}

/**
 * Post JSON and yield the events of the stream that answers.
 *
 * Ends with an `ApiError` if the stream does, or if it breaks off.
 */
export async function* postStream(path, body, key, signal) {
  const response = await post(path, { ...body, stream: true }, key, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await unbroken(reader.read());
    if (done) {
      throw new ApiError("The connection ended before the answer was complete.");
    }
    buffer += value;
    const frames = buffer.split("\n\n");
    buffer = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) {
        continue; // a comment, which keeps the connection open
      }
      const data = frame.slice("data: ".length);
      if (data === "[DONE]") {
        return;
      }
      const event = JSON.parse(data);
      if (event.error) {
        throw errorOf(event.error, 0, null);
      }
      yield event;
    }
  }
}

function post(path, body, key, signal) {
  const headers = { ...headersOf(key), "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function call(path, options) {
  const response = await unbroken(
    fetch(path, { ...options, credentials: "omit", referrerPolicy: "no-referrer" }),
  );
  if (response.ok) {
    return response;
  }
  let detail = { message: `The server answered with status ${response.status}.` };
  try {
    detail = (await response.json()).error ?? detail;
  } catch {
    // Something between here and the server answered, in words of its own.
  }
  throw errorOf(detail, response.status, response.headers.get("Retry-After"));
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function errorOf(detail, status, retryAfter) {
  const several = detail.errors ?? [];
  const problems = several.length ? several : [{ param: detail.param, message: detail.message }];
  const later = retryAfter ? ` (try again in ${retryAfter} s)` : "";
  return new ApiError(detail.message + later, status, problems);
}

/** Wait for something of the network; stopping it stays what it is. */
async function unbroken(waiting) {
  try {
    return await waiting;
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError("The server cannot be reached. Does it run, and is the network there?");
  }
}
