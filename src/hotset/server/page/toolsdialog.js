// The tools dialog: the tools that the model may call in this conversation, and the user's own functions.

import { schemaOf, written } from "./calls.js";
import { byId, h } from "./dom.js";
import * as server from "./server.js";
import { addFunctions, changeTools, functionsOf, ownTools } from "./tools.js";
import { counted } from "./units.js";

const LOOK_MS = 1000; // between two updates while servers start
const EXAMPLE = '{"name": "get_weather", "description": "The weather of a place", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}';

export class ToolsDialog {
  /** conversation(): the open one. changed(): its tools have changed. */
  constructor(tools, { conversation, changed }) {
    Object.assign(this, { tools, conversation, changed });
    this.problem = ""; // with the list of servers
    this.timer = 0;
    this.opened = new Set(); // open details elements
    this.dialog = byId("tools");
    this.servers = h("div", {});
    this.functions = h("div", {});
    this.standing = h("div", {});
    byId("tools-body").append(this.servers, this.functions, this.adding(), this.standing);
    byId("show-tools").addEventListener("click", () => {
      this.dialog.showModal();
      this.draw();
      this.look();
    });
    this.dialog.addEventListener("close", () => window.clearTimeout(this.timer));
    this.nameButton();
  }

  /** Load the list of servers, repeatedly while one of them starts. */
  look() {
    window.clearTimeout(this.timer);
    return this.ask(() => this.tools.load());
  }

  async ask(request) {
    try {
      await request();
      this.problem = "";
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error;
      this.problem = error.message;
    }
    this.draw();
    const starting = this.tools.servers?.some((one) => one.state === "starting");
    if (this.dialog.open && starting && !this.problem) this.timer = window.setTimeout(() => this.look(), LOOK_MS);
  }

  change(how) {
    changeTools(this.conversation(), how);
    this.changed();
    this.draw();
  }

  /** Show the number of active tools on the composer's button. */
  nameButton() {
    const { on, functions } = ownTools(this.conversation());
    const n = on.length + functions.length, name = n === 1 ? "Tools: one is on" : n ? `Tools: ${n} are on` : "Tools";
    byId("show-tools").setAttribute("aria-label", name);
    byId("show-tools").title = name;
    byId("n-tools").textContent = n || "";
  }

  draw() {
    this.nameButton();
    if (!this.dialog.open) return;
    const focused = document.activeElement?.dataset?.act;
    this.drawServers();
    this.drawFunctions();
    this.drawStanding();
    if (focused && document.activeElement === document.body) {
      (this.dialog.querySelector(`[data-act="${CSS.escape(focused)}"]`) ?? this.dialog.querySelector("button")).focus();
    }
  }

  button(label, act, name, does) {
    return h("button", { type: "button", class: "quiet", "aria-label": `${label}: ${name}`, dataset: { act }, on: { click: does } }, label);
  }

  /** Return a details element that keeps its state when the dialog is redrawn. act: its key. */
  details(act, summary, ...content) {
    const element = h("details", { open: this.opened.has(act) }, h("summary", { dataset: { act } }, summary), ...content);
    element.addEventListener("toggle", () => (element.open ? this.opened.add(act) : this.opened.delete(act)));
    return element;
  }

  // ---- MCP servers ----

  drawServers() {
    const { servers } = this.tools;
    const none = servers?.length === 0 ? h("p", { class: "none" }, "This server has none: hotset serve --mcp FILE names them.") : null;
    this.servers.replaceChildren(
      h("h3", {}, "MCP servers"),
      ...(this.problem ? [h("p", { class: "problem", role: "alert" }, this.problem)] : []),
      ...(none ? [none] : []),
      ...(servers ?? []).map((one) => this.server(one)),
      ...(servers && !this.problem ? this.missing() : []),
    );
  }

