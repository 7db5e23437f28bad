// What the page asks of the server, and the errors that come back.

const KEY = "llmc.key"; // in the session's storage: it is gone with the tab

export const readKey = () => sessionStorage.getItem(KEY) ?? "";
export const writeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class ApiError extends Error {
  /** `detail` is the rest of what the server said: its status, type, parameter, code and when to try again. */
  constructor(message, { status = 0, type = "", param = "", code = "", retryAfter = "" } = {}) {
    super(message);
    Object.assign(this, { status, type, param, code, retryAfter });
  }

  get detail() {
    const facts = [
      this.status && `HTTP ${this.status}`,
      this.type,
      this.code && this.code !== this.type && `code ${this.code}`,
      this.param && `parameter ${this.param}`,
      this.retryAfter && `try again in ${this.retryAfter} s`,
    ];
    return facts.filter(Boolean).join(" · ");
  }
}

/** The models, and whether each can chat and sees images. */
export async function readModels() {
  const answer = await (await request("v1/models")).json();
  return answer.data.map(({ id, x_llmc: about }) => ({ name: id, chats: about?.chats ?? true, sees: about?.sees ?? false }));
}

/** Chunks of a streamed answer until its `[DONE]`; a stream that ends without it is an error. */
export async function* streamChat(body, signal) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function request(path, options = {}) {
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (readKey()) headers.Authorization = `Bearer ${readKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await readError(response);
  return response;
}

async function readError(response) {
  const retryAfter = response.headers.get("Retry-After") ?? "";
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message, { ...error, status: response.status, retryAfter });
  } catch {
    return new ApiError(text.slice(0, 500) || response.statusText, { status: response.status, retryAfter });
  }
}

/** The data of each server-sent event of a stream of bytes (https://html.spec.whatwg.org/#event-stream-interpretation). */
export async function* readEvents(stream) {
  let data = [];
  for await (const line of readLines(stream)) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (line === "" && data.length) {
      yield data.join("\n");
      data = [];
    }
  }
}

async function* readLines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return yield* rest.split("\r").slice(0, -1); // a carriage return that waited for its line feed
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      yield* lines;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost before the answer ended.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
