// Keeps the figures of answers across reloads: the packed activity of each answer's tokens, in IndexedDB. Only the
// newest answers are kept. Without a database (private windows) figures last until the page is closed.

import { Activity } from "./activity.js";

const NAME = "hotset.figures", STORE = "answers";
const MOST = 200; // answers
const SHARES = 10_000; // a share is stored with four digits

const keyOf = (conversation, message) => `${conversation.id}/${message.id}`;

const NUMBERS = ["seconds", "bytes_kv", "bytes_touched", "bytes_total", "step_tokens", "active_share"];

/** Pack tokens into a few arrays, which take a tenth of the memory of objects. */
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

let database = null; // a promise of the database; of null without one

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

/** Return the result of a request in a transaction; null if it fails. */
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

/** Store the activity of an answer, and delete the oldest ones beyond the limit. */
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

/** Return the Activity of an answer; null if it is not stored. */
export async function find(conversation, message) {
  const value = await done("readonly", (store) => store.get(keyOf(conversation, message)));
  if (!value) return null;
  const activity = new Activity(value.facts);
  activity.add(unpacked(value));
  return activity;
}

/** Delete the figures of all conversations except `ids`. */
export async function clean(ids) {
  const keys = (await done("readonly", (store) => store.getAllKeys())) ?? [];
  for (const key of keys) if (!ids.has(key.split("/")[0])) await done("readwrite", (store) => store.delete(key));
}
