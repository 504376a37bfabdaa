// The open conversation: sending messages, generating answers, editing and deleting.

import { Activity } from "./activity.js";
import { contentOf } from "./attachments.js";
import { areSettled } from "./calls.js";
import { leftOut, showMeter } from "./context.js";
import { announce, byId } from "./dom.js";
import * as figures from "./figures.js";
import { clearNotice, notice, undoable } from "./notices.js";
import { openPicture } from "./panels.js";
import * as server from "./server.js";
import { requestOf } from "./settings.js";
import * as store from "./store.js";
import { changeTools, ownTools, sentMessages, settle, takeCalls } from "./tools.js";
import { Transcript } from "./transcript.js";
import * as tree from "./tree.js";
import { count, counted } from "./units.js";

const MOST_ROUNDS = 16; // of calls, after which the user must confirm that the model continues

export class Chat {
  /** keep(conversation): it changed. second(): {model, preset} that answers next to the chosen model, or null.
   * opened(conversation): it is shown now. onError(error, retry): a request failed. running(is): an answer begins
   * or ends. */
  constructor({ models, settings, tools, picture, keep, second, opened, onError, running, showEmpty }) {
    Object.assign(this, { models, settings, tools, picture, keep, second, opened, onError, onRunning: running, showEmpty });
    this.conversation = store.fresh();
    this.settings.conversation = this.conversation;
    this.running = null; // {controller, messages}
    this.activities = new WeakMap(); // message → Activity
    this.transcript = new Transcript({
      edit: (message, text) => this.edit(message, text),
      again: (message) => this.again(message),
      goOn: (message) => this.goOn(message),
      remove: (message) => this.remove(message),
      show: (message) => this.showVersion(message),
      picture: (message) => this.showPictureOf(message),
      busy: () => this.running !== null,
      isLeaf: (message) => message.id === this.conversation.leaf,
      toolOf: (call) => this.tools.of(call, this.conversation),
      allow: (message, call, always) => this.allow(message, call, always),
      deny: (message, call) => this.decide(message, call, () => (call.state = "denied")),
      type: (message, call, text) =>
        this.decide(message, call, () => {
          call.consent = "typed";
          settle(call, text);
        }),
    });
  }

  get isEmpty() {
    return this.conversation.messages.length === 0;
  }

  // ---- display ----

  open(conversation) {
    this.stop();
    clearNotice("message");
    clearNotice("context");
    this.conversation = conversation;
    this.opened(conversation);
    this.settings.conversation = conversation;
    this.models.choose(conversation.model);
    this.draw();
    this.findFigures(conversation);
    this.findTools(conversation);
  }

  /** Load the tools for calls that wait since an earlier visit. */
  async findTools(conversation) {
    const waits = (message) => message.calls?.some((call) => call.state === "asked" && !call.typed);
    if (this.tools.servers !== null || !tree.path(conversation).some(waits)) return;
    try {
      await this.tools.load();
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error;
      return; // allowing the call will show the error
    }
    if (conversation === this.conversation && !this.running) this.draw(false);
  }

  /** Load the figures of answers from earlier visits. */
  async findFigures(conversation) {
    const answers = conversation.messages.filter((message) => message.role === "assistant" && !this.activities.has(message));
    const found = await Promise.all(answers.map((message) => figures.find(conversation, message)));
    for (const [i, activity] of found.entries()) {
      // An answer that was generated or edited meanwhile has its own figures.
      if (activity && !this.activities.has(answers[i])) this.activities.set(answers[i], activity);
    }
    if (conversation === this.conversation && !this.running && found.some(Boolean)) this.draw(false);
  }

  draw(toEnd = true) {
    const { conversation, activities } = this;
    this.transcript.show(conversation, activities, this.models.shortName, toEnd);
    this.showEmpty();
    this.picture.show(activities.get(tree.path(conversation).at(-1)) ?? null);
    this.showMeter();
  }

  showMeter() {
    showMeter(this.conversation, this.models.nContext);
  }

  showPictureOf(message) {
    const activity = this.activities.get(message);
    if (!activity?.length) return;
    this.picture.show(activity, this.running?.messages.includes(message));
    openPicture(true);
  }

