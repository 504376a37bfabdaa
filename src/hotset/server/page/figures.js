// Figures of answers, kept in this browser over a reload: of each answer what its tokens did, packed, in IndexedDB. The
// newest ones stay. Without a database (private windows) they last as long as the page.

import { Activity } from "./activity.js";

const NAME = "hotset.figures", STORE = "answers";
const MOST = 200; // answers
const SHARES = 10_000; // a share has four digits

const keyOf = (conversation, message) => `${conversation.id}/${message.id}`;

const NUMBERS = ["seconds", "bytes_kv", "bytes_touched", "bytes_total", "step_tokens", "active_share"];

/** Tokens as a few arrays: a tenth of the memory of as many objects. */
function packed({ tokens, nLayers, hasDevice }) {
  const n = tokens.length;
  const cells = (Kind, of) => Kind.from({ length: n * nLayers }, (_, i) => of(tokens[Math.floor(i / nLayers)].layers, i % nLayers));
  const numbers = NUMBERS.map((name) => Float64Array.from(tokens, (token) => token[name] ?? Number.NaN));
  return {
    numbers,
    nLayers,
    texts: tokens.map((token) => token.text),
    drafted: Uint8Array.from(tokens, (token) => (token.drafted ? 1 : 0)),
    shares: cells(Uint16Array, (layers, i) => Math.round(SHARES * (layers?.active_share[i] ?? 0))),
    bytes: cells(Float64Array, (layers, i) => layers?.bytes[i] ?? 0),
    cpu: hasDevice ? cells(Uint16Array, (layers, i) => Math.round(SHARES * (layers?.cpu_share?.[i] ?? 0))) : null,
  };
}

function unpacked({ numbers, nLayers, texts, drafted, shares, bytes, cpu }) {
  const row = (values, i, scale) => Array.from(values.subarray(i * nLayers, (i + 1) * nLayers), (value) => value / scale);
  return texts.map((text, i) => {
    const token = { text };
    for (const [k, name] of NUMBERS.entries()) if (!Number.isNaN(numbers[k][i])) token[name] = numbers[k][i];
    if (drafted[i]) token.drafted = true;
    if (!nLayers) return token;
    token.layers = { active_share: row(shares, i, SHARES), bytes: row(bytes, i, 1) };
    if (cpu) token.layers.cpu_share = row(cpu, i, SHARES);
    return token;
  });
}

let database = null; // a promise of it; of null where there is none

function opened() {
  database ??= new Promise((found) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "key" }).createIndex("time", "time");
      request.onsuccess = () => found(request.result);
      request.onerror = request.onblocked = () => found(null);
    } catch {
      found(null);
    }
  });
  return database;
}

/** What a request in a transaction gives; null where it fails. */
async function done(mode, ask) {
  const base = await opened();
  if (base === null) return null;
  return new Promise((found) => {
    try {
      const request = ask(base.transaction(STORE, mode).objectStore(STORE));
      request.onsuccess = () => found(request.result);
      request.onerror = () => found(null);
    } catch {
      found(null);
    }
  });
}

/** Keeps what an answer's tokens did; of too many answers the oldest go. */
export async function keep(conversation, message, activity) {
  if (!activity.length) return;
  const value = { key: keyOf(conversation, message), time: Date.now(), facts: activity.facts, ...packed(activity) };
  await done("readwrite", (store) => store.put(value));
  const excess = ((await done("readonly", (store) => store.count())) ?? 0) - MOST;
  if (excess <= 0) return;
  const oldest = (await done("readonly", (store) => store.index("time").getAllKeys(null, excess))) ?? [];
  for (const key of oldest) await done("readwrite", (store) => store.delete(key));
}

export const forget = (conversation, message) => done("readwrite", (store) => store.delete(keyOf(conversation, message)));

/** The Activity of an answer; null where none was kept. */
export async function find(conversation, message) {
  const value = await done("readonly", (store) => store.get(keyOf(conversation, message)));
  if (!value) return null;
  const activity = new Activity(value.facts);
  activity.add(unpacked(value));
  return activity;
}

/** Forgets those of conversations that are not kept any more. ids: of those that are. */
export async function clean(ids) {
  const keys = (await done("readonly", (store) => store.getAllKeys())) ?? [];
  for (const key of keys) if (!ids.has(key.split("/")[0])) await done("readwrite", (store) => store.delete(key));
}
