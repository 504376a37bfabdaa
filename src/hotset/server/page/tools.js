// Tools that a model may call: tools of the server's MCP servers, and functions whose results the user types. A
// conversation stores its tools as {on, functions, allowed}: names of MCP tools, functions, and {name, digest} of tools
// that are called without asking. If a tool changes, the user must allow it again.
//
// A call of an answer is {id, name, arguments (the model's text), state, ...}. digest: of the tool that the model was
// given under that name, which is the one that the user allows. state: "asked" (the user decides), "running", "done"
// (with `result` and, after a failure, `error`) or "denied". consent: "once", "always", "typed".

import * as server from "./server.js";

const isName = (name) => typeof name === "string" && /^[a-zA-Z0-9_.-]{1,128}$/.test(name);
const MOST_FUNCTIONS = 64;
const LONGEST_FUNCTION = 65_536; // characters of JSON
export const LONGEST_RESULT = 60_000; // characters; the server truncates results at about the same length
const MOST_CALLS = 64; // of an answer
const DENIED = "The user did not allow this call.", SKIPPED = "The user went on without this call.";

export class Tools {
  constructor() {
    this.servers = null; // the server's list; null: not loaded yet
  }

  /** Load the MCP servers. Throws ServerError. */
  async load() {
    this.servers = await server.mcpServers();
  }

  async restart(name) {
    this.servers = await server.restartMcp(name);
  }

  /** All MCP tools, each with its server's name in `server`. */
  get all() {
    return (this.servers ?? []).flatMap((one) => one.tools.map((tool) => ({ ...tool, server: one.name })));
  }

  find(name) {
    return this.all.find((tool) => tool.name === name) ?? null;
  }

  /** Return the tool or function of a call; null if it does not exist or has changed since the model got it;
   * undefined if the list is not loaded. */
  of(call, conversation) {
    if (call.typed) return ownTools(conversation).functions.find((one) => one.name === call.name) ?? null;
    if (this.servers === null) return undefined;
    const tool = this.find(call.name);
    return tool && tool.digest !== (call.digest ?? tool.digest) ? null : tool;
  }

  /** Return the names of tools that are on in a conversation but missing on the server. */
  missing(conversation) {
    return ownTools(conversation).on.filter((name) => !this.find(name));
  }

  /** Return the `tools` of a request. Throws ServerError. */
  async request(conversation) {
    const { on, functions } = ownTools(conversation);
    if (on.length) await this.load();
    const named = new Set(functions.map((one) => one.name));
    const found = this.all.filter((tool) => on.includes(tool.name) && !named.has(tool.name));
    const all = [...functions, ...found.map(({ name, description, parameters }) => ({ name, description, parameters }))];
    return all.length ? { tools: all.map((one) => ({ type: "function", function: one })) } : {};
  }

  /** Mark the calls of an answer that cannot be made, and those whose result the user types. offered: `tools`. */
  judge(calls, offered, conversation) {
    const names = new Set((offered ?? []).map((one) => one.function.name));
    const typed = new Set(ownTools(conversation).functions.map((one) => one.name));
    for (const call of calls) {
      if (!names.has(call.name)) settle(call, `There is no tool named ${call.name}.`, true);
      else if (parsed(call) === null) settle(call, "The arguments are not a JSON object.", true);
      else if (typed.has(call.name)) call.typed = true;
      else ({ server: call.server, digest: call.digest } = this.find(call.name) ?? {});
    }
  }

  /** Whether a conversation allows a call without asking. */
  isAllowed(call, conversation) {
    return ownTools(conversation).allowed.some(({ name, digest }) => name === call.name && digest === call.digest);
  }

  /** Make a call and store its result in it. Throws ServerError if it was not made, and AbortError. */
  async run(call, signal) {
    try {
      const { content, is_error: failed } = await server.callTool(call.name, parsed(call) ?? {}, call.digest, signal);
      settle(call, content, failed);
    } catch (error) {
      if (!(error instanceof server.ServerError) || ["key", "network", "loading", "busy"].includes(error.kind)) throw error;
      settle(call, error.message, true);
    }
  }
}

/** Return the tools of a conversation. */
export const ownTools = (conversation) => conversation.tools ?? { on: [], functions: [], allowed: [] };

/** Change the tools of a conversation. change(tools): in place. */
export function changeTools(conversation, change) {
  const { on, functions, allowed } = ownTools(conversation);
  conversation.tools = { on: [...on], functions: [...functions], allowed: [...allowed] };
  change(conversation.tools);
}

export function settle(call, result, error = false) {
  call.state = "done";
  call.result = result.slice(0, LONGEST_RESULT);
  if (error) call.error = true;
  else delete call.error;
  delete call.problem;
}

export const isSettled = (call) => call.state === "done" || call.state === "denied";