  showVersion(message) {
    if (this.running) return;
    tree.show(this.conversation, message);
    this.keep(this.conversation);
    this.draw(false);
  }

  // ---- the user's actions ----

  send(text, files = []) {
    if (this.running || (text.trim() === "" && files.length === 0)) return;
    clearNotice("message");
    const last = tree.path(this.conversation).at(-1) ?? null;
    const message = { role: "user", content: text.trim() };
    if (files.length) message.files = files;
    this.answer(tree.add(this.conversation, last, message));
  }

  /** Edit a message. An edited question gets a new answer next to the old one; an edited answer takes the new text. */
  edit(message, text) {
    if (this.running) return;
    clearNotice("message");
    if (message.role === "assistant") {
      message.content = text.trim();
      message.note = "edited";
      delete message.failed;
      delete message.tokens;
      this.activities.delete(message);
      figures.forget(this.conversation, message);
      this.keep(this.conversation);
      return this.draw(false);
    }
    const question = { role: "user", content: text.trim(), ...(message.files ? { files: message.files } : {}) };
    this.answer(tree.add(this.conversation, this.parentOf(message), question));
  }

  again(message) {
    if (this.running) return;
    clearNotice("message");
    const question = this.parentOf(message);
    if (message.content === "" && message.failed && !message.calls) tree.remove(this.conversation, message); // an empty version is useless
    this.answer(question);
  }

  remove(message) {
    if (this.running) return;
    const { conversation } = this;
    const before = { messages: conversation.messages.map((each) => [each, each.parent]), leaf: conversation.leaf };
    tree.remove(conversation, message);
    this.keep(conversation);
    this.draw(false);
    undoable("message", "Message deleted.", () => {
      for (const [each, parent] of before.messages) each.parent = parent;
      conversation.messages = before.messages.map(([each]) => each);
      conversation.leaf = before.leaf;
      this.keep(conversation);
      if (conversation === this.conversation) this.draw(false);
    });
    byId("ask").focus();
  }

  parentOf(message) {
    return this.conversation.messages.find((other) => other.id === message.parent) ?? null;
  }

  stop() {
    this.running?.controller.abort();
  }

  // ---- answers ----

  /** Generate the answer to a message, with one model or two. */
  answer(question) {
    const { conversation } = this;
    const asked = this.pathTo(question), sides = this.sides();
    const jobs = sides.map(({ label, model, values }) => {
      const message = tree.add(conversation, question, { role: "assistant", content: "", model: label });
      return { message, asked, model, values };
    });
    if (jobs.length > 1) for (const { message } of jobs) message.pair = jobs[0].message.id;
    conversation.leaf = jobs[0].message.id;
    return this.run(jobs, () => {
      for (const { message } of jobs) if (message.content === "" && !message.calls) tree.remove(conversation, message);
      this.answer(question);
    });
  }

  /** Continue an answer; after calls, generate another answer. */
  goOn(message) {
    if (this.running) return undefined;
    clearNotice("message");
    if (message.calls) return areSettled(message) ? this.answer(message) : undefined;
    delete message.failed;
    const job = { message, asked: this.pathTo(message), model: this.models.name, values: this.settings.values };
    return this.run([job], () => this.goOn(message));
  }

  pathTo(message) {
    return message === null ? [] : tree.path({ ...this.conversation, leaf: message.id });
  }

  /** Return the answering models: the chosen one with the conversation's settings and, in a comparison, the second
   * one. */
  sides() {
    const { models, settings } = this, second = this.second();
    const own = { label: models.shortName, model: models.name, values: settings.values };
    if (!second) return [own];
    const preset = settings.presets.get(second.preset);
    const label = [second.label, second.preset].filter(Boolean).join(" · ");
    return [own, { label, model: second.model, values: preset ?? settings.values }];
  }

  /** Return the request for an answer. If the context is full, the server leaves out the oldest turns. */
  bodyOf({ asked, model, values }) {
    return {
      ...(model === null ? {} : { model }),
      messages: sentMessages((values.system ?? "").trim(), asked, contentOf),
      ...requestOf(values),
      truncation: "auto",
      stream_options: { include_usage: true, include_activity: true },
    };
  }