  server(one) {
    const { on } = ownTools(this.conversation()), names = one.tools.map((tool) => tool.name);
    const n = names.filter((name) => on.includes(name)).length;
    const all = h("input", {
      type: "checkbox", checked: n > 0 && n === names.length, disabled: names.length === 0, dataset: { act: `server ${one.name}` },
    });
    all.indeterminate = n > 0 && n < names.length;
    all.addEventListener("change", () =>
      this.change((tools) => {
        tools.on = tools.on.filter((name) => !names.includes(name));
        if (all.checked) tools.on.push(...names);
      }),
    );
    const list = h("ul", {}, one.tools.map((tool) => h("li", {}, this.tool(tool, on), this.schema(tool))));
    const state = { starting: "starting", failed: "not running" }[one.state] ?? "";
    return h(
      "section",
      { class: "mcp" },
      h(
        "div",
        { class: "row" },
        h("label", {}, all, h("b", {}, one.name), h("small", {}, state)),
        one.state === "failed" ? this.button("Start again", `start ${one.name}`, one.name, () => this.ask(() => this.tools.restart(one.name))) : null,
      ),
      one.problem ? h("p", { class: one.state === "failed" ? "problem" : "none" }, `It ${one.problem}.`) : null,
      names.length ? this.details(`list ${one.name}`, `${n} of ${counted(names.length, "tool")} on`, list) : null,
    );
  }

  schema(tool) {
    return this.details(`schema ${tool.name}`, "Arguments", schemaOf(tool));
  }

  tool(tool, on) {
    const box = h("input", { type: "checkbox", checked: on.includes(tool.name), dataset: { act: `tool ${tool.name}` } });
    box.addEventListener("change", () =>
      this.change((tools) => {
        tools.on = tools.on.filter((name) => name !== tool.name);
        if (box.checked) tools.on.push(tool.name);
      }),
    );
    return h("label", {}, box, h("span", {}, h("b", {}, tool.tool), h("small", {}, written(tool.description))));
  }

  missing() {
    const names = this.tools.missing(this.conversation());
    if (names.length === 0) return [];
    const off = () => this.change((tools) => (tools.on = tools.on.filter((name) => !names.includes(name))));
    return [
      h(
        "div",
        { class: "row" },
        h("p", { class: "problem" }, `On in this conversation, but not available: ${names.join(", ")}`),
        this.button("Turn off", "missing", "tools that are not available", off),
      ),
    ];
  }

  // ---- functions ----

  drawFunctions() {
    const { functions } = ownTools(this.conversation());
    this.functions.replaceChildren(
      h("h3", {}, "Your functions"),
      h("p", { class: "none" }, "The model calls them, and you type what they return."),
      h(
        "ul",
        {},
        functions.map((one) => {
          const { name, description } = one;
          const remove = () => this.change((tools) => (tools.functions = tools.functions.filter((other) => other.name !== name)));
          const said = h("span", {}, h("b", {}, name), h("small", {}, written(description)));
          return h("li", {}, h("div", { class: "row" }, said, this.button("Remove", `function ${name}`, name, remove)), this.schema(one));
        }),
      ),
    );
  }

  adding() {
    const area = h("textarea", { id: "function", rows: 4, placeholder: EXAMPLE, spellcheck: false, autocomplete: "off", "aria-describedby": "function-problem" });
    const problem = h("p", { class: "problem", id: "function-problem", role: "alert" });
    const form = h(
      "form",
      { class: "field" },
      h("label", { htmlFor: "function" }, "A function as JSON"),
      area,
      problem,
      h("button", { type: "submit", class: "quiet" }, "Add"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      problem.textContent = "";
      try {
        addFunctions(this.conversation(), functionsOf(area.value.trim()));
      } catch (error) {
        problem.textContent = error.message;
        return area.focus();
      }
      area.value = "";
      this.changed();
      this.draw();
    });
    return form;
  }

  // ---- allowed tools ----

  drawStanding() {
    const { allowed } = ownTools(this.conversation());
    this.standing.replaceChildren(
      ...(allowed.length ? [h("h3", {}, "Always allowed in this conversation")] : []),
      h(
        "ul",
        {},
        allowed.map(({ name }) =>
          h(
            "li",
            { class: "row" },
            h("b", {}, name),
            this.button("Ask again", `allowed ${name}`, name, () => this.change((tools) => (tools.allowed = tools.allowed.filter((one) => one.name !== name)))),
          ),
        ),
      ),
    );
  }
}
