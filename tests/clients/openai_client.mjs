// OpenAI's client for Node: BASE_URL, MODEL and API_KEY are in the environment.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "ok" }];
const greedy = { model, temperature: 0, max_tokens: 32 };

const answer = await client.chat.completions.create({ ...greedy, messages });
const text = answer.choices[0].message.content;
assert.ok(text.length > 0);
assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...greedy, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);

const runner = client.chat.completions.stream({ ...greedy, messages, stop: [text.slice(5, 8)] });
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, text.slice(0, text.indexOf(text.slice(5, 8))));

const listed = [];
for await (const one of client.models.list()) listed.push(one.id);
assert.deepEqual(listed, [model]);
assert.equal((await client.models.retrieve(model)).id, model);

const continued = await client.completions.create({ ...greedy, prompt: "hello" });
assert.ok(continued.choices[0].text.length > 0);

const embedded = await client.embeddings.create({ model, input: ["hello", "ok"] });
assert.equal(embedded.data.length, 2);
assert.ok(Math.abs(Math.hypot(...embedded.data[0].embedding) - 1) < 1e-3);

const asked = { model, input: messages, temperature: 0, max_output_tokens: 32 };
const response = await client.responses.create(asked);
assert.equal(response.output_text, text);
let deltas = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
assert.equal(deltas, text);

const form = { type: "json_schema", name: "answer", schema: { type: "boolean" } };
const decided = await client.responses.create({ ...asked, text: { format: form } });
assert.ok(["true", "false"].includes(decided.output_text));

// A server of one model answers for any name, and ignores unknown fields.
await client.chat.completions.create({ ...greedy, model: "other", messages });
await client.chat.completions.create({ ...greedy, messages, frobnicate: 1 });
await assert.rejects(
  client.chat.completions.create({ ...greedy, messages, top_p: 7 }),
  (error) => error instanceof OpenAI.BadRequestError && error.message.includes("top_p"),
);
const stranger = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "wrong", maxRetries: 0 });
await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
console.log("chat, streams, completions, embeddings, models, responses, errors");
