// The page's requests to the server. It uses the public endpoints, under the same rules as any client.

const KEY = "hotset.key";

/** An error with a message for the user. kind: "key", "network", "loading", "busy", "refused", "broken". */
export class ServerError extends Error {
  constructor(kind, message, retryAfter = null, code = null) {
    super(message);
    Object.assign(this, { kind, retryAfter, code });
  }
}

let key = read(sessionStorage) ?? read(localStorage);

function read(storage) {
  try {
    return storage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Set the API key. keep: store it in this browser, otherwise only for this tab. */
export function useKey(value, keep) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
    if (keep) localStorage.setItem(KEY, value);
    else localStorage.removeItem(KEY);
  } catch {
    // It lasts until the page is closed.
  }
}

export const hasKey = () => key !== null;

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (key !== null && /header|ISO-8859|ByteString/i.test(error.message)) {
      throw new ServerError("key", "The key has characters that a key cannot have.");
    }
    throw new ServerError("network", "The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = "", code = null;
  try {
    const body = await response.json();
    code = body.error?.code ?? null;
    message = body.error?.message ?? (typeof body.detail === "string" ? body.detail : "");
  } catch {
    // The reply has no message of the server; it may come from a proxy.
  }
  const after = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  const wait = Number.isFinite(after) ? after : null;
  if (response.status === 401) {
    return new ServerError("key", message || "The server needs an API key.");
  }
  if (response.status === 503) return new ServerError("loading", message || "The model is being loaded.", wait);
  if (response.status === 429) return new ServerError("busy", message || "The server is busy.", wait);
  const kind = response.status >= 500 ? "broken" : "refused";
  return new ServerError(kind, message || `The server answered ${response.status} ${response.statusText}.`, null, code);
}

/** Return the list of models. */
export const models = async () => (await (await ask("v1/models")).json()).data ?? [];

/** Return the facts of a loaded model; null if the server has none. name: null for the only model. */
export async function props(name = null) {
  try {
    return await (await ask(name === null ? "props" : `props?model=${encodeURIComponent(name)}`)).json();
  } catch (error) {
    if (error instanceof ServerError && error.kind === "refused") return null;
    throw error;
  }
}

/** Return whether the server is up and has its model: "ok", "loading", "away". */
export async function health() {
  try {
    const response = await fetch("health", { credentials: "omit", cache: "no-store" });
    return response.ok ? "ok" : response.status === 503 ? "loading" : "away";
  } catch {
    return "away";
  }
}

const post = (path, body, signal) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

/** Start to load a model, without waiting. n_ctx: tokens of its context; null: the server's default. */
export const load = async (model, n_ctx = null) => void (await post("models/load", n_ctx === null ? { model } : { model, n_ctx }));

/** Return downloadable models that match these words: {id, size, has_zeros, needs, is_stored}. */
export const catalogue = async (words) => (await (await ask(`models/catalogue?q=${encodeURIComponent(words)}`)).json()).data;

/** Download a model; yields {status, completed, total}. Throws ServerError, and AbortError if `signal` aborts. */
export async function* pull(model, signal) {
  for await (const line of linesOf(await post("api/pull", { model, stream: true }, signal))) {
    const state = line && parsed(line);
    if (state?.error) throw new ServerError("refused", state.error);
    if (state) yield state;
  }
}

/** Unload a model when its requests are finished. */
export const unload = async (model) => void (await post("models/unload", { model }));

/** Return the number of tokens of a text for a model (null: the only one). */
export async function countTokens(model, content) {
  const response = await post("tokenize", { ...(model === null ? {} : { model }), content, parse_special: false });
  return (await response.json()).count;
}

/** Return the MCP servers: {name, state, problem, tools: [{name, tool, description, parameters}]}. */
export const mcpServers = async () => (await (await ask("mcp/servers")).json()).servers ?? [];

/** Restart an MCP server. Returns the new list. */
export const restartMcp = async (name) => (await (await post("mcp/restart", { server: name })).json()).servers ?? [];

/** Call a tool; returns {content, is_error}. digest: identifies the intended tool. Throws ServerError, and
 * AbortError if `signal` aborts. */
export const callTool = async (name, given, digest, signal) => (await post("mcp/call", { name, arguments: given, digest }, signal)).json();

/** Yield the states of models as they change: {model, value, ...}. Ends with the connection. */
export async function* states() {
  for await (const data of events(await ask("models/events"))) yield parsed(data);
}

const BROKE = "The connection broke in the middle of the answer.";

/** Yield the chunks of an answer. onDropped(n): called before the first chunk with the number of turns left out of
 * the context. Throws ServerError, and AbortError if `signal` aborts. */
export async function* chat(body, signal, onDropped) {
  const response = await post("v1/chat/completions", { ...body, stream: true }, signal);
  onDropped(Number(response.headers.get("x-hotset-dropped-turns") ?? 0));
  let complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      complete = true;
      continue;
    }
    const chunk = parsed(data);
    if (chunk.error) throw new ServerError("broken", chunk.error.message ?? "The answer failed.");
    yield chunk;
  }
  if (!complete) throw new ServerError("network", BROKE);
}

/** Yield the data of server-sent events. Other lines are comments that keep the connection alive. */
async function* events(response) {
  for await (const line of linesOf(response)) if (line.startsWith("data:")) yield line.slice(5).trim();
}

async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const part = await next(reader);
      if (part.done) break;
      const lines = (rest + part.value).split(/\r\n|\n|\r/);
      rest = lines.pop();
      yield* lines;
    }
  } finally {
    reader.cancel().catch(() => {}); // the consumer stopped early: tell the server
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("network", BROKE);
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ServerError("broken", "The server sent something that this page cannot read.");
  }
}
