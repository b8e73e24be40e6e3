// Talks to the server: the key, JSON, and server-sent events over fetch (EventSource has no headers).

const KEY = "paceline-key";
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not ours: the status has to do.
  }
  throw new HttpError(response.status, message);
}

export const getJson = async (path) => (await request(path)).json();

// Calls `take(object, instant)` for each event, until the stream ends or `signal` aborts it.
export async function stream(path, options, take) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return response;
    const now = performance.now();
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) take(JSON.parse(event.slice(6)), now);
    }
  }
}
