// What the page asks of the server: the endpoints that any client has, under the same rules.

const KEY = "hotset.key";

/** What went wrong, in a message for the reader. kind: "key", "network", "loading", "busy", "refused", "broken". */
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

/** The API key from now on. keep: in this browser, else as long as the tab lives. */
export function useKey(value, keep) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
    if (keep) localStorage.setItem(KEY, value);
    else localStorage.removeItem(KEY);
  } catch {
    // It lives as long as the page, then.
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
    // No message of the server's own: a proxy may stand between.
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

/** The models that are served. */
export const models = async () => (await (await ask("v1/models")).json()).data ?? [];

/** Facts of a loaded model (null where this server has none to give). name: of one that is loaded; null: of the only one. */
export async function props(name = null) {
  try {
    return await (await ask(name === null ? "props" : `props?model=${encodeURIComponent(name)}`)).json();
  } catch (error) {
    if (error instanceof ServerError && error.kind === "refused") return null;
    throw error;
  }
}

/** Whether the server is up and has its model: "ok", "loading", "away". */
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

/** Begins to load a model, and does not wait for it. n_ctx: tokens of its context; null: the server's default. */
export const load = async (model, n_ctx = null) => void (await post("models/load", n_ctx === null ? { model } : { model, n_ctx }));

/** Models that can be downloaded and have these words: {id, size, has_zeros, needs, is_stored}. */
export const catalogue = async (words) => (await (await ask(`models/catalogue?q=${encodeURIComponent(words)}`)).json()).data;

/** Downloads a model; yields {status, completed, total} as it comes. Throws ServerError, and AbortError where `signal` says so. */
export async function* pull(model, signal) {
  for await (const line of linesOf(await post("api/pull", { model, stream: true }, signal))) {
    const state = line && parsed(line);
    if (state?.error) throw new ServerError("refused", state.error);
    if (state) yield state;
  }
}

/** Unloads a model, once its requests are answered. */
export const unload = async (model) => void (await post("models/unload", { model }));

/** How many tokens a text has for a model (null: the only one). */
export async function countTokens(model, content) {
  const response = await post("tokenize", { ...(model === null ? {} : { model }), content, parse_special: false });
  return (await response.json()).count;
}

/** The MCP servers: {name, state, problem, tools: [{name, tool, description, parameters}]}. */
export const mcpServers = async () => (await (await ask("mcp/servers")).json()).servers ?? [];

/** Has one of them started anew; the list as it is then. */
export const restartMcp = async (name) => (await (await post("mcp/restart", { server: name })).json()).servers ?? [];

/** Calls a tool: {content, is_error}. digest: of the tool that is meant. Throws ServerError, and AbortError where `signal` says so. */
export const callTool = async (name, given, digest, signal) => (await post("mcp/call", { name, arguments: given, digest }, signal)).json();

/** The states of models, as they change: {model, value, ...}. Ends where the connection does. */
export async function* states() {
  for await (const data of events(await ask("models/events"))) yield parsed(data);
}

const BROKE = "The connection broke in the middle of the answer.";

/** The chunks of an answer, as the server sends them. onDropped(n): before the first one, how many turns of the conversation
 * had no room. Throws ServerError, and AbortError where `signal` says so. */
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

/** The data of server-sent events. Other lines are comments, which keep the connection alive. */
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
    reader.cancel().catch(() => {}); // left early: the server hears of it
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