  /** Generate answers side by side and show them as they grow. retry: called after the user has entered an API key. */
  async run(jobs, retry) {
    const owner = this.conversation, messages = jobs.map((job) => job.message);
    this.running = { controller: new AbortController(), messages };
    for (const message of messages) this.activities.set(message, new Activity(this.models.facts));
    this.keep(owner);
    this.opened(owner);
    this.draw();
    this.onRunning(true);
    const [first] = messages;
    this.picture.show(this.activities.get(first), true);
    for (const message of messages) this.transcript.update(message, true, this.activities.get(message));
    announce("Answering");
    try {
      await Promise.all(jobs.map((job) => this.stream(job, owner, job.message === first, retry)));
    } finally {
      this.running = null;
      this.onRunning(false);
    }
    this.keep(owner);
    for (const message of messages) figures.keep(owner, message, this.activities.get(message));
    if (owner !== this.conversation) return;
    for (const message of messages) this.transcript.update(message, false, this.activities.get(message));
    this.picture.show(this.activities.get(first), false);
    this.showMeter();
    this.focusAsk();
    const job = jobs.find(({ message }) => message.id === owner.leaf);
    if (job?.complete && job.message.calls) this.goOnBehind(job.message);
  }

  focusAsk() {
    if (document.activeElement === document.body || document.activeElement === byId("stop")) byId("ask").focus();
  }

  async stream(job, owner, isFirst, retry) {
    const { message } = job;
    const activity = this.activities.get(message), before = message.content;
    let reason = null;
    try {
      const { signal } = this.running.controller, offered = await this.tools.request(owner);
      const missing = this.tools.missing(owner);
      if (missing.length) notice("tools", `Tools that are on but not available: ${missing.join(", ")}`);
      else clearNotice("tools");
      const size = this.models.find(job.model)?.max_model_len ?? null;
      const onDropped = (n) => isFirst && leftOut(owner, job.asked, n, size) && owner === this.conversation && this.draw();
      for await (const chunk of server.chat({ ...this.bodyOf(job), ...offered }, signal, onDropped)) {
        reason = take(chunk, message, activity) ?? reason;
        if (owner !== this.conversation) continue; // another conversation was opened; this request is about to end
        this.transcript.update(message, true, activity);
        if (activity.length && isFirst) this.picture.show(activity, true);
      }
      message.note = noteOf(reason, activity);
      if (message.calls) this.tools.judge(message.calls, offered.tools, owner);
      job.complete = reason !== "length";
      announce(activity.length ? `The answer is complete. ${activity.line()}` : "The answer is complete.");
      clearNotice("answer");
    } catch (error) {
      delete message.calls; // they may be truncated
      this.fail(error, message, activity, () => owner === this.conversation && retry());
    }
    if (message.content === before && !message.reasoning && !message.calls && message.failed === undefined) message.failed = "The answer is empty.";
  }

  // ---- calls ----

  /** Make the calls that need no consent, and continue with the model when all calls are finished. */
  goOnBehind(message) {
    if (this.running || message.id !== this.conversation.leaf) return;
    const isFree = (call) => call.state === "asked" && !call.typed && !call.problem && this.tools.isAllowed(call, this.conversation);
    const free = message.calls.filter(isFree);
    for (const call of free) call.consent = "always";
    if (free.length) return void this.makeCalls(message, free);
    if (!areSettled(message)) return announce("The model wants to call a tool and is waiting for you.");
    const path = tree.path(this.conversation), asked = path.findLastIndex((each) => each.role === "user");
    if ((path.length - 1 - asked) % MOST_ROUNDS === 0) {
      message.note = [message.note, `${MOST_ROUNDS} rounds of calls: Continue lets the model go on`].filter(Boolean).join(" · ");
      this.keep(this.conversation);
      return this.transcript.update(message, false, this.activities.get(message));
    }
    this.answer(message);
  }