/** Return the arguments of a call; null if they are not a JSON object. */
export function parsed(call) {
  try {
    const value = JSON.parse(call.arguments || "{}");
    return typeof value === "object" && value !== null && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** Add the calls of a chunk to a message. */
export function takeCalls(message, deltas) {
  message.calls ??= [];
  for (const { index, id, function: part } of deltas) {
    if (!Number.isSafeInteger(index) || index < 0 || index >= MOST_CALLS) continue;
    while (message.calls.length <= index) message.calls.push({ id: `call-${message.calls.length}`, name: "", arguments: "", state: "asked" });
    const call = message.calls[index];
    if (id) call.id = id;
    if (part?.name) call.name += part.name;
    if (part?.arguments) call.arguments += part.arguments;
  }
}

const asParts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  return [...asParts(first), ...asParts(second)];
}

/** Return the messages of a conversation for a request. contentOf(message): its text or parts for the model. */
export function sentMessages(system, messages, contentOf) {
  const sent = system ? [{ role: "system", content: system }] : [];
  // Drop a question without an answer: many templates refuse two questions in a row. Messages that became adjacent by a
  // deletion are joined.
  const isEmpty = (message) => message?.role === "assistant" && message.content === "" && !message.calls;
  for (const [i, message] of messages.entries()) {
    if (isEmpty(message) || (message.role === "user" && isEmpty(messages[i + 1]))) continue;
    const last = sent.at(-1), content = contentOf(message);
    if (last?.role === message.role) last.content = joined(last.content, content);
    else sent.push({ role: message.role, content });
    if (message.calls) addCalls(sent, message);
  }
  return sent;
}

/** Add calls and their results: templates refuse a call without a result. */
function addCalls(sent, { calls, reasoning }) {
  const tool_calls = calls.map((call) => ({
    id: call.id,
    type: "function",
    // Arguments that are not JSON are sent as an object with their text, because templates expect an object.
    function: { name: call.name, arguments: parsed(call) === null ? JSON.stringify({ text: call.arguments }) : call.arguments || "{}" },
  }));
  Object.assign(sent.at(-1), { tool_calls }, reasoning ? { reasoning_content: reasoning } : {});
  for (const call of calls) {
    const content = call.state === "done" ? call.result : call.state === "denied" ? DENIED : SKIPPED;
    sent.push({ role: "tool", tool_call_id: call.id, content });
  }
}

// ---- functions ----

/** Return the functions of a text in OpenAI's format (one or a list) or MCP's. Throws a message for the user. */
export function functionsOf(text) {
  if (text.length > LONGEST_FUNCTION) throw new Error(`It has more than ${LONGEST_FUNCTION} characters.`);
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("This is not JSON.");
  }
  const list = Array.isArray(value) ? value : [value];
  if (list.length === 0 || list.length > MOST_FUNCTIONS) throw new Error(`Give 1 to ${MOST_FUNCTIONS} functions.`);
  return list.map((one) => {
    const given = one?.function ?? one;
    if (!isName(given?.name)) throw new Error("A function needs a name of letters, digits, dots, _ and -.");
    const found = checkedFunction({ ...given, parameters: given.parameters ?? given.inputSchema });
    if (!found) throw new Error(`${given.name}: parameters must be a JSON schema of an object, and description a text.`);
    return found;
  });
}

export function addFunctions(conversation, list) {
  changeTools(conversation, (tools) => {
    const names = new Set(list.map((one) => one.name));
    tools.functions = [...tools.functions.filter((one) => !names.has(one.name)), ...list].slice(-MOST_FUNCTIONS);
  });
}

function checkedFunction(value) {
  if (typeof value !== "object" || value === null || !isName(value.name)) return null;
  const { name, description = "", parameters = { type: "object", properties: {} } } = value;
  if (typeof description !== "string" || typeof parameters !== "object" || parameters === null) return null;
  if (Array.isArray(parameters) || (parameters.type ?? "object") !== "object") return null;
  return { name, description, parameters, ...(value.strict === true ? { strict: true } : {}) };
}

// ---- storage ----

/** Return the valid part of stored tools; null: none. */
export function checkedTools(value) {
  if (typeof value !== "object" || value === null) return null;
  const names = (list) => (Array.isArray(list) ? [...new Set(list.filter(isName))] : []);
  const functions = (Array.isArray(value.functions) ? value.functions : []).map(checkedFunction).filter(Boolean);
  const isAllowed = (one) => isName(one?.name) && typeof one.digest === "string";
  const allowed = (Array.isArray(value.allowed) ? value.allowed : []).filter(isAllowed);
  return {
    on: names(value.on),
    functions: functions.slice(0, MOST_FUNCTIONS),
    allowed: allowed.map(({ name, digest }) => ({ name, digest })),
  };
}

/** Remove consent from the calls of an imported file, which may come from anyone. */
export function distrustCalls(calls) {
  for (const call of calls) if (!isSettled(call)) for (const name of ["server", "problem", "digest"]) delete call[name];
}

/** Return the valid part of stored calls; null if they are not valid. */
export function checkedCalls(value) {
  if (!Array.isArray(value) || value.length === 0 || value.length > MOST_CALLS) return null;
  const calls = value.map(checkedCall);
  return calls.includes(null) ? null : calls;
}

function checkedCall(value) {
  for (const name of ["id", "name", "arguments"]) if (typeof value?.[name] !== "string") return null;
  const call = { id: value.id, name: value.name, arguments: value.arguments, state: "asked" };
  if (value.typed === true) call.typed = true;
  for (const name of ["server", "problem", "digest"]) if (typeof value[name] === "string") call[name] = value[name];
  if (["once", "always", "typed"].includes(value.consent)) call.consent = value.consent;
  if (value.state === "denied") call.state = "denied";
  if (value.state === "done" && typeof value.result === "string") settle(call, value.result, value.error === true);
  if (value.state === "running") call.problem = "The page was closed while it ran: its result is not known.";
  return call;
}