  allow(message, call, always) {
    if (this.running || call.state !== "asked") return;
    if (!ownTools(this.conversation).on.includes(call.name)) {
      return this.decide(message, call, () => settle(call, `The tool ${call.name} is off in this conversation.`, true));
    }
    call.digest ??= this.tools.find(call.name)?.digest;
    call.consent = always ? "always" : "once";
    if (always && call.digest) {
      changeTools(this.conversation, (tools) => {
        tools.allowed = [...tools.allowed.filter((one) => one.name !== call.name), { name: call.name, digest: call.digest }];
      });
    }
    this.makeCalls(message, [call]);
  }

  /** The user denies a call, or types its result. */
  decide(message, call, how) {
    if (this.running || call.state !== "asked") return;
    how();
    delete call.problem;
    this.keep(this.conversation);
    this.transcript.update(message, false, this.activities.get(message));
    this.transcript.focusCall(message);
    this.goOnBehind(message);
  }

  /** Make calls, one after another. */
  async makeCalls(message, calls) {
    const owner = this.conversation, controller = new AbortController();
    const show = () => owner === this.conversation && this.transcript.update(message, false, this.activities.get(message));
    this.running = { controller, messages: [message] };
    this.onRunning(true);
    if (document.activeElement?.closest(".consent")) byId("stop").focus();
    let stopped = false;
    try {
      for (const call of calls) {
        call.state = "running";
        delete call.problem;
        this.keep(owner);
        show();
        await this.tools.run(call, controller.signal);
      }
    } catch (error) {
      stopped = true;
      this.failCall(calls.find((call) => call.state === "running"), error);
    } finally {
      this.running = null;
      this.onRunning(false);
    }
    this.keep(owner);
    show();
    if (owner !== this.conversation) return;
    if (!this.transcript.focusCall(message)) this.focusAsk();
    if (!stopped) this.goOnBehind(message);
  }

  /** Reset a call that was not made or was aborted, so that the user decides again. */
  failCall(call, error) {
    call.state = "asked";
    delete call.consent;
    if (error.name === "AbortError") call.problem = "Stopped: its result is not known.";
    else if (error instanceof server.ServerError) {
      call.problem = error.message;
      this.onError(error, () => {});
    } else {
      call.problem = "This page failed; the browser's console has the error.";
      console.error(error);
    }
    announce(call.problem);
  }

  fail(error, message, activity, retry) {
    if (error.name === "AbortError") {
      message.note = [activity.length ? activity.line() : "", "stopped"].filter(Boolean).join(" · ");
      if (message.content === "") message.failed = "Stopped before the first word.";
      announce("Stopped");
      return;
    }
    if (!(error instanceof server.ServerError)) {
      message.failed = "This page failed; the browser's console has the error.";
      console.error(error);
      return;
    }
    message.failed = error.message;
    if (error.retryAfter !== null) {
      message.failed = `${message.failed.replace(/[.;,]$/, "")}. Try again in ${Math.ceil(error.retryAfter)} s.`;
    }
    announce(message.failed);
    this.onError(error, retry);
  }
}

/** Add the contents of a chunk. Returns the finish reason, if the answer ended. */
function take(chunk, message, activity) {
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) message.content += choice.delta.content;
  if (choice?.delta?.tool_calls) takeCalls(message, choice.delta.tool_calls);
  if (choice?.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
  if (chunk.hotset?.activity) activity.add(chunk.hotset.activity);
  if (chunk.usage) {
    activity.usage = chunk.usage;
    message.tokens = chunk.usage.prompt_tokens + chunk.usage.completion_tokens;
  }
  return choice?.finish_reason;
}

function noteOf(reason, activity) {
  const parts = activity.length ? [activity.line()] : [];
  const cached = activity.usage?.prompt_tokens_details?.cached_tokens;
  if (activity.usage) parts.push(counted(activity.usage.completion_tokens, "token"));
  if (cached) parts.push(`${count(cached)} of ${counted(activity.usage.prompt_tokens, "prompt token")} from the cache`);
  if (reason === "length") parts.push("cut off at the maximum length");
  return parts.join(" · ");
}
